"""Conversations as a chat template reads them: calls of tools and their results among them."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
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

_thinks_in_parts: dict[str, bool] = {}
"""By template, whether it reads a thinking as a part of the content alone, as Mistral's do."""


class _Way(NamedTuple):
    """A way to give a template calls and their results.

    Attributes:
        objects: arguments are objects, and not JSON.
        empty: the content of a message that has calls alone.
        apart: each of several calls is a message of its own, behind which its result stands.
        written: calls stand in the content, as the model writes them.
        role: of results.
    """

    objects: bool = True
    empty: str | None = ""
    apart: bool = False
    written: bool = False
    role: str = "tool"


_ways: dict[tuple[str, bool, bool], _Way] = {}
"""By template, for calls alone and beside a text, for one call and for several."""

_short_ids: dict[str, bool] = {}
"""By template, whether it refuses ids of calls that are not of nine letters and digits."""


def for_template(
    messages: Sequence[dict[str, Any]], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any]]:
    """Messages as the template reads them: contents as parts where it reads nothing else, no role
    that it does not know, no call that it does not show, and nothing of `asks_to_continue`.
    """
    template, made = template_of(tokenizer), list[dict[str, Any]]()
    known = [{key: one[key] for key in one if key not in CONTINUED} for one in messages]
    if any(len(message.get("tool_calls") or ()) > 1 for message in known):
        known = _apart(known) if _way(tokenizer, said=False, several=True).apart else known
    if any(message.get("role") == "tool" for message in known):
        known = known if _way(tokenizer, said=False).role == "tool" else _joined(known)
    names = dict[str, str]()  # of what was called, by the ids of calls
    for message in known:
        calls = message.get("tool_calls")
        names |= {str(call.get("id")): call["function"]["name"] for call in calls or ()}
        if message.get("role") == "developer" and "developer" not in template:
            text = "the chat template knows no role developer"
            logger.warning(f"{text}: its messages are given as those of the system")
            message["role"] = "system"
        elif message.get("role") == "tool":
            if name := names.get(str(message.get("tool_call_id"))):
                message.setdefault("name", name)
            message["role"] = _way(tokenizer, said=False).role
        elif calls:
            way = _way(tokenizer, said=bool(message.get("content")), several=len(calls) > 1)
            message = _with_calls(message, way, tokenizer)
        message = _as_read(message, tokenizer)
        if message.get("reasoning_content") and _reads_thinking_parts(tokenizer):
            message = _with_thinking_part(message)
        has_ids = calls or "tool_call_id" in message
        shortens = has_ids and _wants_short_ids(tokenizer)
        made.append(_with_short_ids(message) if shortens else message)
    return made


