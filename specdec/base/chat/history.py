"""Conversations as a chat template reads them: calls of tools and their results among them."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.base.chat.messages import CONTINUED, PROBE, rendering, template_of, user
from specdec.base.chat.tools import FORMATS, format_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_SAID, _RESULT = "qzx8 specdec", "qzx9 specdec"
"""Texts beside a call and of its result, which no template holds of its own."""

_reads_parts: dict[str, bool] = {}
"""By template, whether it reads the parts of a content, and not the text."""


class _Way(NamedTuple):
    """A way to give a template calls and their results.

    Attributes:
        objects: arguments are objects, and not JSON.
        empty: the content of a message that has calls alone.
        written: calls stand in the content, as the model writes them.
        role: of results.
    """

    objects: bool = True
    empty: str | None = ""
    written: bool = False
    role: str = "tool"


_ways: dict[tuple[str, bool], _Way] = {}
"""By template, for calls alone and for calls beside a text."""


def for_template(
    messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Messages as the template reads them: contents as parts where it reads nothing else, no role
    that it does not know, no call that it does not show, and nothing of `asks_to_continue`.
    """
    template, made = template_of(tokenizer), list[dict[str, Any]]()
    for given in messages:
        message = {key: given[key] for key in given if key not in CONTINUED}
        calls = message.get("tool_calls")
        if message.get("role") == "developer" and "developer" not in template:
            text = "the chat template knows no role developer"
            logger.warning(f"{text}: its messages are given as those of the system")
            message["role"] = "system"
        elif message.get("role") == "tool":
            message["role"] = _way(tokenizer, said=False).role
        elif isinstance(calls, list) and calls and all(map(_is_call, calls)):
            way = _way(tokenizer, said=bool(message.get("content")))
            message = _with_calls(message, way, tokenizer)
        made.append(_as_read(message, tokenizer))
    return made


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str)


def _as_read(message: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """A message whose content is parts, where the template reads nothing else."""
    template, content = template_of(tokenizer), message.get("content")
    if template not in _reads_parts:
        parts = [{"type": "text", "text": PROBE}]
        plain = PROBE in rendering(tokenizer, user(PROBE))
        _reads_parts[template] = PROBE in rendering(tokenizer, user(parts)) and not plain
    if not _reads_parts[template] or not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _way(tokenizer: PreTrainedTokenizerBase, *, said: bool) -> _Way:
    """The first way in which the template shows a call, its result, and what was `said` before."""
    key = template_of(tokenizer), said
    if key not in _ways:
        found = next((way for way in _tried(tokenizer, said)), None)
        if found is None and said:
            logger.warning("the chat template leaves out what is said beside calls of tools")
        elif found is not None and found.written and not said:
            text = "the chat template knows no calls of tools"
            logger.warning(f"{text}: earlier ones are given within the text")
        if found is not None and found.role != "tool" and not said:
            text = "the chat template knows no role tool"
            logger.warning(f"{text}: its messages are given as those of the user")
        _ways[key] = found or (_way(tokenizer, said=False) if said else _Way())
    return _ways[key]


def _tried(tokenizer: PreTrainedTokenizerBase, said: bool) -> Iterator[_Way]:
    """The ways that lose nothing. Arguments as Python writes objects come last but for calls that
    are written: some models call in that way."""
    roles = (_way(tokenizer, said=False).role,) if said else ("tool", "user")
    for role, written, literal in product(roles, (False, True), (False, True)):
        for empty, objects in product(("", None), (True, False)):
            way = _Way(objects, empty, written, role)
            shown = _probed(tokenizer, way, said)
            whole = all(text in shown for text in (PROBE, _RESULT, _SAID if said else ""))
            if whole and (literal or f"'{PROBE}'" not in shown):
                yield way


def _probed(tokenizer: PreTrainedTokenizerBase, way: _Way, said: bool) -> str:
    """What the template makes of a conversation with a call."""
    function, number = {"name": "probe", "arguments": {"a": PROBE}}, "probe1234"
    calls = [{"id": number, "type": "function", "function": function}]
    called = {"role": "assistant", "content": _SAID if said else "", "tool_calls": calls}
    result = {"role": way.role, "tool_call_id": number, "name": "probe", "content": _RESULT}
    end = [{"role": "assistant", "content": "b"}, *user("c")]
    messages = [*user("a"), _with_calls(called, way, tokenizer), result, *end]
    read = [_as_read(message, tokenizer) for message in messages]
    about = {"name": "probe", "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": about}]
    return rendering(tokenizer, read, tools=tools) or rendering(tokenizer, read)


def _with_calls(
    message: dict[str, Any], way: _Way, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    calls, content = message["tool_calls"], message.get("content")
    if way.written:
        form = format_of(tokenizer)
        form = FORMATS["json"] if form is None or form.channels else form
        functions = [call["function"] for call in calls]
        text = form.written((one["name"], one.get("arguments")) for one in functions)
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**rest, "content": f"{content or ''}{text}"}
    made = calls if way.objects else [_written_call(call) for call in calls]
    return {**message, "content": content or way.empty, "tool_calls": made}


def _written_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool, whose arguments are JSON."""
    function = call["function"]
    if not isinstance(function.get("arguments"), dict):
        return call
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}
