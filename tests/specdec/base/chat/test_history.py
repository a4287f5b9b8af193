"""Calls of tools and their results reach templates of all kinds, with every word."""

import json
from itertools import product
from typing import Any

import pytest

from specdec.session.prompts import PromptReader
from tests.helpers.tiny_models import tiny_tokenizer

_EACH, _END = "{% for m in messages %}", "{% endfor %}"
_OTHERS = "[{{ m.role }}]{{ m.content }}"
_CALL = "{{ c.function.name }}{{ c.function.arguments | tojson }}"
_CALLS = "{% for c in m.tool_calls or [] %}<" + _CALL + ">{% endfor %}"
_KNOWN = "m.role in ['user', 'assistant']"

BESIDE = _EACH + _OTHERS + _CALLS + _END
ALONE = _EACH + "{% if m.tool_calls %}" + _CALLS + "{% else %}" + _OTHERS + "{% endif %}" + _END
NULL = ALONE.replace("m.tool_calls %", "m.content is none %")
LOST_ROLE = _EACH + "{% if " + _KNOWN + " %}" + _OTHERS + "{% endif %}" + _END
TEMPLATES = {
    "beside": BESIDE,
    "as texts": BESIDE.replace(" | tojson", " + ''"),
    "alone": ALONE,
    "content null": NULL,
    "texts, content null": NULL.replace(" | tojson", " + ''"),
    "no calls": _EACH + _OTHERS + _END,
    "no role": LOST_ROLE.replace("{% endif %}", "{% else %}{{ raise_exception('x') }}{% endif %}"),
    "lost role": LOST_ROLE,
    "alternating": "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}" + _OTHERS + _END,
    "parts": _EACH + "{% for p in m.content %}{{ p.text }}{% endfor %}" + _CALLS + _END,
    "told of tools": "{% for t in tools %}{{ t.function.name }}{% endfor %}" + BESIDE,
    "one call": BESIDE.replace("<", "{% if loop.length > 1 %}{{ 1 / 0 }}{% endif %}<"),
    "first call": BESIDE.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"),
    "short ids": BESIDE.replace(
        "<", "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}<"
    ).replace("[{{", "{% if (m.tool_call_id or 9 * 'a') | length != 9 %}{{ 1 / 0 }}{% endif %}[{{"),
    "python": BESIDE.replace(" | tojson", ""),
}
TOOLS = [{"type": "function", "function": {"name": "g", "parameters": {"type": "object"}}}]


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return PromptReader(tokenizer, "tiny").chat_text(messages, {"tools": TOOLS})


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", [None, "", "text7", [{"type": "text", "text": "text7"}]])
def test_no_template_loses_a_call(name: str, content: Any) -> None:
    """What was called, with what, its result, and what was said before: each of them once."""
    for as_text, count in product((False, True), (1, 2)):
        given = [{"word": f"value{place}", "more": [1, True]} for place in range(count)]
        calls = [
            {
                "id": f"call{place}",
                "type": "function",
                "function": {
                    "name": f"fun{place}",
                    "arguments": json.dumps(one) if as_text else one,
                },
            }
            for place, one in enumerate(given)
        ]
        results = [
            {"role": "tool", "tool_call_id": f"call{place}", "content": f"result{place}"}
            for place in range(count)
        ]
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "asked1"},
            {"role": "assistant", "content": content, "tool_calls": calls},
            *results,
            {"role": "assistant", "content": "answer3"},
            {"role": "user", "content": "asked2"},
        ]
        text = rendered(TEMPLATES[name], chat)
        words = ["asked1", *(["text7"] if content else []), "answer3", "asked2"]
        for place in range(count):
            words += [f"fun{place}", f"value{place}", f"result{place}"]
        assert [text.count(word) for word in words] == [1] * len(words), text
        if name != "python":
            assert all(json.dumps(one) in text for one in given), text


