"""What reports call the sides of a part of a sweep."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

PLAIN = "none"


class Side(NamedTuple):
    """A way of decoding, the same in every part of a sweep; `peer` where it is another system's."""

    drafter: str
    k: int | str
    peer: bool = False

    @property
    def title(self) -> str:
        """The side's whole name.

        >>> Side("none", 0).title, Side("ngram", 7).title, Side("vllm", 0, True).title
        ('plain', 'ngram k=7', 'vllm')
        """
        return self.name(len(self.drafter))

    def name(self, width: int = 24) -> str:
        """The drafter's name in at most so many characters."""
        if self.peer:
            return short_name(self.drafter, width)
        return side_name(self.drafter, self.k, width)


def drafting(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of sides with drafts whose steps are known."""
    return [
        dict(row)
        for row in rows
        if row["drafter"] != PLAIN and row["acceptance"] and row["acceptance"]["num_steps"]
    ]


def side_of(row: Mapping[str, Any]) -> Side:
    """The side of a row of a report."""
    return Side(row["drafter"], row["k"], bool(row.get("peer")))


def short_name(drafter: str, width: int = 24) -> str:
    """The end of a long name, which tells checkpoints apart better than the start.

    >>> short_name("ngram"), short_name("a/very/long/path/to/a/drafter", 12)
    ('ngram', '…o/a/drafter')
    """
    return drafter if len(drafter) <= width else "…" + drafter[-(width - 1) :]


def drafts_name(k: int | str) -> str:
    """What a side's drafts are called.

    >>> drafts_name(7), drafts_name("auto"), drafts_name("tree 16"), drafts_name("2 of 7")
    ('k=7', 'k=auto', 'tree 16', '2 of 7')
    """
    name = str(k)
    return name if name.startswith("tree") or " of " in name else f"k={k}"


def side_name(drafter: str, k: int | str, width: int = 24) -> str:
    """A side of a part of a sweep, the drafter's name in at most `width` characters."""
    return "plain" if drafter == PLAIN else f"{short_name(drafter, width)} {drafts_name(k)}"


def part_title(
    prompt_set: str, temperature: float, concurrency: int, drafter: str, k: int | str
) -> str:
    """A side and the part of a sweep that it belongs to."""
    return f"{prompt_set} T={temperature:g} c={concurrency} {side_name(drafter, k)}"
