"""Outputs that think within a budget, then follow a grammar: drafts of any kind change nothing."""

import re
from typing import Any

import pytest

pytest.importorskip("xgrammar")

from drafters.ngram import NGramDrafter
from specdec.base.chat.thinking import thinking_of
from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.grammar.grammar import Grammar
from specdec.model.core import Drafter
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import Prompt, SpecDecoder
from specdec.session.outputs import GenerationResult
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.thinking import CHANNELS, LED, OPENED, SWITCHED, thinking_tokenizer
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from tests.helpers.trees import random_trees

K, NODES, BUDGETS = 4, 9, (0, 3, 9, 17)
PATTERN = "(ab|ba|c{2,9})+d"
CHATS = [[{"role": "user", "content": text}] for text in ("hi", "and you", "abab", "x")]
VERIFIER = paged_verifier(plain_model("llama"))


def run(
    template: str,
    drafter: Drafter | None,
    *,
    grammar: bool,
    **sampling: Any,
) -> list[GenerationResult]:
    """Every chat with a budget of its own. Tags are made likelier, so that some thinking ends."""
    tokenizer = thinking_tokenizer(template)
    thinking = thinking_of(tokenizer)
    assert thinking is not None
    tree = NODES if isinstance(drafter, ScriptedTrees) else None
    engine = EngineConfig(max_num_seqs=3, max_model_len=256, num_draft_tokens=None, tree_nodes=tree)
    bias = dict.fromkeys(thinking.first, 8.0) | {thinking.closing[0]: 2.0}
    ways = [
        SamplingParams(
            max_tokens=40,
            seed=seed,
            logit_bias=tuple(bias.items()),
            thinking_token_budget=budget,
            grammar=Grammar.regex(PATTERN) if grammar else None,
            **sampling,
        )
        for seed, budget in enumerate(BUDGETS)
    ]
    return SpecDecoder(VERIFIER, tokenizer, drafter, engine).generate(CHATS, ways)


def drafters(plain: list[GenerationResult]) -> dict[str, Drafter]:
    outputs = {tuple(result.prompt_token_ids): result.token_ids for result in plain}
    return {
        "dflash": random_dflash(VERIFIER, block_size=K + 1),
        "ngram": NGramDrafter(max_draft_tokens=K),
        "scripted": ScriptedDrafter(outputs, K, [set(), {1}, {3}]),
        "trees": ScriptedTrees(outputs, random_trees(4, NODES)),
    }


SAMPLED = {"temperature": 1.1, "top_p": 0.95}


@pytest.mark.parametrize(
    ("template", "grammar", "sampling"),
    [
        (SWITCHED, True, {}),
        (SWITCHED, False, SAMPLED),
        (OPENED, True, SAMPLED),
        (LED, True, SAMPLED),
        (OPENED, False, {}),
        (CHANNELS, True, SAMPLED),
        (CHANNELS, False, {}),
    ],
    ids=str.split("switched switched-free opened led opened-free channels channels-free"),
)
def test_drafts_change_nothing(template: str, grammar: bool, sampling: dict[str, Any]) -> None:
    plain = run(template, None, grammar=grammar, **sampling)
    for name, drafter in drafters(plain).items():
        if name in ("dflash", "ngram") and not (template is SWITCHED and grammar):
            continue
        found = run(template, drafter, grammar=grammar, **sampling)
        assert [one.token_ids for one in found] == [one.token_ids for one in plain], name
        if name in ("scripted", "trees"):
            assert sum(sum(one.stats.num_accepted) for one in found) > 10
    check(template, plain, grammar=grammar)


def check(template: str, results: list[GenerationResult], *, grammar: bool) -> None:
    """No thinking is longer than its budget; what follows is of its form."""
    tokenizer = thinking_tokenizer(template)
    thinking = thinking_of(tokenizer)
    assert thinking is not None
    ended = 0
    for result, budget in zip(results, BUDGETS, strict=True):
        assert result.error is None
        place, count = thinking.behind_prompt(result.prompt_token_ids), 0
        for at, token in enumerate(result.token_ids):
            place = thinking.step(place, token)
            count = max(count, place.num_thought)
            if place.phase.value == "behind":
                text = tokenizer.decode(result.token_ids[at + 1 :], skip_special_tokens=True)
                ended += 1
                if grammar and result.finish_reason == "stop":
                    assert re.fullmatch(PATTERN, text)
                break
        assert count < budget + len(thinking.closing)
    assert ended >= 3


def test_a_model_that_does_not_think() -> None:
    decoder = SpecDecoder(VERIFIER, tiny_tokenizer(), None, EngineConfig(max_model_len=64))
    with pytest.raises(InvalidInputError, match="thinking_token_budget is 4, and no token"):
        decoder.generate("a", thinking_token_budget=4)
    with pytest.raises(InvalidInputError, match="leave out one of the two"):
        SamplingParams(
            grammar=Grammar.regex("a"),
            thinking_token_budget=1,
            grammar_after_thinking=False,
        )


def test_a_grammar_of_a_text_holds_from_its_first_token() -> None:
    """A conversation's begins behind the thinking, if that is not said otherwise."""
    decoder = SpecDecoder(
        VERIFIER,
        thinking_tokenizer(OPENED),
        None,
        EngineConfig(max_model_len=128),
    )
    form = Grammar.regex("(ab)+")
    prompts: list[Prompt] = [CHATS[0], "hi"]
    said = decoder.generate(prompts, max_tokens=8, grammar=form)
    early = decoder.generate(CHATS[0], max_tokens=8, grammar=form, grammar_after_thinking=False)
    assert (
        not said[0].text.startswith("ab")
        and said[1].text.startswith("ab")
        and early.text.startswith("ab")
    )
