"""Figures of a bench report by task: the categories of a set, or several sets, and their mean."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from evals.certainty import LEAST, TAU, conversations, drawn_sums, interval, quotient
from evals.report.report import Report
from evals.report.sides import Side, side_of

Row = dict[str, Any]
Figures = dict[str, Any]

MEAN = "mean"
"""The task that stands for all of them, each weighing the same."""
ALL = "all"
"""The task that stands for a whole set with categories, whose steps and answers weigh the same."""


@dataclass(frozen=True, slots=True)
class TaskTable:
    """Figures of sides on tasks at one temperature and one concurrency.

    Attributes:
        name: of the set, or of several.
        temperature, concurrency: of the part.
        tasks: in the order of the report.
        sides: plain decoding first.
        of: by side and task, and by side and `MEAN` or `ALL`, `tau`, `tau_interval`, `mean_tau`,
            `tokens_per_second` (the median) and `ratio`, any of which may be None.
        by_request: whether speeds are those of one request.
    """

    name: str
    temperature: float
    concurrency: int
    tasks: tuple[str, ...]
    sides: tuple[Side, ...]
    of: dict[tuple[Side, str], Figures]
    by_request: bool

    @property
    def title(self) -> str:
        """Names the part."""
        return f"{self.name}, T={self.temperature:g}, {self.concurrency} at once"


def task_tables(report: Report) -> Iterator[TaskTable]:
    """Tables of every part: one for each set with categories, and one of the sets where there are
    several; a set alone, without categories, is the only task of its part.
    """

    def part(row: Row) -> tuple[float, int]:
        return row["temperature"], row["concurrency"]

    for (temperature, concurrency), group in groupby(sorted(report["rows"], key=part), key=part):
        rows = list(group)
        sets = list(dict.fromkeys(row["prompt_set"] for row in rows))
        for name in sets:
            own = [row for row in rows if row["prompt_set"] == name and _has_tasks(row)]
            if own:
                yield _categories(name, temperature, concurrency, own)
        if len(sets) > 1 or not any(map(_has_tasks, rows)):
            yield _sets(sets, temperature, concurrency, rows)


def _has_tasks(row: Row) -> bool:
    return len(row.get("tasks", ())) > 1


def _categories(name: str, temperature: float, concurrency: int, rows: Sequence[Row]) -> TaskTable:
    of: dict[tuple[Side, str], Figures] = {}
    for row in rows:
        side = side_of(row)
        for task in row["tasks"]:
            speed = task["tokens_per_second"]
            of[side, task["task"]] = task | {"tokens_per_second": speed and speed["median"]}
        of[side, MEAN] = (row["task_mean"] or {}) | {"tokens_per_second": None}
        of[side, ALL] = _whole(row)
    tasks = tuple(task["task"] for task in rows[0]["tasks"])
    sides = tuple(dict.fromkeys(map(side_of, rows)))
    return TaskTable(name, temperature, concurrency, tasks, sides, of, by_request=True)


def _sets(sets: Sequence[str], temperature: float, count: int, rows: Sequence[Row]) -> TaskTable:
    of: dict[tuple[Side, str], Figures] = {}
    for row in rows:
        of[side_of(row), row["prompt_set"]] = _whole(row)
    sides = tuple(dict.fromkeys(map(side_of, rows)))
    for side in sides if len(sets) > 1 else ():
        own = [row for row in rows if side_of(row) == side]
        if len(own) == len(sets):
            of[side, MEAN] = _mean([of[side, name] for name in sets], own)
    name = " + ".join(sets)
    return TaskTable(name, temperature, count, tuple(sets), sides, of, by_request=False)


def _whole(row: Row) -> Figures:
    """A row of a whole set; speeds are those of all requests together."""
    acceptance = row["acceptance"] or {"tau": row.get("peer_tau")}
    names = ("tau", "tau_interval", "mean_tau", "mean_tau_interval")
    speed = {"tokens_per_second": row["speed"]["tokens_per_second"]["median"]}
    return {name: acceptance.get(name) for name in names} | speed | {"ratio": row["ratio"]}


def _mean(figures: Sequence[Figures], rows: Sequence[Row]) -> Figures:
    """See `TaskTable.of`; each set is drawn from its own conversations."""
    found: Figures = {"tokens_per_second": None}
    for name in ("tau", "mean_tau", "ratio"):
        values = [one[name] for one in figures]
        found[name] = None if None in values else float(np.mean(values))
    strata = [list(conversations(row["answers"]).values()) for row in rows if "answers" in row]
    if len(strata) == len(rows) and all(len(one) >= LEAST for one in strata):
        draws = [drawn_sums(np.array(one), seed=seed) for seed, one in enumerate(strata)]
        found["tau_interval"] = interval(np.mean([quotient(one, TAU) for one in draws], axis=0))
    return found
