"""The grammar that a request over HTTP asks for, in OpenAI's words or in vLLM's."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import InvalidInputError
from specdec.grammar.grammar import Grammar

MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda asked: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.ebnf,
}
"""By the keys of vLLM's `structured_outputs`; with `guided_` before it each is a field of its own."""


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a completion or a chat; None where its fields ask for none.

    Args:
        fields: of the request: `response_format`, `structured_outputs`, `guided_json`, `guided_json_object`, `guided_regex`,
            `guided_choice` or `guided_grammar`. What is null or False is not asked for; others are not looked at.

    Raises:
        InvalidInputError: two are asked for, or one is not of its form.

    >>> grammar_of({"guided_regex": "a+", "temperature": 0})
    Grammar(kind='regex', text='a+')
    """
    asked = {name: fields[f"guided_{name}"] for name in MAKERS if _is_given(fields.get(f"guided_{name}"))}
    outputs = fields.get("structured_outputs")
    if outputs is not None:
        if not isinstance(outputs, Mapping):
            raise InvalidInputError(f"structured_outputs is a {type(outputs).__name__}; it must be an object")
        given = {name: value for name, value in outputs.items() if _is_given(value)}
        unknown = next((name for name in given if name not in MAKERS), None)
        if unknown is not None:
            raise InvalidInputError(f"structured_outputs asks for {unknown!r}; choose one of {', '.join(MAKERS)}")
        asked |= given
    made = [_made(name, value) for name, value in asked.items()]
    formatted = _formatted(fields.get("response_format"))
    made += [formatted] if formatted else []
    if len(made) > 1:
        raise InvalidInputError(
            "the request asks for several grammars; give one of response_format, structured_outputs and guided_*"
        )
    return made[0] if made else None


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _made(name: str, value: Any) -> Grammar:
    types: dict[str, tuple[type, ...]] = {"json": (str, Mapping), "json_object": (bool,), "choice": (list, tuple)}
    if not isinstance(value, types.get(name, (str,))):
        raise InvalidInputError(f"the grammar of kind {name!r} is {reprlib.repr(value)}, which has the wrong type")
    return MAKERS[name](value)


def _formatted(response_format: Any) -> Grammar | None:
    """The grammar of OpenAI's `response_format`."""
    if response_format is None:
        return None
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return Grammar.json_object()
        case "json_schema":
            described = response_format.get("json_schema")
            schema = described.get("schema") if isinstance(described, Mapping) else None
            if not isinstance(schema, Mapping):
                raise InvalidInputError("response_format has no object json_schema.schema; give the schema there")
            return Grammar.json_schema(schema)
    raise InvalidInputError(f"the type of response_format is {kind!r}; choose text, json_object or json_schema")
