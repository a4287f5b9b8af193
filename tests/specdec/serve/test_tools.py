"""Calls of tools: what the openai package reads of answers and streams, and what is refused."""

import json
import random
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

pytest.importorskip("xgrammar")
pytest.importorskip("jsonschema")

from specdec.base.chat.tools import FORMATS
from specdec.base.config import EngineConfig
from specdec.sampling.params import SamplingParams
from specdec.serve.answers.calls import CallCompletion
from specdec.serve.answers.token_bytes import TokenBytes
from specdec.serve.processes.setup import Setup
from specdec.serve.protocol import ChatRequest
from specdec.serve.tools import tools_of
from specdec.session.decoder import SpecDecoder
from specdec.session.link.channel import Facts
from specdec.session.thinking import parted_decoder
from tests.checks.calls import asked, compare
from tests.helpers.live_server import MODEL, live_server
from tests.helpers.tools import (
    HARMONY,
    HERMES,
    MISTRAL,
    THINKING,
    UNKNOWN,
    function,
    tool_decoder,
    tool_tokenizer,
)
from tests.helpers.waiting import HANG

CITY: Any = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
}
TOOLS: Any = [function("get_weather", CITY), function("now")]
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
FORCED: tuple[Any, ...] = (
    "required",
    NAMED,
    {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}},
)
BLANKS = {"5": -20.0, "6": -20.0}
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "hi"}],
    "tools": TOOLS,
    "max_tokens": 200,
    "logit_bias": BLANKS,
    "temperature": 1,
}


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANG, max_retries=0)


@pytest.fixture(scope="module")
def hermes() -> Iterator[openai.OpenAI]:
    with live_server(tool_decoder()) as live:
        yield client_of(live.url)


@pytest.fixture(scope="module")
def mistral() -> Iterator[openai.OpenAI]:
    with live_server(tool_decoder(MISTRAL)) as live:
        yield client_of(live.url)


def called(message: Any) -> list[tuple[str, str]]:
    return [(one.function.name, one.function.arguments) for one in message.tool_calls or ()]


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    return tool_decoder()


@pytest.mark.parametrize(
    ("form", "count"),
    [
        ("hermes", 5),
        ("qwen3_coder", 5),
        ("mistral", 4),
        ("harmony", 3),
    ],
)
def test_calls_are_valid_and_the_same_with_drafts(
    decoder: SpecDecoder, form: str, count: int
) -> None:
    """More of them: `python -m tests.checks.calls --shapes 500`."""
    if form == "harmony":
        decoder = tool_decoder(HARMONY)
    draw = random.Random(7)
    found = compare(decoder, [asked(draw, decoder, form) for _ in range(count)])
    assert found["called"] >= count // 3 and found["accepted drafts"], found


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_calls_in_answers_and_streams(hermes: openai.OpenAI, choice: Any) -> None:
    """A name comes first, and arguments in pieces; a name that is chosen is called once."""
    most = 0
    for seed in range(4):
        way = {**ASKED, "tool_choice": choice, "seed": seed}
        way["max_tokens"] = 300
        way["logit_bias"] = {**BLANKS, "2": -20.0}  # an end, as a line break and another call
        made = hermes.chat.completions.create(**way).choices[0]
        if made.finish_reason == "length":
            continue
        calls: dict[int, list[Any]] = {}
        reason = None
        for event in hermes.chat.completions.create(**way, stream=True):
            reason = event.choices[0].finish_reason or reason
            assert not event.choices[0].delta.content
            for one in event.choices[0].delta.tool_calls or ():
                assert one.function is not None
                if one.index not in calls:
                    assert one.id and one.type == "function" and one.function.arguments == ""
                    assert one.index == len(calls)
                    calls[one.index] = [one.function.name, ""]
                else:
                    assert one.id is None and one.function.name is None
                    calls[one.index][1] += one.function.arguments or ""
        assert made.finish_reason == reason == "tool_calls" and made.message.content is None
        assert [tuple(one) for one in calls.values()] == called(made.message) != []
        assert choice == "required" or [name for name, _ in called(made.message)] == ["get_weather"]
        for name, arguments in called(made.message):
            assert set(json.loads(arguments)) == ({"city", "unit"} if name != "now" else set())
        most = max(most, len(calls))
        if seed and (most > 1 or choice != "required"):
            break
    assert most > 1 if choice == "required" else most == 1


