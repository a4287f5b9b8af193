"""Thinking and answer of an output are told apart by token ids, however the tokens come."""

import random
from itertools import accumulate

import pytest

from specdec.base.chat.thinking import thinking_of
from specdec.session.text import IncrementalDecoder, text_of
from specdec.session.thinking import PartedDecoder
from tests.helpers.thinking import CHANNELS, LED, OPENED, SWITCHED, thinking_tokenizer

HEAD, END = "<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("template", "prompt", "output", "parts"),
    [
        (SWITCHED, "", "<think>ab</think> c", ("ab", " c")),
        (SWITCHED, "", "a</think>c", ("", "a</think>c")),
        (SWITCHED, "", "<think>ab", ("ab", "")),
        (SWITCHED, "<think></think>", "<think>c", ("", "<think>c")),
        (LED, "", " <think>ab</think>c", ("ab", "c")),
        (LED, "", "<think>ab</think>c", ("ab", "c")),
        (LED, "", " ab", ("", " ab")),
        (LED, "", " ", ("", " ")),
        (OPENED, "<think>", "ab<think></think></think>c", ("ab<think>", "</think>c")),
        (OPENED, "<think>", "</think>", ("", "")),
        (CHANNELS, "", f"{HEAD}ab{END}c", ("ab", "c")),
        (CHANNELS, "", f"{HEAD}ab<|end|><|start|>assis", ("abassis", "")),
        (CHANNELS, "", f"{HEAD}ab<|end|>{END}c", ("ab", "c")),
        (CHANNELS, "", "<|channel|>final<|message|>c", ("", "c")),
        (CHANNELS, "", "<|channel|>fin", ("", "fin")),
        (CHANNELS, "", "abc", ("", "abc")),
    ],
)
def test_parts(template: str, prompt: str, output: str, parts: tuple[str, str]) -> None:
    """Token by token, at once, and in pieces: what was handed out is never taken back."""
    tokenizer = thinking_tokenizer(template)
    thinking = thinking_of(tokenizer)
    assert thinking is not None
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, output)]
    before, tokens = ids
    draw = random.Random(output)
    for sizes in (
        [1] * len(tokens),
        [len(tokens)],
        *([draw.randint(1, 4) for _ in tokens] for _ in range(8)),
    ):
        decoder = PartedDecoder(tokenizer, thinking=thinking, place=thinking.behind_prompt(before))
        whole, told = "", ["", ""]
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            decoder.push(tokens[end - size : end])
            whole += decoder.take()
            told = [text + new for text, new in zip(told, decoder.new_parts, strict=True)]
        whole += decoder.finish()
        told = [text + new for text, new in zip(told, decoder.new_parts, strict=True)]
        assert tuple(told) == decoder.parts == parts
        assert whole == text_of(tokenizer, tokens)


def test_a_stop_string_ends_either_part() -> None:
    """As it would end the text as a whole."""
    tokenizer = thinking_tokenizer(OPENED)
    thinking = thinking_of(tokenizer)
    assert thinking is not None
    tokens = tokenizer("abc</think>abd", add_special_tokens=False)["input_ids"]
    for stop, parts in (("bc", ("a", "")), ("bd", ("abc", "a")), ("b", ("a", ""))):
        decoder = PartedDecoder(
            tokenizer, [stop], thinking=thinking, place=thinking.behind_prompt(thinking.opening)
        )
        plain = IncrementalDecoder(tokenizer, [stop])
        assert decoder.push(tokens) == plain.push(tokens)
        text = decoder.take() + decoder.finish()
        assert decoder.parts == parts and text == plain.take() + plain.finish()
