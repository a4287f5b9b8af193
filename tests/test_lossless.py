"""The test that matters most: speculative output equals plain output, token for token,
in float32.
"""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from drafters.composed.drafter import ComposedDrafter
from drafters.draft_model.drafter import DraftModel
from drafters.ngram import NGramDrafter
from drafters.suffix.drafter import SuffixDrafter
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.model.core import Drafter, Verifier
from tests.drafters.eagle3.heads import random_eagle3
from tests.helpers.engines import run_all
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
)

K = 4
MAX_TOKENS = 12
Outputs = dict[tuple[int, ...], list[int]]


def run(
    verifier: Verifier,
    drafter: Drafter | None,
    prompts: list[list[int]],
    config: EngineConfig,
    **sampling: Any,
) -> list[list[int]]:
    """Output tokens of every prompt, all queued at once."""
    engine = SpecEngine(verifier, drafter, config)
    outputs = run_all(engine, prompts, **{"max_tokens": MAX_TOKENS, **sampling})
    assert engine.pool.num_used == 0
    return outputs


def engine_config(batch: int, **changes: Any) -> EngineConfig:
    """A small cache with odd sizes; prefill in chunks shorter than most prompts."""
    return EngineConfig(
        max_num_seqs=batch,
        max_prefill_tokens=13,
        cache=CacheConfig(memory_bytes=2**22),
        **{"num_draft_tokens": None, **changes},
    )


DRAFTERS: dict[str, Callable[[Outputs, Verifier], Drafter | None]] = {
    "plain": lambda outputs, verifier: None,
    "ngram": lambda outputs, verifier: NGramDrafter(max_draft_tokens=K),
    "suffix": lambda outputs, verifier: SuffixDrafter(max_draft_tokens=K, pool_tokens=100),
    "suffix+dflash": lambda outputs, verifier: ComposedDrafter(
        [
            SuffixDrafter(max_draft_tokens=K + 2, pool_tokens=100),
            random_dflash(verifier, block_size=K + 1),
        ]
    ),
    "dflash": lambda outputs, verifier: random_dflash(verifier, block_size=K + 1),
    "draft_model": lambda outputs, verifier: DraftModel(
        paged_verifier(plain_model("qwen3", 5)), verifier, max_draft_tokens=K
    ),
    "eagle3": lambda outputs, verifier: random_eagle3(verifier, K),
    "right": lambda outputs, verifier: ScriptedDrafter(outputs, K),
    "wrong": lambda outputs, verifier: ScriptedDrafter(outputs, K, [{0, 1, 2, 3}]),
    "wrong_at_each": lambda outputs, verifier: ScriptedDrafter(
        outputs, K, [{0}, {1}, {2}, {3}, set()]
    ),
}


QUICK = ("llama", "gemma2", "deepseek_v3", "nemotron_h")
"""One architecture of each kind: fused, with windows and softcaps, latent, with states."""

BATCHES = (1, 3)


def ways() -> Iterator[Any]:
    """Every drafter for an architecture of each kind, among these in every batch and at every
    depth; for each of the others one that drafts, so that all of this has its turn.
    """
    for place, name in enumerate(QUICK):
        for i, drafter in enumerate(DRAFTERS):
            yield pytest.param(name, drafter, BATCHES[(place + i) % 2], (place // 2 + i // 2) % 2)
    drafting = [drafter for drafter in DRAFTERS if drafter != "plain"]
    others = [name for name in (*CONFIGS, "glm_moe_dsa", "mistral4") if name not in QUICK]
    for number, name in enumerate(others):
        turn, place = divmod(number, len(drafting))
        way = drafting[place], BATCHES[turn % 2], turn // 2 % 2
        yield pytest.param(name, *way, marks=pytest.mark.slow)


@cache
def case(name: str, max_tokens: int = MAX_TOKENS) -> tuple[Verifier, Outputs]:
    """A target and what transformers' `generate` makes of 5 prompts."""
    model = plain_model(name)
    return paged_verifier(model), {
        tuple(p): plain_greedy(model, p, max_tokens) for p in random_prompts(5)
    }


@pytest.mark.parametrize(("name", "drafter", "batch", "depth"), list(ways()))
def test_greedy_equals_generate(name: str, drafter: str, batch: int, depth: int) -> None:
    """Every architecture, drafter and batch size; results read at once or one step late,
    in turns.
    """
    verifier, outputs = case(name)
    prompts = [list(p) for p in outputs]
    got = run(
        verifier,
        DRAFTERS[drafter](outputs, verifier),
        prompts,
        engine_config(batch, pipeline_depth=depth),
    )
    assert got == list(outputs.values())
