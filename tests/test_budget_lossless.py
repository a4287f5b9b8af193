"""A verify budget beside every kind of layer: whatever rule shares out the rows, in float32 the
tokens are those of plain decoding.
"""

from typing import Any

import pytest

from specdec.engine.build import budget_reasons, target_tree_reasons
from specdec.engine.capture.graphs import StepGraphs
from specdec.model.core import Drafter
from tests.helpers.guided import SAMPLINGS as GUIDED
from tests.helpers.guided import GuidedCase
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.scripted_trees import ScriptedTrees
from tests.helpers.tree_engine import SAMPLINGS, TREES, TreeCase, tokens
from tests.helpers.trees import random_trees
from tests.specdec.engine.capture.test_graphs import Recorder, refuse
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
    return TreeCase(request.param)


def drafter_for(case: TreeCase, sampling: str) -> tuple[Drafter, dict[str, Any]]:
    """Knows the target's text and is wrong now and then; in trees where the target has them."""
    outputs = case.outputs_of(sampling)
    if target_tree_reasons(case.verifier):
        return ScriptedDrafter(outputs, 6, [{3}, {1, 4}, set()]), {"tree_nodes": None}
    return ScriptedTrees(outputs, TREES), {}


@pytest.mark.parametrize("rule", ["own", "random", "by token", "wrong first"])
@pytest.mark.parametrize("sampling", ["greedy", "sampled"])
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
