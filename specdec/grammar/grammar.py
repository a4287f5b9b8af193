"""What an output must look like."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from specdec.base.chat.tools import FORMATS
from specdec.base.errors import InvalidInputError, one_line, shown
from specdec.base.validation import entries
from specdec.grammar.calls import Calls
from specdec.grammar.limits import MAX_CHARACTERS, MAX_PATTERN_CHARACTERS, check_size
from specdec.grammar.schema.schema import NO_TEXT, reading
from specdec.grammar.schema.text_rules import Text

Kind = Literal["json_schema", "json_object", "regex", "choice", "ebnf", "calls"]

QUICK_CHARACTERS = 8192
"""Most characters of a schema without counts or patterns, or of choices; so long take 0.2 s."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The form of one output; the functions below make it. Equal ones are compiled once.

    Attributes:
        kind: how `text` is read.
        text: a JSON schema, a regular expression, a list of strings as JSON, or rules in GBNF,
            whose first is called root; of calls what `Calls.text` says; empty for any JSON object.

    Raises:
        InvalidInputError: nothing matches it, or xgrammar would not hold to all of it.

    >>> Grammar.choice(["yes", "no"])
    Grammar(kind='choice', text='["yes", "no"]')
    """

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            what = f"the grammar's kind is {shown(self.kind)}"
            raise InvalidInputError(f"{what}; choose one of {', '.join(get_args(Kind))}")
        if not isinstance(self.text, str) or bool(self.text) == (self.kind == "json_object"):
            what = f"the text of a grammar of kind {self.kind} is {shown(self.text)}"
            raise InvalidInputError(f"{what}; it must be a string, empty for json_object alone")
        check_size(f"the grammar of kind {self.kind}", len(self.text), MAX_CHARACTERS)
        if self.kind == "calls":
            asked = Calls.of(self.text)
            for name, schema in asked.schemas:
                self._check_schema(f"the JSON schema of {name}", schema)
            if asked.answer is not None:
                Grammar(*asked.answer)
        if self.kind == "choice":
            choices = _parsed("the list of choices", self.text)
            some = choices if isinstance(choices, list) else []
            if not some or not all(isinstance(one, str) and one for one in some):
                what = f"choices are {shown(choices)}; give a list of at least one string"
                raise InvalidInputError(f"{what}, none of them empty")
        plain = "".join(choices) if self.kind == "choice" else self.text
        if self.kind not in ("json_schema", "calls") and NO_TEXT.search(plain):
            what = f"the text of a grammar of kind {self.kind} holds NUL or half a character"
            raise InvalidInputError(f"{what}; leave that out")
        if self.kind == "regex":
            check_size("the regular expression", len(self.text), MAX_PATTERN_CHARACTERS)
            Text((self.text,)).check()
        if self.kind == "json_schema":
            self._check_schema("the JSON schema", self.text)

    @staticmethod
    def _check_schema(what: str, text: str) -> None:
        if reasons := _said(text)[0]:
            message = f"{what} asks for what cannot be held to: {'; '.join(reasons)}"
            raise InvalidInputError(f"{message}; leave that out")

    @property
    def notes(self) -> list[str]:
        """What a JSON schema says and the output need not follow, as the standard allows."""
        if self.kind == "calls":
            asked = Calls.of(self.text)
            said = [f"{name}: {one}" for name, text in asked.schemas for one in _said(text)[1]]
            return [*said, *asked.unheld]
        return list(_said(self.text)[1]) if self.kind == "json_schema" else []

    @property
    def markers(self) -> frozenset[int]:
        """Special tokens that calls are written with, and that the text of an output shows."""
        return frozenset(Calls.of(self.text).markers.values() if self.kind == "calls" else ())

    @property
    def triggers(self) -> list[str]:
        """What ends a free text and begins calls; nothing where no text is free."""
        asked = Calls.of(self.text) if self.kind == "calls" else None
        if asked is None or asked.required or asked.answer is not None:
            return []
        return FORMATS[asked.form].triggers(name for name, _ in asked.functions)

    @property
    def is_quick(self) -> bool:
        """Whether it plainly takes little to compile."""
        if self.kind == "json_schema" and len(self.text) <= QUICK_CHARACTERS:
            return not _said(self.text)[2]
        if self.kind == "calls" and len(self.text) <= QUICK_CHARACTERS:
            asked = Calls.of(self.text)
            answers = asked.answer is None or Grammar.known(*asked.answer).is_quick
            return answers and not any(_said(text)[2] for _, text in asked.schemas)
        short = len(self.text) <= QUICK_CHARACTERS
        return self.kind == "json_object" or (self.kind == "choice" and short)

    @classmethod
    def known(cls, kind: Kind, text: str) -> Grammar:
        """One that was checked before."""
        made = object.__new__(cls)
        for name, value in (("kind", kind), ("text", text)):
            object.__setattr__(made, name, value)
        return made

    @classmethod
    def json_schema(cls, schema: str | bool | Mapping[str, Any]) -> Grammar:
        """JSON that a schema describes: keys in the order of `properties`, and no others."""
        text = schema if isinstance(schema, str) else _written("the JSON schema", schema)
        return cls("json_schema", text)

    @classmethod
    def json_object(cls) -> Grammar:
        """Any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """What a regular expression matches from its first to its last character."""
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Iterable[str]) -> Grammar:
        """One of some strings."""
        found = entries(choices)
        if found is None:
            raise InvalidInputError(f"choices are {shown(choices)}; give a list of strings")
        return cls("choice", _written("the list of choices", [*found]))

    @classmethod
    def calls(
        cls,
        form: str,
        functions: Mapping[str, Mapping[str, Any] | None],
        *,
        required: bool = False,
        parallel: bool = True,
        markers: Mapping[str, int] | None = None,
        answer: Grammar | None = None,
    ) -> Grammar:
        """Calls of functions, or a text without any.

        Args:
            form: how the model writes calls, one of `specdec.base.chat.tools.FORMATS`.
            functions: by name the JSON schema of their arguments, None for any object.
            required: calls alone.
            parallel: several, where the format has that.
            markers: see `ToolFormat.markers`.
            answer: of a text.
        """
        texts = tuple(
            (name, "" if schema is None else _written(f"the JSON schema of {name}", schema))
            for name, schema in functions.items()
        )
        said = None if answer is None else (answer.kind, answer.text)
        return cls("calls", Calls(form, texts, required, parallel, markers or {}, said).text)

    @classmethod
    def ebnf(cls, rules: str) -> Grammar:
        """What the rule `root` describes, in the GBNF of llama.cpp."""
        return cls("ebnf", rules)


@lru_cache(16)
def _said(text: str) -> tuple[list[str], list[str], bool]:
    """Reasons and notes of a schema, and whether it has counts or patterns of its own."""
    found = reading(text)
    return found.reasons, found.notes, found.counts or any(one.patterns for one in found.texts)


def _parsed(what: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(f"{what} is no JSON: {one_line(error)}") from error


def _written(what: str, value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidInputError(f"{what} cannot be written as JSON: {one_line(error)}") from error
