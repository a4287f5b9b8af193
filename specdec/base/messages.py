"""Chat messages in OpenAI's form, made fit for a tokenizer's template, so that no template leaves out what a user wrote."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec.base.errors import InvalidInputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_PROBE = "qzx7 specdec"
"""A text that no template holds of its own."""

_reads_parts: dict[str, bool] = {}
"""By template, whether it reads the parts of a content, and not the text."""


def readable(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages whose contents are texts, and in which the arguments of calls are objects and not JSON.

    Raises:
        InvalidInputError: a message without a role, or with something else than text.

    >>> readable([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}])
    [{'role': 'user', 'content': 'a\\nb'}]
    """
    return [_readable(number, message) for number, message in enumerate(messages)]


def for_template(messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[dict[str, Any]]:
    """The same as the template reads them: contents as parts where it reads nothing else, and no role that it does not know."""
    template = _template(tokenizer)
    if template not in _reads_parts:
        _reads_parts[template] = _shows(tokenizer, [{"type": "text", "text": _PROBE}]) and not _shows(tokenizer, _PROBE)
    made = [dict(message) for message in messages]
    for message in made:
        if message.get("role") == "developer" and "developer" not in template:
            logger.warning("the chat template knows no role developer: its messages are given as those of the system")
            message["role"] = "system"
        if _reads_parts[template] and isinstance(message.get("content"), str):
            message["content"] = [{"type": "text", "text": message["content"]}]
    return made


def _readable(number: int, message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidInputError(f"message {number} has no role; give one, such as user")
    content = message.get("content")
    if isinstance(content, list):
        content = "\n".join(_text_of(number, part) for part in content)
    elif content is None:
        refusal = message.get("refusal")
        content = refusal if isinstance(refusal, str) else ""
    elif not isinstance(content, str):
        raise InvalidInputError(f"the content of message {number} is a {type(content).__name__}; give text")
    made = {**message, "content": content}
    if isinstance(message.get("tool_calls"), list):
        made["tool_calls"] = [_parsed_call(call) for call in message["tool_calls"]]
    return made


def _text_of(number: int, part: Any) -> str:
    """Of a part of a content."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidInputError(f"message {number} holds a part of type {kind!r}; give text alone")


def _parsed_call(call: Any) -> Any:
    """A call of a tool, whose arguments come as JSON and are read by templates as an object."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


def _template(tokenizer: PreTrainedTokenizerBase) -> str:
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else json.dumps(template, default=str)


def _shows(tokenizer: PreTrainedTokenizerBase, content: Any) -> bool:
    try:
        return _PROBE in str(tokenizer.apply_chat_template([{"role": "user", "content": content}], tokenize=False))
    except Exception:  # a template may raise whatever it likes
        return False
