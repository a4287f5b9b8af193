"""Bytes of tokens, joined, are the text; also of tokens that are parts of characters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from specdec.base.config import CacheConfig, EngineConfig
from specdec.serve.answers.token_bytes import TokenBytes
from specdec.session.decoder import SpecDecoder
from tests.helpers.live_server import live_server
from tests.helpers.tiny_models import paged_verifier, plain_model

TEXT = "a 日本é😀 b"


def byte_level(size: int | None = None) -> PreTrainedTokenizerFast:
    alphabet = [
        "</s>",
        *sorted(pre_tokenizers.ByteLevel.alphabet(), key=lambda sign: (sign != "a", sign)),
    ]
    alphabet = alphabet[:20] + alphabet[-(size - 20) :] if size else alphabet
    made = Tokenizer(
        models.BPE(
            vocab={sign: token for token, sign in enumerate(alphabet)}, merges=[], unk_token="</s>"
        )
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


def byte_fallback(size: int | None = None) -> PreTrainedTokenizerFast:
    """With a space before a text that its decoder takes away, and a token before all texts."""
    pieces = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abé", "\u2581b"]
    if size is not None:  # of more letters instead of bytes
        more = [chr(place) for place in range(0x100, 0x100 + size)]
        pieces = [pieces[0], *more[: size - 6], *pieces[257:]]
    vocab = {piece: token for token, piece in enumerate(pieces)}
    made = Tokenizer(
        models.BPE(vocab=vocab, merges=[("\u2581", "b")], unk_token="</s>", byte_fallback=True)
    )
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    steps = [
        decoders.Replace("\u2581", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    made.decoder = decoders.Sequence(steps)
    made.post_processor = processors.TemplateProcessing(
        single="</s> $A", special_tokens=[("</s>", 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>")


@pytest.mark.parametrize(
    "tokenizer", [byte_level(), byte_fallback()], ids=["byte level", "byte fallback"]
)
def test_bytes_join_to_the_text(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    pieces = TokenBytes(tokenizer)
    assert b"".join(map(pieces.of, tokens)) == TEXT.encode()
    partial = [pieces.name(token) for token in tokens if pieces.name(token).startswith("bytes:")]
    assert "bytes:\\xf0" in partial and all(len(pieces.name(token)) == 1 for token in tokens[:1])


def test_an_answer_tells_them() -> None:
    """Random weights choose parts of characters; likely tokens are told apart although they read
    alike.
    """
    verifier = paged_verifier(plain_model("llama"), 4)
    tokenizer = byte_level(verifier.vocab_size)
    tokenizer.chat_template = "{{ messages[0].content }}"
    pieces = TokenBytes(tokenizer)
    engine = EngineConfig(max_num_seqs=2, cache=CacheConfig(memory_bytes=2**22))
    body = {
        "max_tokens": 12,
        "temperature": 1.5,
        "seed": 3,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    with live_server(SpecDecoder(verifier, tokenizer, None, engine)) as live:
        answer = live.post("/v1/completions", json={"prompt": [5], "logprobs": 5, **body}).json()
        (choice,) = answer["choices"]
        tokens, told = choice["token_ids"], choice["logprobs"]
        assert b"".join(map(pieces.of, tokens)).decode(errors="replace") == choice["text"]
        assert told["tokens"] == [pieces.name(token) for token in tokens]
        assert sum(name.startswith("bytes:") for name in told["tokens"]) > 2, "or nothing is tried"
        assert all(5 <= len(top) <= 6 for top in told["top_logprobs"])
        assert told["text_offset"] == sorted(told["text_offset"]) and told["text_offset"][
            -1
        ] <= len(choice["text"])
        chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2}
        (choice,) = live.post("/v1/chat/completions", json={**chat, **body}).json()["choices"]
        found = choice["logprobs"]["content"]
        assert bytes(byte for entry in found for byte in entry["bytes"]) == b"".join(
            map(pieces.of, choice["token_ids"])
        )


@pytest.mark.parametrize(
    ("make", "texts"), [(byte_level, ["aa", "a"]), (byte_fallback, ["ab b", "b"])]
)
@pytest.mark.parametrize("shown", [True, False])
def test_places_in_the_text_are_those_of_tokens(
    make: Callable[[int], PreTrainedTokenizerFast], texts: list[str], shown: bool
) -> None:
    """Whether special tokens are shown or not, behind an echo, and in streams; a space that begins
    a text may be lost, characters may be broken off.
    """
    verifier = paged_verifier(plain_model("llama"), 4)
    tokenizer = make(verifier.vocab_size)
    tokenizer.chat_template = "{{ messages[0].content }}"
    pieces = TokenBytes(tokenizer)
    engine = EngineConfig(max_num_seqs=4, cache=CacheConfig(memory_bytes=2**22))
    often = {str(token): 3.0 for token in (0, 92, 96)}  # the special one, spaces
    body: dict[str, Any] = {"max_tokens": 20, "temperature": 1.5, "ignore_eos": True, "n": 3}
    body |= {"seed": 3, "skip_special_tokens": not shown, "logit_bias": often}
    hidden = found = 0
    with live_server(SpecDecoder(verifier, tokenizer, None, engine)) as live:
        for prompt in (*texts, [5, 6, 0, 7]):
            asked = {"prompt": prompt, "logprobs": 0, "return_token_ids": True, **body}
            for more in ({"echo": True}, {}):
                choices = live.post("/v1/completions", json=asked | more).json()["choices"]
                for choice in choices:
                    told, tokens = choice["logprobs"], choice["token_ids"]
                    echoed = len(told["tokens"]) - len(tokens)
                    tokens = choice["prompt_token_ids"][:echoed] + tokens
                    places = zip(tokens, told["tokens"], told["text_offset"], strict=True)
                    for at, (token, name, offset) in enumerate(places):
                        if pieces.is_special(token) and not choice["text"].startswith(name, offset):
                            hidden += 1
                        elif not name.startswith("bytes:"):
                            spaced = choice["text"].startswith((name, f" {name}"), offset)
                            assert spaced, (at, told, choice["text"])
                            found += 1
        for bias in (often, {"92": 99.0}, {"96": 99.0}):
            chat = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
            chat |= {**body, "logit_bias": bias}
            for choice in live.post("/v1/chat/completions", json=chat).json()["choices"]:
                entries = choice["logprobs"]["content"]
                joined = bytes(byte for one in entries for byte in one["bytes"])
                assert joined.decode(errors="replace") == choice["message"]["content"]
    assert found > 100 and (shown or hidden)
