"""The grammar that a request over HTTP asks for, in OpenAI's words or those of other servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from specdec.base.errors import InvalidInputError, shown
from specdec.grammar.grammar import Grammar

MAKERS: dict[str, Callable[[Any], Grammar]] = {
    "json": Grammar.json_schema,
    "json_object": lambda asked: Grammar.json_object(),
    "regex": Grammar.regex,
    "choice": Grammar.choice,
    "grammar": Grammar.ebnf,
}
"""By the keys of vLLM's `structured_outputs`; with `guided_` before it each is a field."""

TYPES: dict[str, tuple[type, ...]] = {"json": (str, Mapping), "json_object": (bool,)}
TYPES["choice"] = (list, tuple)
"""What each is made of; others of a string."""

FIELDS = {f"guided_{name}": name for name in MAKERS} | {
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Fields of a request that are a grammar's text: vLLM's, then llama.cpp's and SGLang's."""

GRAMMAR_FIELDS = (*FIELDS, "response_format", "structured_outputs", "grammar", "format")
"""All fields that `grammar_of` looks at."""

FORMATS: dict[str, tuple[str, tuple[str, ...]]] = {
    "json_object": ("json", ("schema", "json_schema", "value")),
    "json": ("json", ("schema", "json_schema", "value")),
    "json_schema": ("json", ("json_schema", "schema", "value")),
    "regex": ("regex", ("regex", "pattern", "value")),
    "regex_schema": ("regex", ("regex_schema",)),
    "grammar": ("grammar", ("grammar", "value")),
    "ebnf": ("grammar", ("ebnf", "grammar", "value")),
    "choice": ("choice", ("choice", "value")),
}
"""By the type of a `response_format`: what it makes, and where servers look for its text."""

SCHEMA_WORDS = {"name", "schema", "strict", "description"}
"""Keys of OpenAI's `response_format.json_schema`."""


def grammar_of(fields: Mapping[str, Any]) -> Grammar | None:
    """The grammar of a completion or a chat; None where its fields ask for none.

    Args:
        fields: of the request; `GRAMMAR_FIELDS` count, where not null or False.

    Raises:
        InvalidInputError: two are asked for, or one is not of its form.

    >>> grammar_of({"guided_regex": "a+", "temperature": 0})
    Grammar(kind='regex', text='a+')
    """
    made = [
        _made(kind, fields[name], name)
        for name, kind in FIELDS.items()
        if _is_given(fields.get(name))
    ]
    made += _structured(fields.get("structured_outputs"))
    rules, answer = fields.get("grammar"), fields.get("format")
    if isinstance(rules, Mapping):  # in the words of text-generation-inference
        made += _formatted(rules, "grammar")
    elif _is_given(rules):
        made.append(_made("grammar", rules, "grammar"))
    if answer == "json":  # in Ollama's
        made.append(Grammar.json_object())
    elif isinstance(answer, str) and answer:
        raise InvalidInputError(f"format is {answer[:60]!r}; it must be json, or a schema")
    elif answer:
        made.append(_made("json", answer, "format"))
    made += _formatted(fields.get("response_format"), "response_format")
    if len(made) > 1:
        what = "the request asks for several grammars; give one of response_format"
        raise InvalidInputError(f"{what}, structured_outputs and guided_*")
    return made[0] if made else None


def unknown_keys(fields: Mapping[str, Any]) -> Iterator[str]:
    """Keys within `response_format` that nothing is made of, with the names of what they are in."""
    given = fields.get("response_format")
    if not isinstance(given, Mapping):
        return
    _, places = FORMATS.get(str(given.get("type")), ("", ()))
    known = {"type", "strict", *places}
    yield from (f"response_format.{name}" for name in given if name not in known)
    described = given.get("json_schema")
    if isinstance(described, Mapping) and "schema" in described:
        yield from (
            f"response_format.json_schema.{name}" for name in described if name not in SCHEMA_WORDS
        )


def _is_given(value: Any) -> bool:
    return value is not None and value is not False


def _made(kind: str, value: Any, name: str) -> Grammar:
    if kind == "json" and isinstance(value, Mapping) and value and value.keys() <= SCHEMA_WORDS:
        # OpenAI puts it into an object that has a name as well
        name, value = f"{name}.schema", value.get("schema")
    if not isinstance(value, TYPES.get(kind, (str,))):
        raise InvalidInputError(
            f"{name} is {shown(value)}, which has the wrong type for a grammar of kind {kind!r}"
        )
    return MAKERS[kind](value)


def _structured(outputs: Any) -> list[Grammar]:
    """vLLM's `structured_outputs`."""
    if outputs is None:
        return []
    if not isinstance(outputs, Mapping):
        kind = type(outputs).__name__
        raise InvalidInputError(f"structured_outputs is a {kind}; it must be an object")
    given = {name: value for name, value in outputs.items() if _is_given(value)}
    unknown = next((name for name in given if name not in MAKERS), None)
    if unknown is not None:
        what = f"structured_outputs asks for {shown(unknown)}"
        raise InvalidInputError(f"{what}; choose one of {', '.join(MAKERS)}")
    return [_made(name, value, f"structured_outputs.{name}") for name, value in given.items()]


def _formatted(given: Any, field: str) -> list[Grammar]:
    """OpenAI's `response_format`, and what others made of it."""
    if given is None:
        return []
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "text":
        return []
    if not isinstance(kind, str) or kind not in FORMATS:
        known = ", ".join(FORMATS)
        raise InvalidInputError(f"the type of {field} is {shown(kind)}; choose text, {known}")
    maker, places = FORMATS[kind]
    found = {name: given[name] for name in places if _is_given(given.get(name))}
    if len(found) > 1:
        raise InvalidInputError(f"{field} has {' and '.join(found)}; give one of them")
    if not found and kind in ("json_object", "json"):
        return [Grammar.json_object()]
    if not found:
        raise InvalidInputError(f"{field} of type {kind} has no {places[0]}; give it there")
    name, value = next(iter(found.items()))
    return [_made(maker, value, f"{field}.{name}")]
