"""Requests for responses, which become requests of chats."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import Field, ValidationError

from specdec.base.chat.messages import readable
from specdec.base.errors import InvalidInputError, SpecDecError, shown
from specdec.serve.errors import RequestError, malformed
from specdec.serve.protocol import Body, ChatRequest, warn_of

_KEPT = "nothing is kept between requests; give all items as input"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": (("",), _KEPT),
    "conversation": ((), _KEPT),
    "prompt": ((), _KEPT),
    "store": ((False,), "no later request can name a response; give false or leave it out"),
    "background": ((False,), "ask with stream, or wait"),
    "truncation": (("disabled",), "prompts are never cut; shorten it"),
    "top_logprobs": ((0,), "/v1/chat/completions gives log-probabilities"),
    "logprobs": ((False,), "/v1/chat/completions gives log-probabilities"),
    "n": ((1,), "a response has one output"),
}
"""Fields that cannot be honored: values that ask for nothing, and what to do."""

INCLUDED = ("reasoning.encrypted_content",)
"""Entries of `include` that add nothing here: no thinking is encrypted."""

_OWN = {
    "include", "max_tool_calls", "prompt_cache_key", "prompt_cache_retention", "user", "metadata",
    "service_tier", "safety_identifier", "stream_options",
}  # fmt: skip


class ResponsesRequest(Body):
    """`POST /v1/responses`. Fields of chats, such as `seed`, are taken as well."""

    input: str | list[Any]
    model: str | None = None
    stream: bool = False
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        """The request as a chat.

        Raises:
            RequestError: a field or an item is not of its form, or cannot be honored.
        """
        self._check()
        extra = self.model_extra or {}
        own = {
            "model": self.model,
            "stream": self.stream,
            "messages": messages_of(self.input, self.instructions),
            "tools": None if self.tools is None else [_nested(one) for one in self.tools],
            "tool_choice": _nested_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "max_completion_tokens": self.max_output_tokens,
            "response_format": _format(self.text),
            "reasoning_effort": (self.reasoning or {}).get("effort"),
        }
        given = {name: one for name, one in own.items() if one is not None}
        fields = {**{name: one for name, one in extra.items() if name not in _OWN}, **given}
        if twice := sorted(extra.keys() & given.keys()):
            what = f"{twice[0]} is a chat's word for what the request says already"
            raise RequestError(f"{what}; leave it out", twice[0])
        for name in REFUSED.keys() - {"store"}:
            fields.pop(name, None)
        with own_words():
            try:
                return ChatRequest.model_validate(fields)
            except ValidationError as error:
                problems = [{**one, "loc": ("body", *one["loc"])} for one in error.errors()]
                raise malformed(problems) from error

    def check_others(self) -> None:
        """Looks within `text` and `reasoning`; of other fields the chat is asked."""
        for name, known in (("text", "format"), ("reasoning", "effort")):
            for key, value in (getattr(self, name) or {}).items():
                if key != known and value is not None:
                    warn_of(f"{name}.{key}")

    def _check(self) -> None:
        self.check_others()
        for name, (harmless, way_out) in REFUSED.items():
            value = (self.model_extra or {}).get(name)
            if value is not None and value not in harmless:
                raise RequestError(f"{name} is not offered: {way_out}", name)
        for name in self.include or ():
            if name not in INCLUDED:
                what = f"include asks for {shown(name)}, which is not offered"
                raise RequestError(f"{what}; leave it out", "include")


_WORDS = {
    "messages": "input",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
}
"""Names of this API for fields of a chat."""

_WORD = re.compile(r"^messages(?=[\[. ])|response_format|max_completion_tokens|reasoning_effort")


@contextmanager
def own_words() -> Iterator[None]:
    """A refusal within names fields as the request does, not as the chat that it becomes."""
    try:
        yield
    except RequestError as error:
        error.param = error.param and _WORDS.get(error.param, error.param)
        error.message = _renamed(error.message)
        raise
    except SpecDecError as error:
        raise type(error)(_renamed(str(error))) from error


def _renamed(message: str) -> str:
    return _WORD.sub(lambda found: _WORDS[found[0]], message)


def messages_of(given: str | list[Any], instructions: str | None) -> list[dict[str, Any]]:
    """The messages of a chat that has so much said: consecutive items of an assistant are one.

    Raises:
        RequestError: an item is none that this server knows.

    >>> messages_of([{"role": "user", "content": "a"},
    ...              {"type": "function_call_output", "call_id": "1", "output": "x"}], None)[1]
    {'content': 'x', 'role': 'tool', 'tool_call_id': '1'}
    """
    made = [] if instructions is None else [{"role": "system", "content": instructions}]
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    for place, item in enumerate(items):
        _add(made, f"input[{place}]", item)
    return [{"content": None, **message} for message in made]


def _add(made: list[dict[str, Any]], place: str, item: Any) -> None:
    kind = item.get("type", "message") if isinstance(item, Mapping) else None
    if kind == "message":
        role, content = item.get("role"), item.get("content")
        if not isinstance(role, str):
            raise RequestError(f"{place} has no role; give one, such as user", place)
        _check_content(place, content)
        if role == "assistant":
            _assistant(made, "content", "tool_calls")["content"] = content
        else:
            made.append({"role": role, "content": content})
    elif kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        parts = item.get(name) or []
        if not isinstance(parts, list):
            what = f"{name} of {place} is {shown(parts)}"
            raise RequestError(f"{what}; give a list of parts", place)
        texts = [part.get("text") for part in parts if isinstance(part, Mapping)]
        if said := "\n".join(text for text in texts if isinstance(text, str)):
            taken = ("reasoning_content", "content", "tool_calls")
            _assistant(made, *taken)["reasoning_content"] = said
    elif kind == "function_call":
        _check_texts(place, item, "call_id", "name", "arguments")
        function = {"name": item["name"], "arguments": item["arguments"]}
        call = {"id": item["call_id"], "type": "function", "function": function}
        _assistant(made).setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        _check_texts(place, item, "call_id")
        output = item.get("output")
        _check_content(place, output)
        made.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
    else:
        what = f"{place} is {shown(kind if isinstance(item, Mapping) else item)}"
        known = "message, reasoning, function_call or function_call_output"
        raise RequestError(f"{what}; give {known}", place)


def _assistant(made: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """The last message where it is an assistant's that has nothing of this, or a new one."""
    if not made or made[-1]["role"] != "assistant" or not made[-1].keys().isdisjoint(taken):
        made.append({"role": "assistant"})
    return made[-1]


