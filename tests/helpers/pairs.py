"""Fewer cases than all combinations of what a test depends on."""

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any, TypeVar

First = TypeVar("First")
Second = TypeVar("Second")


def pairs(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows of one value of each axis, in which any two values of different axes meet.

    >>> pairs("ab", "xy", "12")
    [('a', 'x', '1'), ('a', 'y', '2'), ('b', 'x', '2'), ('b', 'y', '1')]
    """
    choices = [[(axis, n) for n in range(len(values))] for axis, values in enumerate(axes)]
    missing = {pair for two in combinations(choices, 2) for pair in product(*two)}
    rows = []
    while missing:
        row = list(min(missing))
        for values in choices:
            if values[0][0] in {axis for axis, _ in row}:
                continue
            gains = [len(missing & {*combinations(sorted([*row, one]), 2)}) for one in values]
            row.append(values[gains.index(max(gains))])
        row.sort()
        missing -= set(combinations(row, 2))
        rows.append(tuple(axes[axis][n] for axis, n in row))
    return rows


def in_turns(
    names: Iterable[First], others: Sequence[Second], each: int = 2
) -> list[tuple[First, Second]]:
    """Each name with `each` of the others, which take turns: every one comes up, where the whole
    product would repeat what the code does not tell apart.

    >>> in_turns("abc", [1, 2, 3])
    [('a', 1), ('a', 2), ('b', 2), ('b', 3), ('c', 3), ('c', 1)]
    """
    return [
        (name, others[(place + turn) % len(others)])
        for place, name in enumerate(names)
        for turn in range(each)
    ]
