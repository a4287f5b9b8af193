"""How families of models write calls of tools, as their chat templates publish it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from specdec.base.chat.messages import template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TAG = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
"""What begins a call, and no other text: `<tool_call>`, `[TOOL_CALLS]`."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How calls are written: `opening`, the calls with `between` between them, `closing`.

    Attributes:
        name: of the format.
        signs: what its chat templates hold, all of it; nothing where no template tells.
        begin: of a call, with `{name}` for that of the function. Its arguments follow.
        end: of a call.
        argument: what begins and ends one argument, with `{key}` for its name, where they are
            written one by one; they are a JSON object otherwise.
        opening, between, closing: around the calls.
        parallel: several may come at once.
        channels: an output is messages, each of which names its channel, as in gpt-oss's harmony:
            `opening` begins one, `closing` ends it, and a call is one.
    """

    name: str
    signs: tuple[str, ...]
    begin: str
    end: str
    argument: tuple[str, str] | None = None
    opening: str = ""
    between: str = "\n"
    closing: str = ""
    parallel: bool = True
    channels: bool = False

    @property
    def trigger(self) -> str:
        """What no text holds that is not followed by a call.

        >>> FORMATS["hermes"].trigger, FORMATS["llama3"].trigger
        ('<tool_call>', '{"name": "')
        """
        before = self.opening + self.begin.partition("{name}")[0]
        tag = _TAG.match(before)
        return tag[0] if tag else before

    def called(self, name: str) -> str:
        """What begins a call of this function."""
        return self.begin.replace("{name}", name)

    def written(self, calls: Iterable[tuple[str, Any]]) -> str:
        """Calls of functions with these arguments, as a model writes them.

        >>> FORMATS["mistral"].written([("f", {"a": 1}), ("g", {})])
        '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}'
        """
        made = (f"{self.called(name)}{self._arguments(given)}{self.end}" for name, given in calls)
        return f"{self.opening}{self.between.join(made)}{self.closing}"

    def _arguments(self, given: Any) -> str:
        if self.argument is None or not isinstance(given, Mapping):
            return given if isinstance(given, str) else _json(given)
        first, last = self.argument
        texts = ((key, one if isinstance(one, str) else _json(one)) for key, one in given.items())
        return "".join(f"{first.replace('{key}', key)}{text}{last}" for key, text in texts)

    def markers(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """Special tokens that it is written with: their ids, by name."""
        written = [getattr(self, one.name) for one in fields(self) if one.name != "signs"]
        text = "".join(str(part) for part in written)
        return {
            added.content: token
            for token, added in tokenizer.added_tokens_decoder.items()
            if added.special and added.content in text
        }


_QUOTED, _CALL = '{"name": "{name}", "arguments": ', "<tool_call>"
_DEEPSEEK: Any = {"opening": "<｜tool▁calls▁begin｜>", "closing": "<｜tool▁calls▁end｜>"}
_LISTED: Any = {"between": ", ", "closing": "]"}

_FORMATS = (
    ToolFormat(
        "harmony",
        ("<|channel|>", "functions."),
        "<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>",
        "",
        opening="<|start|>assistant",
        closing="<|end|>",
        parallel=False,
        channels=True,
    ),
    ToolFormat(
        "deepseek_v3",
        (_DEEPSEEK["opening"], "```json"),
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n",
        "\n```<｜tool▁call▁end｜>",
        **_DEEPSEEK,
    ),
    ToolFormat(
        "deepseek_v31",
        (_DEEPSEEK["opening"],),
        "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        between="",
        **_DEEPSEEK,
    ),
    ToolFormat("mistral", ("[TOOL_CALLS]", "[ARGS]"), "[TOOL_CALLS]{name}[ARGS]", "", None, "", ""),
    ToolFormat("mistral_v3", ("[TOOL_CALLS] [",), _QUOTED, "}", None, "[TOOL_CALLS] [", **_LISTED),
    ToolFormat("mistral_v7", ("[TOOL_CALLS]",), _QUOTED, "}", None, "[TOOL_CALLS][", **_LISTED),
    ToolFormat(
        "glm_4.7",
        ("</arg_key><arg_value>",),
        "<tool_call>{name}",
        "</tool_call>",
        ("<arg_key>{key}</arg_key><arg_value>", "</arg_value>"),
        between="",
    ),
    ToolFormat(
        "glm",
        ("<arg_key>",),
        "<tool_call>{name}\n",
        "</tool_call>",
        ("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
    ToolFormat(
        "qwen3_coder",
        ("<function=", "<parameter="),
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        ("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    ToolFormat("hermes", (_CALL,), f"{_CALL}\n{_QUOTED}", "}\n</tool_call>"),
    ToolFormat(
        "llama3",
        ("<|start_header_id|>", '"parameters": '),
        '{"name": "{name}", "parameters": ',
        "}",
        parallel=False,
    ),
    ToolFormat("json", (), _QUOTED, "}", None, "[", **_LISTED),
)
FORMATS: Mapping[str, ToolFormat] = {one.name: one for one in _FORMATS}
"""By name. Of those whose signs a template has the first is taken."""


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def format_of(tokenizer: PreTrainedTokenizerBase) -> ToolFormat | None:
    """The format that a tokenizer's chat template publishes; None where it is none of these."""
    template = template_of(tokenizer)
    known = (one for one in FORMATS.values() if one.signs)
    return next((one for one in known if all(sign in template for sign in one.signs)), None)


def split_at(text: str, markers: Iterable[str]) -> list[str]:
    """A text in parts, of which every second is a marker.

    >>> split_at("[A]b[C]", ["[A]", "[C]"])
    ['', '[A]', 'b', '[C]', '']
    """
    names = sorted(markers, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
