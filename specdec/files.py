"""Files of a user: text and JSON lines read with messages that name the line, and files that appear whole or not at all."""

import errno
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.errors import CapacityError, InvalidInputError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def cache_folder() -> Path:
    """Where what can be made again is kept: `$SPECDEC_CACHE`, or `~/.cache/specdec`."""
    return Path(os.environ.get("SPECDEC_CACHE") or "~/.cache/specdec").expanduser()


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
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"{str(path)!r} is not UTF-8 text (byte {error.start}); convert it") from error
    except (OSError, ValueError) as error:  # a ValueError: a name with a NUL byte
        reason = reason_of(error) if isinstance(error, OSError) else str(error)
        raise InvalidInputError(f"cannot read {str(path)!r}: {reason}; {way_out}") from error
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    lines = [(f"{path}:{number}", line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InvalidInputError(f"{str(path)!r} holds no {what}; {way_out}")
    return lines


def parse_object(line: str, place: str) -> dict[str, Any]:
    """The JSON object of a line.

    Raises:
        InvalidInputError: the line is not JSON, or another kind of JSON value.
    """
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise InvalidInputError(f"{place} is not JSON ({reason}); write one object per line") from error
    if not isinstance(value, dict):
        raise InvalidInputError(f"{place} is a JSON {type(value).__name__}; write one object per line")
    return value


def read_jsonl(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place, such as "test.jsonl:7"; blank lines are skipped.

    Raises:
        InvalidInputError: the file cannot be read or is empty, or a line is not a JSON object.
    """
    lines = read_lines(path, what="row", way_out="give a file with one JSON object per line")
    return [(place, parse_object(line, place)) for place, line in lines]


def reason_of(error: OSError) -> str:
    """Why the system refused, in its own words.

    >>> reason_of(FileNotFoundError(2, "No such file or directory"))
    'no such file or directory'
    """
    return (error.strerror or str(error)).lower()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what goes wrong while `path` is written into one line.

    Raises:
        CapacityError: the disk has no room.
        InvalidInputError: the system refuses to write there.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as a RuntimeError of its archive writer.
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
            raise
        full = isinstance(error, RuntimeError) or error.errno in _NO_ROOM
        reason = str(error).splitlines()[0] if isinstance(error, RuntimeError) else error.strerror or str(error)
        kind, way_out = (CapacityError, "make room") if full else (InvalidInputError, "choose another place")
        raise kind(f"cannot write {str(path)!r} ({reason}); what was written before is kept, so {way_out} and run again") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write(temporary path)` and moves the result to `path`; what stood there before survives any failure.

    Raises:
        CapacityError, InvalidInputError: see `disk_errors`.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")  # always the same, so that kills leave no more than one
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 file as a whole or not at all.

    Raises:
        CapacityError, InvalidInputError: see `disk_errors`.
    """
    write_atomically(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def check_writable(*paths: str | None) -> None:
    """Refuses output files that could not be written, before hours of work and not after.

    Raises:
        InvalidInputError: the folder is missing or closed, or the name is that of a folder.
    """
    for path in filter(None, paths):
        folder = Path(path).parent
        if Path(path).is_dir():
            raise InvalidInputError(f"cannot write {path!r}: it is a folder; name a file in it")
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise InvalidInputError(f"cannot write {path!r}: folder {str(folder)!r} is missing or closed; make it first")


def make_folder(name: str) -> Path:
    """The folder `name`, made if it is missing.

    Raises:
        InvalidInputError: it cannot be made, or nothing can be written there.
    """
    folder = Path(name).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidInputError(f"cannot make folder {name!r}: {reason_of(error)}; choose another with --out") from error
    if not os.access(folder, os.W_OK):
        raise InvalidInputError(f"cannot write to folder {name!r}; choose another with --out")
    return folder
