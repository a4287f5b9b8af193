"""Finished answers of a cluster's run on disk: the driver writes them, and they are left out of the
next run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specdec.base.journal import Journal, made, settings_of
from specdec.cluster.pool import Pool
from specdec.cluster.rows import Answer, Row
from specdec.session.outputs import GenerationResult


class ClusterJournal:
    """A journal whose settings name what the engines say of themselves, which the driver hears with
    the first answer.

    Args:
        path: the file; None keeps nothing.
        asked: settings that the command says; a journal begun with others is refused.
        command: of specdec, whose journal it is.
    """

    def __init__(self, path: Path | None, asked: dict[str, Any], *, command: str) -> None:
        self._path, self._asked, self._command = path, asked, command
        self.origin = {key: value for key, value in settings_of(path).items() if key not in asked}
        self._journal = Journal(path, asked | self.origin, command=command)

    def get(self, key: str) -> dict[str, Any] | None:
        """The record under `key`: `results`, and the `seconds` of the engines."""
        return self._journal.read(key, _with_results)

    def run(self, pool: Pool, rows: Sequence[Row]) -> Iterator[Answer]:
        """Answers of the rows that have no record, stored at once; one with an error is not, so the
        next run asks it again.

        Raises:
            SpecDecError: see `Pool.answers`; an engine unlike those that began the journal as well.
        """
        missing = [row for row in rows if self._journal.get(row.key) is None]
        for answer in pool.answers(missing, self.origin or None):
            if not self.origin:
                self.origin = answer.origin
                settings = self._asked | self.origin
                self._journal = Journal(self._path, settings, command=self._command)
            if answer.error is None:
                self._journal.add(answer.key, answer.record)
            yield answer


def _with_results(record: dict[str, Any]) -> dict[str, Any]:
    results = [made(GenerationResult, one) for one in record["results"]]
    if not results:
        raise ValueError("no result")
    return {**record, "results": results}
