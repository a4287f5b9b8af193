"""How families of models write calls of tools, as their chat templates publish it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import TYPE_CHECKING, Any

from specdec.base.chat.messages import PROBE, rendering, template_of, user

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
        begin: of a call, with `{name}` for that of the function and `{id}` for what the model tells
            its calls apart by. Its arguments follow.
        end: of a call.
        argument: what begins and ends one argument, with `{key}` for its name, and `{text}` for
            whether it is a text (true or false) or JSON, where they are written one by one; they
            are a JSON object otherwise.
        opening, between, closing: around the calls.
        parallel: several may come at once.
        channels: an output is messages, each of which names its channel, as in gpt-oss's harmony:
            `opening` begins one, `closing` ends it, and a call is one.
        id_form: what `{id}` may be, as a regular expression.
        call_id: the id that the template has for such a call.
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
    id_form: str = ""
    call_id: str = "{id}"

    @property
    def tag(self) -> str:
        """What begins calls and no other text; nothing where calls look like any JSON.

        >>> FORMATS["hermes"].tag, FORMATS["mistral_v7"].tag, FORMATS["llama3"].tag
        ('<tool_call>', '[TOOL_CALLS]', '')
        """
        found = _TAG.match(self.opening + self.begin.partition("{name}")[0])
        return found[0] if found else ""

    @property
    def trigger(self) -> str:
        """What may begin calls.

        >>> FORMATS["hermes"].trigger, FORMATS["llama3"].trigger
        ('<tool_call>', '{"name": "')
        """
        return self.tag or self.opening + self.begin.partition("{name}")[0]

    def triggers(self, names: Iterable[str]) -> list[str]:
        """What no text holds that is not followed by a call of one of these functions.

        >>> FORMATS["llama3"].triggers(["f", "g"])
        ['{"name": "f"', '{"name": "g"']
        """
        before, behind = self.begin.split("{name}")
        return (
            [self.tag]
            if self.tag
            else [self.opening + before + name + behind[:1] for name in names]
        )

    def called(self, name: str) -> str:
        """What begins a call of this function; nine zeros stand for an id."""
        return self.begin.replace("{name}", name).replace("{id}", "0" * 9)

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
        return "".join(
            first.replace("{key}", key).replace("{text}", _json(isinstance(one, str)))
            + (one if isinstance(one, str) else _json(one))
            + last
            for key, one in given.items()
        )

    def markers(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
        """Special tokens that it is written with: their ids, by name."""
        written = [
            getattr(self, one.name) for one in fields(self) if one.name not in ("signs", "id_form")
        ]
        text = "".join(str(part) for part in written)
        return {
            added.content: token
            for token, added in tokenizer.added_tokens_decoder.items()
            if added.special and added.content in text
        }


_QUOTED, _CALL = '{"name": "{name}", "arguments": ', "<tool_call>"
_DEEPSEEK: Any = {"opening": "<｜tool▁calls▁begin｜>", "closing": "<｜tool▁calls▁end｜>"}
_LISTED: Any = {"between": ", ", "closing": "]"}


def _dsml(name: str, block: str) -> ToolFormat:
    """DeepSeek's since V3.2, which differ in the name of a group of calls."""
    return ToolFormat(
        name,
        ("｜DSML｜", block),
        '<｜DSML｜invoke name="{name}">\n',
        "</｜DSML｜invoke>\n",
        ('<｜DSML｜parameter name="{key}" string="{text}">', "</｜DSML｜parameter>\n"),
        opening=f"<｜DSML｜{block}>\n",
        between="",
        closing=f"</｜DSML｜{block}>",
    )


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
    _dsml("deepseek_v32", "function_calls"),
    _dsml("deepseek_v4", "tool_calls"),
    ToolFormat(
        "command_r",
        ("<|START_ACTION|>", '"tool_name"'),
        '{"tool_call_id": "{id}", "tool_name": "{name}", "parameters": ',
        "}",
        opening="<|START_ACTION|>[\n    ",
        between=",\n    ",
        closing="\n]<|END_ACTION|>",
        id_form="[0-9]{1,9}",
    ),
    ToolFormat(
        "kimi_k2",
        ("<|tool_call_argument_begin|>",),
        "<|tool_call_begin|>functions.{name}:{id}<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
        opening="<|tool_calls_section_begin|>",
        between="",
        closing="<|tool_calls_section_end|>",
        id_form="[0-9]{1,9}",
        call_id="functions.{name}:{id}",
    ),
    ToolFormat(
        "mistral_v11",
        ("[TOOL_CALLS]", "[CALL_ID]"),
        "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]",
        "",
        between="",
        id_form="[a-zA-Z0-9]{9}",
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
        "minimax_m2",
        ("<minimax:tool_call>",),
        '<invoke name="{name}">\n',
        "</invoke>\n",
        ('<parameter name="{key}">', "</parameter>\n"),
        opening="<minimax:tool_call>\n",
        between="",
        closing="</minimax:tool_call>",
    ),
    ToolFormat(
        "seed_oss",
        ("<seed:tool_call>",),
        "<seed:tool_call>\n<function={name}>\n",
        "</function>\n</seed:tool_call>",
        ("<parameter={key}>", "</parameter>\n"),
    ),
    ToolFormat(
        "qwen3_coder",
        ("<function=", "<parameter="),
        "<tool_call>\n<function={name}>\n",
        "</function>\n</tool_call>",
        ("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    ToolFormat(
        "granite",
        ("<|tool_call|>", "<|start_of_role|>"),
        _QUOTED,
        "}",
        opening="<|tool_call|>[",
        **_LISTED,
    ),
    ToolFormat(
        "nemotron",
        ("<TOOLCALL>",),
        _QUOTED,
        "}",
        opening="<TOOLCALL>[",
        between=", ",
        closing="]</TOOLCALL>",
    ),
    ToolFormat("hermes", (_CALL,), f"{_CALL}\n{_QUOTED}", "}\n</tool_call>"),
    ToolFormat(
        "llama3",
        ("header_", '"parameters": '),
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
    """The format that a tokenizer's chat template publishes; None where it is none of these.

    An earlier call shows it. Of templates that show none the signs tell.
    """
    template = template_of(tokenizer)
    if template not in _found:
        signed = [
            one for one in _FORMATS if one.signs and all(map(template.__contains__, one.signs))
        ]
        tagged = [one for one in _FORMATS if one.signs and one.tag]
        shown = _shown_calls(tokenizer)
        if not shown or any(one.channels for one in signed):
            told = signed
        else:
            told = [one for one in {*signed, *tagged} if re.search(_pattern(one), shown)]
            bare = "".join(shown.split())
            told = told or [one for one in signed if re.search(_pattern(one, blanks=False), bare)]
        _found[template] = min(told, key=_FORMATS.index, default=None)
    return _found[template]


_found: dict[str, ToolFormat | None] = {}
"""By template."""


def _shown_calls(tokenizer: PreTrainedTokenizerBase) -> str:
    """Earlier calls of a function `probe`, in all ways in which the template shows its argument."""
    other = {"name": "other", "parameters": {"type": "object", "properties": {}}}
    tools, given, texts = [{"type": "function", "function": other}], {"a": PROBE}, list[str]()
    ways = product(("probe1234", "functions.probe:0"), ("", None), (given, _json(given)))
    for number, content, arguments in ways:
        function = {"name": "probe", "arguments": arguments}
        calls = [{"id": number, "type": "function", "function": function}]
        chat = [*user("a"), {"role": "assistant", "content": content, "tool_calls": calls}]
        texts.append(rendering(tokenizer, chat, tools=tools) or rendering(tokenizer, chat))
    return "\n".join(text for text in texts if PROBE in text)


def _pattern(form: ToolFormat, *, blanks: bool = True) -> str:
    """A regular expression of what begins a call of `probe` and its argument."""
    first = form.argument[0].replace("{key}", "a") + PROBE if form.argument else "{"
    first = first.replace("{text}", "true")
    text = form.opening + form.begin.replace("{name}", "probe") + first
    parts = (text if blanks else "".join(text.split())).split("{id}")
    return form.id_form.join(map(re.escape, parts))


def split_at(text: str, markers: Iterable[str]) -> list[str]:
    """A text in parts, of which every second is a marker.

    >>> split_at("[A]b[C]", ["[A]", "[C]"])
    ['', '[A]', 'b', '[C]', '']
    """
    names = sorted(markers, key=len, reverse=True)
    return re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
