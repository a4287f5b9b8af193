"""A verify budget beside every kind of layer: whatever rule shares out the rows, in float32 the
tokens are those of plain decoding.
"""

from typing import Any

import pytest
import torch

from specdec.base.config import CacheConfig
from specdec.engine import build
from specdec.engine.build import budget_reasons, target_tree_reasons
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.kv_cache import StateCache
from specdec.model.core import Drafter
from specdec.sampling.params import SamplingParams
from tests.helpers.guided import SAMPLINGS as GUIDED
from tests.helpers.guided import GuidedCase
from tests.helpers.recorder import Recorder, refuse
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.tree_engine import MAX_TOKENS, SAMPLINGS, TREES, TreeCase, finish, tokens
from tests.helpers.trees import random_trees
from tests.specdec.engine.test_budget import at_random, by_token, reading, ruled

FAMILIES = [
    "qwen3_5",
    "deepseek_v2",
    "deepseek_v32",
    "llama4",
    "lfm2",
    pytest.param("nemotron_h", marks=pytest.mark.slow),
    pytest.param("falcon_h1", marks=pytest.mark.slow),
    pytest.param("kimi_linear", marks=pytest.mark.slow),
    pytest.param("zamba2", marks=pytest.mark.slow),
    pytest.param("gemma4_shared", marks=pytest.mark.slow),
]
"""The delta rule, latents, an indexer, chunks and a convolution; then Mamba-2, that beside
attention, a decay per key channel beside latents, blocks that layers share, and shared caches."""


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest) -> TreeCase:
    return TreeCase(request.param, ("greedy", "sampled"))


def drafter_for(case: TreeCase, sampling: str) -> tuple[Drafter, dict[str, Any]]:
    """Knows the target's text and is wrong now and then; in trees where the target has them."""
    outputs = case.outputs_of(sampling)
    if target_tree_reasons(case.verifier):
        return ScriptedDrafter(outputs, 6, [{3}, {1, 4}, set()]), {"tree_nodes": None}
    return ScriptedTrees(outputs, TREES), {}


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [
        ("sampled", "own"),
        ("greedy", "random"),
        ("sampled", "by token"),
        ("greedy", "wrong first"),
    ],
)
def test_any_rule_is_exact(case: TreeCase, sampling: str, rule: str) -> None:
    """The engine's, one at random, one that reads the drafts, and one that verifies wrong ones."""
    assert not budget_reasons(case.verifier, case.engine(None).config)
    drafter, options = drafter_for(case, sampling)
    engine = case.engine(drafter, verify_budget=1.5, pipeline_depth=1, **options)
    assert engine.planner.shapes[0].budget == 1.5
    rules = {
        "random": at_random,
        "by token": by_token,
        "wrong first": reading(case.outputs_of(sampling), engine, -1),
    }
    decided = ruled(engine, rules[rule]) if rule in rules else [[0], [1], [2]]
    requests = case.run(engine, **SAMPLINGS[sampling])
    assert tokens(requests) == tokens(case.plain[sampling])
    assert len({tuple(drafts) for drafts in decided}) > 2
    assert any(count for request in requests for count in request.num_accepted)


@pytest.mark.parametrize("sampling", ["sampled"])
def test_captured_equals_eager(case: TreeCase, sampling: str) -> None:
    """Recorded operations replayed, in a batch that is padded."""
    drafter, options = drafter_for(case, sampling)
    engine = case.engine(drafter, verify_budget=1.5, pipeline_depth=1, max_num_seqs=3, **options)
    engine.runner.host_may_look = False
    recorder = Recorder()
    engine.runner.graphs = StepGraphs(recorder, engine.slots, engine.runner.step_table)
    engine.slots.decode_batch = refuse  # type: ignore[assignment, method-assign]
    requests = case.run(engine, **SAMPLINGS[sampling])
    assert tokens(requests) == tokens(case.plain[sampling])
    assert recorder.num_replays == engine.timer.num_steps > 3