def test_the_client_puts_streams_together(hermes: openai.OpenAI) -> None:
    way = {**ASKED, "tool_choice": NAMED, "seed": 1}
    strict: Any = [function("get_weather", {**CITY, "additionalProperties": False}, strict=True)]
    with hermes.chat.completions.stream(**{**way, "tools": strict}) as stream:
        made = stream.get_final_completion().choices[0]
    whole = hermes.chat.completions.create(**{**way, "tools": strict}).choices[0]
    assert called(made.message) == called(whole.message) and made.finish_reason == "tool_calls"
    parsed: Any = (made.message.tool_calls or [])[0].function.parsed_arguments
    assert parsed["unit"] in ("C", "F")


def test_a_stop_string_within_arguments(hermes: openai.OpenAI) -> None:
    """Such a call is none to answer."""
    way = {**ASKED, "tool_choice": NAMED, "stop": "city", "seed": 0}
    made = hermes.chat.completions.create(**way).choices[0]
    assert made.finish_reason == "stop" and called(made.message)[0][1].endswith('{"')


def test_one_call_where_several_are_not_wanted(hermes: openai.OpenAI) -> None:
    way = {**ASKED, "tool_choice": "required", "parallel_tool_calls": False, "n": 6, "seed": 0}
    made = hermes.chat.completions.create(**way)
    ended = [one for one in made.choices if one.finish_reason == "tool_calls"]
    assert ended and all(len(called(one.message)) == 1 for one in ended)


def test_text_and_calls_as_the_model_likes(mistral: openai.OpenAI) -> None:
    """The tokens that calls are written with are no text, and hold up no other."""
    kinds = set()
    for seed in range(12):
        way = {**ASKED, "logit_bias": {**BLANKS, "3": 3.0, "2": 1.0}, "seed": seed}
        made = mistral.chat.completions.create(**way).choices[0]
        text, calls, reason = "", [], None
        for event in mistral.chat.completions.create(**way, stream=True):
            delta = event.choices[0].delta
            text += delta.content or ""
            calls += [
                one.function.name for one in delta.tool_calls or () if one.id and one.function
            ]
            reason = event.choices[0].finish_reason or reason
        assert text == (made.message.content or "") and "[TOOL_CALLS]" not in text
        assert calls == [name for name, _ in called(made.message)] and reason == made.finish_reason
        assert (reason == "tool_calls") == bool(calls) or reason == "length"
        kinds.add((bool(text), bool(calls)))
        if seed and {(True, False), (True, True)} <= kinds:
            return
    raise AssertionError(f"only {kinds}")


def test_channels() -> None:
    """Thinking, talk, answers and calls of gpt-oss, in answers, streams and responses."""
    kinds = set()
    with live_server(tool_decoder(HARMONY)) as live:
        client, ids = client_of(live.url), live.decoder.tokenizer.convert_tokens_to_ids
        ends = {str(ids("<|end|>")): 2.5, str(ids("</s>")): 2.0, str(ids("\n")): -9.0}
        for seed in range(9):
            # In turn: any channel; that of thinking, by its letter; a call before its channel.
            first = {str(ids(sign)): -20.0 * (seed % 3 == 1) for sign in "fc"}
            first[str(ids(" "))] = 9.0 * (seed % 3 == 2)
            bias = {**ends, **first}
            way = {**ASKED, "seed": seed, "logit_bias": bias, "max_tokens": 150}
            made: Any = client.chat.completions.create(**way).choices[0]
            message, thought, text, arguments = made.message, "", "", ""
            events: Any = client.chat.completions.create(**way, stream=True)
            for event in events:
                delta = event.choices[0].delta
                text += delta.content or ""
                thought += getattr(delta, "reasoning_content", None) or ""
                arguments += "".join(
                    one.function.arguments for one in delta.tool_calls or () if not one.id
                )
            assert thought == (getattr(message, "reasoning_content", None) or "")
            assert text == (message.content or "") and "<|" not in text + thought
            assert arguments == "".join(given for _, given in called(message))
            if made.finish_reason != "length":
                assert (made.finish_reason == "tool_calls") == bool(message.tool_calls)
            kinds |= {name for name in ("content", "tool_calls") if getattr(message, name)}
            kinds |= {"thought"} if thought else set()
            if seed >= 2 and kinds == {"content", "tool_calls", "thought"}:
                return
    raise AssertionError(f"only {kinds}")


