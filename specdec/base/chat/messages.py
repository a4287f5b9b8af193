"""Chat messages in OpenAI's form, made fit for a tokenizer's template; none is left out."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.base.errors import InvalidInputError, one_line, shown
from specdec.base.files import parse_json, read_text, user_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROBE = "qzx7 specdec"
"""A text that no template holds of its own."""

CONTINUED = ("prefix", "partial")
"""Keys of a last message that answers go on with: DeepSeek's and Mistral's, Kimi's and Qwen's."""

_shows_tools: dict[str, bool] = {}
"""By template, whether it tells the model of tools."""


def readable(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages whose contents are texts, in which the arguments of calls are objects and not JSON,
    and the calls of functions, as OpenAI had them first, those of tools.

    Raises:
        InvalidInputError: a message without a role, or with something else than text.

    >>> readable([{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}])
    [{'role': 'user', 'content': 'a\\nb'}]
    """
    return [_readable(number, message) for number, message in enumerate(messages)]


def asks_to_continue(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message asks to be continued, as `continue_final_message` does.

    Raises:
        InvalidInputError: another message asks for it, or it is neither true nor false.

    >>> asks_to_continue([{"role": "user", "content": "a"}, {"role": "assistant", "prefix": True}])
    True
    """
    asks = False
    for number, message in enumerate(messages):
        for name in CONTINUED:
            given = message.get(name)
            if not isinstance(given, bool | None):
                what = f"{name} of message {number} is {shown(given)}"
                raise InvalidInputError(f"{what}; give true or false")
            if given and (number < len(messages) - 1 or message.get("role") != "assistant"):
                raise InvalidInputError(
                    f"message {number} has {name}, which only the last message may have, and only"
                    f" one of the assistant; leave it out"
                )
            asks = asks or bool(given)
    return asks


def knows_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template tells the model of tools."""
    template = template_of(tokenizer)
    if template not in _shows_tools:
        nothing = {"type": "object", "properties": {}}
        function = {"name": "probe", "description": PROBE, "parameters": nothing}
        tools = [{"type": "function", "function": function}]
        _shows_tools[template] = _shows(tokenizer, user("a"), tools=tools)
    return _shows_tools[template]


def template_text(given: Any) -> str | None:
    """A chat template: the text itself, which has a brace, or what a file holds; None for None.

    Raises:
        InvalidInputError: the file cannot be read, or holds no template.
    """
    if given is None or (isinstance(given, str) and "{" in given):
        return given
    way_out = "give a file with a Jinja template, or its text"
    if not isinstance(given, str | Path):
        raise InvalidInputError(f"chat_template is {shown(given)}; {way_out}")
    text = read_text(user_path(given), way_out=way_out)
    if "{" not in text:
        raise InvalidInputError(f"{str(given)!r} holds no chat template; {way_out}")
    return text


def template_variables(given: Any) -> dict[str, Any]:
    """Variables of a chat template, given as a mapping or as a JSON object; none for None.

    Raises:
        InvalidInputError: it is neither, or JSON cannot hold it.

    >>> template_variables('{"enable_thinking": false}')
    {'enable_thinking': False}
    """
    way_out = 'give an object, such as {"enable_thinking": false}'
    if given is None or given == "":
        return {}
    try:
        found = parse_json(given if isinstance(given, str) else json.dumps(given))
    except (TypeError, ValueError, RecursionError) as error:
        what = f"chat_template_kwargs are no JSON: {one_line(error)}"
        raise InvalidInputError(f"{what}; {way_out}") from error
    if not isinstance(found, dict):
        raise InvalidInputError(f"chat_template_kwargs are {shown(given)}; {way_out}")
    return found


def variables_text(given: Any) -> str | None:
    """Variables as JSON; None for none."""
    return json.dumps(template_variables(given), sort_keys=True) if given else None


def check_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises:
    InvalidInputError: one has the name of what the tokenizer's method takes for itself.
    """
    kind: Any = type(tokenizer)
    if taken := next((name for name in variables if name in _own(kind)), None):
        what = f"chat_template_kwargs names {taken!r}, which is no variable of templates"
        raise InvalidInputError(f"{what}; leave it out")


def check_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises:
    InvalidInputError: the chat template is no Jinja. What it says of messages is not asked.
    """
    try:
        tokenizer.apply_chat_template(user("a"), tokenize=False)
    except Exception as error:  # a template may raise whatever it likes
        from jinja2 import TemplateSyntaxError

        if isinstance(error, TemplateSyntaxError):
            what = f"the chat template is no Jinja template: line {error.lineno}: "
            raise InvalidInputError(f"{what}{one_line(error, 300)}") from error


@cache
def _own(kind: Any) -> frozenset[str]:
    """What the method of a tokenizer that applies templates takes for itself."""
    own = inspect.signature(kind.apply_chat_template).parameters
    return frozenset(own) | {"conversations", "messages"}  # what it hands on by these names


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
        what = f"the content of message {number} is a {type(content).__name__}"
        raise InvalidInputError(f"{what}; give text")
    made = {**message, "content": content}
    if not isinstance(thought := message.get("reasoning_content"), str | None):
        what = f"the reasoning_content of message {number} is {shown(thought)}"
        raise InvalidInputError(f"{what}; give text")
    calls = message.get("tool_calls")
    if not calls and isinstance(message.get("function_call"), Mapping):
        function = dict(made.pop("function_call"))
        calls = [{"id": _call_id(number), "type": "function", "function": function}]
    elif message["role"] == "function":
        made = {"tool_call_id": _call_id(number - 1), **made, "role": "tool"}
    if calls:
        made["tool_calls"] = _parsed_calls(number, calls)
    return made


def _call_id(number: int) -> str:
    """The id of the call in a message; some templates want nine letters or digits."""
    return f"call{number:05}"


def _text_of(number: int, part: Any) -> str:
    """The text of a part of a content."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping):
        text = part.get("refusal") if part.get("type") == "refusal" else part.get("text")
        if isinstance(text, str):
            return text
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidInputError(f"message {number} holds a part of type {shown(kind)}; give text alone")


def _parsed_calls(number: int, calls: Any) -> list[dict[str, Any]]:
    way_out = 'give a list of calls: {"type": "function", "function": {"name": ...}}'
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not named or not isinstance(calls, list):
            raise InvalidInputError(f"message {number} has the call {shown(call)}; {way_out}")
    return [_parsed_call(call) for call in calls]


def _parsed_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a tool, whose arguments come as JSON and are read by templates as an object."""
    function = call["function"]
    given = function.get("arguments")
    if not isinstance(given, str | None):
        return call
    try:
        arguments = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return call
    if not isinstance(arguments, dict):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def template_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template of a tokenizer; of several, all of them as JSON."""
    template = getattr(tokenizer, "chat_template", None)
    return template if isinstance(template, str) else json.dumps(template, default=str)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def _shows(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **more: Any) -> bool:
    return PROBE in rendering(tokenizer, messages, **more)


def rendering(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **variables: Any
) -> str:
    """What the chat template makes of messages, nothing where it refuses them."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **variables))
    except Exception:  # a template may raise whatever it likes
        return ""
