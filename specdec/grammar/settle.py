"""A pattern for the whole of a text: anchors at its edges are met, lookaheads become languages."""

from __future__ import annotations

from specdec.grammar.schema.characters import LAST, Characters
from specdec.grammar.schema.pattern import (
    Anchor,
    Both,
    Look,
    Node,
    Options,
    Repeat,
    Row,
    read_pattern,
    refusal,
)

EVERYTHING = Repeat(Characters.span(0, LAST), 0, None)
"""Any text."""


def settled(pattern: str, *, anywhere: bool = False) -> Node:
    """What a pattern matches from the first to the last character, without anchors.

    Args:
        anywhere: where it has no anchor, more may stand before it or behind.

    Raises:
        InvalidInputError: a construct that cannot be held to.
    """
    node = read_pattern(pattern)
    return _Settler(pattern).part(_opened(node) if anywhere else node, start=True, end=True)


def _opened(node: Node) -> Node:
    if isinstance(node, Options):
        return Options(tuple(map(_opened, node.parts)))
    parts = node.parts if isinstance(node, Row) else (node,)
    before = () if parts[:1] == (Anchor("^"),) else (EVERYTHING,)
    return Row((*before, *parts, *(() if parts[-1:] == (Anchor("$"),) else (EVERYTHING,))))


class _Settler:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def part(self, node: Node, *, start: bool, end: bool) -> Node:
        """A part; `start` and `end` say whether no text can stand before it, or behind."""
        match node:
            case Characters():
                if node.is_empty:
                    raise refusal(self._pattern, "a class of no characters")
                return node
            case Repeat(part, 0, 1):
                return Options((self.part(part, start=start, end=end), Row(())))
            case Repeat(part, least, most):
                return Repeat(self.part(part, start=False, end=False), least, most)
            case Options(parts):
                return Options(tuple(self.part(part, start=start, end=end) for part in parts))
            case Row(parts):
                return self._row(parts, start=start, end=end)
            case _:
                return self._row((node,), start=start, end=end)

    def _row(self, parts: tuple[Node, ...], *, start: bool, end: bool) -> Node:
        num_leading = next(
            (place for place, part in enumerate(parts) if not isinstance(part, Anchor | Look)),
            len(parts),
        )
        behind: list[Node] = []  # the last one first
        for place in reversed(range(len(parts))):
            part = parts[place]
            first = start and place <= num_leading
            last = end and not behind
            if isinstance(part, Anchor):
                if not (first if part.sign == "^" else last):
                    raise refusal(self._pattern, f"a {part.sign} in its midst")
            elif isinstance(part, Look):
                if not end:
                    raise refusal(self._pattern, "a lookahead within a group that text can follow")
                ahead = self._ahead(part.part, start=first)
                behind = [Both(ahead, part.wanted, Row(tuple(behind[::-1])))]
            else:
                behind.append(self.part(part, start=first, end=last))
        return behind[0] if len(behind) == 1 else Row(tuple(behind[::-1]))

    def _ahead(self, node: Node, *, start: bool) -> Node:
        """Texts that begin with a part, or with `$` are it."""
        match node:
            case Options(parts):
                return Options(tuple(self._ahead(part, start=start) for part in parts))
            case Row((*before, Anchor("$"))):
                return self._row(tuple(before), start=start, end=False)
            case Row((*before, (Row() | Options()) as last)):
                first = start and all(one == Anchor("^") for one in before)
                before_last = self._row(tuple(before), start=start, end=False)
                return Row((before_last, self._ahead(last, start=first)))
            case Anchor("$"):
                return Row(())
        return Row((self.part(node, start=start, end=False), EVERYTHING))
