"""Sets of characters, as a regular expression names them.

ECMA-262, which JSON Schema refers to, and Python, which checks most documents, read some classes
otherwise: Python's `\\d` has the digits of all scripts, and its `.` a carriage return. So a set
knows the characters that are in it for both, and for either.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import groupby

Ranges = tuple[tuple[int, int], ...]
"""Code points, first and last of each run, in order and apart."""

LAST = 0x10FFFF
NOT_TEXT: Ranges = ((0, 0), (0xD800, 0xDFFF))
"""NUL, which the grammar library cannot write, and halves of characters."""

LOOKED_AT = 0x20000
"""Characters whose class is asked of Python; behind them are ideographs, or nothing yet."""

ECMA_SPACES = "\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000\ufeff" + "".join(
    map(chr, range(0x2000, 0x200B))
)


def ranges(pairs: Iterable[tuple[int, int]]) -> Ranges:
    """Spans in order and apart.

    >>> ranges([(5, 9), (1, 2), (3, 6)])
    ((1, 9),)
    """
    found: list[tuple[int, int]] = []
    for first, last in sorted(pairs):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(last, found[-1][1]))
        else:
            found.append((first, last))
    return tuple(found)


def others(some: Ranges) -> Ranges:
    """All code points that are not among these.

    >>> others(((1, 9),))
    ((0, 0), (10, 1114111))
    """
    edges = [-1, *(edge for pair in some for edge in pair), LAST + 1]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return tuple((before + 1, after - 1) for before, after in gaps if after - before > 1)


def both(some: Ranges, more: Ranges) -> Ranges:
    """Code points of two sets at once."""
    return others(ranges([*others(some), *others(more)]))


@dataclass(frozen=True, slots=True)
class Characters:
    """Some characters.

    Attributes:
        sure: for both readers.
        possible: for one of them.
    """

    sure: Ranges
    possible: Ranges

    @classmethod
    def span(cls, first: int, last: int) -> Characters:
        """All from one code point to another."""
        return cls(((first, last),), ((first, last),))

    @classmethod
    def either(cls, some: Iterable[Characters]) -> Characters:
        """Characters of several sets."""
        given = list(some)
        sure = ranges(pair for one in given for pair in one.sure)
        return cls(sure, ranges(pair for one in given for pair in one.possible))

    @property
    def inverse(self) -> Characters:
        """All but these."""
        return Characters(others(self.possible), others(self.sure))

    @property
    def is_empty(self) -> bool:
        """Whether none can be written for both readers."""
        texts = (any(low <= a and b <= high for low, high in NOT_TEXT) for a, b in self.sure)
        return all(texts)

    @property
    def text(self) -> Ranges:
        """What can be written for both readers."""
        return both(self.sure, others(NOT_TEXT))


@cache
def named(letter: str) -> Characters:
    """The class of an escape: d, w or s, or in capitals its inverse; or of "." a dot's."""
    if letter in "DWS":
        return named(letter.lower()).inverse
    if letter == ".":
        return Characters(others(_of_text("\n\r\u2028\u2029")), others(_of_text("\n")))
    python = _of_text("".join(re.findall(rf"\{letter}", "".join(map(chr, range(LOOKED_AT))))))
    ascii_ones = "".join(re.findall(rf"(?a:\{letter})", "".join(map(chr, range(128)))))
    ecma = _of_text(ECMA_SPACES if letter == "s" else ascii_ones)
    further = [(LOOKED_AT, LAST)] if letter == "w" else []
    return Characters(both(python, ecma), ranges([*python, *ecma, *further]))


def _of_text(text: str) -> Ranges:
    codes = sorted(map(ord, text))
    runs = [list(run) for _, run in groupby(enumerate(codes), key=lambda pair: pair[1] - pair[0])]
    return tuple((run[0][1], run[-1][1]) for run in runs)