def test_a_model_thinks_before_it_calls() -> None:
    with live_server(tool_decoder(THINKING)) as live:
        client = client_of(live.url)
        way = {**ASKED, "tool_choice": NAMED, "seed": 0}
        extra = {"thinking_token_budget": 5}
        made: Any = client.chat.completions.create(**way, extra_body=extra).choices[0]
        assert len(made.message.reasoning_content) == 5 and made.finish_reason == "tool_calls"
        ((name, arguments),) = called(made.message)
        assert name == "get_weather" and set(json.loads(arguments)) == {"city", "unit"}
        parts = ["", ""]
        events: Any = client.chat.completions.create(**way, extra_body=extra, stream=True)
        for event in events:
            delta = event.choices[0].delta
            parts[0] += getattr(delta, "reasoning_content", None) or ""
            parts[1] += "".join(one.function.arguments for one in delta.tool_calls or ())
        assert parts == [made.message.reasoning_content, arguments]
        extra["separate_reasoning"] = False
        mixed: Any = client.chat.completions.create(**way, extra_body=extra).choices[0].message
        assert mixed.content == f"{parts[0]}</think>" and not hasattr(mixed, "reasoning_content")
        assert called(mixed) == [(name, arguments)]
        text = ""
        events = client.chat.completions.create(**way, extra_body=extra, stream=True)
        for event in events:
            delta = event.choices[0].delta
            assert not hasattr(delta, "reasoning_content")
            text += delta.content or ""
        assert text == mixed.content


@pytest.mark.parametrize("separate", [True, False])
def test_a_thinking_calls_nothing(separate: bool) -> None:
    """Whatever it writes, and wherever it goes."""
    tokenizer = tool_tokenizer(THINKING)
    one, two = (
        f'<tool_call>\n{{"name": "now", "arguments": {{"a": {place}}}}}\n</tool_call>'
        for place in (1, 2)
    )
    body: Any = {"messages": ASKED["messages"], "tools": TOOLS, "separate_reasoning": separate}
    asked = ChatRequest(**body)
    tools = tools_of(asked, tokenizer, FORMATS["hermes"])
    assert tools is not None
    about = asked, "m", [[1]], TokenBytes(tokenizer)
    answer = CallCompletion(*about, tools=tools)
    prompt, tokens = (
        tokenizer(text)["input_ids"] for text in ("<think>", f"or {one}.</think>\n\n{two}")
    )
    assert answer.parted
    text = parted_decoder(tokenizer, prompt, SamplingParams(), tagged=answer.tagged)
    assert text is not None
    text.push(tokens)
    text.finish()
    reasoning, content = text.parts
    result: Any = SimpleNamespace(
        text=text.text, content=content, reasoning=reasoning, token_ids=tokens,
        logprobs=[], top_logprobs=[],
    )  # fmt: skip
    message = answer.choice(result, 0, result)["message"]
    assert [call["function"]["arguments"] for call in message["tool_calls"]] == ['{"a": 2}']
    thought = f"or {one}."
    assert message.get("reasoning_content") == (thought if separate else None)
    assert message["content"] == (None if separate else f"{thought}</think>")


def test_log_probabilities_and_tokens_beside_calls(mistral: openai.OpenAI) -> None:
    """Of every token one, whatever its text is part of."""
    way = {**ASKED, "tool_choice": "required", "logprobs": True, "seed": 1}
    extra = {"return_token_ids": True}
    made: Any = mistral.chat.completions.create(**way, extra_body=extra)
    (choice,) = made.choices
    assert len(choice.logprobs.content) == len(choice.token_ids) == made.usage.completion_tokens
    values, tokens = list[Any](), list[int]()
    events: Any = mistral.chat.completions.create(**way, extra_body=extra, stream=True)
    for event in events:
        some = event.choices[0]
        values += some.logprobs.content if some.logprobs else ()
        tokens += getattr(some, "token_ids", None) or ()
    assert tokens == choice.token_ids
    whole = [one.logprob for one in choice.logprobs.content]
    assert [one.logprob for one in values] == pytest.approx(whole, abs=1e-4)


