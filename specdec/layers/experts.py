"""Routed experts in plain torch: every expert's rows at once, and the sum over a token's experts in the token's own order.

`specdec.kernels.triton_experts` is the same in kernels.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kernels.experts import Experts
from specdec.layers.activation import gated


def expected_experts(num_experts: int, top_k: int, rows: int) -> float:
    """How many different experts `rows` tokens choose, if each chooses on its own and all experts alike.

    Neighboring tokens agree more than that, so weights read are at most this share of all, on average.

    >>> [round(expected_experts(128, 8, rows), 1) for rows in (1, 8, 16, 1024)]
    [8.0, 51.6, 82.4, 128.0]
    """
    return num_experts * (1 - (1 - top_k / num_experts) ** rows)


def apply_experts(x: Tensor, weights: Tensor, ids: Tensor, layer: Experts) -> Tensor:
    """The weighted sum of each row's experts. The order of a sum does not depend on other rows.

    Args:
        x: [T, H].
        weights: float32 [T, top_k].
        ids: int64 [T, top_k], different ones in each row.
        layer: the experts, of the type of `x`.

    Returns:
        [T, H] in the type of `x`.
    """
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)
    expert_of = chosen[order]
    counts = torch.zeros(layer.num_experts, dtype=torch.int32, device=x.device)
    ends = counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32)).cumsum(0, dtype=torch.int32)
    gate_up = _product(x[order // ids.shape[1]], layer.gate_up, layer.gate_up_bias, expert_of, ends)
    gate, up = gate_up.chunk(2, dim=-1)
    product = _product(gated(gate, up, layer.activation), layer.down, layer.down_bias, expert_of, ends)
    outputs = torch.empty_like(product).index_copy_(0, order, product).view(*ids.shape, -1)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
    for output, weight in zip(outputs.unbind(1), weights.unbind(1), strict=True):
        total += output * weight[:, None]
    return total.to(x.dtype)


def _product(rows: Tensor, weight: Tensor, bias: Tensor | None, expert_of: Tensor, ends: Tensor) -> Tensor:
    """[n, out] from rows [n, in] in the order of their experts, of which expert `e` has those before `ends[e]`.

    torch's grouped product wants rows of multiples of 16 bytes and no wider types than float32; other shapes make the host wait.
    """
    grouped = rows.element_size() <= 4 and not any(size * rows.element_size() % 16 for size in weight.shape[1:])
    if grouped:
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    else:
        pieces = rows.tensor_split(ends.tolist()[:-1])
        out = torch.cat([F.linear(piece, expert) for piece, expert in zip(pieces, weight, strict=True)])
    return out if bias is None else out + bias[expert_of]
