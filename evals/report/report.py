"""Reports on disk: JSON that says which schema and which version of it it follows.

docs/evaluation.md documents every field. Fields that change or go away raise its version.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specdec.base.errors import InvalidInputError, SpecDecError, one_line
from specdec.base.files import read_json
from specdec.base.writing import place_of, write_text

SCHEMA_VERSIONS = {"specdec-bench": 2, "specdec-dummy-bench": 1, "specdec-eval": 1}

Report = dict[str, Any]


def new_report(schema: str, provenance: dict[str, Any], settings: dict[str, Any]) -> Report:
    """The head of a report; `complete` turns true when everything asked for has been measured."""
    return {
        "schema": schema,
        "schema_version": SCHEMA_VERSIONS[schema],
        "provenance": provenance,
        "settings": settings,
        "complete": False,
    }


def write_report(report: Report, path: Path) -> None:
    """Writes a report whole or not at all, over an earlier one; a pipe gets a complete one only.

    Raises:
        CapacityError, InvalidInputError: see `specdec.base.writing.write_atomically`.
    """
    if report["complete"] or not place_of(path).is_stream:
        write_text(path, json.dumps(report, indent=2, allow_nan=False) + "\n")


def read_report(path: Path, schema: str | None = None) -> Report:
    """Reads a report.

    Args:
        schema: which one is wanted; None takes any.

    Raises:
        InvalidInputError: missing, not a report, of another schema, or of an unknown version.
    """
    report = read_json(path, way_out="give a report that specdec bench or eval wrote")
    name = report.get("schema")
    if not isinstance(name, str) or name not in SCHEMA_VERSIONS:
        what = f"{str(path)!r} was not written by specdec"
        raise InvalidInputError(f"{what}; give a file that specdec bench or eval wrote")
    if schema is not None and name != schema:
        what = f"{str(path)!r} follows schema {name!r}, not {schema!r}"
        raise InvalidInputError(f"{what}; give a report of the same kind")
    if report.get("schema_version") != SCHEMA_VERSIONS[name]:
        raise InvalidInputError(
            f"{str(path)!r} follows version {report.get('schema_version')} of schema {name!r} and"
            f" this specdec reads version"
            f" {SCHEMA_VERSIONS[name]}; measure again, or read it with the specdec that wrote it"
        )
    needed = ("provenance", "settings", "complete", "tasks" if name == "specdec-eval" else "rows")
    missing = [field for field in needed if field not in report]
    if missing:
        what = f"{str(path)!r} lacks {', '.join(missing)}"
        raise InvalidInputError(f"{what}; it was cut or edited, so measure again")
    return report


@contextmanager
def of_files(*files: str) -> Iterator[None]:
    """Makes what goes wrong while reports of files are shown one line: they were changed.

    Raises:
        InvalidInputError: a field is missing, or of another type.
    """
    try:
        yield
    except SpecDecError:
        raise
    except (
        ArithmeticError,
        AssertionError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
        names = " or ".join(map(repr, files))
        what = f"{names} was cut or edited ({type(error).__name__}: {one_line(error)})"
        raise InvalidInputError(f"{what}; measure again") from error
