"""Finished answers on disk, so that a run that died goes on where it stopped."""

import json
from pathlib import Path
from typing import Any

from specdec.errors import InvalidInputError
from specdec.files import disk_errors, reason_of


class Journal:
    """One JSON object per line: first the settings, then a record per finished answer.

    Args:
        path: the file, made on the first record; None keeps records in memory only.
        settings: what the records depend on, beside what their keys say.
        command: of specdec, whose journal it is.

    Raises:
        InvalidInputError: the file was made with other settings, or is damaged elsewhere than at its end, where a killed run may
            leave half a line.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any], *, command: str = "eval") -> None:
        self._path, self._settings, self._command = path, settings, command
        self._records: dict[str, dict[str, Any]] = {}
        if path is not None and path.exists():
            self._read(path)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> dict[str, Any] | None:
        """The record under `key`, if that answer is finished."""
        return self._records.get(key)

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Stores a finished answer at once.

        Raises:
            CapacityError, InvalidInputError: see `specdec.files.disk_errors`.
        """
        self._records[key] = record
        if self._path is None:
            return
        lines = [] if self._path.exists() else [{"schema": _schema(self._command), "settings": self._settings}]
        with disk_errors(self._path), self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in [*lines, {"key": key, **record}])

    def _read(self, path: Path) -> None:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InvalidInputError(f"cannot read {str(path)!r}: {reason_of(error)}; choose another place with --out") from error
        whole, _, cut = content.rpartition(b"\n")
        opening = f'{{"schema": "{_schema(self._command)}"'.encode()
        lines = whole.decode(errors="replace").split("\n") if whole else []
        entries = [self._parse(path, number, line) for number, line in enumerate(lines, start=1)]
        if entries:
            self._check(path, entries[0])
        elif cut[: len(opening)] != opening[: len(cut)]:
            raise self._foreign(path)
        for entry in entries[1:]:
            self._records[entry.pop("key")] = entry
        if cut:  # the answer that was being written when the run died
            with path.open("r+b") as file:
                file.truncate(len(content) - len(cut))
        if not entries:
            path.unlink()

    def _check(self, path: Path, head: dict[str, Any]) -> None:
        if head.get("schema") != _schema(self._command) or not isinstance(head.get("settings"), dict):
            raise self._foreign(path)
        before = head["settings"]
        differing = [name for name in sorted(before.keys() | self._settings) if before.get(name) != self._settings.get(name)]
        if differing:
            name = differing[0]
            raise InvalidInputError(
                f"{str(path)!r} was begun with {name} {before.get(name)!r}, not {self._settings.get(name)!r};"
                " run with the settings it was begun with, or choose another place with --out"
            )

    def _parse(self, path: Path, number: int, line: str) -> dict[str, Any]:
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise InvalidInputError(f"{path}:{number} is damaged ({error}); delete that line to run its sample again") from error
        if not isinstance(entry, dict) or (number > 1 and "key" not in entry):
            raise InvalidInputError(
                f"{path}:{number} holds no sample of specdec {self._command}; delete that line to run its sample again"
            )
        return entry

    def _foreign(self, path: Path) -> InvalidInputError:
        return InvalidInputError(f"{str(path)!r} was not written by specdec {self._command}; choose another place with --out")


def settings_of(path: Path | None) -> dict[str, Any]:
    """Settings that the journal at `path` was begun with; none where there is no journal, or not a whole line of one."""
    try:
        with open(path or "") as file:
            settings = json.loads(file.readline())["settings"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}  # what is wrong with it, `Journal` says
    return settings if isinstance(settings, dict) else {}


def _schema(command: str) -> str:
    return f"specdec-{command}-journal"
