"""triton_fa on rows of draft trees, on a CUDA device or in Triton's interpreter; see
`tests.helpers.triton_interpreter`.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.triton.fa import TritonFaBackend
from specdec.base.blocks import MAX_NODES
from tests.helpers.attention_case import Case, spec
from tests.helpers.trees import random_trees
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()


def attended(case: Case, splits: int, **how: Any) -> Tensor:
    """The case's rows on triton_fa, the keys of each divided among `splits` programs."""
    backend = TritonFaBackend(case.spec)
    assert backend.tree_reasons(case.spec) == []
    backend.num_splits = lambda *_: splits  # type: ignore[method-assign]
    return case.attend(backend, scale=0.2, **how)


@pytest.mark.parametrize(
    ("drafts", "heads", "kv_heads", "window", "extra", "splits"),
    [
        (1, 2, 2, None, "", 1),
        (7, 3, 1, 3, "sinks", 4),
        (16, 8, 2, None, "softcap", 4),
        (16, 6, 2, 1, "", 1),
        (23, 4, 1, 30, "sinks", 2),
        (MAX_NODES, 2, 1, None, "", 2),
        (MAX_NODES, 3, 1, 9, "softcap", 1),
    ],
)
def test_masks(
    drafts: int, heads: int, kv_heads: int, window: int | None, extra: str, splits: int
) -> None:
    """Every bit of a word, windows by depth, groups that leave lanes empty, more rows than a tile
    holds, and no context.
    """
    asked = spec(
        device=DEVICE, dtype=torch.float32, num_heads=heads, num_kv_heads=kv_heads, head_dim=16
    )
    lengths = [drafts + 1 + context for context in (21, 0, 130)]
    case = Case(asked, lengths, [drafts + 1] * 3, uniform=True, trees=random_trees(3, drafts))
    sinks = torch.randn(heads).to(DEVICE) if extra == "sinks" else None
    how: dict[str, Any] = {
        "window": window,
        "softcap": 0.7 if extra == "softcap" else None,
        "sinks": sinks,
    }
    case.check(attended(case, splits, **how), scale=0.2, **how)


@pytest.mark.parametrize("window", [None, 4])
def test_a_chain_is_a_tree(window: int | None) -> None:
    """To the last bit."""
    tree, chain = (
        Case(spec(device=DEVICE, dtype=torch.float32), [50, 7], [7, 7], uniform=True, trees=trees)
        for trees in ([range(6)] * 2, [])
    )
    assert attended(tree, 2, window=window).equal(attended(chain, 2, window=window))
