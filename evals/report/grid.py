"""A table of text, for a terminal and for a page."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows under a head.

    Attributes:
        title: what it shows.
        head: names of the columns.
        rows: as wide as the head.
        left: columns whose cells begin together; others end together.
        notes: lines below it.
    """

    title: str
    head: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[int, ...] = (0,)
    notes: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Lines for a terminal."""
        return [f"{self.title}:", *align([self.head, *self.rows], left=self.left), *self.notes]


def cell(value: float | None, form: str, unit: str = "") -> str:
    """A number in a form; nothing where it is not known.

    >>> cell(1.5, ".2f", "x"), cell(None, ".2f")
    ('1.50x', '')
    """
    return "" if value is None else f"{value:{form}}{unit}"


def align(rows: Sequence[Sequence[str]], *, left: Sequence[int]) -> list[str]:
    """Lines of columns two spaces apart; those in `left` begin together, the others end so.

    >>> align([("a", "1"), ("bcd", "22")], left=(0,))
    ['a     1', 'bcd  22']
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [one.ljust(n) if i in left else one.rjust(n) for i, (one, n) in pairs]
        lines.append("  ".join(cells).rstrip())
    return lines
