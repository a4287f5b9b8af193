"""Masks of outputs that think: a row has that of its path, and what must follow is drafted."""

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

pytest.importorskip("xgrammar")

from specdec.base.chat.thinking import thinking_of
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.grammar import Grammar
from specdec.grammar.progress import GrammarProgress
from specdec.grammar.thinking import ThinkingProgress
from tests.helpers.thinking import CHANNELS, LED, OPENED, SWITCHED, thinking_tokenizer
from tests.helpers.tiny_configs import VOCAB

WORDS = -(-VOCAB // 32)
TOKENIZERS = {name: thinking_tokenizer(name) for name in (SWITCHED, OPENED, LED, CHANNELS)}
COMPILERS = {name: GrammarCompiler(one, VOCAB, [2]) for name, one in TOKENIZERS.items()}


def prompt_of(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    chat = [{"role": "user", "content": "a"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


PROMPTS = {name: prompt_of(one) for name, one in TOKENIZERS.items()}


def start(
    template: str, grammar: str | None, budget: int | None
) -> ThinkingProgress | GrammarProgress:
    form = None if grammar is None else Grammar.regex(grammar)
    made = COMPILERS[template].follow(
        PROMPTS[template], form, after_thinking=grammar is not None, budget=budget
    )
    assert made is not None
    made.compiled.result()
    return made


def masks(progress: Any, drafts: list[int], parents: list[int] | None = None) -> torch.Tensor:
    made = torch.zeros(len(drafts) + 1, WORDS, dtype=torch.int32)
    progress.fill(made, drafts, parents)
    return made


def allowed(mask: torch.Tensor) -> set[int]:
    return {token for token in range(VOCAB) if int(mask[token // 32]) >> token % 32 & 1}


@pytest.mark.parametrize("template", [SWITCHED, OPENED, LED, CHANNELS])
@pytest.mark.parametrize(
    ("grammar", "budget"), [("(ab|ba)+", None), ("(ab|ba)+", 3), (None, 0), (None, 2), ("c", 0)]
)
def test_a_row_has_the_mask_of_its_path(
    template: str, grammar: str | None, budget: int | None
) -> None:
    """Of trees drawn at random, mostly from what may follow: as if its path had been read."""
    random_ = random.Random(f"{template} {grammar} {budget}")
    thinking = thinking_of(TOKENIZERS[template])
    assert thinking is not None
    tags = [*thinking.lead, *thinking.opening, *thinking.closing, *thinking.answering]
    read: list[int] = []
    for _ in range(12):
        progress = start(template, grammar, budget)
        assert progress.advance(read)
        drafts: list[int] = []
        parents: list[int] = []
        for row in range(1, 9):
            parent = random_.choice([row - 1, row - 1, random_.randrange(row)])
            known = masks(progress, drafts, parents or None)[parent]
            few = sorted(allowed(known))
            likely = [token for token in few if token in tags] or few or [5]
            drafts.append(random_.choice([*likely, *few[:3], random_.randrange(VOCAB)]))
            parents.append(parent)
        found = masks(progress, drafts, parents)
        for row in range(9):
            path = []
            at = row
            while at:
                path.append(drafts[at - 1])
                at = parents[at - 1]
            alone = start(template, grammar, budget)
            assert alone.advance(read)
            if 2 not in path and alone.advance(path[::-1]):
                assert allowed(found[row]) == allowed(masks(alone, [])[0]), (read, path[::-1])
        options = sorted(allowed(masks(progress, [])[0]) - {2})
        read = (
            [*read, random_.choice([t for t in options if t in tags] or options)] if options else []
        )
        if len(read) > 30:
            read = []


def test_what_must_follow_is_drafted() -> None:
    """A closing of several tokens, and behind it what the grammar allows."""
    thinking = thinking_of(TOKENIZERS[CHANNELS])
    assert thinking is not None
    progress = start(CHANNELS, "ab", 2)
    assert progress.advance([*thinking.opening, 20, 21])
    letters = [TOKENIZERS[CHANNELS].convert_tokens_to_ids(letter) for letter in "ab"]
    count = len(thinking.closing)
    constrained = progress.constrained(
        [5] * (count + 2), [[6]] * count + [[letters[0]], [letters[1]]]
    )
    assert constrained == [*thinking.closing, *letters]


def test_no_thinking_ends_the_output_before_its_answer() -> None:
    assert 2 not in allowed(masks(start(OPENED, "ab", None), [])[0])
    assert 2 in allowed(masks(start(OPENED, None, 5), [])[0])
