"""Cases of tests."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

First = TypeVar("First")
Second = TypeVar("Second")


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
