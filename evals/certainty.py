"""How sure a figure is, and a difference between two sides that answered the same questions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import comb, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

NORMAL = 1.959963984540054
"""Standard deviations on both sides of which 95 % of a normal distribution lie."""


def wilson(right: int, total: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927), which holds near 0 and 1, too.

    >>> [[round(bound, 4) for bound in wilson(right, 100)] for right in (0, 50)]
    [[0.0, 0.037], [0.4038, 0.5962]]
    """
    square = NORMAL**2
    middle = (right + square / 2) / (total + square)
    reach = NORMAL * sqrt(right * (total - right) / total + square / 4) / (total + square)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def mcnemar(one: int, other: int) -> float:
    """How likely counts so uneven, or more, are of two sides that are right equally often.

    The test of McNemar (1947), exact and two-sided.

    Args:
        one: questions that one side alone answers rightly.
        other: those that the other side alone does.

    >>> mcnemar(0, 0), mcnemar(3, 3), mcnemar(0, 5)
    (1.0, 1.0, 0.0625)
    """
    total, least = one + other, min(one, other)
    tail = sum(comb(total, count) for count in range(least + 1))
    return min(1.0, 2 * tail / 2**total)


def rights(records: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Which answers are right, "1", and which are not, "0", by question; of each "metric,filter".

    Args:
        records: lm-eval's, of the samples of a task. Metrics of other values are left out.
    """
    found: dict[str, dict[int, Any]] = {}
    for record in records:
        for metric in record["metrics"]:
            found.setdefault(f"{metric},{record['filter']}", {})[record["doc_id"]] = record[metric]
    return {
        name: "".join(str(int(values[place])) for place in sorted(values))
        for name, values in found.items()
        if all(value in (0, 1) for value in values.values())
    }


def paired(one: str, other: str) -> dict[str, Any]:
    """Questions that one side alone answers rightly; arguments are values of `rights`."""
    pairs = list(zip(one, other, strict=True))
    alone, against = pairs.count(("1", "0")), pairs.count(("0", "1"))
    return {"first_only": alone, "second_only": against, "p": mcnemar(alone, against)}


DRAWS = 10_000
"""Samples that a bootstrap draws."""
SEED = 0
FEW = 20
"""Conversations below which intervals of a bootstrap come out too narrow."""
LEAST = 5
"""Conversations below which there are none, and no test."""


def drawn_sums(columns: Array, *, draws: int = DRAWS, seed: int = SEED) -> Array:
    """Sums of columns over rows that are drawn with replacement, as many as there are (Efron 1979).

    Columns are summed over the same rows, so that two sides' figures of one draw are paired.

    Args:
        columns: [n, m], a row for each conversation.

    Returns:
        [draws, m].

    >>> sums = drawn_sums(np.array([[1.0, 10.0], [2.0, 20.0]]))
    >>> sums.shape, bool((sums[:, 1] == 10 * sums[:, 0]).all()), interval(sums[:, 0] / 2)
    ((10000, 2), True, (1.0, 2.0))
    """
    num_rows = len(columns)
    rng, share = np.random.default_rng(seed), np.full(num_rows, 1 / num_rows)
    chunk = max(1, 2**22 // num_rows)  # counts of 32 MiB at once
    sizes = [min(chunk, draws - start) for start in range(0, draws, chunk)]
    return np.concatenate([rng.multinomial(num_rows, share, size) @ columns for size in sizes])


def interval(draws: Array) -> tuple[float, float] | None:
    """The 95 % interval of a figure whose draws these are, by percentiles; None without any.

    >>> interval(np.arange(1001.0))
    (25.0, 975.0)
    """
    if not len(draws):
        return None
    low, high = np.quantile(draws, (0.025, 0.975))
    return float(low), float(high)


def no_difference(differences: Array, pairs: int) -> float:
    """The two-sided p of a difference whose draws these are: how likely so much is where there is
    none. At least 2 / (draws + 1), and what the signs of so many pairs could show at best.

    >>> no_difference(np.zeros(99), 40), no_difference(np.ones(99), 40)
    (1.0, 0.02)
    >>> no_difference(np.arange(-9.0, 90.0), 40), no_difference(np.ones(99), 5)
    (0.22, 0.0625)
    """
    least = min((differences <= 0).sum(), (differences >= 0).sum())
    return float(min(1.0, max(2 * (least + 1) / (len(differences) + 1), 2.0 ** (1 - pairs))))


TAU, MEAN_TAU = slice(0, 2), slice(2, 4)
"""Columns of `conversations` whose sums are a figure's numerator and denominator."""


def conversations(columns: Mapping[str, Sequence[int]]) -> dict[int, Array]:
    """Conversations with steps: tokens emitted, verify steps, answers' tau summed, answers.

    Args:
        columns: `answers` of a row of a report.

    >>> conversations({"item": [0, 1, 0], "num_emitted": [6, 0, 4], "num_steps": [2, 0, 4]})
    {0: array([10.,  6.,  4.,  2.])}
    """
    found: dict[int, Array] = {}
    wanted = (columns[name] for name in ("item", "num_emitted", "num_steps"))
    for item, emitted, steps in zip(*wanted, strict=True):
        if steps:
            found.setdefault(item, np.zeros(4))
            found[item] += (emitted, steps, emitted / steps, 1)
    return found


def quotient(sums: Array, of: slice) -> Array:
    """A figure of every draw."""
    top, bottom = np.moveaxis(sums[..., of], -1, 0)
    return top / bottom


def intervals(columns: Mapping[str, Sequence[int]], items: Iterable[int]) -> dict[str, Any]:
    """95 % intervals of both kinds of tau over some conversations; None for fewer than `LEAST`."""
    rows = [row for item, row in conversations(columns).items() if item in set(items)]
    draws = drawn_sums(np.array(rows)) if len(rows) >= LEAST else np.empty((0, 4))
    found = interval(quotient(draws, TAU)), interval(quotient(draws, MEAN_TAU))
    return dict(zip(("tau_interval", "mean_tau_interval"), found, strict=True))


def mean_of_tasks(columns: Mapping[str, Sequence[int]], tasks: Sequence[str | None]) -> Array:
    """The mean of tasks' tau in every draw, each from its own; empty where one has too few.

    Args:
        columns: `answers` of a row of a report.
        tasks: of every item of the set; items without one are left out.
    """
    rows = conversations(columns)
    taus = []
    for seed, task in enumerate(task for task in dict.fromkeys(tasks) if task is not None):
        own = [row for item, row in rows.items() if tasks[item] == task]
        if len(own) < LEAST:
            return np.empty(0)
        taus.append(quotient(drawn_sums(np.array(own), seed=seed), TAU))
    return np.mean(taus, axis=0)
