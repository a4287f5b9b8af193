"""Reports on disk: JSON that says which schema and which version of it it follows.

docs/evaluation.md documents every field. The version goes up when a field changes its meaning or goes away; new fields alone do
not raise it.
"""

import json
from pathlib import Path
from typing import Any

from specdec.errors import InvalidInputError
from specdec.files import reason_of, write_text

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
    """Writes a report as a whole or not at all, over an earlier one.

    Raises:
        CapacityError, InvalidInputError: see `specdec.files.disk_errors`.
    """
    write_text(path, json.dumps(report, indent=2, allow_nan=False) + "\n")


def read_report(path: Path, schema: str | None = None) -> Report:
    """Reads a report.

    Args:
        path: a file that `write_report` wrote.
        schema: which one is wanted; None takes any.

    Raises:
        InvalidInputError: missing, not a report, of another schema, or of a version that this code does not read.
    """
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInputError(f"cannot read report {str(path)!r}: {reason_of(error)}") from error
    except ValueError as error:
        raise InvalidInputError(f"{str(path)!r} is not JSON ({error}); give a report that specdec bench or eval wrote") from error
    name = report.get("schema") if isinstance(report, dict) else None
    if name not in SCHEMA_VERSIONS:
        raise InvalidInputError(f"{str(path)!r} was not written by specdec; give a file that specdec bench or eval wrote")
    if schema is not None and name != schema:
        raise InvalidInputError(f"{str(path)!r} follows schema {name!r}, not {schema!r}; give a report of the same kind")
    if report.get("schema_version") != SCHEMA_VERSIONS[name]:
        raise InvalidInputError(
            f"{str(path)!r} follows version {report.get('schema_version')} of schema {name!r} and this specdec reads version"
            f" {SCHEMA_VERSIONS[name]}; measure again, or read it with the specdec that wrote it"
        )
    needed = ("provenance", "settings", "complete", "tasks" if name == "specdec-eval" else "rows")
    missing = [field for field in needed if field not in report]
    if missing:
        raise InvalidInputError(f"{str(path)!r} lacks {', '.join(missing)}; it was cut or edited, so measure again")
    return report
