"""Calls of tools as rules in GBNF: structural tags of xgrammar's, with schemas held to."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from specdec.base.chat.tools import FORMATS, ToolFormat, split_at
from specdec.base.errors import InvalidInputError, one_line
from specdec.grammar.schema.arguments import Argument, arguments_of

NAME = re.compile(r"[\w.-]{1,64}")
"""Names of functions: letters and digits of any script, and a few signs."""

MARKER = "\x1d"
"""What tokens of markers read while calls are compiled: in no JSON string, in rules by ids."""

_ANY_NAME, _ANY = "root ::= [A-Za-z_] [A-Za-z0-9_.-]*", Argument("", {}, False, {})

Rules = Callable[[Any, str], str]
"""Makes rules of another grammar, of its kind and its text."""


@dataclass(frozen=True)
class Calls:
    """Calls of functions, in the way a family of models writes them, or a text.

    Attributes:
        form: name of one of `specdec.base.chat.tools.FORMATS`.
        functions: names, and the JSON schemas of their arguments, as JSON; empty for any object.
        required: calls alone.
        parallel: several, where the format has that.
        markers: ids of the special tokens that calls are written with, by name.
        answer: kind and text of the grammar of a text without calls; None where that is free.

    Raises:
        InvalidInputError: a name is none, or there is no such format.
    """

    form: str
    functions: tuple[tuple[str, str], ...]
    required: bool
    parallel: bool
    markers: Mapping[str, int]
    answer: tuple[Any, str] | None

    def __post_init__(self) -> None:
        if self.form not in FORMATS:
            problem = f"the format of calls is {self.form!r}"
            raise InvalidInputError(f"{problem}; choose one of {', '.join(FORMATS)}")
        wrong = [name for name, _ in self.functions if not NAME.fullmatch(name)]
        if wrong or not self.functions:
            message = "there is no function to call; give one"
            if wrong:
                what = f"the function is called {wrong[0][:80]!r}"
                message = f"{what}; give 1 to 64 letters, digits, _ . or -"
            raise InvalidInputError(message)

    @property
    def text(self) -> str:
        """All of it, as JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def of(cls, text: str) -> Calls:
        """What `text` was written of.

        Raises:
            InvalidInputError: nothing was.
        """
        return _read(text)

    @property
    def schemas(self) -> list[tuple[str, str]]:
        """The functions that have schemas."""
        return [(name, schema) for name, schema in self.functions if schema]

    @cached_property
    def unheld(self) -> list[str]:
        """What their schemas ask of arguments that are written as they are, in vain."""
        if self._format.argument is None:
            return []
        found: list[str] = []
        for name, schema in self.schemas:
            known = arguments_of(json.loads(schema))
            if known is None:
                found.append(f"{name}: its arguments are held to no schema, since it names none")
            for one in (one for argument in known or () for one in argument.unheld):
                found.append(f"{name}: {one} is not held to, since texts are written as they are")
        return found

    @property
    def _format(self) -> ToolFormat:
        return FORMATS[self.form]

    def rules(self, others: Rules) -> str:
        """Rules in GBNF, as xgrammar makes them of a structural tag."""
        import xgrammar

        made = _CallFormat(self, self._format, others)
        whole = made.channels() if self._format.channels else made.whole()
        return str(xgrammar.Grammar.from_structural_tag(_format("structural_tag", format=whole)))


@lru_cache(16)
def _read(text: str) -> Calls:
    try:
        given = json.loads(text)
        pairs = tuple((str(name), str(schema)) for name, schema in given["functions"])
        markers = {str(name): int(one) for name, one in given["markers"].items()}
        answer = given["answer"] and tuple(map(str, given["answer"]))
        return Calls(**given | {"functions": pairs, "markers": markers, "answer": answer})
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"a grammar of kind calls is not of its form ({one_line(error)})"
        raise InvalidInputError(f"{what}; make it with Grammar.calls") from error


Format = dict[str, Any]
"""A part of an output, as xgrammar's structural tags have it."""


def _format(kind: str, **values: Any) -> Format:
    return {"type": kind, **values}


def _grammar(rules: str) -> Format:
    return _format("grammar", grammar=rules)


def _text(text: str) -> Format:
    return _format("const_string", value=text)


def _row(*parts: Format) -> Format:
    return _format("sequence", elements=list(parts))


def _either(*parts: Format) -> Format:
    return _format("or", elements=list(parts))


def _optional(part: Format) -> Format:
    return _format("optional", content=part)


def _any(*parts: Format) -> Format:
    """So many times as one likes, also none."""
    return _format("star", content=_row(*parts))


