"""What is not finite concerns who asked for it: rejected drafts, and what was left in a block,
spoil no sound request.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from specdec import SpecDecoder
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from tests.drafters.eagle3.heads import random_eagle3
from tests.helpers.engines import finish
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
    tiny_tokenizer,
)

MAX_TOKENS, K = 16, 4
FAMILIES = ("llama", "gemma3", "gpt_oss", "deepseek_v3", "gemma4", "qwen3_5")
HYBRID = "qwen3_5"
Outputs = dict[tuple[int, ...], list[int]]


class Case(NamedTuple):
    """A target, what `generate` makes of some prompts, and a token in none of them, whose row of
    the embeddings is NaN.
    """

    verifier: Verifier
    outputs: Outputs
    damaged: int


@cache
def case(name: str) -> Case:
    model = plain_model(name)
    outputs = {
        tuple(prompt): plain_greedy(model, prompt, MAX_TOKENS)
        for prompt in random_prompts(4, seed=7, longest=21)
    }
    used = {token for prompt, output in outputs.items() for token in (*prompt, *output)}
    damaged = next(token for token in range(3, VOCAB) if token not in used)
    assert not model.config.tie_word_embeddings
    with torch.no_grad():
        model.get_input_embeddings().weight[damaged] = torch.nan
    return Case(paged_verifier(model), outputs, damaged)


def engine_of(verifier: Verifier, drafter: Drafter | None, **changes: Any) -> SpecEngine:
    cache = CacheConfig(
        memory_bytes=2**22, prefix_caching=bool(changes.pop("prefix_caching", True))
    )
    return SpecEngine(
        verifier,
        drafter,
        EngineConfig(max_num_seqs=3, max_prefill_tokens=13, cache=cache, **changes),
    )


def finished(engine: SpecEngine, prompts: list[list[int]], **sampling: Any) -> list[Request]:
    params = SamplingParams(max_tokens=MAX_TOKENS, **sampling)
    requests = [engine.add_request(prompt, params) for prompt in prompts]
    finish(engine)
    assert engine.pool.num_used == 0
    return requests


def draft_the_damaged(engine: SpecEngine, token: int, place: int) -> None:
    """Every block has a damaged token at one place."""
    drafter = engine.runner.drafter
    assert drafter is not None
    propose = drafter.propose

    def damaged(batch: DecodeBatch) -> DraftOutput:
        draft = propose(batch)
        token_ids = draft.token_ids.clone()
        token_ids[:, place % token_ids.shape[1]] = token
        return replace(draft, token_ids=token_ids)

    drafter.propose = damaged  # type: ignore[method-assign]


SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"num_draft_tokens": None},
    "auto": {"num_draft_tokens": "auto"},
    "tree": {"tree_nodes": 9},
}


WAYS = [
    (name, shape, place)
    for name in FAMILIES
    for shape in SHAPES
    for place in range(K)
    if (name, shape) != (HYBRID, "tree")
]


@pytest.mark.parametrize(("name", "shape", "place"), WAYS[::5])
def test_a_rejected_row_that_is_nan_ends_nobody(name: str, shape: str, place: int) -> None:
    """Wherever in a chain or a tree, with and without the prefix cache, steps in flight or none:
    tokens are those of `generate`.
    """
    verifier, outputs, damaged = case(name)
    drafter = (
        ScriptedDrafter(outputs, K)
        if shape == "chain"
        else random_dflash(verifier, block_size=K + 1, taps=(0, 1, 2))
    )
    engine = engine_of(
        verifier, drafter, pipeline_depth=place % 2, prefix_caching=place < 2, **SHAPES[shape]
    )
    draft_the_damaged(engine, damaged, place)
    requests = finished(engine, [list(prompt) for prompt in outputs])
    assert [request.output_token_ids for request in requests] == list(outputs.values())
    assert {request.finish_reason for request in requests} <= {"length", "stop"}
    if shape != "auto":  # which may find that drafts do not pay before any does harm
        assert any(request.num_tries for request in requests), "the test needs a row that does harm"
        assert sum(request.num_tries for request in requests) <= 4 * len(requests), (
            "tries are far apart"
        )


LOGPROBS = ("top_logprobs", "prompt_logprobs")
DRAFTERS: dict[str, Callable[[Verifier], Drafter | None]] = {
    "plain": lambda verifier: None,
    "dflash": lambda verifier: random_dflash(verifier, block_size=K + 1, taps=(0, 1, 2)),
    "eagle3": lambda verifier: random_eagle3(verifier, K),
}


@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        ("llama", "plain"),
        ("llama", "dflash"),
        ("deepseek_v3", "dflash"),
        (HYBRID, "plain"),
        (HYBRID, "eagle3"),
    ],
)
def test_what_was_left_in_blocks_spoils_no_request(name: str, drafter: str) -> None:
    """As after a request whose last rows nobody looked at; scored prompts are scored again."""
    verifier, outputs, _ = case(name)
    prompts = [list(prompt) for prompt in outputs]
    scores = []
    for value in (0.0, torch.nan):
        engine = engine_of(
            verifier,
            DRAFTERS[drafter](verifier),
            num_draft_tokens=None if drafter != "plain" else 0,
        )
        for layer in engine.kv_cache.layers:
            for tensor in layer:
                if tensor.is_floating_point():
                    tensor.fill_(value)
        requests = finished(engine, prompts, prompt_logprobs=2)
        assert [request.output_token_ids for request in requests] == list(outputs.values())
        scores.append([request.prompt_logprobs for request in requests])
    assert [len(some) for some in scores[1]] == [len(prompt) - 1 for prompt in prompts]
    for one, other in zip(*scores, strict=True):
        torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("drafter", "logprobs"), [*((name, "") for name in DRAFTERS), *(("plain", n) for n in LOGPROBS)]
)
def test_a_request_that_is_nan_itself_ends_alone(drafter: str, logprobs: str) -> None:
    """It is tried once more from where it is, and its neighbors keep their outputs; streams have no
    empty chunks.
    """
    verifier, outputs, damaged = case("llama")
    config = EngineConfig(
        max_num_seqs=3,
        num_draft_tokens=None if drafter != "plain" else 0,
        cache=CacheConfig(memory_bytes=2**22),
    )
    decoder = SpecDecoder(verifier, tiny_tokenizer(), DRAFTERS[drafter](verifier), config)
    prompts = [list(prompt) for prompt in outputs]
    asked = [*prompts[:2], [5, damaged, 6], *prompts[2:]]
    tokens: dict[int, list[int]] = {}
    asked_for: dict[str, Any] = {logprobs: 3} if logprobs else {}
    for chunk in decoder.stream(asked, max_tokens=MAX_TOKENS, **asked_for):
        assert chunk.token_ids or chunk.result is not None
        tokens.setdefault(chunk.index, []).extend(chunk.token_ids)
        if chunk.result is not None and chunk.index == 2:
            assert chunk.result.finish_reason == "error" and "NaN" in (chunk.result.error or "")
    assert [tokens[i] for i in (0, 1, 3, 4)] == list(outputs.values()) and tokens[2] == []
    assert decoder.engine.pool.num_used == 0
