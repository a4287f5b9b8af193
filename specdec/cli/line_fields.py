"""What a line of a .jsonl file says beside its prompt: how to decode it, and what is carried along
to its answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.grammar.fields import MAKERS, grammar_of
from specdec.sampling.params import SamplingParams

_ALIASES = {"max_new_tokens": "max_tokens", "max_completion_tokens": "max_tokens"}
_NAMES = {field.name for field in fields(SamplingParams)} - {"grammar"}
_GRAMMAR = ("response_format", "structured_outputs", *(f"guided_{name}" for name in MAKERS))


def unpacked(record: Mapping[str, Any]) -> dict[str, Any]:
    """A line; of a batch in OpenAI's form the request within, and what names it.

    >>> unpacked({"custom_id": "a", "body": {"prompt": "x", "max_tokens": 3}})
    {'custom_id': 'a', 'prompt': 'x', 'max_tokens': 3}
    """
    body = record.get("body")
    if not isinstance(body, Mapping) or "custom_id" not in record:
        return dict(record)
    return {
        name: value for name, value in record.items() if name not in ("body", "url", "method")
    } | dict(body)


def parted(line: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a line says of sampling, and the rest.

    >>> parted({"max_tokens": 3, "topic": "x", "temperature": None})
    ({'max_tokens': 3}, {'topic': 'x'})
    """
    known = {*_NAMES, *_ALIASES, *_GRAMMAR, "n"}
    asked = {name: value for name, value in line.items() if name in known and value is not None}
    return asked, {name: value for name, value in line.items() if name not in known}


def sampled(asked: Mapping[str, Any], sampling: SamplingParams, source: str) -> SamplingParams:
    """The command's sampling with what a line asks for.

    Raises:
        InvalidInputError: a value is wrong, or cannot be honored here.
    """
    try:
        values = {
            _ALIASES.get(name, name): value
            for name, value in asked.items()
            if name not in (*_GRAMMAR, "n")
        }
        if asked.get("n", 1) != 1:
            raise InvalidInputError(
                f"n is {asked['n']}; a line has one answer, so write it several times"
            )
        grammar = grammar_of({name: asked[name] for name in _GRAMMAR if name in asked})
        return replace(sampling, **values, grammar=grammar or sampling.grammar)
    except SpecDecError as error:
        raise InvalidInputError(f"{source}: {error}") from error