def _reads_thinking_parts(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = template_of(tokenizer)
    if template not in _thinks_in_parts:
        message = {"role": "assistant", "content": "b", "reasoning_content": PROBE}
        ways = [message, _with_thinking_part(message)]
        plain, parted = (PROBE in rendering(tokenizer, [*user("a"), one]) for one in ways)
        _thinks_in_parts[template] = parted and not plain
    return _thinks_in_parts[template]


def _with_thinking_part(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content") or []
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    thinking = {"type": "thinking", "thinking": message["reasoning_content"]}
    return {**message, "content": [thinking, *parts]}


def _apart(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which none has several calls."""
    made, waiting = list[dict[str, Any]](), list(messages)
    while waiting:
        message = waiting.pop(0)
        calls, results = message.get("tool_calls") or [], list[dict[str, Any]]()
        if len(calls) < 2:
            made.append(message)
            continue
        while waiting and waiting[0].get("role") == "tool":
            results.append(waiting.pop(0))
        for call in calls:
            own = [one for one in results if one.get("tool_call_id") == call.get("id")]
            results = [one for one in results if one not in own]
            made += [{**message, "tool_calls": [call]}, *own]
            message = {"role": message["role"], "content": ""}
        made += results
    return made


def _joined(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages, in which results that follow each other are one: the users' may alternate."""
    made = list[dict[str, Any]]()
    for message in messages:
        before = made[-1] if made else {}
        if message.get("role") == before.get("role") == "tool":
            made[-1] = {**before, "content": f"{before['content']}\n{message['content']}"}
        else:
            made.append(message)
    return made


def _wants_short_ids(tokenizer: PreTrainedTokenizerBase) -> bool:
    template = template_of(tokenizer)
    if template not in _short_ids:
        way = _way(tokenizer, said=False)
        short, long = (_probed(tokenizer, way, number=one) for one in ("probe1234", "call_1234567"))
        _short_ids[template] = bool(short) and not long
    return _short_ids[template]


def _with_short_ids(message: dict[str, Any]) -> dict[str, Any]:
    made = dict(message)
    if isinstance(number := message.get("tool_call_id"), str):
        made["tool_call_id"] = _short(number)
    if calls := message.get("tool_calls"):
        named = ((call, call.get("id")) for call in calls)
        made["tool_calls"] = [
            {**call, "id": _short(number)} if isinstance(number, str) else call
            for call, number in named
        ]
    return made


def _short(number: str) -> str:
    """Nine letters and digits in place of an id.

    >>> _short("abc123XYZ"), _short("call_1")
    ('abc123XYZ', '74196fe72')
    """
    if len(number) == 9 and number.isascii() and number.isalnum():
        return number
    return hashlib.sha256(number.encode(errors="replace")).hexdigest()[:9]


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


def _way(tokenizer: PreTrainedTokenizerBase, *, said: bool, several: bool = False) -> _Way:
    """The first way in which the template shows calls, their result, and what was `said` before."""
    key = template_of(tokenizer), said, several
    if key not in _ways:
        found = next((way for way in _tried(tokenizer, said, several)), None)
        if found is None:
            lost = "is said beside" if said else "belongs to"
            calls = "several calls of tools" if several else "a call of tools"
            logger.warning(f"the chat template may leave out what {lost} {calls}")
        elif found.written and not (said or several):
            text = "the chat template knows no calls of tools"
            logger.warning(f"{text}: earlier ones are given within the text")
        if found is not None and found.role != "tool" and not (said or several):
            text = "the chat template knows no role tool"
            logger.warning(f"{text}: its messages are given as those of the user")
        usual = _Way() if not said else _way(tokenizer, said=False, several=several)
        _ways[key] = found or usual
    return _ways[key]


def _tried(tokenizer: PreTrainedTokenizerBase, said: bool, several: bool) -> Iterator[_Way]:
    """The ways that lose nothing. Arguments as Python writes objects come last but for calls that
    are written: some models call in that way."""
    roles = (_way(tokenizer, said=False).role,) if said or several else ("tool", "user")
    shapes = [(False, False), *([(True, False)] if several else []), (False, True)]
    for role, (apart, written), literal in product(roles, shapes, (False, True)):
        for empty, objects in product(("", None), (True, False)):
            way = _Way(objects, empty, apart, written, role)
            shown = _probed(tokenizer, way, said=said, count=1 + several)
            whole = min(shown.count(PROBE), shown.count(_RESULT)) > several
            whole = whole and (not said or _SAID in shown)
            if whole and (literal or f"'{PROBE}'" not in shown):
                yield way


def _probed(
    tokenizer: PreTrainedTokenizerBase,
    way: _Way,
    *,
    said: bool = False,
    count: int = 1,
    number: str = "probe1234",
) -> str:
    """What the template makes of a conversation with calls."""
    function, numbers = {"name": "probe", "arguments": {"a": PROBE}}, [number, "probe5678"][:count]
    calls = [{"id": one, "type": "function", "function": function} for one in numbers]
    called = {"role": "assistant", "content": _SAID if said else "", "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": one, "content": _RESULT} for one in numbers]
    end = [{"role": "assistant", "content": "b"}, *user("c")]
    messages: list[dict[str, Any]] = [*user("a"), called, *results, *end]
    read = list[dict[str, Any]]()
    messages = _apart(messages) if way.apart else messages
    for message in messages if way.role == "tool" else _joined(messages):
        if message["role"] == "tool":
            message["role"] = way.role
        elif message.get("tool_calls"):
            message = _with_calls(message, way, tokenizer)
        read.append(_as_read(message, tokenizer))
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
