"""Rows of draft trees on torch_ref against the definition, whose keys are found by walking from
parent to parent.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.attention.backend import AttentionSpec, TreeRows
from specdec.attention.selector import tree_reasons
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.base.blocks import MAX_NODES
from tests.helpers.attention_case import Case, spec
from tests.helpers.trees import Parents, random_trees

SHAPES: dict[str, dict[str, Any]] = {
    "groups of 2": {"drafts": 7},
    "groups of 3, window": {
        "drafts": 12, "num_heads": 9, "num_kv_heads": 3, "head_dim": 16, "window": 5,
    },
    "one head, every bit": {
        "drafts": MAX_NODES, "num_heads": 1, "num_kv_heads": 1, "head_dim": 32,
    },
    "narrow window, sinks": {"drafts": 9, "num_kv_heads": 4, "window": 2, "sinks": True},
    "softcap": {"drafts": 1, "num_kv_heads": 1, "softcap": 0.7},
    "window of one, both": {"drafts": 16, "window": 1, "sinks": True, "softcap": 0.7},
    "wide window": {"drafts": 16, "window": 30},
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_every_case_equals_the_definition(shape: str) -> None:
    """Chains, stars and trees behind contexts of any length, none too."""
    case, how = tree_case(torch.float32, **SHAPES[shape])
    case.check(case.attend(TorchRefBackend(case.spec), layers=2, **how), **how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", ["groups of 3, window", "narrow window, sinks"])
def test_16_bits(dtype: torch.dtype, shape: str) -> None:
    """As exact as any rows in these types."""
    case, how = tree_case(dtype, **SHAPES[shape])
    chain, _ = tree_case(dtype, **SHAPES[shape])
    chain.metadata, chain.trees = replace(chain.metadata, visibility="causal", tree=None), ()
    error, usual = (
        (each.attend(TorchRefBackend(case.spec), **how) - each.exact(**how)).square().mean().sqrt()
        for each in (case, chain)
    )
    assert error <= 1.5 * usual


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chain_is_a_tree(dtype: torch.dtype) -> None:
    """The same bits, whether rows say that they form a chain or that each continues the one before
    it; windows too.
    """
    chains = [list(range(6))] * 2
    tree = Case(spec(dtype=dtype), [50, 7], [7, 7], uniform=True, trees=chains)
    chain = Case(spec(dtype=dtype), [50, 7], [7, 7], uniform=True)
    for window in (None, 4):
        got, want = (
            case.attend(TorchRefBackend(case.spec), scale=0.2, window=window)
            for case in (tree, chain)
        )
        assert got.equal(want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_more_drafts_leave_a_row_its_bits(dtype: torch.dtype) -> None:
    """The first drafts of a tree are computed as they are when there are no others."""
    parents = random_trees(1, 15)[0]
    large = Case(spec(dtype=dtype), [66], [16], uniform=True, trees=[parents])
    small = Case(spec(dtype=dtype), [66], [16], uniform=True, trees=[parents])
    rows = slice(0, 9)
    small.metadata = replace(
        small.metadata,
        query_start_loc=torch.tensor([0, 9], dtype=torch.int32),
        seq_lens=torch.tensor([59], dtype=torch.int32),
        slot_mapping=small.metadata.slot_mapping[rows],
        num_tokens=9,
        max_query_len=9,
        tree=TreeRows(*(side[rows] for side in small.metadata.tree)),  # type: ignore[union-attr]
    )
    small.query, small.new = (
        small.query[rows],
        {name: side[rows] for name, side in small.new.items()},
    )
    got, want = (case.attend(TorchRefBackend(case.spec), scale=0.2) for case in (small, large))
    assert got.equal(want[rows])


def test_a_layer_of_any_shape_may_stand_against_trees() -> None:
    """What its backend says counts for the model; who serves them says nothing."""

    class Full(TorchRefBackend):
        @classmethod
        def tree_reasons(cls, spec: AttentionSpec) -> list[str]:
            return [f"window {window}" for window in spec.windows if window]

    wanted = spec(further=((spec().shape, frozenset({4})),))
    assert tree_reasons(TorchRefBackend(wanted)) == tree_reasons(Full(spec())) == []
    assert tree_reasons(Full(wanted)) == ["window 4"]


def tree_case(
    dtype: torch.dtype,
    drafts: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    **changes: Any,
) -> tuple[Case, dict[str, Any]]:
    """Four requests, and how to attend."""
    asked = spec(dtype=dtype, **changes)
    trees: list[Parents] = random_trees(4, drafts)
    case = Case(
        asked,
        [drafts + 1 + context for context in (20, 0, 47, 3)],
        [drafts + 1] * 4,
        uniform=True,
        trees=trees,
    )
    logits = torch.randn(asked.num_heads) if sinks else None
    return case, {"scale": 0.2, "window": window, "softcap": softcap, "sinks": logits}
