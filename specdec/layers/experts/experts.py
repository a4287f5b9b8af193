"""Routed experts in plain torch: every expert's rows at once, and the sum over a token's experts in
the token's own order.

`specdec.layers.experts.triton_experts` is the same in kernels; here is also when they are used.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device.deviation import Deviation, deviation, mismatches, normal, worst
from specdec.device.self_check import Ways
from specdec.kernels.kernel import FLOATS, OURS, TORCH, Kernel
from specdec.layers.experts.router import route
from specdec.layers.experts.routing import Experts, Routing, SharedExperts
from specdec.layers.ops.activation import activate
from specdec.layers.packed.weight import PackedWeight


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
    totals = counts.index_add_(0, chosen, torch.ones_like(chosen, dtype=torch.int32))
    ends = totals.cumsum(0, dtype=torch.int32)
    gate_up = _product(x[order // ids.shape[1]], layer.gate_up, layer.gate_up_bias, expert_of, ends)
    gate_up = activate(gate_up, layer.activation)
    product = _product(gate_up, layer.down, layer.down_bias, expert_of, ends)
    outputs = torch.empty_like(product).index_copy_(0, order, product).view(*ids.shape, -1)
    total = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, weights.dtype))
    for output, weight in zip(outputs.unbind(1), weights.unbind(1), strict=True):
        total += output * weight[:, None]
    return total.to(x.dtype)


def _product(
    rows: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    expert_of: Tensor,
    ends: Tensor,
) -> Tensor:
    """[n, out] from rows [n, in] in the order of their experts, of which expert `e` has those
    before `ends[e]`.

    torch's grouped product wants rows of multiples of 16 bytes and no wider types than float32;
    other shapes make the host wait, and so do packed weights, as numbers an expert at a time.
    """
    if isinstance(weight, PackedWeight):
        products = (
            F.linear(piece, weight.expert(number).dequantized(rows.dtype))
            for number, piece in enumerate(rows.tensor_split(ends.tolist()[:-1]))
            if len(piece)
        )
        out = torch.cat([*products])
        return out if bias is None else out + bias[expert_of]
    size = rows.element_size()
    if size <= 4 and not any(count * size % 16 for count in weight.shape[1:]):
        out = F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)
    else:
        slices = rows.tensor_split(ends.tolist()[:-1])
        products = (F.linear(*pair) for pair in zip(slices, weight, strict=True))
        out = torch.cat([*products])
    return out if bias is None else out + bias[expert_of]


def check_experts(device: torch.device, dtype: torch.dtype) -> Deviation:
    """Both kinds of scores; experts of one row, of a few that share some, and of many that are
    sorted; one that all rows share.
    """
    return worst([*_routing_deviations(device), *_expert_deviations(device, dtype)])


def steps(device: torch.device, dtype: torch.dtype) -> Ways:
    """Eight rows, each of which has four of 32 experts."""
    from specdec.layers.experts.triton_experts import experts  # it imports Triton

    shapes = (32, 2 * 1024, 1024), (32, 1024, 1024), (8, 1024)
    gate_up, down, x = (torch.randn(*shape, device=device, dtype=dtype) for shape in shapes)
    layer = Experts(gate_up, down, "silu")
    weights, ids = route(normal(8, 32).to(device), Routing(32, 4))
    return {
        OURS: lambda: experts(x, weights, ids.int(), layer),
        TORCH: lambda: apply_experts(x, weights, ids, layer),
    }


KERNEL = Kernel("experts", check_experts, dtypes=FLOATS, ways=steps)


def _routing_deviations(device: torch.device) -> Iterator[Deviation]:
    from specdec.layers.experts import triton_router  # it imports Triton

    grouped = Routing(64, 6, "sigmoid", biased=True, num_groups=4, topk_groups=2)
    for routing in (Routing(60, 4), grouped):
        numbers = normal(10, routing.num_experts)
        logits, bias = numbers[:9], numbers[9] / 8 if routing.biased else None
        added = None if bias is None else bias.to(device)
        weights, ids = triton_router.route(logits.to(device), routing, added)
        plain, plain_ids = route(logits, routing, bias)
        scores = logits.double().gather(-1, plain_ids)
        exact = scores.softmax(-1)
        if routing.biased:
            exact = scores.sigmoid() / scores.sigmoid().sum(-1, keepdim=True)
        yield mismatches(ids.long(), plain_ids)
        yield deviation(weights, plain, exact)


def expert_deviation(layer: Experts, count: int, device: torch.device) -> Deviation:
    """How far the kernels are off for some random rows, each of which has two experts."""
    from specdec.layers.experts import triton_experts  # it imports Triton

    dtype, experts, hidden = layer.down.dtype, layer.num_experts, layer.down.shape[1]
    weights, ids = route(normal(count, experts), Routing(experts, 2))
    x, there = normal(count, hidden).to(dtype), layer.to(device)
    got = triton_experts.experts(x.to(device), weights.to(device), ids.int().to(device), there)
    got = got.sum(0).to(dtype) if got.ndim == 3 else got
    exact = apply_experts(x.double(), weights, ids, layer.to(torch.float64))
    return deviation(got, apply_experts(x, weights, ids, layer), exact)


def _expert_deviations(device: torch.device, dtype: torch.dtype) -> Iterator[Deviation]:
    from specdec.layers.experts import triton_experts  # it imports Triton

    into = normal(6, 320, 128).to(dtype) / 8
    out_of = normal(6, 128, 160).to(dtype) / 8
    layer = Experts(into, out_of, "silu", normal(6, 320).to(dtype), normal(6, 128).to(dtype))
    for rows in (1, 5, triton_experts.FEW_ROWS + 6):
        yield expert_deviation(layer, rows, device)
    gate_up, down = normal(4, 320, 128).to(dtype) / 8, normal(4, 128, 160).to(dtype) / 8
    three, all_four = (Experts(gate_up[:count], down[:count], "silu") for count in (3, 4))
    x, weights = normal(5, 128).to(dtype), torch.full((5, 2), 0.5)
    ids = torch.tensor([[0, 3], [2, 3], [1, 3], [0, 3], [2, 3]])
    last = SharedExperts(gate_up[3].to(device), down[3].to(device), 1)
    chosen = weights.to(device), ids.int().to(device)
    got = triton_experts.experts(x.to(device), *chosen, three.to(device), last).sum(0).to(dtype)
    exact = apply_experts(x.double(), weights, ids, all_four.to(torch.float64))
    yield deviation(got, apply_experts(x, weights, ids, all_four), exact)
