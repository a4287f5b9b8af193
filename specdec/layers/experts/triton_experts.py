"""A layer's routed experts in Triton; see `specdec.layers.experts.experts`.

Two products: gate, up and activation, and down with the weights of the routing; then the sum over a
row's experts, in its own order. Few rows read every weight once, which is their whole cost; there
the sum is left to the norm that follows. For many rows arithmetic is the cost, so tiles are wide.
How a product is divided depends on the number of rows and on shapes alone.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from specdec.kernels import triton_launch
from specdec.kernels.triton_argmax import DTYPES
from specdec.kernels.triton_launch import (
    num_processors,
    num_stages,
    on_device,
    overlap_options,
    shared_memory,
)
from specdec.layers.experts.routing import Experts, SharedExperts
from specdec.layers.experts.triton_expert_groups import Groups, group_by_expert
from specdec.layers.experts.triton_expert_products import (
    combine_kernel,
    few_rows_kernel,
    grouped_kernel,
)
from specdec.layers.packed.triton_packed import expert_codes, suits
from specdec.layers.packed.weight import PackedWeight

FEW_ROWS = 64
"""Most rows that find those who share an expert themselves, and whose experts the next kernel adds
up.
"""


class Tile(NamedTuple):
    """What a program multiplies."""

    rows: int
    columns: int  # of the output
    depth: int  # inputs per iteration
    num_warps: int
    num_stages: int  # iterations under way at once
    beside: int = 1  # blocks of rows that take all columns before the next ones do


def unsupported_reasons(layer: Experts, top_k: int) -> list[str]:
    """All reasons why these kernels cannot compute `layer`; empty when they can."""
    reasons = triton_launch.unavailable_reasons(layer.down.device)
    parts = (layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)
    tensors = [part for part in parts if part is not None]
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1 or not kinds <= set(DTYPES):
        names = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        reasons.append(f"experts in {names} (the kernels take bfloat16, float16 or float32)")
    if not all(tensor.is_contiguous() for tensor in tensors if isinstance(tensor, Tensor)):
        reasons.append("experts that are not contiguous")
    packed = [weight for weight in (layer.gate_up, layer.down) if isinstance(weight, PackedWeight)]
    if not all(suits(weight) and weight.plain for weight in packed):
        reasons.append("packed experts in float32, or in groups that 16 does not divide")
    if top_k > MAX_EXPERTS:
        reasons.append(f"{top_k} experts per token (the kernels take up to {MAX_EXPERTS})")
    return reasons


MAX_EXPERTS = 32
"""Experts of a row that a program looks at together with those of all others."""


@lru_cache(maxsize=1024)
def few_rows_tile(
    width: int, top_k: int, rows: int, itemsize: int, *, gated: bool, processors: int, memory: int
) -> Tile:
    """The tile for at most `FEW_ROWS` rows: half a processor's memory is for what it loads ahead,
    so that it has two programs.

    Columns and depth are the same for all numbers of rows, and so is a row's result.

    >>> few_rows_tile(768, 8, 1, 2, gated=True, processors=132, memory=227 * 1024)
    Tile(rows=16, columns=64, depth=64, num_warps=4, num_stages=5, beside=1)
    >>> few_rows_tile(2880, 4, 64, 2, gated=True, processors=132, memory=227 * 1024)
    Tile(rows=64, columns=64, depth=64, num_warps=4, num_stages=4, beside=1)
    """
    padded = max(16, triton.next_power_of_2(rows))
    if itemsize == 4:
        return Tile(padded, 32, 32, 4, 1 if torch.version.hip else 2)
    # Two fifths of a chip's processors read at the speed of its memory.
    columns = 64 if 5 * top_k * triton.cdiv(width, 64) >= 2 * processors else 32
    loaded = ((1 + gated) * columns + padded) * 64 * itemsize
    stages = num_stages(loaded, memory // 2, most=1 if torch.version.hip else 5)
    return Tile(padded, columns, 64, 4, stages)


@lru_cache(maxsize=1024)
def many_rows_tile(
    num_pairs: int, num_experts: int, itemsize: int, *, gated: bool, memory: int
) -> Tile:
    """The tile for more rows: room for half as many again as an expert has on average, and wide
    columns where that is many.

    >>> many_rows_tile(2048, 128, 2, gated=True, memory=227 * 1024)
    Tile(rows=32, columns=64, depth=64, num_warps=4, num_stages=4, beside=8)
    >>> many_rows_tile(262144, 128, 2, gated=False, memory=227 * 1024)
    Tile(rows=128, columns=256, depth=64, num_warps=8, num_stages=3, beside=8)
    """
    rows = min(max(16, triton.next_power_of_2(triton.cdiv(3 * num_pairs, 2 * num_experts))), 128)
    if itemsize == 4:
        return Tile(min(rows, 32), 32, 32, 4, 1 if torch.version.hip else 2, beside=8)
    wide = rows == 128
    columns = (64 if gated else 128) * (2 if wide and memory >= 128 * 1024 else 1)
    loaded = ((1 + gated) * columns + rows) * 64 * itemsize
    most = 1 if torch.version.hip else 3 if wide else 4
    stages = num_stages(loaded, memory, most=most)
    return Tile(rows, columns, 64, 8 if wide else 4, stages, beside=8)


@lru_cache(maxsize=1024)
def packed_tile(bits: int, rows: int, *, few: bool, gated: bool, memory: int) -> Tile:
    """The tile for weights of few bits. Few rows have a lane of the inputs per warp, see
    `triton_packed`; many have warps for all.

    >>> packed_tile(4, 5, few=True, gated=True, memory=227 * 1024)
    Tile(rows=16, columns=16, depth=128, num_warps=4, num_stages=4, beside=1)
    >>> packed_tile(4, 64, few=False, gated=True, memory=227 * 1024)
    Tile(rows=64, columns=64, depth=128, num_warps=4, num_stages=3, beside=8)
    """
    columns, lanes = (16, 4) if few else (64, 1)
    padded = max(16, triton.next_power_of_2(rows))
    loaded = lanes * 128 * ((1 + gated) * columns * bits // 8 + padded * 2)
    most = 1 if torch.version.hip else 4 if few else 3
    stages = num_stages(loaded, memory if padded == 64 else memory // 2, most=most)
    return Tile(padded, columns, 128, 4, stages, beside=1 if few else 8)


def describable(weight: Tensor, tile: Tile) -> bool:
    """Whether tiles of `weight` [experts, out, in] come by descriptor: wide ones on NVIDIA's Hopper
    and later, of aligned rows.
    """
    aligned = weight.data_ptr() % 16 == 0 and weight.stride(1) * weight.itemsize % 16 == 0
    return tile.num_warps == 8 and aligned and bool(overlap_options(weight.device)["OVERLAP"])


def experts(
    x: Tensor, weights: Tensor, ids: Tensor, layer: Experts, shared: SharedExperts | None = None
) -> Tensor:
    """The weighted sum of each row's experts, or for up to `FEW_ROWS` rows what is to be added up.

    Args:
        x: [T, H] in the type of the layer; rows may be strided.
        weights: float32 [T, top_k], contiguous.
        ids: int32 [T, top_k], contiguous, different ones in each row.
        layer: one that `unsupported_reasons` has none against.
        shared: further experts of up to `FEW_ROWS` rows, of a layer whose weights are neither
            packed nor biased.

    Returns:
        float32 [top_k, T, H], whose sum over the first axis counts, of up to `FEW_ROWS` rows; of
        more [T, H] in the type of `x`.
    """
    assert x.dtype == layer.down.dtype and x.stride(-1) == 1
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert ids.is_contiguous() and weights.is_contiguous()
    assert ids.shape == weights.shape and len(ids) == len(x)
    assert shared is None or len(x) <= FEW_ROWS
    with on_device(x):
        if len(x) > FEW_ROWS:
            return _many_rows(x, weights, ids, layer)
        return _few_rows(x, weights, ids, layer, shared)


def _few_rows(
    x: Tensor, weights: Tensor, ids: Tensor, layer: Experts, shared: SharedExperts | None
) -> Tensor:
    (rows, hidden), top_k = x.shape, ids.shape[1]
    pairs = ids.numel()
    middle = x.new_empty(pairs, layer.width)
    parts = x.new_empty(top_k, rows, hidden, dtype=torch.float32)
    first = _few_rows_tile(x, layer.gate_up, top_k, layer.gated)
    second = _few_rows_tile(x, layer.down, top_k, False)
    count = 0 if shared is None else shared.count
    gate_up, down = (None, None) if shared is None else (shared.gate_up, shared.down)
    multiply_few(
        x,
        layer.gate_up,
        layer.gate_up_bias,
        None,
        middle,
        ids,
        first,
        layer.activation,
        gate_up,
        count,
    )
    multiply_few(
        middle, layer.down, layer.down_bias, weights, parts, ids, second, None, down, count
    )
    return parts


def _many_rows(x: Tensor, weights: Tensor, ids: Tensor, layer: Experts) -> Tensor:
    (rows, hidden), top_k = x.shape, ids.shape[1]
    pairs = ids.numel()
    middle, parts = x.new_empty(pairs, layer.width), x.new_empty(pairs, hidden)
    first = _many_rows_tile(x, layer.gate_up, pairs, layer.gated)
    second = _many_rows_tile(x, layer.down, pairs, False)
    # which share their blocks
    first, second = (tile._replace(rows=min(first.rows, second.rows)) for tile in (first, second))
    groups = group_by_expert(ids, layer.num_experts, first.rows)
    multiply_groups(
        x, layer.gate_up, layer.gate_up_bias, None, middle, groups, top_k, first, layer.activation
    )
    multiply_groups(
        middle, layer.down, layer.down_bias, weights, parts, groups, top_k, second, None
    )
    output = torch.empty_like(x, memory_format=torch.contiguous_format)
    block = min(triton.next_power_of_2(hidden), 2048)
    combine_kernel[(rows, triton.cdiv(hidden, block))](
        parts,
        output,
        WIDTH=hidden,
        TOP_K=top_k,
        BLOCK=block,
        num_warps=4,
        **overlap_options(x.device),
    )
    return output


def _few_rows_tile(x: Tensor, weight: Tensor | PackedWeight, top_k: int, gated: bool) -> Tile:
    memory = shared_memory(x.device)
    if isinstance(weight, PackedWeight):
        return packed_tile(4 if weight.halves else 8, len(x), few=True, gated=gated, memory=memory)
    width, processors = weight.shape[1] // (1 + gated), num_processors(x.device)
    return few_rows_tile(
        width, top_k, len(x), x.itemsize, gated=gated, processors=processors, memory=memory
    )


def _many_rows_tile(x: Tensor, weight: Tensor | PackedWeight, pairs: int, gated: bool) -> Tile:
    memory = shared_memory(x.device)
    tile = many_rows_tile(pairs, weight.shape[0], x.itemsize, gated=gated, memory=memory)
    if isinstance(weight, PackedWeight):  # whose sums of groups take registers too
        bits, rows = 4 if weight.halves else 8, min(tile.rows, 64)
        return packed_tile(bits, rows, few=False, gated=gated, memory=memory)
    return tile


def multiply_few(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    factors: Tensor | None,
    output: Tensor,
    ids: Tensor,
    tile: Tile,
    activation: str | None,
    shared: Tensor | None = None,
    shared_count: int = 0,
) -> None:
    """One product of few rows; see `specdec.layers.experts.triton_expert_products`."""
    (rows, top_k), num_experts, width = ids.shape, weight.shape[0], output.shape[-1]
    most = num_experts + shared_count
    few_rows_kernel[(min(rows * top_k, most), triton.cdiv(width, tile.columns))](
        x,
        *_tensors(weight),
        shared,
        bias,
        factors,
        output,
        ids,
        rows,
        x.stride(0),
        WIDTH=width,
        INPUTS=x.shape[1],
        TOP_K=top_k,
        EXPERTS=num_experts,
        SHARED=shared_count,
        ACTIVATION=activation,
        BY_RANK=activation is None,
        BY_EXPERT=rows * top_k > most,
        ALONE=rows == 1,
        ROWS=tile.rows,
        PACKED=expert_codes(weight, tile.num_warps, x.device)
        if isinstance(weight, PackedWeight)
        else None,
        **_options(tile, x),
    )


def multiply_groups(
    x: Tensor,
    weight: Tensor | PackedWeight,
    bias: Tensor | None,
    factors: Tensor | None,
    output: Tensor,
    groups: Groups,
    top_k: int,
    tile: Tile,
    activation: str | None,
) -> None:
    """One product of sorted pairs; see `specdec.layers.experts.triton_expert_products`."""
    num_blocks, width = len(groups.experts), output.shape[1]
    described = isinstance(weight, Tensor) and describable(weight, tile)
    weights = _tensors(weight)
    if isinstance(weight, Tensor) and described:
        shape = [tile.columns, tile.depth]
        weights = (TensorDescriptor.from_tensor(weight.flatten(0, 1), shape), None, None)
    grouped_kernel[(num_blocks * triton.cdiv(width, tile.columns),)](
        x,
        *weights,
        bias,
        factors,
        output,
        groups.pairs,
        groups.experts,
        len(output),
        num_blocks,
        x.stride(0),
        WIDTH=width,
        INPUTS=x.shape[1],
        TOP_K=top_k,
        ACTIVATION=activation,
        ROWS=tile.rows,
        BESIDE=tile.beside,
        DESCRIBED=described,
        PACKED=expert_codes(weight, 1, x.device) if isinstance(weight, PackedWeight) else None,
        **_options(tile, x),
    )


def _tensors(weight: Tensor | PackedWeight) -> tuple[Any, ...]:
    """What kernels read of a weight: itself, or words, scales and perhaps zeros."""
    if isinstance(weight, PackedWeight):
        return weight.codes.view(torch.uint16), weight.scale, weight.zero
    return weight, None, None


def _options(tile: Tile, x: Tensor) -> dict[str, object]:
    """Options that both products' kernels have."""
    return {
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "PRECISION": "ieee" if x.itemsize == 4 else None,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        **overlap_options(x.device),
    }
