"""JSON lines read with messages that name the line."""

import json
from pathlib import Path
from typing import Any

from specdec.errors import InvalidInputError


def read_jsonl(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with its place, such as "test.jsonl:7"; blank lines are skipped.

    Raises:
        InvalidInputError: the file is missing, unreadable or empty, or a line is not a JSON object.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise InvalidInputError(
            f"cannot read data file {str(path)!r}: {reason}; give a file with one JSON object per line"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"data file {str(path)!r} is not UTF-8 text (byte {error.start}); convert it") from error
    rows = []
    # Not splitlines(): JSON strings may hold other line separators, such as U+2028.
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InvalidInputError(
                f"{place} is not JSON ({error.msg} at column {error.colno}); write one object per line"
            ) from error
        if not isinstance(row, dict):
            raise InvalidInputError(f"{place} is a JSON {type(row).__name__}; write one object per line")
        rows.append((place, row))
    if not rows:
        raise InvalidInputError(f"data file {str(path)!r} holds no row; write one JSON object per line")
    return rows