@pytest.mark.parametrize(
    ("sampling", "rule"),
    [("greedy", "random"), ("sampled", "by token"), ("filtered", "captured")],
)
def test_grammars(sampling: str, rule: str) -> None:
    """Masks are made for whole blocks, of which few rows are verified."""
    pytest.importorskip("xgrammar")
    from tests.specdec.engine.test_guided import captured

    case = GuidedCase()
    drafter = ScriptedTrees(case.outputs(sampling), random_trees(4, 9))
    engine = case.engine(drafter, tree_nodes=9, verify_budget=2.5, pipeline_depth=1)
    if rule == "captured":
        captured(engine)
    else:
        ruled(engine, at_random if rule == "random" else by_token)
    requests = case.run(engine, **GUIDED[sampling])
    assert tokens(requests) == tokens(case.plain[sampling])
    assert sum(sum(request.num_accepted) for request in requests) > 20
    assert {shape.budget for shape in engine.timer.steps_by_shape} == {2.5}


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("tree", [False, True])
def test_requests_that_want_fewer_drafts(tree: bool, every: bool) -> None:
    """Beside those that want all, and where none does; a request gets no more than it wants."""
    case = TreeCase(samplings=["greedy"])
    wanted: list[dict[str, Any]] = [{"num_draft_tokens": 2}, {"num_draft_tokens": 0}]
    wanted += [{"num_draft_tokens": 1}, {"num_draft_tokens": 2}] if every else [{}, {}]
    if tree:
        wanted = [{"tree_nodes": 3}, {"num_draft_tokens": 0, "tree_nodes": 3}] * 2
        wanted[3] = wanted[2] if every else {}
    drafter: Drafter = ScriptedTrees(case.outputs, TREES)
    if not tree:
        drafter = ScriptedDrafter(case.outputs, 6, [{3}, set()])
    engine = case.engine(drafter, verify_budget=1.5, **({} if tree else {"tree_nodes": None}))
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS, seed=0, **each))
        for prompt, each in zip(case.prompts, wanted, strict=True)
    ]
    assert tokens(finish(engine, *requests)) == tokens(case.plain["greedy"])
    most = [max(request.num_accepted) for request in requests]
    assert most[1] == 0 and most[0] <= (3 if tree else 2)
    assert any(shape.budget for shape in engine.timer.steps_by_shape)


def test_preempted_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts that begin alike in a cache far too small: states are those of accepted rows."""
    monkeypatch.setattr(build, "SNAPSHOT_TOKENS", 8)
    case = TreeCase("qwen3_5", ["greedy"])
    first = max(case.prompts, key=len)
    prompts = [first, [*first[:-3], 5, 9], [*first[:17], 8], first]

    def decode(engine: SpecEngine) -> list[Request]:
        sampling = SamplingParams(max_tokens=MAX_TOKENS, seed=0)
        requests = [engine.add_request(prompt, sampling) for prompt in prompts]
        return finish(engine, *requests)

    plain = tokens(decode(case.engine(None)))
    outputs = {tuple(prompt): output for prompt, output in zip(prompts, plain, strict=True)}
    options: dict[str, Any] = {"tree_nodes": None, "verify_budget": 1.5, "max_num_seqs": 3}
    drafter = ScriptedDrafter(outputs, 6, [{3}, {1, 4}, set()])
    engine = case.engine(drafter, **options)
    states = sum(
        tensor.nbytes
        for cache in engine.kv_cache.layers
        if isinstance(cache, StateCache)
        for tensor in cache[:2]
    )
    per_block = 4 * sum(spec.bytes_per_token(torch.float32) for spec in case.verifier.kv_specs)
    engine = case.engine(
        drafter, cache=CacheConfig(memory_bytes=states + 23 * per_block), **options
    )
    assert tokens(decode(engine)) == plain
    assert tokens(decode(engine)) == plain, "from what the first time has left"
    assert engine.scheduler.num_preemptions > 0 < engine.prefix_counts.found
