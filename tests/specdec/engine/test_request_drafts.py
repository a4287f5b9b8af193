"""Drafts as a request wants them: none, a few of a chain, or of a tree; no output depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import AcceptanceStats
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.model.core import Drafter, Verifier
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.pairs import pairs
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
)

WANTED: list[dict[str, Any]] = [
    {},
    {"num_draft_tokens": 0},
    {"num_draft_tokens": 2},
    {"tree_nodes": 0},
    {"tree_nodes": 3},
    {"num_draft_tokens": 1, "tree_nodes": 4},
]
CHAINS = [one for one in WANTED if "tree_nodes" not in one]
WAYS: dict[str, dict[str, Any]] = {
    "chain": {"num_draft_tokens": 5},
    "tree": {"tree_nodes": 9},
    "chosen": {"num_draft_tokens": "auto"},
    "drawn": {"num_draft_tokens": 5, "draft_sampling": "probabilistic"},
    "ahead": {"num_draft_tokens": 5, "pipeline_depth": 1},
}


@pytest.fixture(scope="module")
def target() -> Verifier:
    return paged_verifier(plain_model("llama"))


def decoded(
    target: Verifier,
    drafter: Drafter | None,
    wanted: Sequence[dict[str, Any]],
    at_once: int = 3,
    temperature: float = 0.0,
    **engine: Any,
) -> tuple[list[Request], SpecEngine]:
    """As many prompts as wishes."""
    config = {"cache": CacheConfig(memory_bytes=2**22), **engine}
    made = SpecEngine(target, drafter, EngineConfig(max_num_seqs=at_once, **config))
    requests = [
        made.add_request(
            prompt, SamplingParams(max_tokens=30, seed=4, temperature=temperature, **one)
        )
        for prompt, one in zip(random_prompts(len(wanted)), wanted, strict=True)
    ]
    finish(made)
    return requests, made


def stats_of(request: Request) -> AcceptanceStats:
    return GenerationResult.of(request, "").stats


@pytest.mark.parametrize(("way", "temperature", "at_once"), pairs([*WAYS], [0.0, 0.8], [1, 3]))
def test_none_gets_more_than_it_wants(
    target: Verifier, way: str, temperature: float, at_once: int
) -> None:
    """Alone, and beside others that want more."""
    wanted = WANTED if way == "tree" else CHAINS
    plain, _ = decoded(target, None, [{}] * len(wanted), temperature=temperature)
    drafter = random_dflash(target, block_size=6)
    requests, _ = decoded(target, drafter, wanted, at_once, temperature, **WAYS[way])
    if not (way == "drawn" and temperature):  # drawn drafts have random tokens of their own
        assert [one.output_token_ids for one in requests] == [one.output_token_ids for one in plain]
    for request, asked in zip(requests, wanted, strict=True):
        stats = stats_of(request)
        assert max(stats.num_drafted) <= asked.get("num_draft_tokens", 5)
        assert max(stats.num_accepted) <= asked.get("num_draft_tokens", 5)
        if "tree_nodes" in asked:
            assert max(stats.tree_sizes) <= asked["tree_nodes"]
        if asked.get("num_draft_tokens") == 0:
            assert stats.tau == 1 and not any(stats.num_verified)
        if asked == {} and way in ("chain", "drawn", "ahead"):
            assert max(stats.num_drafted) == 5


def test_what_is_wanted_is_drafted() -> None:
    """A drafter that is always right is accepted as far as each request lets it, and steps of
    requests that want little are small.
    """
    model = plain_model("llama")
    target = paged_verifier(model)
    outputs = {tuple(p): plain_greedy(model, p, 30) for p in random_prompts(4)}
    wanted = [{"num_draft_tokens": k} for k in (0, 2, 6, 3)]
    drafter = ScriptedDrafter(outputs, 6)
    for at_once in (1, 4):
        requests, _ = decoded(target, drafter, wanted, at_once, num_draft_tokens=6)
        assert [one.output_token_ids for one in requests] == list(outputs.values())
        for request, asked in zip(requests, wanted, strict=True):
            most = asked["num_draft_tokens"]
            assert set(request.num_accepted[:-1]) == {most}
        if at_once == 1:
            assert {request.num_drafted[0] for request in requests} == {0, 2, 3, 6}


def test_a_step_is_as_small_as_its_requests_want(target: Verifier) -> None:
    """Rows that nobody wants are not computed."""
    rows: list[int] = []
    drafter = random_dflash(target, block_size=6)
    none: dict[str, Any] = {"num_draft_tokens": 0}
    wishes: list[list[dict[str, Any]]] = [[none] * 2, [{"num_draft_tokens": 2}, {}], [{}, {}]]
    for wanted in wishes:
        engine = tiny_engine(target, drafter, max_num_seqs=2, num_draft_tokens=5)
        for prompt, one in zip(random_prompts(2), wanted, strict=True):
            engine.add_request(prompt, SamplingParams(max_tokens=9, **one))
        engine.step()
        engine.step()
        batch = engine.slots.select(engine.scheduler.decoding)
        rows.append(engine.planner.plan(batch).shape.drafts)
    assert rows == [0, 5, 5]


def test_what_cannot_be_wanted(target: Verifier) -> None:
    """More than there is, and what is no number; before the request is queued."""
    chains = decoded(target, random_dflash(target, block_size=6), [{}], num_draft_tokens=5)[1]
    none = decoded(target, None, [{}])[1]
    cases: list[tuple[SpecEngine, dict[str, Any], str]] = [
        (chains, {"num_draft_tokens": 6}, "num_draft_tokens is 6 and this engine has 5 at most"),
        (chains, {"tree_nodes": 1}, "tree_nodes is 1 and this engine has 0 at most"),
        (none, {"num_draft_tokens": 1}, "this engine has 0 at most; ask for no more, or leave it"),
    ]
    for engine, wanted, said in cases:
        with pytest.raises(InvalidInputError, match=said):
            engine.add_request([1], SamplingParams(**wanted))
    none.add_request([1], SamplingParams(num_draft_tokens=0, tree_nodes=0))
    values: list[Any] = [-1, 1.5, True, "auto", 2**31]
    for name in ("num_draft_tokens", "tree_nodes"):
        for value in values:
            with pytest.raises(InvalidInputError, match=name):
                SamplingParams(**{name: value})
