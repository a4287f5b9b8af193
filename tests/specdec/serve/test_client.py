"""OpenAI's own client against a live server: what it gets is what the engine gives without a
server.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdec.base.metrics import pooled
from specdec.sampling.params import SamplingDefaults
from specdec.serve.protocol import CompletionRequest
from specdec.serve.sampling import sampling_params
from specdec.session.decoder import SpecDecoder
from tests.helpers.live_server import MODEL, Live, live_server, tiny_decoder

CHAT: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=live.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    """The same model with an engine of its own."""
    return tiny_decoder()


def test_completions_are_what_the_decoder_generates(
    client: openai.OpenAI, decoder: SpecDecoder
) -> None:
    prompts = ["abc", "some other text"]
    extra: Any = {"top_k": 20, "min_p": 0.02, "ignore_eos": True, "return_token_ids": True}
    options: Any = {"max_tokens": 12, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    made = client.completions.create(model=MODEL, prompt=prompts, n=2, extra_body=extra, **options)
    del options["seed"], extra["return_token_ids"]
    for index, choice in enumerate(made.choices):
        want = decoder.generate(prompts[index // 2], seed=11 + index % 2, **options, **extra)
        assert (choice.index, choice.text, choice.finish_reason) == (
            index,
            want.text,
            want.finish_reason,
        )
        assert (
            choice.token_ids == want.token_ids and choice.prompt_token_ids == want.prompt_token_ids
        )
    assert made.usage is not None
    assert (made.usage.prompt_tokens, made.usage.completion_tokens) == (
        sum(map(len, prompts)),
        4 * 12,
    )
    assert made.choices[0].text != made.choices[1].text


def test_token_ids_are_a_prompt_and_stops_end_it(
    client: openai.OpenAI, decoder: SpecDecoder
) -> None:
    plain = decoder.generate([70, 71, 72], max_tokens=20, ignore_eos=True)
    stop = plain.text[6:8]
    made = client.completions.create(
        model=MODEL, prompt=[70, 71, 72], max_tokens=20, temperature=0, stop=[stop]
    )
    assert (made.choices[0].text, made.choices[0].finish_reason) == (
        plain.text[: plain.text.index(stop)],
        "stop",
    )
    token, place = plain.token_ids[5], plain.token_ids.index(plain.token_ids[5])
    extra = {"stop_token_ids": [token], "return_token_ids": True}
    made = client.completions.create(
        model=MODEL, prompt=[70, 71, 72], max_tokens=20, temperature=0, extra_body=extra
    )
    assert made.choices[0].token_ids == plain.token_ids[: place + 1]  # type: ignore[attr-defined]


def test_a_chat_goes_through_the_template(client: openai.OpenAI, decoder: SpecDecoder) -> None:
    made = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=9, temperature=0
    )
    assert made.choices[0].message.content == decoder.generate(CHAT, max_tokens=9).text
    extra: Any = {"chat_template_kwargs": {"name": "robot"}}
    made = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=9, temperature=0, extra_body=extra
    )
    assert (
        made.choices[0].message.content
        == decoder.generate("user: hello\nrobot: ", max_tokens=9).text
    )
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "hello"}]},
        {"role": "assistant", "content": "so be"},
    ]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    made = client.chat.completions.create(
        model=MODEL, messages=parts, max_tokens=9, temperature=0, extra_body=extra
    )
    assert (
        made.choices[0].message.content
        == decoder.generate("user: hello\nassistant: so be", max_tokens=9).text
    )


@pytest.mark.parametrize("word", ["prefix", "partial"])
def test_an_answer_goes_on_with_a_last_message_that_asks_for_it(
    client: openai.OpenAI, decoder: SpecDecoder, word: str
) -> None:
    """In the words of DeepSeek and Mistral, and of Kimi and Qwen; over HTTP and in Python."""
    first, last = CHAT[0], {"role": "assistant", "content": "so be"}
    wanted = decoder.generate("user: hello\nassistant: so be", max_tokens=9).text
    way: Any = {"model": MODEL, "max_tokens": 9, "temperature": 0}
    chat: Any = [{**first, word: False}, {**last, word: True}]
    made = client.chat.completions.create(messages=chat, **way)
    assert made.choices[0].message.content == decoder.generate(chat, max_tokens=9).text == wanted
    plain: Any = [first, {**last, word: False}]
    new = client.chat.completions.create(messages=plain, **way)
    assert new.choices[0].message.content == decoder.generate([first, last], max_tokens=9).text
    assert new.choices[0].message.content != wanted
    refused: list[tuple[Any, dict[str, bool], str]] = [
        ([{**last, word: True}, first], {}, f"message 0 has {word}, which only the last message"),
        ([{**first, word: True}], {}, f"message 0 has {word}, which only the last message"),
        ([first, {**last, word: "yes"}], {}, f"{word} of message 1 is 'yes'; give true or false"),
        (chat, {"add_generation_prompt": True}, "set add_generation_prompt to false"),
        (chat, {"continue_final_message": False}, "leave one out"),
    ]
    for messages, more, words in refused:
        with pytest.raises(openai.BadRequestError, match=words):
            client.chat.completions.create(messages=messages, extra_body=more, **way)


def test_a_stream_adds_up_and_ends_with_its_usage(
    client: openai.OpenAI, decoder: SpecDecoder
) -> None:
    events = list(
        client.chat.completions.create(
            model=MODEL,
            messages=CHAT,
            max_tokens=10,
            n=2,
            seed=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    texts, reasons = {0: "", 1: ""}, {}
    for event in events[:-1]:
        assert event.object == "chat.completion.chunk" and event.usage is None
        (choice,) = event.choices
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert [events[number].choices[0].delta.role for number in (0, 1)] == ["assistant"] * 2
    want = [
        decoder.generate(CHAT, max_tokens=10, temperature=1.0, seed=5 + number) for number in (0, 1)
    ]
    assert texts == {number: result.text for number, result in enumerate(want)}
    assert reasons == {number: result.finish_reason for number, result in enumerate(want)}
    assert events[-1].choices == [] and events[-1].usage is not None
    assert events[-1].usage.completion_tokens == sum(len(result.token_ids) for result in want)
    whole = "".join(
        event.choices[0].text
        for event in client.completions.create(
            model=MODEL, prompt="abc", max_tokens=8, temperature=0, stream=True, echo=True
        )
    )
    assert whole == "abc" + decoder.generate("abc", max_tokens=8).text


def test_log_probabilities_in_both_forms(client: openai.OpenAI, decoder: SpecDecoder) -> None:
    want = decoder.generate("abc", max_tokens=6, top_logprobs=2, prompt_logprobs=2)
    made = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=6, temperature=0, logprobs=2, echo=True
    )
    got = made.choices[0].logprobs
    assert (
        want.prompt_logprobs is not None
        and want.logprobs is not None
        and got is not None
        and got.top_logprobs is not None
    )
    assert got.token_logprobs == pytest.approx([*want.prompt_logprobs, *want.logprobs])
    assert "".join(got.tokens or []) == made.choices[0].text == "abc" + want.text
    assert got.token_logprobs is not None
    greedy = [
        max(top.values()) == value
        for top, value in zip(got.top_logprobs[3:], got.token_logprobs[3:], strict=True)
    ]
    assert all(greedy), "the likeliest token's number and the token's own are the same number"
    scored = client.completions.create(
        model=MODEL, prompt="abc", max_tokens=0, logprobs=1, echo=True
    )
    choice = scored.choices[0]
    assert choice.text == "abc" and choice.logprobs is not None
    assert len(choice.logprobs.tokens or []) == 3
    want = decoder.generate("user: xyz", max_tokens=5, top_logprobs=3, ignore_eos=True)
    chat: Any = [{"role": "user", "content": "xyz"}]
    events = client.chat.completions.create(
        model=MODEL,
        messages=chat,
        max_tokens=5,
        temperature=0,
        logprobs=True,
        top_logprobs=3,
        stream=True,
        extra_body={
            "ignore_eos": True,
            "add_generation_prompt": False,
            "continue_final_message": True,
        },
    )
    entries = [
        entry
        for event in events
        if event.choices[0].logprobs
        for entry in event.choices[0].logprobs.content or []
    ]
    assert [entry.logprob for entry in entries] == pytest.approx(want.logprobs)
    assert [len(entry.top_logprobs) for entry in entries] == [3] * len(want.token_ids)
    assert bytes(byte for entry in entries for byte in entry.bytes or []).decode() == want.text


def test_acceptance_stands_where_clients_look(live: Live, decoder: SpecDecoder) -> None:
    options: dict[str, Any] = {"max_tokens": 40, "temperature": 3.0, "ignore_eos": True}
    body = {"messages": CHAT, "n": 2, "seed": 7, "return_meta_info": True, **options}
    made = live.post("/v1/chat/completions", json=body).json()
    each = [decoder.generate(CHAT, seed=seed, **options).stats for seed in (7, 8)]
    both = pooled(each)
    assert sum(both.num_accepted) > 0
    for info, stats in (
        (made["meta_info"], both),
        (made["choices"][0]["meta_info"], each[0]),
        (made["choices"][1]["meta_info"], each[1]),
    ):
        assert (info["spec_verify_ct"], info["spec_accept_length"]) == (stats.num_steps, stats.tau)
    figures = made["metrics"]["speculative_decoding"]
    drafted = [
        accepted
        for accepted, offered in zip(both.num_accepted, both.num_drafted, strict=True)
        if offered
    ]
    assert figures["num_spec_steps"] == len(drafted)
    assert figures["acceptance_histogram"] == [drafted.count(accepted) for accepted in range(4)]
    assert figures["num_accepted_draft_tokens"] == sum(both.num_accepted)
    assert figures["mean_acceptance_length"] == 1 + sum(drafted) / len(drafted)


def test_metrics_count_what_was_done() -> None:
    with live_server(vllm_metrics=True) as live:
        for stream in (False, True):
            body = {
                "prompt": "abc",
                "max_tokens": 30,
                "temperature": 0,
                "ignore_eos": True,
                "stream": stream,
            }
            live.post("/v1/completions", json=body).raise_for_status()
        text = live.get("/metrics").text
    stats = tiny_decoder().generate("abc", max_tokens=30, ignore_eos=True).stats
    labels = 'engine="0",model_name="tiny"'
    for prefix in ("specdec", "vllm"):
        for line in (
            f"{prefix}:prompt_tokens_total{{{labels}}} 6.0",
            f"{prefix}:generation_tokens_total{{{labels}}} 60.0",
            f"{prefix}:spec_decode_num_accepted_tokens_total{{{labels}}}"
            f" {2.0 * sum(stats.num_accepted)}",
            f"{prefix}:spec_decode_num_draft_tokens_total{{{labels}}}"
            f" {2.0 * sum(stats.num_verified)}",
            f"{prefix}:time_to_first_token_seconds_count{{{labels}}} 1.0",
            f"{prefix}:e2e_request_latency_seconds_count{{{labels}}} 2.0",
            f"{prefix}:request_time_per_output_token_seconds_count{{{labels}}} 1.0",
            f"{prefix}:request_prompt_tokens_sum{{{labels}}} 6.0",
            f"{prefix}:request_generation_tokens_sum{{{labels}}} 60.0",
            f'{prefix}:request_generation_tokens_bucket{{{labels[:11]}le="20",{labels[11:]}}} 0.0',
            f'{prefix}:request_generation_tokens_bucket{{{labels[:11]}le="50",{labels[11:]}}} 2.0',
        ):
            assert line in text.splitlines()


def test_models_and_tokens(live: Live, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert live.get("/tokenizer_info").json()["eos_token"] == "</s>"
    made = live.post("/tokenize", json={"prompt": "ab c", "add_special_tokens": False}).json()
    assert made["count"] == 4
    assert live.post("/detokenize", json={"tokens": made["tokens"]}).json() == {"prompt": "ab c"}
    made = live.post("/tokenize", json={"messages": CHAT, "return_token_strs": True}).json()
    assert "".join(made["token_strs"]) == "user: hello\nassistant: ".replace(
        "\n", made["token_strs"][11]
    )


@pytest.mark.parametrize(
    ("fields", "status", "param", "words"),
    [
        ({"model": "other"}, 404, "model", "there is no model 'other' (known: tiny)"),
        ({"prompt": "a" * 600}, 400, None, "the prompt has 600 tokens and the limit is 512"),
        ({"temperature": "hot"}, 400, "temperature", "temperature is 'hot'"),
        ({"max_tokens": True}, 400, "max_tokens", "max_tokens is True"),
        ({"top_p": 1.5}, 400, "top_p", "top_p is 1.5; it must lie in (0, 1]"),
        ({"n": 0}, 400, "n", "n is 0"),
        ({"n": 300}, 400, None, "300 outputs and the limit is 256"),
        ({"tools": [{"type": "function"}]}, 400, "tools", "completions call no tools"),
        ({"best_of": 4}, 400, "best_of", "outputs are not ranked"),
        ({"prompt": [1, 97]}, 400, None, "token id 97"),
        ({"prompt": []}, 400, None, "the prompt is empty"),
        ({"echo": True, "logprobs": 1, "stream": True}, 400, "stream", "drop stream"),
        ({"guided_grammar": 3}, 400, "guided_grammar", "guided_grammar is 3"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, 400, None, "several grammars"),
        ({"chat_template": "{{ x }}"}, 400, "chat_template", "the template is the model's own"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    live: Live, fields: dict[str, Any], status: int, param: str | None, words: str
) -> None:
    answer = live.post("/v1/completions", json={"prompt": "a", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (
        status,
        param,
        "invalid_request_error",
    )
    assert words in error["message"] and "\n" not in error["message"]


def test_what_a_chat_may_not_hold(client: openai.OpenAI) -> None:
    image: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    with pytest.raises(openai.BadRequestError, match="message 0 holds a part of type 'image_url'"):
        client.chat.completions.create(model=MODEL, messages=image)
    extra = {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}
    with pytest.raises(openai.BadRequestError, match="no variable of templates"):
        client.chat.completions.create(model=MODEL, messages=CHAT, extra_body=extra)
    with pytest.raises(openai.NotFoundError, match="no model 'other'"):
        client.chat.completions.create(model="other", messages=CHAT)


@pytest.fixture(scope="module")
def asking(decoder: SpecDecoder) -> Iterator[Live]:
    """A server whose checkpoint asks for something, and whose tokenizer ends texts with one token
    more.
    """
    asking = tiny_decoder()
    ends = (decoder.generate("abc", max_tokens=6).token_ids[5],)
    asking.verifier.defaults = SamplingDefaults(
        1.4, sampled=(("temperature", 0.7), ("top_k", 9)), served_ends=ends
    )
    with live_server(asking) as live:
        yield live


def choice_of(live: Live, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "abc", "max_tokens": 12, "return_token_ids": True, **fields}
    answer = live.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json()["choices"][0])


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({}, {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.4}),
        (dict.fromkeys(("temperature", "top_k", "top_p", "min_p", "repetition_penalty",
                        "min_tokens", "skip_special_tokens")),
         {"temperature": 0.7, "top_k": 9, "repetition_penalty": 1.4}),
        ({"temperature": 1.0, "top_k": 0, "repetition_penalty": 1.0}, {"temperature": 1.0}),
        ({"temperature": 2.0, "top_k": -1}, {"temperature": 2.0, "repetition_penalty": 1.4}),
        ({"top_p": 0, "repetition_penalty": 1.0}, {}),
        ({"top_p": 0, "temperature": 3.0}, {"repetition_penalty": 1.4}),
    ],
)  # fmt: skip
def test_the_checkpoint_says_what_a_request_does_not(
    asking: Live, decoder: SpecDecoder, asked: dict[str, Any], meant: dict[str, Any]
) -> None:
    """What is null is not said; what is said wins, also where it asks for nothing."""
    choice = choice_of(asking, seed=3, ignore_eos=True, **asked)
    assert (
        choice["token_ids"]
        == decoder.generate("abc", max_tokens=12, seed=3, ignore_eos=True, **meant).token_ids
    )


def test_an_end_that_only_the_tokenizer_names_ends_outputs(
    asking: Live, decoder: SpecDecoder
) -> None:
    plain = decoder.generate("abc", max_tokens=12).token_ids
    end = plain.index(plain[5])
    greedy: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1}
    choice = choice_of(asking, **greedy, stop_token_ids=[96])
    assert (choice["token_ids"], choice["finish_reason"]) == (plain[: end + 1], "stop")
    assert len(choice_of(asking, **greedy, ignore_eos=True)["token_ids"]) == 12


def test_a_seed_of_minus_one_is_random() -> None:
    asked = [CompletionRequest.model_validate({"prompt": "a", "seed": seed}) for seed in (-1, 7)]
    assert [sampling_params(one, SamplingDefaults(), most=9).seed for one in asked] == [None, 7]


@pytest.mark.parametrize("stream", [False, True])
def test_special_tokens_in_texts(live: Live, client: openai.OpenAI, stream: bool) -> None:
    """Left out unless asked for; a stop string that is one ends the output either way."""
    options: Any = {
        "model": MODEL,
        "messages": CHAT,
        "max_tokens": 3,
        "temperature": 0,
        "logit_bias": {"1": 60},
        "stream": stream,
    }

    def text(n: int = 1, **extra: Any) -> str:
        made = client.chat.completions.create(**options, n=n, extra_body=extra)
        if not stream:
            return "|".join(choice.message.content for choice in made.choices)
        pieces: dict[int, str] = {}
        for event in made:
            for choice in event.choices:
                pieces[choice.index] = pieces.get(choice.index, "") + (choice.delta.content or "")
        return "|".join(pieces[index] for index in range(n))

    assert (text(), text(skip_special_tokens=True)) == ("", "")
    assert text(2, skip_special_tokens=False) == "<s><s><s>|<s><s><s>"
    assert text(skip_special_tokens=False, stop=["><"]) == "<s"
    for skip in (True, False):
        choice = choice_of(
            live,
            temperature=0,
            logit_bias={"1": 60},
            stop=["<s>"],
            skip_special_tokens=skip,
            logprobs=0,
        )
        assert (choice["token_ids"], choice["text"], choice["finish_reason"]) == ([1], "", "stop")
        assert choice["logprobs"]["tokens"] == ["<s>"]


def test_an_output_follows_a_regex_and_salts_part_the_cache(live: Live) -> None:
    body = {"prompt": "number: ", "max_tokens": 8, "temperature": 0, "guided_regex": "[0-9]{3}x"}
    (choice,) = live.post("/v1/completions", json=body).json()["choices"]
    assert re.fullmatch("[0-9]{3}x", choice["text"]) and choice["finish_reason"] == "stop"
    cached = []
    for salt in ("a", "a", "b"):
        body = {"prompt": "the same long beginning", "max_tokens": 1, "cache_salt": salt}
        cached.append(
            live.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"][
                "cached_tokens"
            ]
        )
    assert cached[0] == cached[2] == 0 < cached[1]
