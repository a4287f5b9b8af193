"""Reading calls out of texts that come in pieces."""

import json
import random
from typing import Any

import pytest

from specdec.base.chat.tools import FORMATS, ToolFormat
from specdec.serve.answers.reader import CallReader, Piece

IN_TEXTS = [form for form in FORMATS.values() if not form.channels]
FUNCTIONS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": ["integer", "string"]},
            "where": {"type": "object", "properties": {"x": {"type": "string"}}},
        },
    },
    "get": {"type": "object", "properties": {}},
}
ARGUMENTS = {"city": 'P"ar{is\\ö\n</', "days": 5, "where": {"x": '}"'}}


def called(form: ToolFormat, name: str, arguments: dict[str, object]) -> str:
    """A call as the model writes it."""
    if form.argument is None:
        written = json.dumps(arguments, ensure_ascii=False)
    else:
        first, last = form.argument
        written = "".join(
            first.replace("{key}", key).replace("{text}", json.dumps(isinstance(one, str)))
            + (one if isinstance(one, str) else json.dumps(one))
            + last
            for key, one in arguments.items()
        )
    return f"{form.called(name)}{written}{form.end}"


def together(pieces: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """The text and the calls of pieces."""
    text, calls = "", list[tuple[str, str]]()
    for kind, some, _ in pieces:
        if kind == "text":
            text += some
        elif kind == "name":
            calls.append((some, ""))
        else:
            calls[-1] = calls[-1][0], calls[-1][1] + some
    return text, calls


def read(form: ToolFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    reader = CallReader(form, FUNCTIONS)
    found = [piece for some in pieces for piece in reader.push(some)]
    return together(found + reader.push("", end=True))


@pytest.mark.parametrize("form", IN_TEXTS, ids=lambda form: form.name)
def test_pieces_and_cuts(form: ToolFormat) -> None:
    calls = [called(form, "get_weather", ARGUMENTS), called(form, "get", {})]
    whole = f"It is <t.\n{form.opening}{form.between.join(calls)}{form.closing}"
    text, found = read(form, [whole])
    assert text == "It is <t.\n" and [name for name, _ in found] == ["get_weather", "get"]
    assert [json.loads(arguments) for _, arguments in found] == [ARGUMENTS, {}]
    assert read(form, list(whole)) == (text, found)
    draw = random.Random(0)
    for _ in range(20):
        cuts = sorted(draw.sample(range(len(whole)), 9))
        some = [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)]
        assert read(form, some) == (text, found)
    for end in range(len(whole)):
        said, some_calls = read(form, [whole[:end]])
        assert (text + form.trigger).startswith(said)
        assert read(form, list(whole[:end])) == (said, some_calls)
        for one, other in zip(some_calls, found, strict=False):
            assert one[0] == other[0] and other[1].startswith(one[1])


def test_a_text_comes_as_soon_as_it_is_none_of_a_call() -> None:
    """So does one of an argument; of other arguments the value as a whole."""
    reader = CallReader(FORMATS["qwen3_coder"], FUNCTIONS)
    assert reader.push("a <tool") == [Piece("text", "a ")]
    assert reader.push("s> b") == [Piece("text", "<tools> b")]
    (name,) = reader.push("<tool_call>\n<function=get_weather>\n")
    assert name == Piece("name", "get_weather", name.call_id) and len(name.call_id) == 9
    begun = reader.push("<parameter=city>\nPar\nis\n</par")
    assert "".join(piece.text for piece in begun) == '{"city": "Par\\nis'
    assert [piece.text for piece in reader.push("t\n</parameter>\n")] == ['\\n</part"']
    assert [piece.text for piece in reader.push("<parameter=days>\n1")] == [', "days": ']
    assert [piece.text for piece in reader.push("2\n</parameter>\n")] == ["12"]


def test_blanks_before_a_call_are_no_text() -> None:
    form = FORMATS["hermes"]
    assert read(form, ["\n", "\n", called(form, "get", {})]) == ("", [("get", "{}")])
    assert read(form, ["\n", "a"]) == ("\na", [])
    assert read(form, ["\n"]) == ("\n", [])


def test_what_looks_like_a_call_and_is_none() -> None:
    """Where no grammar has held the output."""
    text = 'a <tool_call>\n{"name": "unknown"}\n</tool_call>'
    assert read(FORMATS["hermes"], [text]) == (text, [])


@pytest.mark.parametrize("form", IN_TEXTS, ids=lambda form: form.name)
def test_a_call_behind_what_looks_like_one(form: ToolFormat) -> None:
    """A marker that is a token may be spelled in a text, and a thinking may speak of it."""
    said = f"I write {form.trigger}, {form.opening}x, {form.trigger}{form.trigger} and {{: "
    whole = f"{said}{form.opening}{called(form, 'get_weather', ARGUMENTS)}{form.closing}"
    text, found = read(form, [whole])
    assert text == said and [name for name, _ in found] == ["get_weather"]
    for at in range(1, len(whole)):
        assert read(form, [whole[:at], whole[at:]]) == (text, found), whole[:at]
    assert read(form, list(whole)) == (text, found)


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("NaN", {}, '"NaN"'),
        ("-Infinity", {"type": ["number", "string"]}, '"-Infinity"'),
        ("1e999", {"type": "number"}, "1e999"),
        ("1e999", {}, "1e999"),
        ("0.10000000000000000555", {"type": "number"}, "0.10000000000000000555"),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("1.0", {"type": ["integer", "string"]}, "1.0"),
        ('{"a": 1, "a": 2}', {"type": "object"}, '{"a": 1, "a": 2}'),
        ("None", {"type": ["null", "string"]}, '"None"'),
    ],
)
def test_numbers_stay_as_they_were_written(text: str, schema: object, value: str) -> None:
    """And what JSON has no number for is a text."""
    form = FORMATS["qwen3_coder"]
    assert form.argument is not None
    first, last = form.argument
    whole = f"{form.called('f')}{first.replace('{key}', 'v')}{text}{last}{form.end}"
    functions = {"f": {"type": "object", "properties": {"v": schema}}}
    for pieces in ([whole], list(whole)):
        reader = CallReader(form, functions)
        found = [piece for some in pieces for piece in reader.push(some)]
        assert together(found) == ("", [("f", f'{{"v": {value}}}')])