def test_calls_that_no_template_shows_are_written_as_the_model_does(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One line says so, and one of what is said beside calls and cannot be told."""
    function = {"name": "f", "arguments": {"a": 1}}
    calls = [{"id": "1", "type": "function", "function": function}]
    said: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    chat = [{"role": "user", "content": "a"}, said]
    template = "{# <tool_call> written #}" + TEMPLATES["no calls"]
    for _ in range(2):
        written = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
        assert rendered(template, chat) == f"[user]a[assistant]{written}"
    assert [one for one in caplog.messages if "earlier ones are given within the text" in one] == (
        ["the chat template knows no calls of tools: earlier ones are given within the text"]
    )
    strict = TEMPLATES["alone"].replace("m.tool_calls %}", "m.tool_calls and loop.index == 2 %}")
    strict = strict.replace(_OTHERS, "{% if '{' in m.content %}{{ 1 / 0 }}{% endif %}" + _OTHERS)
    said["content"] = "lost"
    assert (
        "lost" not in rendered(strict, chat) and "may leave out what is said" in caplog.messages[-1]
    )


def test_nothing_is_said_of_calls_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    """Catches lines that every chat with a small model would begin with."""
    template = "{# without calls #}" + TEMPLATES["no calls"]
    chat = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    assert rendered(template, chat).endswith("[user]a")
    assert not caplog.messages


def test_a_result_has_the_id_of_its_call() -> None:
    """Also where ids of another form are given another one."""
    ids = "{{ m.tool_call_id }}{% for c in m.tool_calls or [] %}{{ c.id }}{% endfor %},"
    template = TEMPLATES["short ids"].removesuffix(_END) + ids + _END
    function = {"name": "f", "arguments": "{}"}
    for number in ("call_0123456789", "abc123XYZ", "", "é" * 9):
        calls = [{"id": number, "type": "function", "function": function}]
        result = {"role": "tool", "tool_call_id": number, "content": "b"}
        chat: list[dict[str, Any]] = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "tool_calls": calls},
            result,
        ]
        one, other = (part[-9:] for part in rendered(template, chat).split(",")[1:3])
        assert one == other and one.isascii() and (one == number) == (number == "abc123XYZ")


@pytest.mark.parametrize("content", ["answer", None, ""])
def test_a_thinking_is_a_part_of_the_content_where_that_is_read(content: str | None) -> None:
    """As by Mistral's templates, beside calls as well; others get it by its own name."""
    part = "{% if p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% else %}{{ p.text }}"
    parts = "{% for p in m.content %}" + part + "{% endif %}{% endfor %}"
    read = "{% if m.content is string %}{{ m.content }}{% else %}" + parts + "{% endif %}"
    template = BESIDE.replace("{{ m.content }}", read)
    own = BESIDE.replace("{{ m.content }}", "[THINK]{{ m.reasoning_content }}[/THINK]" + read)
    function = {"name": "f", "arguments": "{}"}
    said: dict[str, Any] = {"role": "assistant", "content": content, "reasoning_content": "why"}
    said["tool_calls"] = [{"id": "1", "type": "function", "function": function}]
    expected = f"[user]a[assistant][THINK]why[/THINK]{content or ''}<f{{}}>"
    for one in (template, own):
        text = rendered(one, [{"role": "user", "content": "a"}, said])
        assert text.replace("[user][THINK][/THINK]", "[user]") == expected


def test_a_result_has_the_name_of_what_was_called() -> None:
    """Templates such as Kimi's want it, and clients send the id alone."""
    calls = [
        {"id": number, "type": "function", "function": {"name": name, "arguments": "{}"}}
        for number, name in (("1", "f"), ("2", "g"))
    ]
    results: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": "2", "content": "b"},
        {"role": "tool", "tool_call_id": "1", "content": "c", "name": "own"},
        {"role": "tool", "tool_call_id": "3", "content": "d"},
    ]
    said: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
    chat = [{"role": "user", "content": "a"}, said, *results]
    assert rendered(BESIDE.replace("[{{", "{{ m.name }}[{{"), chat).endswith(
        "<f{}><g{}>g[tool]bown[tool]c[tool]d"
    )
