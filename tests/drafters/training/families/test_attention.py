"""Attention of unrolled steps against each row by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.training.families.attention import Step, UnrolledAttention
from specdec.attention.backend import AttentionSpec

HEADS, KV_HEADS, DIM, LENGTH, BLOCKS = 4, 2, 8, 9, 3
CPU = torch.device("cpu")


def alone(query: Tensor, keys: Tensor, values: Tensor, how: dict[str, Any]) -> Tensor:
    """[heads, D] of one row [heads, D] that sees keys and values [n, kv_heads, D]."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (keys, values))
    scores = torch.einsum("hd,nhd->hn", query, k) * how["scale"]
    if how["softcap"] is not None:
        scores = how["softcap"] * torch.tanh(scores / how["softcap"])
    weights = scores.exp()
    total = weights.sum(dim=1)
    if how["sinks"] is not None:
        total = total + how["sinks"].exp()
    return torch.einsum("hn,nhd->hd", weights / total[:, None], v)


@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
def test_a_row_sees_what_is_before_its_block_and_its_own_block(
    window: int | None, kind: str
) -> None:
    """Catches masks of another block, windows counted from elsewhere, and scores of other heads."""
    torch.manual_seed(0)
    how: dict[str, Any] = {
        "scale": 0.7,
        "window": window,
        "softcap": 2.0 if kind == "softcap" else None,
        "sinks": torch.randn(HEADS) if kind == "sinks" else None,
    }
    backend = UnrolledAttention(AttentionSpec(CPU, torch.float32, HEADS, KV_HEADS, DIM, 16))
    anchors, cache = torch.tensor([[2, 4, 8], [1, 5, 5]]), list[Any]()
    rows: dict[tuple[int, int], list[tuple[int, Tensor, Tensor]]] = {}  # of a block, by position
    whole: list[list[tuple[int, Tensor, Tensor]]] = [[], []]
    for step in range(3):
        count = BLOCKS if step else LENGTH
        query, key, value = (
            torch.randn(2 * count, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        plan = Step(2, LENGTH, step, anchors if step else None)
        out = backend.run(query, key, value, cache, plan, **how)
        for number in range(2 * count):
            sequence, place = divmod(number, count)
            if step:
                anchor = int(anchors[sequence, place])
                position, own = anchor - 1 + step, rows.setdefault((sequence, place), [])
                own.append((position, key[number], value[number]))
                seen = whole[sequence][:anchor] + own
            else:
                position = place
                whole[sequence].append((position, key[number], value[number]))
                seen = whole[sequence]
            near = [one for one in seen if window is None or position - one[0] < window]
            keys, values = (torch.stack(list(x)) for x in list(zip(*near, strict=True))[1:])
            torch.testing.assert_close(out[number], alone(query[number], keys, values, how))