class _CallFormat:
    def __init__(self, asked: Calls, form: ToolFormat, others: Rules) -> None:
        self._asked, self._form, self._others = asked, form, others

    def whole(self) -> Format:
        """An output: a group of calls, or an answer."""
        asked, form, literal = self._asked, self._form, self._literal
        before, behind = form.begin.split("{name}")
        calls = (
            _row(self._named(name + behind), self._arguments(schema), literal(form.end))
            for name, schema in asked.functions
        )
        call = _either(*calls)
        again = _any(self._named(form.between + before), call)
        several = [again] if asked.parallel and form.parallel else []
        group, begin = _row(call, *several, literal(form.closing)), form.opening + before
        if asked.required or asked.answer is not None:
            called = _row(self._named(begin), group)
            answers = [] if asked.required or asked.answer is None else [self._of(*asked.answer)]
            return _either(called, *answers)
        # any text, until that what begins a call
        if not form.tag:
            triggers = form.triggers(name for name, _ in asked.functions)
            ends = literal(form.end), *several, literal(form.closing)
            rules: list[Any] = [
                [trigger, _row(literal(behind[1:]), self._arguments(schema), *ends)]
                for trigger, (_, schema) in zip(triggers, asked.functions, strict=True)
            ]
            return _format("dispatch", rules=rules, loop=False, excludes=self._no_markers)
        text, *found = split_at(form.trigger, asked.markers)
        rest = _row(self._named(begin[len("".join([text, *found[:1]])) :]), group)
        if not found:
            rules = [[form.trigger, rest]]
            return _format("dispatch", rules=rules, loop=False, excludes=self._no_markers)
        rules = [[asked.markers[found[0]], rest]]
        others = [token for name, token in asked.markers.items() if name != found[0]]
        return _format("token_dispatch", rules=rules, loop=False, exclude_tokens=others)

    def channels(self) -> Format:
        """An output that is messages, of which the last is a call or an answer."""
        asked, form, literal = self._asked, self._form, self._literal
        others = ", ".join(map(str, asked.markers.values()))
        root = f"root ::= TokenTagDispatch(loop_after_dispatch=false, excludes=({others}))"
        free = _grammar(root)
        given, constrain = literal("json<|message|>"), literal("<|constrain|>")
        named, first = [], []
        for name, schema in asked.functions:
            arguments = self._arguments(schema)
            named.append(_row(_text(name), _optional(_text(" ")), constrain, given, arguments))
            channel = literal(f"{name}<|channel|>commentary ")
            first.append(_row(channel, _optional(constrain), given, arguments))
        last = [
            _row(literal("<|channel|>commentary to=functions."), _either(*named)),
            _row(_text(" to=functions."), _either(*first)),
        ]
        if not asked.required:
            answer = free if asked.answer is None else self._of(*asked.answer)
            last.append(_row(literal("<|channel|>final<|message|>"), answer))
        kind, end = _either(_text("analysis"), _text("commentary")), form.closing + form.opening
        before = _any(literal("<|channel|>"), kind, literal("<|message|>"), free, literal(end))
        return _row(before, _either(*last))

    def _of(self, kind: Any, text: str) -> Format:
        return _grammar(self._others(kind, text))

    @property
    def _no_markers(self) -> list[str]:
        return [MARKER] if self._asked.markers else []

    def _named(self, text: str) -> Format:
        """What begins a call, with an id where the format has one."""
        before, found, behind = text.partition("{id}")
        number = [_grammar(f"root ::= {self._form.id_form}")] if found else []
        return _row(self._literal(before), *number, self._literal(behind))

    def _literal(self, text: str) -> Format:
        markers = self._asked.markers
        parts = enumerate(split_at(text, markers))
        texts = (
            _format("token", token=markers[part]) if place % 2 else _text(part)
            for place, part in parts
        )
        return _row(*texts)

    def _arguments(self, schema: str) -> Format:
        """The arguments of a function."""
        if self._form.argument is None:
            return self._of("json_schema" if schema else "json_object", schema)
        known = arguments_of(json.loads(schema)) if schema else None
        if known is None:
            return _any(self._argument(_grammar(_ANY_NAME), _ANY))
        parts = ((one, self._argument(_text(one.name), one)) for one in known)
        return _row(_text(""), *(part if one.required else _optional(part) for one, part in parts))

    def _argument(self, name: Format, argument: Argument) -> Format:
        assert self._form.argument is not None
        first, last = self._form.argument
        before, behind = first.split("{key}")

        def written(is_text: str, value: Format) -> Format:
            literals = map(self._literal, (before, behind.replace("{text}", is_text), last))
            start, middle, end = literals
            return _row(start, name, middle, value, end)

        if "{text}" not in behind:
            return written("", self._value(argument, last))
        ways, listed = [], argument.listed
        if texts := [one for one in listed or () if isinstance(one, str)]:
            ways.append(written("true", _either(*map(_text, texts))))
        elif listed is None and argument.may_be_text:
            ways.append(written("true", self._value(argument, last)))
        if not argument.is_text:
            value = self._of("json_schema", json.dumps(argument.whole, ensure_ascii=False))
            ways.append(written("false", value))
        return _either(*ways)

    def _value(self, argument: Argument, last: str) -> Format:
        """The value of an argument, behind which this stands."""
        tag = last.strip()
        if argument.values is not None:
            return _either(*map(_text, argument.values))
        if (text := argument.text) is not None:
            without = rf"^(?![\s\S]*{re.escape(tag)})[\s\S]*$"
            made, more = replace(text, patterns=(*text.patterns, without)).rules("t")
            return _grammar("\n".join([f"root ::= {made}", *more]))
        if argument.may_be_text:
            tags = (tag, *self._no_markers)
            ends = ", ".join(json.dumps(end, ensure_ascii=False) for end in tags)
            return _grammar(f"root ::= TagDispatch(loop_after_dispatch=false, excludes=({ends}))")
        return self._of("json_schema", json.dumps(argument.whole, ensure_ascii=False))