def test_tools_are_counted_where_texts_become_tokens(hermes: openai.OpenAI) -> None:
    made: Any = hermes.chat.completions.create(**{**ASKED, "max_tokens": 1})
    body = {"messages": ASKED["messages"], "tools": TOOLS}
    url = f"{str(hermes.base_url).removesuffix('/v1/')}/tokenize"
    assert httpx.post(url, json=body, timeout=HANG).json()["count"] == made.usage.prompt_tokens


def test_a_schema_for_answers_beside_tools(mistral: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "m", "schema": schema}}
    for bias in (20.0, -20.0):
        way = {**ASKED, "logit_bias": {**BLANKS, "3": bias}, "response_format": form, "seed": 1}
        made = mistral.chat.completions.create(**way).choices[0].message
        if bias > 0:
            assert called(made) and made.content is None
        else:
            assert not called(made) and json.loads(made.content or "")["a"] in (1, 2)


@pytest.mark.parametrize("template", [HERMES, MISTRAL])
def test_templates_get_tools_and_earlier_calls(template: str) -> None:
    """Arguments as objects where a template reads these, and as JSON where it joins texts."""
    function = {"name": "now", "arguments": '{"a": ["ö", 1]}'}
    call = {"id": "abc123456", "type": "function", "function": function}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abc123456", "content": "noon"},
    ]
    with live_server(tool_decoder(template)) as live:
        for choice in ("auto", "none"):
            made: Any = client_of(live.url).chat.completions.create(
                **{**ASKED, "messages": messages, "tool_choice": choice, "max_tokens": 1},
                extra_body={"return_token_ids": True},
            )
            prompt = live.decoder.tokenizer.decode(made.prompt_token_ids)
            assert re.search(r'now.*{"a": \["ö", 1\]}', prompt) and "noon" in prompt
            assert "tool: noonabc123456" in prompt
            assert ("get_weather does get_weather" in prompt) == (choice == "auto")


def test_a_template_that_says_not_how_calls_are_written() -> None:
    with live_server(tool_decoder(UNKNOWN)) as live:
        client = client_of(live.url)
        with pytest.raises(openai.BadRequestError, match="says in no known way"):
            client.chat.completions.create(**ASKED)
        made = client.chat.completions.create(**ASKED, tool_choice=NAMED, seed=0).choices[0]
        assert [name for name, _ in called(made.message)] == ["get_weather"]
    with live_server(tool_decoder(UNKNOWN), tool_format="mistral") as live:
        way = {**ASKED, "logit_bias": {**BLANKS, "3": 20.0}}
        assert called(client_of(live.url).chat.completions.create(**way).choices[0].message)


def test_what_is_said_at_the_start() -> None:
    def said(template: str, **config: Any) -> str | None:
        with live_server(tool_decoder(template), **config) as live:
            return Setup(Facts.of(live.decoder), live.front.config, MODEL).said_of_tools(
                live.decoder.tokenizer
            )

    assert said(HERMES) == "tools are called in the format hermes, as the chat template has it"
    assert said(HERMES, tool_format="glm") == (
        "tools are called in the format glm, as --tool-format says"
    )
    assert "tool_choice required alone" in (said(UNKNOWN) or "")


def test_a_model_that_is_told_of_no_tools() -> None:
    with (
        live_server() as live,
        pytest.raises(openai.BadRequestError, match="tells the model of no tools"),
    ):
        client_of(live.url).chat.completions.create(**ASKED)


def test_what_a_schema_asks_in_vain_is_said(hermes: openai.OpenAI) -> None:
    """Unless it is strict."""
    never: Any = {"type": "object", "properties": {"a": {"not": {}}}}
    way: Any = {**ASKED, "tool_choice": "required", "tools": [function("get", never)]}
    made: Any = hermes.chat.completions.create(**way)
    assert "get: its arguments are any object" in made.warnings[0] and "not" in made.warnings[0]
    with pytest.raises(openai.BadRequestError, match="get, which is strict: "):
        hermes.chat.completions.create(**{**way, "tools": [function("get", never, strict=True)]})


