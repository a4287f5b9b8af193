"""What a line of a .jsonl file says beside its prompt: how to decode it, and what is carried along
to its answer. Its words are those of requests to the server, which reads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.base.packages import install_command
from specdec.base.registry import PARTS, resolve
from specdec.grammar.fields import MAKERS
from specdec.sampling.params import SamplingParams

_NAMES = {field.name for field in fields(SamplingParams)} - {"grammar"}
_GRAMMAR = {"response_format", "structured_outputs", *(f"guided_{name}" for name in MAKERS)}
OF_TEMPLATE = {
    *("add_generation_prompt", "continue_final_message", "add_special_tokens"),
    *("chat_template_kwargs", "reasoning_effort", "enable_thinking"),
}
"""Fields for the chat template."""
KNOWN = {*_NAMES, *_GRAMMAR, *OF_TEMPLATE, "n", "max_new_tokens", "max_completion_tokens"}
"""All that say how a line is decoded."""


def is_request(record: Any) -> bool:
    """Whether a line is one of an OpenAI batch file."""
    return isinstance(record, Mapping) and "custom_id" in record and "body" in record


def served(part: str) -> Any:
    """What the server's room has for lines.

    Raises:
        InvalidInputError: a package is missing.
    """
    try:
        return resolve(PARTS, part, "part")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("specdec", "torch", "transformers"):
            raise
        what = f"lines that say how they are decoded need {error.name}, which is not installed"
        raise InvalidInputError(f"{what}; run: {install_command('serve')}") from error


def parted(line: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a line says of sampling, and the rest.

    >>> parted({"max_tokens": 3, "topic": "x", "temperature": None})
    ({'max_tokens': 3}, {'topic': 'x'})
    """
    asked = {name: value for name, value in line.items() if name in KNOWN and value is not None}
    return asked, {name: value for name, value in line.items() if name not in KNOWN}


def sampled(asked: Mapping[str, Any], sampling: SamplingParams, source: str) -> SamplingParams:
    """The command's sampling with what a line asks for.

    Raises:
        InvalidInputError: a value is wrong, or cannot be honored here.
    """
    if not asked:
        return sampling
    try:
        words = dict(asked)
        if "max_new_tokens" in words:
            words["max_tokens"] = words.pop("max_new_tokens")
        values = served("line wishes")(words)
        own = {name: words[name] for name in words.keys() & _NAMES - values.keys()}
        return replace(sampling, **values, **own)
    except SpecDecError as error:
        raise InvalidInputError(f"{source}: {error}") from error
