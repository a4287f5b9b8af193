"""Thinking in a server: a default, parts told apart, budgets, and grammars behind it."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

pytest.importorskip("xgrammar")

from specdec.base.config import EngineConfig
from specdec.session.decoder import SpecDecoder
from tests.helpers.live_server import MODEL, live_server
from tests.helpers.thinking import OPENED, SPELLED, SWITCHED, thinking_tokenizer
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash

CHAT: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": CHAT, "max_tokens": 20, "temperature": 0}


def decoder_of(template: str, **options: Any) -> SpecDecoder:
    verifier = paged_verifier(plain_model("llama"), 4)
    engine = EngineConfig(max_num_seqs=2, num_draft_tokens=3, max_model_len=256)
    return SpecDecoder(
        verifier, thinking_tokenizer(template), random_dflash(verifier), engine, **options
    )


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with live_server(decoder_of(OPENED)) as live:
        yield openai.OpenAI(base_url=f"{live.url}/v1", api_key="none")


def test_parts_of_answers_and_streams(client: openai.OpenAI) -> None:
    """A budget ends the thinking that the prompt has opened; fields turn the parting off."""
    budget = {"thinking_token_budget": 5}
    made = client.chat.completions.create(**ASKED, extra_body=budget)
    message: Any = made.choices[0].message
    assert len(message.reasoning_content) == 5 and message.content
    parts, count = ["", ""], 0
    for event in client.chat.completions.create(**ASKED, extra_body=budget, stream=True):
        delta: Any = event.choices[0].delta
        parts[0] += getattr(delta, "reasoning_content", None) or ""
        parts[1] += delta.content or ""
        count += 1
    assert parts == [message.reasoning_content, message.content] and count > 5
    whole = client.chat.completions.create(
        **ASKED, extra_body={**budget, "separate_reasoning": False}
    )
    assert whole.choices[0].message.content == f"{parts[0]}</think>{parts[1]}"
    for stream in (False, True):
        extra = {**budget, "include_reasoning": False}
        answer: Any = client.chat.completions.create(**ASKED, extra_body=extra, stream=stream)
        choices = [event.choices[0] for event in answer] if stream else answer.choices
        texts = [(one.delta if stream else one.message).content for one in choices]
        found = "".join(text or "" for text in texts)
        assert found == parts[1]
        assert stream or not hasattr(answer.choices[0].message, "reasoning_content")


def test_log_probabilities_come_with_either_part(client: openai.OpenAI) -> None:
    tokens, text = 0, ""
    asked = ASKED | {"logprobs": True, "stream": True}
    for event in client.chat.completions.create(**asked, extra_body={"thinking_token_budget": 5}):
        some = event.choices[0].logprobs
        tokens += len(some.content or ()) if some else 0
        text += event.choices[0].delta.content or ""
    assert tokens == 20 and text


def test_a_grammar_begins_behind_the_thinking(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        **ASKED, extra_body={"thinking_token_budget": 5, "guided_regex": "(ab)+"}
    )
    message: Any = made.choices[0].message
    assert message.content.startswith("ab") and len(message.reasoning_content) == 5


def test_a_default_that_a_request_overrides() -> None:
    with live_server(decoder_of(SWITCHED, chat_template_kwargs={"enable_thinking": False})) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none")

        def prompt(**extra: Any) -> list[int]:
            extra = {"return_token_ids": True, **extra}
            made: Any = client.chat.completions.create(**ASKED, extra_body=extra)
            return list(made.prompt_token_ids)

        tokenizer = live.decoder.tokenizer
        assert tokenizer.decode(prompt()).endswith("</think>")
        on: list[dict[str, Any]] = [
            {"chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
            {"thinking": {"type": "enabled"}},
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True}},
        ]
        for words in on:
            thinking = prompt(**words)
            assert tokenizer.decode(thinking).endswith("assistant ")
            if "thinking" not in words:
                body = {"messages": ASKED["messages"], **words}
                assert live.post("/tokenize", json=body).json()["tokens"] == thinking


@pytest.mark.parametrize(
    "words",
    [{"enable_thinking": False}, {"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}],
)
@pytest.mark.parametrize(
    "variable", ["enable_thinking", "thinking", "reasoning", "thinking_budget"]
)
def test_it_is_switched_off_in_the_words_of_several_providers(
    words: dict[str, Any], variable: str
) -> None:
    """Whatever the template calls it."""
    decoder = decoder_of(SWITCHED)
    template = SWITCHED.replace("enable_thinking", variable)
    if variable == "thinking_budget":
        template = template.replace("thinking_budget is false", "thinking_budget == 0")
    decoder.tokenizer.chat_template = template
    with live_server(decoder) as live:
        body = {**ASKED, **words, "return_token_ids": True}
        made = live.post("/v1/chat/completions", json=body).json()
        assert live.decoder.tokenizer.decode(made["prompt_token_ids"]).endswith("</think>")
        assert "warnings" not in made
        on = live.post("/v1/chat/completions", json={**body, "chat_template_kwargs": {variable: 7}})
        prompt = live.decoder.tokenizer.decode(on.json()["prompt_token_ids"])
        assert prompt.endswith("assistant ")


def test_a_template_without_a_switch_is_told_of(client: openai.OpenAI) -> None:
    """In answers and streams; a model that does not think needs none."""
    extra: Any = {"enable_thinking": False}
    whole: Any = client.chat.completions.create(**ASKED, extra_body=extra)
    (said,) = whole.warnings
    assert "no known switch" in said
    events: Any = list(client.chat.completions.create(**ASKED, extra_body=extra, stream=True))
    assert events[-1].warnings == [said]
    made: Any = client.responses.create(
        model=MODEL, input="hi", max_output_tokens=3, reasoning={"effort": "none"}
    )
    assert made.warnings == [said]
    thinks: Any = client.chat.completions.create(**ASKED, extra_body={"enable_thinking": True})
    assert not hasattr(thinks, "warnings")


def test_a_model_that_does_not_think() -> None:
    with live_server() as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none")
        with pytest.raises(
            openai.BadRequestError, match="no token that is known to end a thinking"
        ):
            client.chat.completions.create(**ASKED, extra_body={"thinking_token_budget": 5})
        made: Any = client.chat.completions.create(**ASKED, extra_body={"enable_thinking": False})
        assert not hasattr(made, "warnings")


def test_a_thinking_whose_tags_are_text() -> None:
    """It is told apart; a budget is refused, and a grammar holds from the first token on."""
    with live_server(decoder_of(SPELLED)) as live:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key="none")
        message: Any = client.chat.completions.create(**ASKED).choices[0].message
        assert message.reasoning_content and message.content == ""
        parts = ["", ""]
        for event in client.chat.completions.create(**ASKED, stream=True):
            delta: Any = event.choices[0].delta
            parts[0] += getattr(delta, "reasoning_content", None) or ""
            parts[1] += delta.content or ""
        assert parts == [message.reasoning_content, ""]
        held = client.chat.completions.create(**ASKED, extra_body={"guided_regex": "(ab)+"})
        answer: Any = held.choices[0].message
        assert answer.content.startswith("ab") and not hasattr(answer, "reasoning_content")
        with pytest.raises(openai.BadRequestError, match="no token that is known"):
            client.chat.completions.create(**ASKED, extra_body={"thinking_token_budget": 5})
