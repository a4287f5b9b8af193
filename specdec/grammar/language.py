"""Texts that meet several conditions, as rules in GBNF: by derivatives of expressions.

Expressions are numbers of an `Algebra`. The derivative of one by a character is what may follow
that character. See Brzozowski, "Derivatives of Regular Expressions" (1964); with Owens, Reppy and
Turon (2009) characters that lead to the same go as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from specdec.base.errors import InvalidInputError
from specdec.grammar.limits import MAX_EXPRESSIONS, MAX_STATES
from specdec.grammar.schema.characters import (
    LAST,
    NOT_TEXT,
    Characters,
    Ranges,
    both,
    others,
    ranges,
)
from specdec.grammar.schema.pattern import Both, Node, Options, Repeat, Row

Expression = int


class Algebra:
    """Expressions, each kept once in a form that makes many of the same language the same."""

    def __init__(self) -> None:
        self._forms: list[tuple[Any, ...]] = []
        self._known: dict[tuple[Any, ...], Expression] = {}
        self._firsts: dict[Expression, frozenset[Ranges]] = {}
        self._derived: dict[tuple[Expression, int], Expression] = {}
        self.nothing = self._kept("characters", ())
        self.empty = self._kept("row")
        self.everything = self.repeat(self.characters(((0, LAST),)), 0, None)

    def _kept(self, *form: Any) -> Expression:
        if form not in self._known:
            if len(self._forms) == MAX_EXPRESSIONS:
                raise TooManyStates
            self._known[form] = len(self._forms)
            self._forms.append(form)
        return self._known[form]

    def characters(self, some: Ranges) -> Expression:
        """One of some characters."""
        return self._kept("characters", some)

    def row(self, first: Expression, second: Expression) -> Expression:
        """One after the other."""
        if self.nothing in (first, second):
            return self.nothing
        if first == self.empty:
            return second
        form = self._forms[first]
        if form[0] == "row" and len(form) == 3:
            return self.row(form[1], self.row(form[2], second))
        return first if second == self.empty else self._kept("row", first, second)

    def any(self, parts: Iterable[Expression]) -> Expression:
        """One of several."""
        some = self._flat("any", parts) - {self.nothing}
        if self.everything in some:
            return self.everything
        single = [one for one in some if self._forms[one][0] == "characters"]
        if len(single) > 1:
            pairs = [pair for one in single for pair in self._forms[one][1]]
            some = some - set(single) | {self.characters(ranges(pairs))}
        return self._joined("any", some, self.nothing)

    def all(self, parts: Iterable[Expression]) -> Expression:
        """All of several at once."""
        some = self._flat("all", parts) - {self.everything}
        return self.nothing if self.nothing in some else self._joined("all", some, self.everything)

    def but(self, part: Expression) -> Expression:
        """All texts that are none of these."""
        if part in (self.nothing, self.everything):
            return self.everything if part == self.nothing else self.nothing
        form = self._forms[part]
        return form[1] if form[0] == "but" else self._kept("but", part)

    def repeat(self, part: Expression, least: int, most: int | None) -> Expression:
        """One so many times."""
        if most == 0 or part == self.empty or (part == self.nothing and not least):
            return self.empty
        if (least, most) == (1, 1) or part == self.nothing:
            return part
        return self._kept("repeat", part, least, most)

    def _flat(self, kind: str, parts: Iterable[Expression]) -> set[Expression]:
        found: set[Expression] = set()
        for part in parts:
            form = self._forms[part]
            found |= set(form[1]) if form[0] == kind else {part}
        return found

    def _joined(self, kind: str, some: set[Expression], none: Expression) -> Expression:
        if len(some) < 2:
            return next(iter(some), none)
        return self._kept(kind, tuple(sorted(some)))

    def of(self, node: Node, *, inverted: bool = False) -> Expression:
        """A pattern; where it is not wanted, whatever it may match for one of its readers."""
        match node:
            case Characters(sure, possible):
                return self.characters(possible if inverted else sure)
            case Repeat(part, least, most):
                return self.repeat(self.of(part, inverted=inverted), least, most)
            case Options(parts):
                return self.any(self.of(part, inverted=inverted) for part in parts)
            case Row(parts):
                whole = self.empty
                for part in reversed(parts):
                    whole = self.row(self.of(part, inverted=inverted), whole)
                return whole
            case Both(first, wanted, second):
                look = self.of(first, inverted=inverted == wanted)
                look = look if wanted else self.but(look)
                return self.all([look, self.of(second, inverted=inverted)])
        raise AssertionError(f"{node} is not settled")

    def ends(self, part: Expression) -> bool:
        """Whether the empty text is among these."""
        match self._forms[part]:
            case ("row", first, second):
                return self.ends(first) and self.ends(second)
            case ("any", parts):
                return any(map(self.ends, parts))
            case ("all", parts):
                return all(map(self.ends, parts))
            case ("but", inner):
                return not self.ends(inner)
            case ("repeat", inner, least, _):
                return least == 0 or self.ends(inner)
            case form:
                return form[0] == "row"

    def firsts(self, part: Expression) -> frozenset[Ranges]:
        """Sets of characters that tell apart what may follow."""
        if part not in self._firsts:
            match self._forms[part]:
                case ("row", first, second):
                    found = self.firsts(first) | (
                        self.firsts(second) if self.ends(first) else frozenset()
                    )
                case ("any" | "all", parts):
                    found = frozenset().union(*map(self.firsts, parts))
                case ("but" | "repeat", inner, *_):
                    found = self.firsts(inner)
                case ("characters", some):
                    found = frozenset([some])
                case _:
                    found = frozenset()
            self._firsts[part] = found
        return self._firsts[part]

    def after(self, part: Expression, code: int) -> Expression:
        """What may follow a character."""
        key = (part, code)
        if key not in self._derived:
            match self._forms[part]:
                case ("row", first, second):
                    found = self.row(self.after(first, code), second)
                    if self.ends(first):
                        found = self.any([found, self.after(second, code)])
                case ("any", parts):
                    found = self.any(self.after(one, code) for one in parts)
                case ("all", parts):
                    found = self.all(self.after(one, code) for one in parts)
                case ("but", inner):
                    found = self.but(self.after(inner, code))
                case ("repeat", inner, least, most):
                    rest = self.repeat(inner, max(0, least - 1), None if most is None else most - 1)
                    found = self.row(self.after(inner, code), rest)
                case ("characters", some):
                    takes = any(first <= code <= last for first, last in some)
                    found = self.empty if takes else self.nothing
                case _:
                    found = self.nothing
            self._derived[key] = found
        return self._derived[key]


class TooManyStates(InvalidInputError):
    """What meets all conditions at once takes too much to find out."""

    def __init__(self) -> None:
        super().__init__(
            f"patterns, lookaheads and lengths of a string come to more than {MAX_STATES:,} states"
            " together, or to too many on the way there; make them simpler"
        )


Steps = dict[Expression, Ranges]
"""By what may follow, the characters that lead there."""


def automaton(algebra: Algebra, start: Expression) -> dict[Expression, Steps]:
    """By expression, the first one first, where characters lead; without dead ends.

    Raises:
        TooManyStates: there are more than `MAX_STATES`.
    """
    found: dict[Expression, Steps] = {}
    waiting = [start]
    while waiting:
        state = waiting.pop()
        if state in found:
            continue
        if len(found) == MAX_STATES:
            raise TooManyStates
        steps: Steps = {}
        found[state] = steps
        for block in _blocks(algebra.firsts(state)):
            target = algebra.after(state, block[0][0])
            if target != algebra.nothing:
                steps[target] = ranges([*steps.get(target, ()), *block])
                waiting.append(target)
    return _alive(algebra, found)


def _blocks(sets: frozenset[Ranges]) -> list[Ranges]:
    """Characters of a text, those together that are in the same sets."""
    blocks = [others(NOT_TEXT)]
    for one in sets:
        rest = others(one)
        parts = [both(block, side) for block in blocks for side in (one, rest)]
        blocks = [part for part in parts if part]
    return blocks


def _alive(algebra: Algebra, states: dict[Expression, Steps]) -> dict[Expression, Steps]:
    """States from which a text can end."""
    sources: dict[Expression, list[Expression]] = {}
    for state, steps in states.items():
        for target in steps:
            sources.setdefault(target, []).append(state)
    waiting = [state for state in states if algebra.ends(state)]
    alive: set[Expression] = set()
    while waiting:
        state = waiting.pop()
        if state not in alive:
            alive.add(state)
            waiting += sources.get(state, [])
    return {
        state: {target: some for target, some in steps.items() if target in alive}
        for state, steps in states.items()
        if state in alive
    }
