"""Whether two sides that answered the same prompts differ in tau, by a paired bootstrap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

import numpy as np

from evals.certainty import (
    DRAWS,
    LEAST,
    MEAN_TAU,
    TAU,
    Array,
    conversations,
    drawn_sums,
    interval,
    no_difference,
    quotient,
)
from evals.report.grid import align
from evals.report.report import Report
from evals.report.sides import drafting, side_of

Row = dict[str, Any]
Part = tuple[str, float, int]

SPEED_ALONE = {"prompt_sets", "repeats", "warmup", "graphs", "num_engines"}
"""Settings that leave tau alone; prompts are compared set by set."""
MODEL = ("dtype", "weights", "kv_dtype", "prefill_dtype", "generation_config")
"""Fields of where a report comes from without which the same drafter has another tau."""


def paired_lines(one: Report, other: Report | None) -> list[str]:
    """A line for each kind of tau of every two sides of a part: those that both reports have, and
    every other one of the first with every one of the second; every two sides of a report alone.
    """
    other, alone = other or one, other is None
    if why := unlike(one, other):
        return [f"tau is not tested: {why}; measure both with the same target and settings"]
    parts, others = _parts(one), _parts(other)
    hashes = _sets(one), _sets(other)
    head = ("part", "first", "second", "tau of", "first", "second", "difference", "95 %", "p")
    rows: list[tuple[str, ...]] = []
    notes = []
    for part in parts:
        name, temperature, concurrency = part
        theirs = others.get(part, [])
        title = f"{name} T={temperature:g} c={concurrency}"
        for mine, their in _pairs(parts[part], theirs, alone=alone):
            if hashes[0][name]["sha256"] != hashes[1][name]["sha256"]:
                what = f"tau of {name} is not tested: the reports asked other prompts"
                notes.append(f"{what}; measure both with the same file and limit")
                break
            tasks = hashes[0][name].get("tasks") or []
            found = [*_tested(mine, their, tasks)]
            if not found:
                notes.append(f"tau of {name} is not tested: a test takes {LEAST} conversations")
            for what, *figures in found:
                rows.append((title, side_of(mine).name(), side_of(their).name(), what, *figures))
    notes = [*dict.fromkeys(notes)]
    if not rows:
        return notes
    return [
        f"paired bootstrap over conversations, {DRAWS:,} draws; p: of no difference",
        *align([head, *rows], left=(0, 1, 2, 3)),
        *notes,
    ]


def unlike(one: Report, other: Report) -> str:
    """What else than the drafter would tell the tau of two reports apart; empty where nothing."""
    ours, theirs = one["provenance"], other["provenance"]
    if ours["target"]["sha256"] != theirs["target"]["sha256"] or (
        not ours["target"]["sha256"] and ours["target"] != theirs["target"]
    ):
        return f"the target differs: {ours['target']['name']} / {theirs['target']['name']}"
    deciding = [name for name in one["settings"] if name in other["settings"].keys() - SPEED_ALONE]
    settings = one["settings"], other["settings"]
    for first, second, names in ((ours, theirs, MODEL), (*settings, deciding)):
        for name in names:
            if why := difference(name, first, second):
                return why
    return ""


def difference(name: str, one: Row, other: Row) -> str:
    """What two reports say of a field, where that is not the same; an older one may say nothing."""
    said = [str(some[name]) if name in some else "not said" for some in (one, other)]
    if one.get(name, "not said") == other.get(name, "not said"):
        return ""
    return f"{name} {'may differ' if 'not said' in said else 'differs'}: {' / '.join(said)}"


def _parts(report: Report) -> dict[Part, list[Row]]:
    parts: dict[Part, list[Row]] = {}
    for row in drafting(report["rows"]):
        if row.get("answers"):
            key = row["prompt_set"], row["temperature"], row["concurrency"]
            parts.setdefault(key, []).append(row)
    return parts


def _sets(report: Report) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in report["settings"]["prompt_sets"]}


def _pairs(mine: Sequence[Row], theirs: Sequence[Row], *, alone: bool) -> Iterator[tuple[Row, Row]]:
    """See `paired_lines`."""
    if alone:
        yield from combinations(mine, 2)
        return
    ours, others = ({side_of(row): row for row in some} for some in (mine, theirs))
    yield from ((row, others[side]) for side, row in ours.items() if side in others)
    unmatched = [row for side, row in ours.items() if side not in others]
    yield from product(unmatched, [row for side, row in others.items() if side not in ours])


def _tested(one: Row, other: Row, tasks: Sequence[str | None]) -> Iterator[tuple[str, ...]]:
    """Both sides' figures of each kind of tau, their difference, its interval, and p."""
    rows, others = conversations(one["answers"]), conversations(other["answers"])
    items = [item for item in rows if item in others]
    if len(items) < LEAST:
        return
    both = np.array([np.concatenate([rows[item], others[item]]) for item in items])
    sums, draws = both.sum(axis=0), drawn_sums(both)
    for what, of in (("all steps", TAU), ("answers", MEAN_TAU)):
        yield what, *_cells(_two(sums, of), _two(draws, of), len(items))
    names = [name for name in dict.fromkeys(tasks) if name is not None]
    strata = [both[[tasks[item] == name for item in items]] for name in names]
    if len(names) > 1 and all(len(some) >= LEAST for some in strata):
        found = np.mean([_two(some.sum(axis=0), TAU) for some in strata], axis=0)
        drawn = [_two(drawn_sums(some, seed=seed), TAU) for seed, some in enumerate(strata)]
        yield "mean of tasks", *_cells(found, np.mean(drawn, axis=0), len(items))


def _two(sums: Array, of: slice) -> Array:
    """The figure of both sides, [2] or [2, draws]."""
    half = sums.shape[-1] // 2
    return np.stack([quotient(sums[..., :half], of), quotient(sums[..., half:], of)])


def _cells(found: Array, draws: Array, pairs: int) -> tuple[str, ...]:
    differences = draws[1] - draws[0]
    low, high = interval(differences) or (0.0, 0.0)
    p = no_difference(differences, pairs)
    sides, bounds = (f"{found[0]:.3f}", f"{found[1]:.3f}"), f"{low:+.3f} to {high:+.3f}"
    return *sides, f"{found[1] - found[0]:+.3f}", bounds, "<0.001" if p < 0.001 else f"{p:.3f}"
