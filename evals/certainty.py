"""How sure an accuracy is, and a difference between two sides that answered the same questions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb, sqrt
from typing import Any

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