def wrong(**changes: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "get", **changes}}]}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tools": "get"}, "should be a valid list"),
        ({"tools": ["get"]}, "tools[0] is 'get'; give a function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is 'web_search'"),
        ({"tools": [{"type": "function"}]}, "tools[0] has no function"),
        ({"tools": [{"type": "function", "function": []}]}, "tools[0] has no function"),
        (wrong(name=None), "tools[0] is called None"),
        (wrong(name=""), "tools[0] is called ''"),
        (wrong(name="a b"), "1 to 64 letters"),
        (wrong(name="a" * 65), "1 to 64 letters"),
        (wrong(name='a"'), "1 to 64 letters"),
        (wrong(strict="yes"), "strict of get is 'yes'"),
        (wrong(description=[1]), "description of get is no text"),
        (wrong(parameters=[]), "the parameters of get are []"),
        (wrong(parameters={"type": "string"}), "describe no object"),
        (wrong(parameters={"type": "str"}), "the parameters of get: "),
        (wrong(parameters={"type": "object", "properties": ["a"]}), "the parameters of get: "),
        (wrong(parameters={"$ref": "#/nowhere"}), "describe no object"),
        ({"tools": [*wrong()["tools"], *wrong()["tools"]]}, "two functions are called 'get'"),
        ({"tools": [*wrong()["tools"]] * 129}, "tools has 129 entries and the limit is 128"),
        ({"tools": [], "tool_choice": "required"}, "there are no tools"),
        ({"tool_choice": "any"}, "tool_choice is 'any'; choose none, auto, required"),
        ({"tool_choice": 3}, "tool_choice is 3"),
        ({"tool_choice": {"type": "function"}}, "tool_choice names None"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "names 'x'"),
        ({"tool_choice": {"type": "allowed_tools", "allowed_tools": {}}}, "tool_choice is"),
        ({"parallel_tool_calls": "no"}, "should be a valid boolean"),
        ({"functions": [{"name": "get"}]}, "give tools and tool_choice instead"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        *(({"tool_choice": one, "guided_regex": "a"}, "guided_regex says what") for one in FORCED),
        (
            {"tool_choice": NAMED, "structured_outputs": {"choice": ["a"]}},
            "structured_outputs says",
        ),
    ],
)
def test_what_is_malformed_is_refused_in_one_line(
    hermes: openai.OpenAI, fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        hermes.post("/chat/completions", cast_to=object, body={**ASKED, **fields})
    body: Any = caught.value.body
    assert words in body["message"] and "\n" not in body["message"]
    assert len(body["message"]) < 300 and body["type"] == "invalid_request_error"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_format_is_of_answers_without_calls(hermes: openai.OpenAI, choice: Any) -> None:
    """Clients say it of every answer of a conversation."""
    way: Any = {**ASKED, "tool_choice": choice, "seed": 3}
    wanted: Any = {"type": "json_object"}
    plain, both = (
        hermes.chat.completions.create(**way, **more).choices[0].message
        for more in ({}, {"response_format": wanted})
    )
    assert called(both) and called(both) == called(plain)


def test_some_of_the_tools(hermes: openai.OpenAI) -> None:
    choice: Any = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "now"}}],
        },
    }
    made = hermes.chat.completions.create(**ASKED, tool_choice=choice, seed=2).choices[0]
    assert {name for name, _ in called(made.message)} == {"now"}


@pytest.mark.slow
def test_the_embedded_model_with_the_template_of_the_examples() -> None:
    template = str(Path(__file__).parents[3] / "docs" / "examples" / "tools.jinja")
    engine = EngineConfig(max_num_seqs=2, max_model_len=1024)
    decoder = SpecDecoder.from_pretrained("embedded", engine=engine, chat_template=template)
    question: Any = {"role": "user", "content": "What is the weather in Paris?"}
    with closing(decoder), live_server(decoder) as live:
        client = client_of(live.url)
        way: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 80}
        made: Any = client.chat.completions.create(**way, messages=[question], tool_choice=NAMED)
        message = made.choices[0].message
        assert made.choices[0].finish_reason == "tool_calls"
        assert "Paris" in json.loads(called(message)[0][1])["city"]
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21 C"}
        messages = [question, message.model_dump(exclude_none=True), result]
        again: Any = client.chat.completions.create(**way, messages=messages)
        assert again.choices[0].message.content
        assert again.usage.prompt_tokens > made.usage.prompt_tokens
