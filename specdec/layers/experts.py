"""Routed experts in plain torch: every expert's rows at once, and the sum over a token's experts in the token's own order.

`specdec.kernels.triton_experts` is the same in kernels, which no host waits for.
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
    """The weighted sum of each row's experts.

    The host looks at how many rows each expert has, so on an accelerator it waits. A sum's order does not depend on other rows.

    Args:
        x: [T, H].
        weights: float32 [T, top_k].
        ids: integers [T, top_k], different ones in each row.
        layer: the experts, of the type of `x`.

    Returns:
        [T, H] in the type of `x`.
    """
    top_k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=layer.num_experts).tolist()
    outputs = x.new_empty(ids.numel(), x.shape[1])
    for expert, pairs in enumerate(order.split(counts)):
        if len(pairs):
            outputs[pairs] = _apply_one(x[pairs // top_k], layer, expert)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
    for output, weight in zip(outputs.view(*ids.shape, -1).unbind(1), weights.unbind(1), strict=True):
        total += output * weight[:, None]
    return total.to(x.dtype)


def _apply_one(rows: Tensor, layer: Experts, expert: int) -> Tensor:
    """One expert's output [n, H] for its rows [n, H]."""
    biases = (layer.gate_up_bias, layer.down_bias)
    first, second = (None if bias is None else bias[expert] for bias in biases)
    gate, up = F.linear(rows, layer.gate_up[expert], first).chunk(2, dim=-1)
    return F.linear(gated(gate, up, layer.activation), layer.down[expert], second)
