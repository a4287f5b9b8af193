"""What a request may ask at most is checked before anything is made of it, and texts become tokens
no further than needed.
"""

from __future__ import annotations

import re
import threading
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.base.config import CacheConfig
from specdec.base.errors import InvalidInputError
from specdec.grammar import limits as grammars
from specdec.sampling.params import MAX_TOP_LOGPROBS, SamplingParams
from specdec.serve import app, limits, texts
from specdec.serve.config import ServeConfig
from specdec.serve.processes.setup import Setup
from specdec.serve.texts import SmallestFirst
from specdec.session.link.channel import Facts
from specdec.session.prompts import PromptReader
from tests.helpers.live_server import MODEL, Live, live_server, tiny_decoder
from tests.helpers.waiting import HANG, gated, wait_until

CHAT: Any = [{"role": "user", "content": "hello"}]
CONTEXT = 512


@pytest.fixture
def tokenized(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Texts that the tokenizer was given."""
    given: list[str] = []
    kind = type(live.decoder.tokenizer)
    own = kind.__call__

    def noting(self: Any, text: str, **options: Any) -> Any:
        given.append(text)
        return own(self, text, **options)

    monkeypatch.setattr(kind, "__call__", noting)
    return given


def refusal(live: Live, path: str, body: Any, status: int = 400) -> str:
    """The one line that a request is refused with."""
    answer = live.post(path, json=body)
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message and len(message) < 500
    return message


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"n": 257}, "asks for 257 outputs and the limit is 256"),
        ({"n": 10**9}, "asks for 1,000,000,000 outputs"),
        ({"n": int("9" * 4300)}, "n is 999"),
        ({"prompt": ["a"] * 257}, "asks for 257 outputs"),
        ({"prompt": [[5]] * 86, "n": 3}, "asks for 258 outputs"),
        ({"prompt": [True] * 1000}, "input should be a text, a list of texts"),
        ({"stop": ["a"] * 65}, "stop has 65 entries and the limit is 64"),
        ({"stop": "a" * 2049}, "stop has 2,049 characters and the limit is 2,048"),
        ({"stop": ["a" * 1025] * 2}, "stop has 2 strings of 2,050 characters together"),
        ({"stop_token_ids": [5] * 1025}, "stop_token_ids has 1,025 entries"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias has 1,025 entries"),
        ({"logit_bias": {"1" * 5000: 1}}, "it must be an integer"),
        ({"logit_bias": {"5": 10**400}}, "logit_bias"),
        ({"messages": CHAT * 4097}, "messages has 4,097 entries"),
        ({"messages": CHAT, "n": 257}, "asks for 257 outputs"),
        (
            {"messages": CHAT, "chat_template_kwargs": {str(i): 1 for i in range(257)}},
            "chat_template_kwargs has 257 entries",
        ),
        (
            {"guided_choice": [1] * 1000},
            "guided_choice is [1, 1, 1, 1, 1, 1, ...]: input should be a list of texts",
        ),
        ({"cache_salt": "a" * 1025}, "cache_salt has 1,025 characters"),
        ({str(i): 1 for i in range(1024)}, "the request has 1,025 fields and the limit is 1,024"),
        ({"prompt": "a" * (16 * CONTEXT + 1)}, "has 8,193 characters and the limit is 512 tokens"),
        (
            {"messages": [{"role": "user", "content": "a" * (16 * CONTEXT)}]},
            "and the limit is 512 tokens",
        ),
    ],
    ids=lambda value: str(value)[:40],
)
def test_counts_are_checked_before_anything_is_made(
    live: Live, tokenized: list[str], asked: Any, words: str
) -> None:
    path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
    needed = {} if "messages" in asked or "prompt" in asked else {"prompt": "a"}
    assert words in refusal(live, path, needed | asked)
    assert not tokenized


def test_prompts_with_too_many_log_probabilities(live: Live) -> None:
    asked = {"prompt": [[5] * 500] * 17, "echo": True, "logprobs": 64, "max_tokens": 0}
    assert "552,500 log-probabilities of prompts are asked for" in refusal(
        live, "/v1/completions", asked
    )


@pytest.mark.parametrize(("path", "most"), [("/v1/completions", CONTEXT), ("/tokenize", 2000)])
def test_a_long_text_is_looked_at_in_pieces_until_it_has_too_many_tokens(
    live: Live, tokenized: list[str], path: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(texts, "SHORT", 100)
    monkeypatch.setattr(texts, "AT_ONCE", 0)
    monkeypatch.setattr(limits, "TOKENIZED", most)
    monkeypatch.setattr(app, "TOKENIZED", most)
    with live_server(tiny_decoder()) as other:
        assert f"more than {most:,} tokens in its first" in refusal(
            other, path, {"prompt": "ab" * most * 5}
        )
    assert most < sum(map(len, tokenized)) < 2 * most and max(map(len, tokenized)) <= 100


def test_tokens_beyond_the_limit_of_what_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of texts that are short for so many, of chats, and of tokens."""
    decoder = tiny_decoder()
    most = decoder.engine.admission.max_model_len
    monkeypatch.setattr(app, "TOKENIZED", most)
    with live_server(decoder) as other:
        for count, status in ((most, 200), (most + 1, 400)):
            chat = [{"role": "user", "content": "a" * count}]
            for path, body in (
                ("/tokenize", {"prompt": "a" * count}),
                ("/detokenize", {"tokens": [5] * count}),
            ):
                answer = other.post(path, json=body)
                assert answer.status_code == status, answer.text[:300]
                assert status == 200 or f"holds {count:,} tokens and the limit" in answer.text
        assert "messages holds" in refusal(other, "/tokenize", {"messages": chat})


def test_tokens_are_those_of_the_whole_text(
    live: Live, tokenized: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where its pieces were counted before."""
    monkeypatch.setattr(texts, "SHORT", 10)
    monkeypatch.setattr(texts, "AT_ONCE", 0)
    monkeypatch.setattr(texts, "PLAUSIBLE", 0)
    prompt = "the quick brown fox " * 20
    body = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True}
    (choice,) = live.post("/v1/completions", json=body).json()["choices"]
    assert len(tokenized) == len(prompt) / 10 + 1
    assert choice["prompt_token_ids"] == live.decoder.tokenize(prompt)


def test_a_long_text_never_holds_up_a_short_one(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()
    own = PromptReader.tokenize

    def slowly(self: PromptReader, prompt: Any, **options: Any) -> list[int]:
        if len(prompt) > 100:
            begun.set()
            assert go.wait(HANG)
        return own(self, prompt, **options)

    monkeypatch.setattr(PromptReader, "tokenize", slowly)
    monkeypatch.setattr(texts, "SHORT", 100)
    monkeypatch.setattr(texts, "AT_ONCE", 0)
    answers: list[Any] = []
    ask = {"prompt": "a" * 400, "max_tokens": 1}
    waiting = threading.Thread(
        target=lambda: answers.append(live.post("/v1/completions", json=ask))
    )
    waiting.start()
    assert begun.wait(HANG)
    assert live.post("/v1/completions", json={"prompt": "abc", "max_tokens": 1}).status_code == 200
    assert not answers
    go.set()
    waiting.join()
    assert answers[0].status_code == 200


def test_outputs_of_others_come_between_those_of_one_request(live: Live) -> None:
    """Few of many are in the engine at once; all come, in their order."""
    seeds = 30
    many: dict[str, Any] = {
        "prompt": "abc", "n": seeds, "max_tokens": 3, "seed": 5, "temperature": 1,
        "ignore_eos": True,
    }  # fmt: skip
    made: list[Any] = []
    waiting = threading.Thread(target=lambda: made.append(live.post("/v1/completions", json=many)))
    with gated(live.decoder.engine):
        waiting.start()
        wait_until(lambda: live.front.num_open == seeds)
        assert len(live.front.engine._open) == 5, "four seats, and one that is ready to follow"
    waiting.join()
    texts = [choice["text"] for choice in made[0].json()["choices"]]
    own = {name: many[name] for name in ("max_tokens", "temperature", "ignore_eos")}
    samplings = [SamplingParams(seed=5 + i, **own) for i in range(seeds)]
    assert texts == [one.text for one in live.decoder.generate(["abc"] * seeds, samplings)]


def test_outputs_that_had_no_turn_are_canceled_as_well() -> None:
    with live_server() as live:
        with gated(live.decoder.engine), httpx.Client() as client:
            body = {"prompt": "abc", "n": 30, "max_tokens": 9, "stream": True}
            with client.stream("POST", live.url + "/v1/completions", json=body):
                wait_until(lambda: live.front.num_open == 30)
            wait_until(lambda: live.front.idle)
        assert live.front.totals.finished == {"cancelled": 30}


def test_a_lane_does_the_smallest_first_and_survives_all() -> None:
    """What was canceled is not done; a panic of Rust is an error like any other."""

    class PanicException(BaseException):
        pass

    def panic() -> None:
        raise PanicException("index out of bounds")

    done: list[int] = []
    thread, begun, go = SmallestFirst("test"), threading.Event(), threading.Event()

    def hold() -> bool:
        begun.set()
        return go.wait(HANG)

    first = thread.submit(0, hold)
    assert begun.wait(HANG)
    panicked = thread.submit(2, panic)
    others = [thread.submit(size, partial(done.append, size)) for size in (5, 1, 3, 4)]
    assert others[3].cancel()
    go.set()
    assert first.result(HANG) and isinstance(panicked.exception(HANG), RuntimeError)
    assert [other.result(HANG) for other in others[:3]] == [None] * 3 and done == [1, 3, 5]
    thread.close()


def test_a_large_answer_is_the_same_written_choice_by_choice(
    live: Live, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = {"prompt": ["abc", "de"], "echo": True, "logprobs": 3, "max_tokens": 4, "temperature": 0}
    made = []
    for few in (app.FEW_LOGPROBS, 0):
        monkeypatch.setattr(app, "FEW_LOGPROBS", few)
        made.append(live.post("/v1/completions", json=ask))
    assert [answer.headers["content-type"] for answer in made] == ["application/json"] * 2
    first, second = (
        {name: value for name, value in one.json().items() if name not in ("id", "created")}
        for one in made
    )
    assert (
        len(first["choices"]) == 2
        and first["choices"] == second["choices"]
        and list(first) == list(second)
    )


def test_a_chat_is_bounded_by_what_the_cache_holds() -> None:
    with live_server(tiny_decoder(cache=CacheConfig(memory_bytes=200_000))) as live:
        front = live.front
        assert live.setup.short_cache == (
            f"the cache holds {front.max_total_tokens} tokens of one request and the context has"
            " 512; a larger --kv-memory allows more,"
            " and --max-model-len says less"
        )
        ask = {"messages": CHAT, "ignore_eos": True}
        answer = live.post("/v1/chat/completions", json=ask).json()
        assert (
            answer["usage"]["total_tokens"] == front.max_total_tokens
            and answer["choices"][0]["finish_reason"] == "length"
        )
        (model,) = live.get("/v1/models").json()["data"]
        assert model["max_model_len"] == front.max_total_tokens < CONTEXT
        assert "give the cache more memory" in refusal(
            live, "/v1/chat/completions", {"messages": CHAT, "max_tokens": 480}
        )


def test_a_cache_that_holds_the_context_says_nothing(live: Live) -> None:
    assert live.setup.short_cache is None and live.front.max_total_tokens == CONTEXT


def test_clients_are_not_told_the_folder(tmp_path: Path) -> None:
    """They may call the model by it all the same."""
    folder = tmp_path / "secret" / "llama"
    folder.mkdir(parents=True)
    decoder = tiny_decoder()
    decoder.tokenizer.chat_template = None
    decoder.verifier.name = str(folder)
    setup = Setup(Facts.of(decoder), ServeConfig(), str(folder), f"suffix+{folder}")
    assert setup.names == ("llama",) and setup.drafter_name == "suffix+llama"
    with live_server(decoder) as live:
        message = refusal(live, "/v1/chat/completions", {"messages": CHAT})
        assert MODEL in message and "secret" not in message


def test_a_folder_whose_name_is_no_text(tmp_path: Path) -> None:
    """Bytes of another encoding, which the name of a file may have, are in no answer."""
    folder = tmp_path / "m\udcff"
    folder.mkdir()
    decoder = tiny_decoder()
    setup = Setup(Facts.of(decoder), ServeConfig(), str(folder), f"suffix+{folder}")
    assert setup.names == ("m?",) and setup.drafter_name == "suffix+m?"
    decoder.tokenizer.chat_template = "{{ messages }}\ud800"  # as a file of JSON may have it
    with live_server(decoder) as live:
        assert live.get("/tokenizer_info").json()["chat_template"].endswith("?")
    with pytest.raises(InvalidInputError, match=r"has 'm.udcff', which is no text"):
        ServeConfig(served_model_name=("m\udcff",))


PAGE = (Path(__file__).parents[3] / "docs" / "serve.md").read_text()


def test_the_page_has_every_limit() -> None:
    """With its value, and no other."""
    options = {
        f"`--{one.name.replace('_', '-')}`": f"{one.default:,}".removesuffix(".0")
        for one in fields(ServeConfig)
        if one.name.startswith("max_") or one.name.endswith("_seconds")
    }
    entries = {f"entries of `{name}`": f"{most:,}" for name, most in limits.MAX_ENTRIES.items()}
    lengths = {
        f"characters of `{name}`": f"{most:,}" for name, most in limits.MAX_CHARACTERS.items()
    }
    others = {
        "fields": f"{limits.MAX_FIELDS:,}",
        "characters of a text per token it may have": f"{limits.CHARACTERS_PER_TOKEN}",
        "tokens of `/tokenize` and `/detokenize`, where the context is"
        " shorter": f"{limits.TOKENIZED:,}",
        "log-probabilities per token": f"{MAX_TOP_LOGPROBS}",
        "grammars that wait to be compiled": f"{grammars.MAX_WAITING}",
        "characters of a grammar": f"{grammars.MAX_CHARACTERS:,}",
        "characters of a regular expression": f"{grammars.MAX_PATTERN_CHARACTERS:,}",
        "log-probabilities of prompts": f"{limits.MAX_PROMPT_LOGPROBS:,}",
    }
    found = dict(re.findall(r"^\| .*?(`--[a-z-]+`) \| ([\d,.]+) \|", PAGE, re.MULTILINE))
    found |= dict(
        re.findall(
            r"^\| ((?:entries|characters|fields|tokens|log-prob|grammars)[^|]*?) \| ([\d,.]+) \|",
            PAGE,
            re.MULTILINE,
        )
    )
    assert found == options | entries | lengths | others
