"""Finished answers on disk, so that a run that died goes on where it stopped."""

import json
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from io import FileIO
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from specdec.base.errors import InvalidInputError, one_line
from specdec.base.files import parse_json
from specdec.base.writing import append, check_writable, reading_alone

Made = TypeVar("Made")


class Journal:
    """One JSON object per line: first the settings, then a record per finished answer.

    Args:
        path: the file, made on the first record; a device is only written; None has no file.
        settings: what the records depend on, beside what their keys say.

    Raises:
        InvalidInputError: the file was made with other settings, is damaged elsewhere than at its
            end, where a killed run may leave half a line, or cannot be written.
    """

    def __init__(
        self, path: Path | None, settings: dict[str, Any], *, command: str = "eval"
    ) -> None:
        self._path, self._settings, self._command = path, settings, command
        # with the lines of the file, 0 for records of this run
        self._records: dict[str, tuple[int, dict[str, Any]]] = {}
        self._head = json.dumps({"schema": _schema(command), "settings": settings}) + "\n"
        if path is not None:
            check_writable(path)
            with reading_alone(path) as file:
                if file is not None:
                    self._read(path, file)

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: str) -> dict[str, Any] | None:
        """The record under `key`, if that answer is finished."""
        found = self._records.get(key)
        return found and found[1]

    def read(self, key: str, parse: Callable[[dict[str, Any]], Made]) -> Made | None:
        """What `parse` makes of the record under `key`, if that answer is finished.

        Raises:
            InvalidInputError: the record does not hold what `parse` asks for.
        """
        if key not in self._records:
            return None
        line, record = self._records[key]
        try:
            return parse(record)
        except (AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise InvalidInputError(
                f"{self._path}:{line} is damaged, or of another version of specdec"
                f" ({one_line(error)}); delete that line to run its sample again"
            ) from error

    def add(self, key: str, record: dict[str, Any]) -> None:
        """Stores a finished answer at once.

        Raises:
            CapacityError, InvalidInputError: see `specdec.base.writing.append`.
        """
        self.add_all({key: record})

    def add_all(self, records: Mapping[str, dict[str, Any]]) -> None:
        """Stores finished answers at once, all or none of them; see `add`."""
        self._records |= {key: (0, record) for key, record in records.items()}
        if self._path is not None and records:
            lines = [json.dumps({"key": key, **record}) + "\n" for key, record in records.items()]
            append(self._path, "".join(lines), head=self._head)

    def _read(self, path: Path, file: FileIO) -> None:
        opening = f'{{"schema": "{_schema(self._command)}"'.encode()
        content = file.read(len(opening))
        if content != opening[: len(content)]:  # said before all of a large file is read
            raise self._foreign(path)
        content += file.readall()
        whole, _, cut = content.rpartition(b"\n")
        lines = whole.split(b"\n") if whole else []
        for number, line in enumerate(lines, start=1):
            entry = self._parse(path, number, line)
            if number == 1:
                self._check(path, entry)
            else:
                self._records[entry.pop("key")] = number, entry
        if cut:  # the answer that was being written when the run died
            file.truncate(len(content) - len(cut))

    def _check(self, path: Path, head: dict[str, Any]) -> None:
        known = isinstance(head.get("settings"), dict)
        if head.get("schema") != _schema(self._command) or not known:
            raise self._foreign(path)
        before = head["settings"]
        names = sorted(before.keys() | self._settings)
        differing = [name for name in names if before.get(name) != self._settings.get(name)]
        if differing:
            name = differing[0]
            raise InvalidInputError(
                f"{str(path)!r} was begun with {name} {before.get(name)!r}, not"
                f" {self._settings.get(name)!r};"
                " run with the settings it was begun with, or choose another place with --out"
            )

    def _parse(self, path: Path, number: int, line: bytes) -> dict[str, Any]:
        way_out = "choose another place with --out"
        way_out = "delete that line to run its sample again" if number > 1 else way_out
        try:
            entry = parse_json(line, strict=False)  # log-probabilities may be infinite
        except ValueError as error:
            raise InvalidInputError(f"{path}:{number} is damaged ({error}); {way_out}") from error
        if not isinstance(entry, dict) or (number > 1 and not isinstance(entry.get("key"), str)):
            what = f"{path}:{number} holds no sample of specdec {self._command}"
            raise InvalidInputError(f"{what}; {way_out}")
        return entry

    def _foreign(self, path: Path) -> InvalidInputError:
        what = f"{str(path)!r} was not written by specdec {self._command}"
        return InvalidInputError(f"{what}; choose another place with --out")


def settings_of(path: Path | None) -> dict[str, Any]:
    """Settings that the journal at `path` was begun with; none without a whole line of one.

    Raises:
        InvalidInputError: nothing can be kept there.
    """
    if path is None:
        return {}
    with reading_alone(path) as file:
        first = b"" if file is None else file.read(_LONGEST_HEAD)
    try:
        settings = parse_json(first.partition(b"\n")[0], strict=False)["settings"]
    except (ValueError, KeyError, TypeError):
        return {}  # what is wrong with it, `Journal` says
    return settings if isinstance(settings, dict) else {}


_LONGEST_HEAD = 1 << 20


def made(kind: type[Made], given: Any) -> Made:
    """A dataclass from what `dataclasses.asdict` and JSON made of it, looked at by its `check`.

    Raises:
        TypeError, ValueError: a field is missing, unknown, of another type or out of range.
    """
    if not isinstance(given, dict):
        raise TypeError(f"{kind.__name__} is a JSON {type(given).__name__}")
    hints, values = get_type_hints(kind), dict(given)
    for name, value in values.items():
        if is_dataclass(hints.get(name)):
            values[name] = made(hints[name], value)
        elif name not in hints or not _fits(value, hints[name]):
            raise TypeError(f"{name} is a JSON {type(value).__name__}")
        else:
            values[name] = _keyed(value, hints[name])
    found = kind(**values)
    if callable(check := getattr(found, "check", None)):
        check()
    return found


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON is what an annotation says.

    >>> _fits([1, None], list[int | None]), _fits({"7": 0.5}, dict[int, float])
    (True, True)
    >>> _fits([True], list[int])
    False
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is list:
        return isinstance(value, list) and all(_fits(one, inner[0]) for one in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(one, inner[1]) for one in value.values())
    if hint in (None, NoneType):
        return value is None
    kinds = (int, float) if hint is float else hint
    return isinstance(value, kinds) and (hint is bool or not isinstance(value, bool))


def _keyed(value: Any, hint: Any) -> Any:
    """A value of JSON whose keys, which are texts there, are whole numbers where these are meant.

    >>> _keyed([None, {"7": 0.5}], list[dict[int, float] | None])
    [None, {7: 0.5}]
    """
    for one in get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,):
        origin, inner = get_origin(one), get_args(one)
        if origin is list and isinstance(value, list) and get_args(inner[0]):
            return [_keyed(entry, inner[0]) for entry in value]
        if origin is dict and isinstance(value, dict) and inner[0] is int:
            return {int(key): entry for key, entry in value.items()}
    return value


def _schema(command: str) -> str:
    return f"specdec-{command}-journal"
