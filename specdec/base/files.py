"""Files of a user: text and JSON, read with messages that name the file and the line."""

import io
import json
import math
import os
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from specdec.base.errors import CheckpointError, InvalidInputError, one_line

JSON_LINES = (".jsonl", ".jsonlines", ".ndjson")

_OTHER_FILES = {".csv", ".htm", ".html", ".json", ".parquet", ".tsv", ".xml", ".yaml", ".yml"}
"""Names of files end so that hold no text with a prompt per line."""


def cache_folder() -> Path:
    """Where what can be made again is kept: `$SPECDEC_CACHE`, or `~/.cache/specdec`.

    Raises:
        InvalidInputError: there is no such home.
    """
    return user_path(os.environ.get("SPECDEC_CACHE") or "~/.cache/specdec", "SPECDEC_CACHE")


def user_path(name: str | Path, option: str | None = None) -> Path:
    """A path as a user writes it, `~` for a home included.

    Raises:
        InvalidInputError: it is empty, or the system knows no such home.
    """
    if name == "":
        raise InvalidInputError("the path is empty; name a file or a folder")
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        way_out = f"set {option} to a whole path" if option else "write the path without ~"
        what = f"{str(name)!r} begins with a home that the system does not know"
        raise InvalidInputError(f"{what}; {way_out}") from error


def read_lines(path: Path, *, what: str, way_out: str) -> list[tuple[str, str]]:
    """The lines of a UTF-8 file that are not blank, each with its place, such as "test.jsonl:7".

    Args:
        path: a file; a byte order mark and either kind of line end are dropped.
        what: a line holds, for messages.
        way_out: what to give instead, at the end of a message.

    Raises:
        InvalidInputError: the file cannot be read, is not UTF-8, or holds blank lines alone.
    """
    try:
        # any end of line
        text = io.TextIOWrapper(io.BytesIO(_content(path, way_out)), encoding="utf-8-sig").read()
    except UnicodeDecodeError as error:
        message = f"{str(path)!r} is not UTF-8 text (byte {error.start})"
        raise InvalidInputError(f"{message}; convert it") from error
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    numbered = enumerate(text.split("\n"), start=1)
    lines = [(f"{path}:{number}", line) for number, line in numbered if line.strip()]
    if not lines:
        raise InvalidInputError(f"{str(path)!r} holds no {what}; {way_out}")
    return lines


def check_prompt_lines(path: Path, way_out: str) -> None:
    """Refuses a file as one with a prompt per line whose name says that it is another kind.

    Raises:
        InvalidInputError: it is, with `way_out` at the end.
    """
    if path.suffix.lower() in _OTHER_FILES:
        what = f"{str(path)!r} is no text with a prompt per line by its name"
        raise InvalidInputError(f"{what}; {way_out}")


def parse_json(content: str | bytes, *, strict: bool = True) -> Any:
    """The value that JSON text holds.

    Args:
        content: the text, in UTF-8 where it is bytes.
        strict: refuse NaN and infinities, which JSON does not have, though Python writes them.

    Raises:
        ValueError: there is none, or it is nested more deeply than can be read; in a few words.
    """
    try:
        text = content if isinstance(content, str) else content.decode("utf-8-sig")
        options: Any = {"parse_constant": _no_number, "parse_float": _finite} if strict else {}
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text, byte {error.start}") from error
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        raise ValueError(f"{error.msg} at {line}column {error.colno}") from error


def parse_object(line: str, place: str) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        InvalidInputError: the line is not JSON, or another kind of JSON value.
    """
    return _object(line, f"{place} is", "write one object per line")


def read_json(path: Path, *, way_out: str, strict: bool = True) -> dict[str, Any]:
    """The JSON object that a file holds.

    Args:
        way_out: what to give instead, at the end of a message.
        strict: see `parse_json`.

    Raises:
        InvalidInputError: the file cannot be read, is not JSON, or another kind of JSON value.
    """
    return _object(_content(path, way_out), f"{str(path)!r} is", way_out, strict)


def read_toml(path: Path, *, way_out: str) -> dict[str, Any]:
    """The table that a TOML file holds; see `read_json`."""
    content = _content(path, way_out)
    try:
        return tomllib.loads(content.decode())
    except (ValueError, RecursionError) as error:
        reason = one_line(error)
        raise InvalidInputError(f"{str(path)!r} is not TOML ({reason}); {way_out}") from error


def read_text(path: Path, *, way_out: str) -> str:
    """The text that a file holds; see `read_json`."""
    try:
        return _content(path, way_out).decode()
    except UnicodeDecodeError as error:
        where = f"{str(path)!r} is not UTF-8 text (byte {error.start})"
        raise InvalidInputError(f"{where}; {way_out}") from error


def _content(path: Path, way_out: str) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as error:  # a ValueError: a name with a NUL byte
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise InvalidInputError(f"cannot read {str(path)!r}: {reason}; {way_out}") from error


def _object(content: str | bytes, begin: str, way_out: str, strict: bool = True) -> dict[str, Any]:
    try:
        value = parse_json(content, strict=strict)
    except ValueError as error:
        raise InvalidInputError(f"{begin} not JSON ({error}); {way_out}") from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"{begin} a JSON {type(value).__name__}; {way_out}")
    return value


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def _finite(word: str) -> float:
    number = float(word)
    return number if math.isfinite(number) else _no_number(word)


def read_jsonl(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place, such as "test.jsonl:7"; blank lines are skipped.

    Raises:
        InvalidInputError: the file cannot be read or is empty, or a line is not a JSON object.
    """
    lines = read_lines(path, what="row", way_out="give a file with one JSON object per line")
    return [(place, parse_object(line, place)) for place, line in lines]


def check_file(path: Path) -> None:
    """Looks at a file of a checkpoint before it is opened, since a pipe would be waited for.

    Raises:
        CheckpointError: there is none, or it is none, as a folder or a device.
    """
    if not path.is_file():
        raise CheckpointError(f"{path.name!r} is no file; fetch the whole checkpoint again")


def reason_of(error: OSError) -> str:
    """Why the system refused, in its own words.

    >>> reason_of(FileNotFoundError(2, "No such file or directory"))
    'no such file or directory'
    """
    return (error.strerror or str(error)).lower()
