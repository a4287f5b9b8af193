"""Reports on disk: JSON that says which schema and which version of it it follows.

docs/evaluation.md documents every field. The version goes up when a field changes its meaning or goes away; new fields alone do
not raise it.
"""

import json
import os
from pathlib import Path
from typing import Any

from specdec.errors import InvalidInputError

SCHEMA_VERSIONS = {"specdec-bench": 2, "specdec-eval": 1}

_FIELDS = {
    "specdec-bench": ("provenance", "settings", "complete", "rows"),
    "specdec-eval": ("provenance", "settings", "complete", "tasks"),
}

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
        InvalidInputError: it cannot be written there.
    """
    write_text(path, json.dumps(report, indent=2, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Writes a file that appears as a whole or not at all.

    Raises:
        InvalidInputError: it cannot be written there.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise InvalidInputError(
            f"cannot write {str(path)!r}: {(error.strerror or str(error)).lower()}; choose another file"
        ) from error


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
        raise InvalidInputError(f"cannot read report {str(path)!r}: {(error.strerror or str(error)).lower()}") from error
    except ValueError as error:
        raise InvalidInputError(f"{str(path)!r} is not JSON ({error}); give a report that specdec bench or eval wrote") from error
    name = report.get("schema") if isinstance(report, dict) else None
    if name not in SCHEMA_VERSIONS:
        raise InvalidInputError(f"{str(path)!r} is no report of specdec; give a file that specdec bench or eval wrote")
    if schema is not None and name != schema:
        raise InvalidInputError(f"{str(path)!r} follows schema {name!r}, not {schema!r}; give a report of the same kind")
    if report.get("schema_version") != SCHEMA_VERSIONS[name]:
        raise InvalidInputError(
            f"{str(path)!r} follows version {report.get('schema_version')} of schema {name!r} and this specdec reads version"
            f" {SCHEMA_VERSIONS[name]}; measure again, or read it with the specdec that wrote it"
        )
    missing = [field for field in _FIELDS[name] if field not in report]
    if missing:
        raise InvalidInputError(f"{str(path)!r} lacks {', '.join(missing)}; it was cut or edited, so measure again")
    return report
