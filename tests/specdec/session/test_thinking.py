"""Thinking and answer of an output are told apart, however the tokens come."""

import random
from itertools import accumulate, product

import pytest

from specdec.base.chat.thinking import thinking_of
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.session.text import IncrementalDecoder, text_of
from specdec.session.thinking import TokenParted, parted_decoder
from tests.helpers.thinking import CHANNELS, LED, OPENED, SWITCHED, thinking_tokenizer
from verifiers.weights.tokenizer import load_tokenizer

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
        (CHANNELS, "", f"{HEAD}ab<|end|><|start|>assis", ("ab", "")),
        (
            CHANNELS,
            "",
            f"{HEAD}ab<|end|><|start|>assistant{HEAD}cd<|message|>{END}e",
            ("abcd", "e"),
        ),
        (CHANNELS, "", f"{HEAD}<|end|><|start|>assistant{HEAD}<|start|>a", ("", "")),
        (CHANNELS, "", f"{HEAD}a<|start|><|start|>b<|message|>c{END}{HEAD}", ("ac", "analysis")),
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
        decoder = TokenParted(tokenizer, thinking=thinking, place=thinking.behind_prompt(before))
        whole, told = "", ["", ""]
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            decoder.push(tokens[end - size : end])
            whole += decoder.take()
            told = [text + new for text, new in zip(told, decoder.new_parts, strict=True)]
        whole += decoder.finish()
        told = [text + new for text, new in zip(told, decoder.new_parts, strict=True)]
        assert tuple(told) == decoder.parts == parts
        assert whole == text_of(tokenizer, tokens)
        place = thinking.behind_prompt(before)
        tagged = TokenParted(tokenizer, thinking=thinking, place=place, tagged=True)
        told = ["", ""]
        for end, size in zip(accumulate(sizes), sizes, strict=True):
            tagged.push(tokens[end - size : end])
            tagged.take()
            told = [text + new for text, new in zip(told, tagged.new_parts, strict=True)]
        tagged.finish()
        assert tagged.parts[1] == parts[1] and "".join(tagged.parts).startswith("".join(told))
        assert thinking.head or "".join(tagged.parts) == whole


def test_a_stop_string_ends_either_part() -> None:
    """As it would end the text as a whole."""
    tokenizer = thinking_tokenizer(OPENED)
    thinking = thinking_of(tokenizer)
    assert thinking is not None
    tokens = tokenizer("abc</think>abd", add_special_tokens=False)["input_ids"]
    for stop, parts in (("bc", ("a", "")), ("bd", ("abc", "a")), ("b", ("a", ""))):
        decoder = TokenParted(
            tokenizer, [stop], thinking=thinking, place=thinking.behind_prompt(thinking.opening)
        )
        plain = IncrementalDecoder(tokenizer, [stop])
        assert decoder.push(tokens) == plain.push(tokens)
        text = decoder.take() + decoder.finish()
        assert decoder.parts == parts and text == plain.take() + plain.finish()


FREE = Grammar.calls("hermes", {"f": None})
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("opened", "output", "parts"),
    [
        ("", "<think>\nIs it 6 x 7?\n</think>\n\nYes.", ("\nIs it 6 x 7?\n", "\n\nYes.")),
        ("", "\n <think>ab.</think>c</think>", ("ab.", "c</think>")),
        ("", "<think>a</thi</think>\n", ("a</thi", "\n")),
        ("", "<think>ab </thin", ("ab </thin", "")),
        ("", "<think></think>", ("", "")),
        ("", " <thing>ab</thing>", ("", " <thing>ab</thing>")),
        ("", " <thin", ("", " <thin")),
        ("", "\nab <think>c</think>", ("", "\nab <think>c</think>")),
        ("<think>", "ab.</think>\n\nc", ("ab.", "\n\nc")),
        ("<think>\n", "ab <think>", ("ab <think>", "")),
        ("<think>\n", f"ab {CALL}</think>", ("ab ", f"{CALL}</think>")),
        ("<think>\n", f"ab</think> {CALL}", ("ab", f" {CALL}")),
        ("<think>\n\n</think>\n\n", "<think>c</think>", ("", "<think>c</think>")),
    ],
)
def test_tags_that_are_text_of_several_tokens(
    opened: str, output: str, parts: tuple[str, str]
) -> None:
    """However they are cut into tokens, and these into pieces; the prompt may open the thinking."""
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    prompt = tokenizer(f"Say <think> twice {opened}")["input_ids"]
    sampling = SamplingParams(grammar=FREE)
    whole = tokenizer(output)["input_ids"]
    letters = [one for letter in output for one in tokenizer(letter)["input_ids"]]
    assert len(tokenizer("</think>")["input_ids"]) > 1
    for tokens, size in product((whole, letters), (1, 2, 3, 99)):
        tagged = parted_decoder(tokenizer, prompt, sampling, tagged=True)
        assert tagged is not None
        for token in tokens:
            tagged.push([token])
            tagged.take()
        tagged.finish()
        assert "".join(tagged.parts) == output and tagged.parts[1] == parts[1]
        text = parted_decoder(tokenizer, prompt, sampling)
        assert text is not None
        told = ["", ""]
        for at in range(0, len(tokens), size):
            text.push(tokens[at : at + size])
            text.take()
            told = [old + new for old, new in zip(told, text.new_parts, strict=True)]
        text.finish()
        told = [old + new for old, new in zip(told, text.new_parts, strict=True)]
        assert tuple(told) == text.parts == parts


def test_a_grammar_holds_what_is_no_thinking() -> None:
    """Where tags are text: from the first token on."""
    tokenizer = load_tokenizer("embedded")
    tokenizer.chat_template = "{{ messages[0].content }}<think>"
    held = [
        Grammar.json_object(),
        Grammar.calls("hermes", {"f": None}, required=True),
        Grammar.calls("hermes", {"f": None}, answer=Grammar.json_object()),
    ]
    for grammar in held:
        assert parted_decoder(tokenizer, [5], SamplingParams(grammar=grammar)) is None
    assert parted_decoder(tokenizer, [5], SamplingParams()) is not None
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert parted_decoder(tokenizer, [5], SamplingParams()) is None
