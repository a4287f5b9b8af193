"""What a string may be, as rules in GBNF: a pattern, or several, and how long."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

from specdec.base.errors import InvalidInputError
from specdec.grammar.language import Algebra, TooManyStates, automaton
from specdec.grammar.schema.characters import LAST, Characters, Ranges, both, ranges
from specdec.grammar.schema.pattern import MOST, Both, Node, Options, Repeat, Row
from specdec.grammar.settle import settled

logger = logging.getLogger(__name__)

SHORT = {0x22: '"', 0x5C: "\\", 0x08: "b", 0x0C: "f", 0x0A: "n", 0x0D: "r", 0x09: "t"}
"""What JSON escapes with one letter."""

SIGNS = {(0, None): "*", (1, None): "+", (0, 1): "?", (1, 1): ""}


@dataclass(frozen=True, slots=True)
class Text:
    """What a string may be; made and kept as words, and only later as rules.

    Attributes:
        patterns: all of which match the whole of it.
        formats: the same, but not held to beside patterns where all together would take too much.
        least, most: characters.
        in_json: it stands between the quotes of a JSON string, where some characters are escaped.
    """

    patterns: tuple[str, ...]
    least: int = 0
    most: int | None = None
    in_json: bool = False
    formats: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises:
        InvalidInputError: a construct that cannot be held to, by name and place.
        """
        for pattern in self.patterns:
            settled(pattern)

    def rules(self, name: str) -> tuple[str, list[str]]:
        """The right side of a rule, and rules that it needs, whose names begin with `name`.

        Raises:
            InvalidInputError: no text meets all, or it takes too much to find out.

        >>> Text(("^(?:a+?|[bc]{2,})$",)).rules("x")
        ('("a"+|[b-c]{2,})', [])
        >>> Text(("^[ab]*$",), most=1).rules("x")
        ('[a-b]?', [])
        >>> Text(("^a?[ab]*$",), most=1).rules("x")
        ('x_0', ['x_0 ::= [a-b] x_1|""', 'x_1 ::= ""'])
        """
        if self.formats:
            return self._with_formats(name)
        nodes = [settled(pattern) for pattern in self.patterns]
        counted = _counted(nodes[0], self.least, self.most) if len(nodes) == 1 else None
        if counted is not None:
            return self._written(counted) or '""', []
        algebra = Algebra()
        length = algebra.repeat(algebra.characters(((0, LAST),)), self.least, self.most)
        for some in (nodes, [settled(pattern, anywhere=True) for pattern in self.patterns]):
            start = algebra.all([length, *map(algebra.of, some)])
            states = automaton(algebra, start)
            if states:
                break
        else:
            asked = [*map(repr, self.patterns)]
            asked += ["the length"] if length != algebra.everything else []
            raise InvalidInputError(f"no text meets {' and '.join(asked)[:200]}")
        names = {state: f"{name}_{number}" for number, state in enumerate(states)}
        made = []
        for state, steps in states.items():
            ways = [f"{self._character(some)} {names[target]}" for target, some in steps.items()]
            ways += ['""'] if algebra.ends(state) else []
            made.append(f"{names[state]} ::= {'|'.join(ways)}")
        return names[start], made

    def _with_formats(self, name: str) -> tuple[str, list[str]]:
        try:
            return replace(self, patterns=self.patterns + self.formats, formats=()).rules(name)
        except TooManyStates:
            if not self.patterns:
                raise
            text = "a JSON schema asks for more than outputs are held to: a format beside"
            logger.warning(f"{text} the pattern %s", self.patterns[0])
            return replace(self, formats=()).rules(name)

    def _written(self, node: Node) -> str:
        """A part in GBNF; empty where it matches the empty text alone."""
        match node:
            case Characters():
                return self._character(node.text)
            case Repeat(part, least, most):
                inner = self._written(part)
                if not inner or most == 0:
                    return ""
                upto = "" if most is None else most
                count = f"{{{least}}}" if least == most else f"{{{least},{upto}}}"
                return (inner if isinstance(part, Characters) else f"({inner})") + SIGNS.get(
                    (least, most), count
                )
            case Options(parts):
                ways = dict.fromkeys(self._written(part) or '""' for part in parts)
                return "" if list(ways) == ['""'] else f"({'|'.join(ways)})"
            case Row(parts):
                return " ".join(filter(None, (self._written(part) for part in parts)))
        raise AssertionError("lookaheads take an automaton")

    def _character(self, some: Ranges) -> str:
        """One of some; in JSON rare controls only where there is nothing else."""
        if not self.in_json:
            return _class(some)
        plain = both(some, ((0x20, 0x21), (0x23, 0x5B), (0x5D, LAST)))
        short = ranges(
            (ord(sign), ord(sign)) for code, sign in SHORT.items() if both(some, ((code, code),))
        )
        ways = ([_class(plain)] if plain else []) + ([f'"\\\\" {_class(short)}'] if short else [])
        ways = ways or [f'"\\\\u{code:04x}"' for a, b in some for code in range(a, b + 1)]
        return ways[0] if plain and len(ways) == 1 else f"({'|'.join(ways)})"


def _counted(node: Node, least: int, most: int | None) -> Node | None:
    """A part with bounds for its length, where one count can say them; None where it takes more."""
    if not least and most is None:
        return None if _has_looks(node) else node
    parts = list(node.parts) if isinstance(node, Row) else [node]
    spans = [
        (1, 1)
        if isinstance(part, Characters)
        else (part.least, part.most)
        if isinstance(part, Repeat) and isinstance(part.part, Characters)
        else (0, -1)
        for part in parts
    ]
    open_ = [place for place, (first, last) in enumerate(spans) if first != last]
    if len(open_) != 1 or spans[open_[0]][1] == -1:
        return None
    place = open_[0]
    repeated, (first, last) = parts[place], spans[place]
    rest = sum(first for first, _ in spans) - first
    first = max(first, least - rest)
    ends = [end for end in (last, None if most is None else most - rest) if end is not None]
    last = min([*ends, MOST]) if ends else None
    if first > (MOST if last is None else last):
        return None
    assert isinstance(repeated, Repeat)
    parts[place] = Repeat(repeated.part, first, last)
    return Row(tuple(parts))


def _has_looks(node: Node) -> bool:
    match node:
        case Both():
            return True
        case Options(parts) | Row(parts):
            return any(_has_looks(part) for part in parts)
    return False  # nothing that is repeated looks ahead


def _class(spans: Ranges) -> str:
    if len(spans) == 1 and spans[0][0] == spans[0][1]:
        return f'"{_sign(spans[0][0])}"'
    parts = (_sign(first) + (f"-{_sign(last)}" if last > first else "") for first, last in spans)
    return f"[{''.join(parts)}]"


def _sign(code: int) -> str:
    sign = chr(code)
    if sign.isascii() and sign.isalnum():
        return sign
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
