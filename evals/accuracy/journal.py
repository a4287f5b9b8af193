"""Finished samples on disk, so that a run that died goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

from specdec.errors import InvalidInputError
from specdec.files import disk_errors, reason_of

SCHEMA = "specdec-eval-journal"

_OPENING = f'{{"schema": "{SCHEMA}"'.encode()
_FOREIGN = "{!r} was not written by specdec eval; choose another folder with --out"


class Journal:
    """One JSON object per line: first the settings, then a record per finished sample.

    Args:
        path: the file, made on the first record; None keeps records in memory only.
        settings: what the records depend on, beside what their keys say.

    Raises:
        InvalidInputError: the file was made with other settings, or is damaged elsewhere than at its end, where a killed run may
            leave half a line.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]) -> None:
        self._path, self._settings = path, settings
        self._records: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> dict[str, Any] | None:
        """The record under `key`, if that sample is finished."""
        return self._records.get(key)

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Stores a finished sample at once.

        Raises:
            CapacityError, InvalidInputError: see `specdec.files.disk_errors`.
        """
        self._records[key] = record
        if self._path is None:
            return
        lines = [] if self._path.exists() else [{"schema": SCHEMA, "settings": self._settings}]
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in [*lines, {"key": key, **record}])

    def _read(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InvalidInputError(f"cannot read {str(path)!r}: {reason_of(error)}; choose another folder with --out") from error
        whole, _, cut = content.rpartition(b"\n")
        lines = whole.decode(errors="replace").split("\n") if whole else []
        entries = [_parse(path, number, line) for number, line in enumerate(lines, start=1)]
        if entries:
            self._check(path, entries[0])
        elif cut[: len(_OPENING)] != _OPENING[: len(cut)]:
            raise InvalidInputError(_FOREIGN.format(str(path)))
        for entry in entries[1:]:
            self._records[entry.pop("key")] = entry
        if cut:  # the sample that was being written when the run died
            with path.open("r+b") as file:
                file.truncate(len(content) - len(cut))
        if not entries:
            path.unlink()

    def _check(self, path: Path, head: dict[str, Any]) -> None:
        if head.get("schema") != SCHEMA or not isinstance(head.get("settings"), dict):
            raise InvalidInputError(_FOREIGN.format(str(path)))
        before = head["settings"]
        differing = [name for name in sorted(before.keys() | self._settings) if before.get(name) != self._settings.get(name)]
        if differing:
            name = differing[0]
            raise InvalidInputError(
                f"{str(path)!r} was begun with {name} {before.get(name)!r}, not {self._settings.get(name)!r};"
                " run with the settings it was begun with, or choose another folder with --out"
            )


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidInputError(f"{path}:{number} is damaged ({error}); delete that line to run its sample again") from error
    if not isinstance(entry, dict) or (number > 1 and "key" not in entry):
        raise InvalidInputError(f"{path}:{number} holds no sample of specdec eval; delete that line to run its sample again")
    return entry
