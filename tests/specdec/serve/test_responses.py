"""`/v1/responses`, as the openai package reads answers and streams."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

pytest.importorskip("xgrammar")

from specdec.serve import protocol
from specdec.serve.batch.lines import BatchLine
from specdec.serve.responses.protocol import ResponsesRequest, messages_of
from tests.helpers.live_server import MODEL, Live, live_server
from tests.helpers.thinking import OPENED
from tests.helpers.tools import HARMONY, HERMES, MISTRAL, tool_decoder
from tests.helpers.waiting import HANG
from tests.specdec.serve.test_thinking import decoder_of
from tests.specdec.serve.test_tools import BLANKS, CITY, client_of

TOOL: Any = {"type": "function", "name": "get_weather", "parameters": CITY, "strict": False}
NAMED: Any = {"type": "function", "name": "get_weather"}
ASKED: dict[str, Any] = {"model": MODEL, "input": "hi", "max_output_tokens": 200}
CALLED: list[Any] = [
    {"type": "function_call", "call_id": "1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "x"},
]
"""A call and its output: the first is put together with a message of the assistant."""
BODY: dict[str, Any] = {"seed": 1, "logit_bias": BLANKS}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(tool_decoder(MISTRAL)) as made:
        yield made


@pytest.fixture(scope="module")
def client(live: Live) -> openai.OpenAI:
    return client_of(live.url)


def test_a_text_is_that_of_a_chat(client: openai.OpenAI) -> None:
    made = client.responses.create(**ASKED, temperature=0)
    chat = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=0, max_tokens=200
    )
    assert made.output_text == chat.choices[0].message.content
    assert chat.usage is not None and made.usage is not None
    assert made.usage.input_tokens == chat.usage.prompt_tokens
    assert made.usage.output_tokens == chat.usage.completion_tokens
    cut: Any = client.responses.create(**{**ASKED, "max_output_tokens": 3}, temperature=0)
    assert cut.status == "incomplete" and cut.output[0].status == "incomplete"
    assert cut.incomplete_details.reason == "max_output_tokens"


@pytest.mark.parametrize("bias", [-20.0, 20.0])
def test_a_stream_adds_up_to_the_answer(live: Live, client: openai.OpenAI, bias: float) -> None:
    """A text, or calls; every event has its number, and tells of the item that is open."""
    body = {**BODY, "logit_bias": {**BLANKS, "3": bias}}
    asked: Any = {**ASKED, "tools": [TOOL], "parallel_tool_calls": False, "extra_body": body}
    whole: Any = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:
        events: list[Any] = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def plain(response: Any) -> list[Any]:
        names = {"message": ("content",), "function_call": ("name", "arguments")}
        return [
            (item.type, [getattr(item, name) for name in names[item.type]])
            for item in response.output
        ]

    shown = json.dumps(plain(whole), default=lambda one: one.text)
    assert json.dumps(plain(final), default=lambda one: one.text) == shown
    pieces = "".join(event.delta for event in events if event.type.endswith(".delta"))
    if bias > 0:
        call = whole.output[0]
        assert call.type == "function_call" and json.loads(call.arguments)["unit"] in ("C", "F")
        assert pieces == "".join(item.arguments for item in whole.output)
        assert "response.function_call_arguments.done" in kinds
    else:
        assert pieces == whole.output_text and "response.output_text.done" in kinds
    lines = live.post("/v1/responses", json={**ASKED, **body, "stream": True}, timeout=HANG).text
    assert "[DONE]" not in lines and lines.startswith("event: response.created\ndata: {")


def test_forced_calls_and_their_results(client: openai.OpenAI) -> None:
    made: Any = client.responses.create(**ASKED, tools=[TOOL], tool_choice=NAMED, extra_body=BODY)
    (call,) = made.output
    assert call.type == "function_call" and made.tool_choice.name == "get_weather"
    items: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "warm"},
    ]
    again: Any = client.responses.create(
        **{**ASKED, "input": items}, instructions="be short", tools=[TOOL], extra_body=BODY
    )
    assert again.usage.input_tokens > made.usage.input_tokens and again.instructions == "be short"


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    made = messages_of(
        [
            {"role": "developer", "content": "d"},
            {"role": "user", "content": "u"},
            {
                "type": "reasoning",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "r"}],
            },
            {"type": "message", "role": "assistant", "content": "a"},
            call,
            {**call, "call_id": "2"},
            {"type": "function_call_output", "call_id": "1", "output": "o"},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "content": "c"},
            {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        ],
        "i",
    )
    assert [message["role"] for message in made] == [
        *("system", "developer", "user", "assistant", "tool", "assistant", "assistant")
    ]
    said = made[3]
    assert (said["content"], said["reasoning_content"]) == ("a", "r")
    assert [one["id"] for one in said["tool_calls"]] == ["1", "2"]


def test_structured_output(client: openai.OpenAI) -> None:
    class Answer(BaseModel):
        sure: bool

    made = client.responses.parse(**ASKED, text_format=Answer, extra_body=BODY)
    assert isinstance(made.output_parsed, Answer)


def test_words_of_chats_are_taken() -> None:
    """Also those that responses have other words for."""
    words: dict[str, Any] = {
        "response_format": {"type": "json_object"},
        "reasoning_effort": "low",
        "max_completion_tokens": 3,
    }
    made = ResponsesRequest(input="hi", **words).chat()
    assert {name: getattr(made, name) for name in words} == words


def test_thinking_is_an_item_of_its_own() -> None:
    with live_server(decoder_of(OPENED)) as live:
        client = client_of(live.url)
        asked: Any = {**ASKED, "max_output_tokens": 20, "temperature": 0}
        body = {"thinking_token_budget": 5}
        made: Any = client.responses.create(**asked, extra_body=body)
        kinds = [item.type for item in made.output]
        assert kinds == ["reasoning", "message"]
        assert made.usage.output_tokens_details.reasoning_tokens == 6  # and that which closes it
        deltas: dict[str, str] = {}
        events: Any = client.responses.create(**asked, extra_body=body, stream=True)
        for event in events:
            if event.type.endswith("_text.delta"):
                deltas[event.type] = deltas.get(event.type, "") + event.delta
        thought = made.output[0]
        assert deltas["response.reasoning_text.delta"] == thought.content[0].text
        assert deltas["response.output_text.delta"] == made.output_text


def test_the_thinking_of_channels_is_counted() -> None:
    with live_server(tool_decoder(HARMONY)) as live:
        client, ids = client_of(live.url), live.decoder.tokenizer.convert_tokens_to_ids
        bias = {str(ids("<|end|>")): 2.5, str(ids("f")): -20.0}  # no letter of channel final
        for seed in range(12):
            body = {"seed": seed, "logit_bias": bias}
            made: Any = client.responses.create(**ASKED, tools=[TOOL], extra_body=body)
            texts = [one.content[0].text for one in made.output if one.type == "reasoning"]
            least = len("".join(texts)) + len(texts)  # a token a letter, and those that begin it
            found = made.usage.output_tokens_details.reasoning_tokens
            assert least <= found <= least + len(made.output)
            if texts:
                return
    raise AssertionError("no output has thought")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "nothing is kept between requests"),
        ({"conversation": "c"}, "nothing is kept between requests"),
        ({"store": True}, "no later request can name a response"),
        ({"background": True}, "background is not offered"),
        ({"truncation": "auto"}, "prompts are never cut"),
        ({"top_logprobs": 3}, "gives log-probabilities"),
        ({"n": 2}, "a response has one output"),
        ({"include": ["file_search_call.results"]}, "include asks for"),
        ({"input": 3}, "input is 3"),
        ({"input": []}, "input is []"),
        ({"input": ["a"]}, "input[0] is 'a'"),
        ({"input": [{"content": "a"}]}, "input[0] has no role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0] is 'item_reference'"),
        ({"input": [{"type": "function_call", "call_id": "1"}]}, "name of input[0] is None"),
        (
            {"input": [*CALLED, {"role": "user", "content": [{"type": "input_image"}]}]},
            "input[2] holds a part of type 'input_image'",
        ),
        (
            {"input": [*CALLED, {**CALLED[1], "output": {}}], "instructions": "a"},
            "the content of input[2] is a dict; give text",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0] is 'web_search'"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, "names 'x'"),
        ({"text": {"format": {"type": "csv"}}}, "the type of text.format is 'csv'"),
        (
            {"text": {"format": {"type": "text"}}, "response_format": {"type": "json_object"}},
            "response_format is a chat's word for what the request says already",
        ),
        ({"max_completion_tokens": 3}, "max_completion_tokens is a chat's word"),
        ({"max_output_tokens": 0}, "max_output_tokens is 0"),
        ({"input": [{"type": "reasoning", "summary": 5}]}, "summary of input[0] is 5; give a list"),
        (
            {"input": [{"type": "reasoning", "content": {"a": 1}}]},
            "content of input[0] is {'a': 1}",
        ),
        ({"tools": [{**TOOL, "strict": "x" * 999}]}, "strict of get_weather is 'xxx"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
    ],
)
def test_what_is_refused(client: openai.OpenAI, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.post("/responses", cast_to=object, body={**ASKED, **fields})
    body: Any = caught.value.body
    assert words in body["message"] and "\n" not in body["message"] and len(body["message"]) < 300
    assert body["param"] not in {"messages", "response_format"} - fields.keys()


@pytest.mark.parametrize("stream", [False, True])
def test_half_characters_are_repeated_as_question_marks(
    client: openai.OpenAI, stream: bool
) -> None:
    """In whatever a response repeats of its request."""
    echoed = {"metadata": {"\ud800": 1}, "text": {"\udfff": 5}}
    asked = json.dumps({**ASKED, **echoed, "stream": stream, "max_output_tokens": 1})
    kind = {"Content-Type": "application/json"}
    answer = httpx.post(f"{client.base_url}responses", content=asked, headers=kind, timeout=HANG)
    assert answer.status_code == 200
    assert '"?"' in answer.text and "defect" not in answer.text


def test_a_server_that_ends_says_so_in_the_stream() -> None:
    with live_server(tool_decoder(HERMES, max_model_len=512)) as live:
        client = client_of(live.url)
        kinds = []
        asked: Any = {**ASKED, "max_output_tokens": 480}
        events: Any = client.responses.create(**asked, stream=True, extra_body={"ignore_eos": True})
        for event in events:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                live.hub.stop()
        assert kinds[-2:] == ["error", "response.failed"]


def test_fields_that_do_nothing_are_told_of_and_no_others(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch as in the server: fields of chats are honored."""
    inner = {
        "text": {"verbosity": "low", "format": {"type": "text"}},
        "reasoning": {"summary": "", "a": None},
    }
    body = {"input": "hi", "max_output_tokens": 1, "seed": 1, "top_k": 5, **inner, "alien": 1}
    record = {"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}
    for ask in (
        lambda: BatchLine.read(record, MODEL),
        lambda: live.post("/v1/responses", json=body),
    ):
        monkeypatch.setattr(protocol, "_warned", set())
        ask()
        assert protocol._warned == {"text.verbosity", "reasoning.summary", "alien"}
