"""Attention of unrolled steps against each row by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.training.families.attention import Step, UnrolledAttention, UnrolledLatent, unrolled
from specdec.attention.backend import AttentionSpec
from specdec.attention.mla import MlaRows, MlaSpec, UpProjection

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


@pytest.mark.parametrize("latent", [False, True])
def test_gradients_are_those_of_small_changes(latent: bool) -> None:
    """Over two steps. Catches queries, keys or values whose gradient stops."""
    torch.manual_seed(0)
    spec: Any = AttentionSpec(CPU, torch.float64, HEADS, KV_HEADS, DIM, 16)
    shapes: list[tuple[int, ...]] = [(HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, DIM)]
    maps: list[Tensor] = []
    if latent:
        spec = MlaSpec(CPU, torch.float64, HEADS, 6, DIM, 4, 5, 16)
        shapes = [(HEADS, DIM), (HEADS, 4), (6,), (4,)]
        maps = [torch.randn(HEADS, DIM, 6), torch.randn(HEADS, 6, 5)]
    backend: Any = unrolled(spec)
    given = [torch.randn(n, *shape) for n in (LENGTH, BLOCKS) for shape in shapes] + maps
    given = [one.double().requires_grad_() for one in given]

    def both(*given: Tensor) -> Tensor:
        cache, outs, count = list[Any](), [], len(shapes)
        for step, anchors in enumerate((None, torch.tensor([[2, 4, 8]]))):
            rows, plan = given[step * count : (step + 1) * count], Step(1, LENGTH, step, anchors)
            if isinstance(backend, UnrolledLatent):
                up = UpProjection(*given[2 * count :])
                outs.append(backend.run(MlaRows(*rows), up, cache, plan, scale=0.7))
            else:
                outs.append(backend.run(*rows, cache, plan, scale=0.7))
        return torch.cat(outs)

    assert torch.autograd.gradcheck(both, given)
