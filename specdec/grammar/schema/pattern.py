"""Regular expressions, written anew in the words that the grammar library reads as all do.

xgrammar 0.2.8 leaves out lookaheads and anchors in the midst of a pattern, takes `\\A` or a
possessive quantifier for something else, writes quotes into JSON strings as they are, and has an
automaton that takes `x|(y|)` for more than it is, with a warning at most. So it is given rules in
GBNF alone. What ECMA-262 and Python read in different ways is refused, or narrowed to what fits
both. A pattern is taken for the whole text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from specdec.base.errors import InvalidInputError
from specdec.grammar.limits import DEEPEST, shown
from specdec.grammar.schema.characters import LAST, Characters, named

CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}

GROUPS = {
    "(?<=": "a lookbehind", "(?<!": "a lookbehind", "(?>": "an atomic group",
    "(?P=": "a back-reference", "(?P>": "a recursion", "(?#": "a comment", "(?(": "a condition",
}  # fmt: skip
"""What is refused by name."""

GROUP = re.compile(r"\(\?(?::|=|!|P?<[A-Za-z_]\w*>)|\((?!\?)", re.ASCII)
REPEAT = re.compile(r"[*+?]|\{(\d+)(,?)(\d*)\}", re.ASCII)
COUNT = re.compile(r"\{(\d+,?\d*|,\d*)\}", re.ASCII)
BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}

NOT_HELD = ", which cannot be held to; write it without"

MOST = 2**16
"""Most repetitions of one part."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """`^` or `$`."""

    sign: str


@dataclass(frozen=True, slots=True)
class Repeat:
    """A part so many times; None is without an end."""

    part: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """Parts one after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """One of several parts."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Look:
    """What has to follow here, or must not."""

    part: Node
    wanted: bool


@dataclass(frozen=True, slots=True)
class Both:
    """What two parts match, or the second alone; `specdec.grammar.settle` makes it."""

    first: Node
    wanted: bool
    second: Node


Node = Characters | Anchor | Repeat | Row | Options | Look | Both


def read_pattern(pattern: str) -> Node:
    """The parts of a pattern as ECMA-262 or Python write it.

    Raises:
        InvalidInputError: a construct that cannot be held to, by name and place.
    """
    return _Reader(pattern).read()


def refusal(pattern: str, what: str) -> InvalidInputError:
    """What to raise of a pattern that has something."""
    shown = pattern if len(pattern) <= 60 else f"{pattern[:57]}..."
    return InvalidInputError(f"the pattern {shown!r} has {what}{NOT_HELD}")


class _Reader:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._place, self._depth = pattern, 0, 0

    def read(self) -> Node:
        whole = self._options()
        if self._place < len(self._pattern):
            raise self._wrong("a ) without its (")
        return whole

    def _options(self) -> Node:
        found = [self._row()]
        while self._takes("|"):
            found.append(self._row())
        return found[0] if len(found) == 1 else Options(tuple(found))

    def _row(self) -> Node:
        parts: list[Node] = []
        while self._place < len(self._pattern) and self._next not in "|)":
            parts.append(self._repeated(self._one()))
        return parts[0] if len(parts) == 1 else Row(tuple(parts))

    def _repeated(self, part: Node) -> Node:
        match = REPEAT.match(self._pattern, self._place)
        if match is None:
            if COUNT.match(self._pattern, self._place):
                raise self._wrong("a count without its least number")
            return part
        if isinstance(part, Anchor | Look):
            raise self._wrong("a repeated anchor or lookahead")
        least, most = BOUNDS.get(match[0]) or (
            _count(match[1]),
            _count(match[3] or match[1]) if match[3] or not match[2] else None,
        )
        if max(least, most or 0) > MOST or (most is not None and most < least):
            raise self._wrong(
                f"the count {shown(match[0], 40)}, which must rise and reach {MOST} at most,"
            )
        self._place = match.end()
        self._takes("?")  # lazy: the same texts
        if REPEAT.match(self._pattern, self._place):
            raise self._wrong("a quantifier of a quantifier")
        return Repeat(part, least, most)

    def _one(self) -> Node:
        sign = self._next
        if sign == "(":
            return self._group()
        if sign == "[":
            return self._class()
        if REPEAT.match(self._pattern, self._place) or COUNT.match(self._pattern, self._place):
            raise self._wrong("a quantifier of nothing")
        if sign == "\\":
            return self._escape(in_class=False)
        self._place += 1
        if sign in "^$":
            return Anchor(sign)
        return named(".") if sign == "." else self._literal(sign)

    def _group(self) -> Node:
        for opening in sorted(GROUPS, key=len, reverse=True):
            if self._pattern.startswith(opening, self._place):
                raise self._wrong(GROUPS[opening])
        match = GROUP.match(self._pattern, self._place)
        if match is None:
            raise self._wrong("a flag or an unknown group")
        self._depth += 1
        if self._depth > DEEPEST:
            raise self._wrong(f"more than {DEEPEST} groups in each other")
        self._place = match.end()
        inner = self._options()
        if not self._takes(")"):
            raise self._wrong("a ( without its )")
        self._depth -= 1
        return Look(inner, match[0] == "(?=") if match[0] in ("(?=", "(?!") else Row((inner,))

    def _class(self) -> Node:
        self._place += 1
        inverted = self._takes("^")
        found: list[Characters] = []
        begin = self._place
        if self._pattern.startswith("]", self._place):
            raise self._wrong("a class that begins with ]")
        while not self._takes("]"):
            if re.compile(r"\[[:.=]").match(self._pattern, self._place):
                raise self._wrong("a named class")
            first = self._of_class()
            rest = self._pattern[self._place : self._place + 2]
            if rest.startswith("-") and rest != "-]":
                self._place += 1
                last = self._of_class()
                if not (_is_one(first) and _is_one(last) and first.sure <= last.sure):
                    raise self._wrong("a range that does not go from one character to a later one")
                first = Characters.span(first.sure[0][0], last.sure[0][0])
            found.append(first)
        within = self._pattern[begin : self._place]
        if any(f"\\{one}" in within and f"\\{one.upper()}" in within for one in "dsw"):
            found = [Characters.span(0, LAST)]
        every = Characters.either(found)
        return every.inverse if inverted else every

    def _of_class(self) -> Characters:
        if self._place == len(self._pattern):
            raise self._wrong("a [ without its ]")
        if self._next == "\\":
            return self._escape(in_class=True)
        self._place += 1
        return self._literal(self._pattern[self._place - 1])

    def _escape(self, *, in_class: bool) -> Characters:
        sign = self._pattern[self._place + 1 : self._place + 2]
        if sign and sign in "dDwWsS":
            self._place += 2
            return named(sign)
        character = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})")
        code = character.match(self._pattern, self._place + 1)
        if code is not None:
            self._place = code.end()
            return self._literal(chr(int(code[1] or code[2], 16)))
        if sign == "b" and in_class:
            sign = "\b"
        elif sign in CONTROLS:
            sign = CONTROLS[sign]
        elif not sign or (sign.isascii() and sign.isalnum()):
            what = "a back-reference" if sign.isdigit() else "the escape"
            what = "a word boundary" if sign in ("b", "B") else what
            raise self._wrong(f"{what} \\{sign}")
        self._place += 2
        return self._literal(sign)

    def _literal(self, sign: str) -> Characters:
        if sign == "\0" or "\ud800" <= sign <= "\udfff":
            raise self._wrong("NUL or half a character")
        return Characters.span(ord(sign), ord(sign))

    @property
    def _next(self) -> str:
        return self._pattern[self._place]

    def _takes(self, sign: str) -> bool:
        found = self._pattern.startswith(sign, self._place)
        self._place += found
        return found

    def _wrong(self, what: str) -> InvalidInputError:
        return refusal(self._pattern, f"{what} at character {self._place}")


def _is_one(some: Characters) -> bool:
    return len(some.sure) == 1 and some.sure == some.possible and some.sure[0][0] == some.sure[0][1]


def _count(digits: str) -> int:
    """A number as large as it matters; Python reads no endless ones."""
    return int(digits.lstrip("0")[: len(str(MOST)) + 1] or "0")
