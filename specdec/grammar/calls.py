"""Calls of tools as rules in GBNF: what xgrammar's structural tags stand for, with schemas that are
held to as everywhere.
"""

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
"""What the tokens of markers read while grammars of calls are compiled. No string of JSON holds it,
and in rules they stand by their ids.
"""

_WORDS = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|[A-Za-z_]\w*')
_RULES = re.compile(r"^(\w+) ::=", re.MULTILINE)
_ANY_NAME, _ANY = "[A-Za-z_] [A-Za-z0-9_.-]*", Argument("", {}, False, {})

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
            raise InvalidInputError(
                f"the format of calls is {self.form!r}; choose one of {', '.join(FORMATS)}"
            )
        wrong = [name for name, _ in self.functions if not NAME.fullmatch(name)]
        if wrong or not self.functions:
            raise InvalidInputError(
                f"the function is called {wrong[0][:80]!r}; give 1 to 64 letters, digits, _ . or -"
                if wrong
                else "there is no function to call; give one"
            )

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
        """Rules, the first of them called root."""
        rules = _CallRules(self, self._format, others)
        return rules.of_channels() if self._format.channels else rules.made()


@lru_cache(16)
def _read(text: str) -> Calls:
    try:
        given = json.loads(text)
        return Calls(
            **{
                **given,
                "functions": tuple((str(name), str(schema)) for name, schema in given["functions"]),
                "markers": {str(name): int(one) for name, one in given["markers"].items()},
                "answer": given["answer"] and tuple(map(str, given["answer"])),
            }
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = f"a grammar of kind calls is not of its form ({one_line(error)})"
        raise InvalidInputError(f"{what}; make it with Grammar.calls") from error


class _CallRules:
    def __init__(self, asked: Calls, form: ToolFormat, others: Rules) -> None:
        self._asked, self._form, self._others = asked, form, others
        self._lines: list[str] = []

    def made(self) -> str:
        asked, form = self._asked, self._form
        before, behind = form.begin.split("{name}")
        begin, end = form.opening + before, self._literal(form.end)
        calls = [
            f"{self._literal(name + behind)} {self._arguments(number, schema)} {end}"
            for number, (name, schema) in enumerate(asked.functions)
        ]
        group = f"call more {self._literal(form.closing)}"
        again = f"{self._literal(form.between + before)} call more | "
        more = again if asked.parallel and form.parallel else ""
        self._lines += [f"call ::= {' | '.join(calls)}", f'more ::= {more}""']
        root = f"{self._literal(begin)} {group}"
        if not asked.required and asked.answer is not None:
            root += f" | {self._put('answer', self._others(*asked.answer))}"
        elif not asked.required:
            self._lines.append(f"group ::= {self._literal(begin[len(form.trigger) :])} {group}")
            root = self._text(form.trigger)
        return "\n".join([f"root ::= {root}", *self._lines])

    def of_channels(self) -> str:
        """Rules of an output that is messages, of which the last is a call or an answer."""
        asked, form, literal = self._asked, self._form, self._literal
        others = ", ".join(map(str, asked.markers.values()))
        given, free = literal("json<|message|>"), f"loop_after_dispatch=false, excludes=({others})"
        named, first = [], []
        for number, (name, schema) in enumerate(asked.functions):
            arguments = self._arguments(number, schema)
            named.append(f'{literal(name)} " "? {literal("<|constrain|>")} {given} {arguments}')
            channel = f"{literal(f'{name}<|channel|>commentary ')} {literal('<|constrain|>')}?"
            first.append(f"{channel} {given} {arguments}")
        root = "before root | call"
        if not asked.required:
            root += f" | {literal('<|channel|>final<|message|>')} answer"
            answer = "free"
            if asked.answer is not None:
                answer = self._put("said", self._others(*asked.answer))
            self._lines.append(f"answer ::= {answer}")
        return "\n".join(
            [
                f"root ::= {root}",
                f'before ::= {literal("<|channel|>")} ("analysis" | "commentary")'
                f" {literal('<|message|>')} free {literal(form.closing + form.opening)}",
                f"free ::= TokenTagDispatch({free})",
                f"call ::= {literal('<|channel|>commentary to=functions.')} named |"
                ' " to=functions." first',
                f"named ::= {' | '.join(named)}",
                f"first ::= {' | '.join(first)}",
                *self._lines,
            ]
        )

    def _text(self, trigger: str) -> str:
        """Any text, until that what begins a call."""
        markers = self._asked.markers
        if trigger not in markers:
            what, kind, without = _quoted(trigger), "TagDispatch", self._no_markers
        else:
            what, kind = str(markers[trigger]), "TokenTagDispatch"
            without = [str(token) for name, token in markers.items() if name != trigger]
        loop = "loop_after_dispatch=false"
        return f"{kind}(({what}, group), {loop}, excludes=({', '.join(without)}))"

    @property
    def _no_markers(self) -> list[str]:
        return [_quoted(MARKER)] if self._asked.markers else []

    def _literal(self, text: str) -> str:
        markers = self._asked.markers
        made = [
            f"Token({markers[part]})" if place % 2 else _quoted(part)
            for place, part in enumerate(split_at(text, markers))
            if part
        ]
        return " ".join(made) or '""'

    def _arguments(self, number: int, schema: str) -> str:
        """The name of a rule for the arguments of a function."""
        name = f"a{number}"
        if self._form.argument is None:
            kind = "json_schema" if schema else "json_object"
            return self._put(name, self._others(kind, schema))
        known, parts = arguments_of(json.loads(schema)) if schema else None, list[str]()
        if known is None:
            parts.append(f"({self._argument(_ANY_NAME, self._value(f'{name}v', _ANY))})*")
        for place, one in enumerate(known or ()):
            part = self._argument(_quoted(one.name), self._value(f"{name}v{place}", one))
            parts.append(part if one.required else f"({part})?")
        self._lines.append(f"{name} ::= {' '.join(parts) or _quoted('')}")
        return name

    def _argument(self, name: str, value: str) -> str:
        assert self._form.argument is not None
        first, last = self._form.argument
        before, behind = map(self._literal, first.split("{key}"))
        return f"{before} {name} {behind} {value} {self._literal(last)}"

    def _value(self, name: str, argument: Argument) -> str:
        """The name of a rule for the value of an argument."""
        assert self._form.argument is not None
        tag = self._form.argument[1].strip()
        if argument.values is not None:
            made = " | ".join(map(_quoted, argument.values))
        elif (text := argument.text) is not None:
            without = rf"^(?![\s\S]*{re.escape(tag)})[\s\S]*$"
            made, more = replace(text, patterns=(*text.patterns, without)).rules(f"{name}t")
            self._lines += more
        elif argument.may_be_text:
            ends = [_quoted(tag), *self._no_markers]
            made = f"TagDispatch(loop_after_dispatch=false, excludes=({', '.join(ends)}))"
        else:
            whole = json.dumps(argument.whole, ensure_ascii=False)
            return self._put(name, self._others("json_schema", whole))
        self._lines.append(f"{name} ::= {made}")
        return name

    def _put(self, prefix: str, rules: str) -> str:
        """Adds other rules, with names of their own, and gives that of their root."""
        names = set(_RULES.findall(rules))

        def named(match: re.Match[str]) -> str:
            return f"{prefix}_{match[0]}" if match[0] in names else match[0]

        self._lines.append(_WORDS.sub(named, rules).strip())
        return f"{prefix}_root"


def _quoted(text: str) -> str:
    """A string in GBNF, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)