@pytest.mark.parametrize(
    ("name", "calls", "ids"),
    [
        ("mistral_v11", "[TOOL_CALLS]get[CALL_ID]abcdefgh1[ARGS]{}", ["abcdefgh1"]),
        (
            "kimi_k2",
            "<|tool_calls_section_begin|>"
            "<|tool_call_begin|>functions.get:3<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>functions.get:4<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_calls_section_end|>",
            ["functions.get:3", "functions.get:4"],
        ),
    ],
)
def test_ids_are_those_that_the_model_writes(name: str, calls: str, ids: list[str]) -> None:
    """Its template has no other name of a call."""
    for size in range(1, len(calls) + 1):
        reader = CallReader(FORMATS[name], FUNCTIONS)
        found = [
            piece
            for at in range(0, len(calls), size)
            for piece in reader.push(calls[at : at + size], end=at + size >= len(calls))
        ]
        assert [one.call_id for one in found if one.kind == "name"] == ids
        assert together(found) == ("", [("get", "{}")] * len(ids))


@pytest.mark.parametrize(
    ("value", "is_text", "wanted"),
    [
        ("null", True, "null"),
        ("null", False, None),
        ("5", False, 5),
        ("5", True, "5"),
        ('"a"', False, "a"),
    ],
)
@pytest.mark.parametrize("kind", [{}, {"type": ["string", "integer", "null"]}])
def test_an_argument_that_says_whether_it_is_a_text(
    kind: Any, value: str, is_text: bool, wanted: Any
) -> None:
    form = FORMATS["deepseek_v4"]
    assert form.argument is not None
    first, last = form.argument
    first = first.replace("{key}", "v").replace("{text}", json.dumps(is_text))
    whole = f"{form.opening}{form.called('f')}{first}{value}{last}{form.end}{form.closing}"
    functions = {"f": {"type": "object", "properties": {"v": kind}}}
    for pieces in ([whole], list(whole)):
        reader = CallReader(form, functions)
        found = [piece for some in pieces for piece in reader.push(some)]
        ((name, arguments),) = together(found)[1]
        assert (name, json.loads(arguments)) == ("f", {"v": wanted})


def test_an_id_before_the_name_is_not_that_of_the_call() -> None:
    """Templates number calls anew, and a model may write the same number twice."""
    call = '{"tool_call_id": "0", "tool_name": "get", "parameters": {}}'
    numbered = call, call.replace("0", "17")
    whole = "<|START_ACTION|>[\n    " + ",\n    ".join(numbered) + "\n]<|END_ACTION|>"
    for pieces in ([whole], list(whole)):
        reader = CallReader(FORMATS["command_r"], FUNCTIONS)
        found = [piece for some in pieces for piece in reader.push(some)]
        assert together(found) == ("", [("get", "{}")] * 2)
        ids = {one.call_id for one in found if one.kind == "name"}
        assert len(ids) == 2 and {len(one) for one in ids} == {9}


def test_messages_that_name_their_channels() -> None:
    """Whichever way calls are addressed; a message that is cut in its head is none."""
    form = FORMATS["harmony"]
    for call in (
        '<|channel|>commentary to=functions.get <|constrain|>json<|message|>{"a": "<|e"}',
        ' to=functions.get<|channel|>commentary json<|message|>{"a": "<|e"}',
    ):
        thought = "<|channel|>analysis<|message|>hm < |<|end|><|start|>assistant"
        said = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
        whole = thought + said + call
        for pieces in ([whole], list(whole)):
            reader = CallReader(form, FUNCTIONS)
            found = [piece for some in pieces for piece in reader.push(some)]
            found += reader.push("", end=True)
            assert "".join(one.text for one in found if one.kind == "reasoning") == "hm < |"
            rest = [piece for piece in found if piece.kind != "reasoning"]
            assert together(rest) == ("Let me see.", [("get", '{"a": "<|e"}')])
    assert read(form, ["<|channel|>final<|message|>Hello <|"]) == ("Hello <|", [])
    marks = "<|end|> ends, <|message|> begins, <|end|><|start|>assistant"
    assert read(form, [f"<|channel|>final<|message|>{marks}"]) == (marks, [])
    thought = "<|channel|>commentary<|message|><|end|> {ends<|end|><|start|>assistant"
    call = f"<|channel|>commentary to=functions.get json<|message|>{json.dumps({'a': marks})}"
    for whole in (thought + call, thought[:-18], thought[:-18] + "<|st"):
        expected = "<|end|> {ends", [("get", json.dumps({"a": marks}))] if call in whole else []
        for at in range(len(whole)):
            assert read(form, [whole[:at], whole[at:]]) == expected, whole[:at]
    assert read(form, ["<|channel|>fin"]) == ("", [])
