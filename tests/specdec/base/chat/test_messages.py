"""Chat messages of all forms reach templates of all kinds, with every word."""

from typing import Any

import pytest

from specdec.base.chat.messages import readable
from specdec.base.errors import InvalidInputError
from specdec.session.decoder import SpecDecoder
from tests.helpers.live_server import tiny_decoder

PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}{{ p.text }}{% endfor %}{%"
    " endfor %}"
)
TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}{{"
    " raise_exception('no such role') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{% for t in m.tool_calls or [] %}{{ t.function.arguments | tojson }}"
    "{% for name, value in t.function.arguments | items %}<{{ name }}={{ value }}>{% endfor %}{%"
    " endfor %}{% endfor %}"
)

MALFORMED: list[Any] = [[None], ["x"], [{}], [{"function": "x"}], [{"function": {}}], "x", 5]


def rendered(template: str, messages: list[dict[str, Any]]) -> str:
    decoder: SpecDecoder = tiny_decoder()
    decoder.tokenizer.chat_template = template
    return str(decoder.tokenizer.decode(decoder.tokenize(messages)))


@pytest.mark.parametrize("template", [PARTS, TEXTS, BOTH, STRICT])
@pytest.mark.parametrize(
    "content",
    ["ab", [{"type": "text", "text": "ab"}], ["ab"], [{"type": "input_text", "text": "ab"}]],
)
def test_no_template_loses_what_was_written(template: str, content: Any) -> None:
    assert (
        rendered(
            template, [{"role": "system", "content": "x"}, {"role": "user", "content": content}]
        )
        == "[system]x[user]ab"
    )


def test_a_template_that_knows_no_developer_gets_a_system_message(
    caplog: pytest.LogCaptureFixture,
) -> None:
    chat = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    assert rendered(STRICT, chat) == "[system]x[user]y"
    assert "knows no role developer" in caplog.messages[0]
    assert rendered("{# developer #}" + TEXTS, chat) == "[developer]x[user]y"


def test_arguments_of_calls_are_objects() -> None:
    def call(arguments: Any) -> list[dict[str, Any]]:
        return [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"function": {"name": "f", "arguments": arguments}}],
            }
        ]

    assert rendered(CALLS, call('{"a": 1}')) == rendered(CALLS, call({"a": 1})) == '{"a": 1}<a=1>'
    for nothing in ("", None, "{}"):
        assert rendered(CALLS, call(nothing)) == "{}"
    bare = call(None)
    del bare[0]["tool_calls"][0]["function"]["arguments"]
    assert rendered(CALLS, bare) == "{}"
    assert readable(call("no json")) == [{**call("no json")[0], "content": ""}]


def test_calls_of_functions_are_those_of_tools() -> None:
    """Catches a history of which no template says what was called."""
    function = {"name": "f", "arguments": '{"a": 1}'}
    said, result = readable(
        [
            {"role": "assistant", "content": None, "function_call": function},
            {"role": "function", "name": "f", "content": "b"},
        ]
    )
    (call,) = said["tool_calls"]
    assert call["function"] == {"name": "f", "arguments": {"a": 1}} and len(call["id"]) == 9
    assert result == {"role": "tool", "name": "f", "content": "b", "tool_call_id": call["id"]}
    assert rendered(CALLS, [{"role": "assistant", "function_call": function}]) == '{"a": 1}<a=1>'
    for odd in ({"tool_calls": [call], "function_call": function}, {"function_call": None}):
        (made,) = readable([{"role": "assistant", **odd}])
        assert made == {"role": "assistant", "content": "", **odd}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": None, "refusal": "no"}, "no"),
        ({"content": [{"type": "refusal", "refusal": "no"}]}, "no"),
        ({"content": None}, ""),
        ({}, ""),
        ({"content": []}, ""),
    ],
)
def test_what_stands_for_a_text(message: dict[str, Any], text: str) -> None:
    (made,) = readable([{"role": "assistant", **message}])
    assert made["content"] == text


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"content": "a"}, "message 0 has no role"),
        ("a", "message 0 has no role"),
        ({"role": 3}, "message 0 has no role"),
        ({"role": "user", "content": 3}, "the content of message 0 is a int"),
        (
            {"role": "user", "content": [{"type": "image_url"}]},
            "message 0 holds a part of type 'image_url'",
        ),
        ({"role": "user", "content": [3]}, "message 0 holds a part of type 'int'"),
        *(
            ({"role": "assistant", "tool_calls": calls}, "message 0 has the call .* give a list")
            for calls in MALFORMED
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": 5}}]},
            "message 0 has the call",
        ),
        ({"role": "assistant", "function_call": {"name": None}}, "message 0 has the call"),
        ({"role": "assistant", "reasoning_content": ["a"]}, "the reasoning_content of message 0"),
    ],
)
def test_what_is_no_message(message: Any, reason: str) -> None:
    with pytest.raises(InvalidInputError, match=reason):
        readable([message])


@pytest.mark.parametrize(
    "expression", ["1 / 0", "raise_exception('no')", "messages[5].x.y", "[].pop()"]
)
def test_a_template_that_fails_is_one_line(expression: str) -> None:
    with pytest.raises(InvalidInputError, match=r"the chat template of .* refuses these messages"):
        rendered("{{ " + expression + " }}", [{"role": "user", "content": "a"}])