def _check_content(place: str, content: Any) -> None:
    """Refuses what is no text by the place of its item, which is not that of the message made."""
    try:
        readable([{"role": "user", "content": content}])
    except InvalidInputError as error:
        raise RequestError(str(error).replace("message 0", place, 1), place) from error


def _check_texts(place: str, item: Mapping[str, Any], *names: str) -> None:
    for name in names:
        if not isinstance(item.get(name), str):
            what = f"{name} of {place} is {shown(item.get(name))}"
            raise RequestError(f"{what}; give a text", place)


def _nested(tool: Any) -> Any:
    """A tool as chats have it."""
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "function" in tool:
        return tool
    about = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": about}


def _nested_choice(given: Any) -> Any:
    kind = given.get("type") if isinstance(given, Mapping) else None
    if kind == "function" and "function" not in given:
        return {"type": "function", "function": {"name": given.get("name")}}
    if kind == "allowed_tools" and "allowed_tools" not in given:
        some = given.get("tools")
        named = [_nested(one) for one in some] if isinstance(some, list) else some
        return {"type": kind, "allowed_tools": {"mode": given.get("mode", "auto"), "tools": named}}
    return given


def _format(text: Mapping[str, Any] | None) -> Any:
    """The `response_format` of a chat."""
    given = (text or {}).get("format")
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        return given
    about = {name: value for name, value in given.items() if name != "type" and value is not None}
    return {"type": "json_schema", "json_schema": about}
