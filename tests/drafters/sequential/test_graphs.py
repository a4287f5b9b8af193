"""Captured steps of token-by-token drafters: the tokens and rows without graphs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec.engine.engine import SpecEngine
from specdec.model.core import Drafter
from tests.drafters.eagle3.heads import random_eagle3
from tests.drafters.sequential.toy import toy_drafter
from tests.specdec.engine.capture import test_graphs
from tests.specdec.engine.capture.test_graphs import Case, run
from tests.specdec.engine.capture.test_prefill_graphs import captured_engine, small_shapes

K = 4
DRAFTERS: dict[str, Callable[[Case], Drafter]] = {
    "pairs": lambda case: toy_drafter(case.verifier, K),
    "tokens": lambda case: toy_drafter(case.verifier, K, features=False),
    "pairs at once": lambda case: toy_drafter(case.verifier, K, parallel=True),
    "eagle3": lambda case: random_eagle3(case.verifier, K),
}

__all__ = ["small_shapes"]  # a fixture of all tests here


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def cached(engine: SpecEngine, blocks: slice) -> list[torch.Tensor]:
    """Keys of the drafter's layers."""
    return [
        layer.key[blocks].clone()
        for layer in engine.kv_cache.layers[len(engine.verifier.kv_specs) :]
    ]


@pytest.mark.parametrize(
    ("drafter", "sampling", "changes"),
    [
        ("pairs", "greedy", {}),
        ("tokens", "mixed", {"tree_nodes": 12}),
        ("pairs at once", "greedy", {}),
        ("eagle3", "mixed", {"draft_sampling": "probabilistic"}),
    ],
)
def test_captured_equals_eager(
    case: Case,
    drafter: str,
    sampling: str,
    changes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While requests join and leave; catches a length or a block that a graph holds."""
    monkeypatch.setitem(test_graphs.DRAFTERS, drafter, DRAFTERS[drafter])
    prompts = list(case.outputs)
    eager = case.engine(drafter, 3, capture=False, pipeline_depth=1, **changes)
    expected = run(eager, prompts, sampling)
    engine, recorder, packed = captured_engine(case, drafter, 3, pipeline_depth=1, **changes)
    requests = run(engine, prompts, sampling)
    assert [one.output_token_ids for one in requests] == [one.output_token_ids for one in expected]
    assert recorder.num_replays >= 7 and not packed
    written = slice(1, None)  # without the null block, where padding goes
    for found, right in zip(cached(engine, written), cached(eager, written), strict=True):
        # a captured step may have more drafts than there is room for, and more rows then
        rows = right.flatten(2).any(2)
        assert rows.sum() > 100
        torch.testing.assert_close(found[rows], right[rows], rtol=1e-4, atol=1e-4)
