"""Products with weights kept in 8 or 4 bits, in Triton.

Few rows cost the bytes of the codes, which a kernel reads once and turns into numbers in registers. A program multiplies some
columns of the output; its warps divide the inputs among them in lanes, and add up what they have at the end. So each of them turns
other codes into numbers, and a weight of few columns has programs enough. A prompt's rows are many: its product is torch's, with a
slice of the weight at a time that is turned into numbers in memory, `SLICE_BYTES` of it and never the whole weight.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import num_stages, on_device, overlap_options, shared_memory
from specdec.kernels.triton_overlap import await_previous
from specdec.kernels.triton_prefetch import hint_options, surplus
from specdec.layers.packed.triton_packed_codes import numbers_of
from specdec.layers.packed.triton_packed_products import packed_kernel
from specdec.layers.packed.weight import Code, PackedWeight

MOST_ROWS = 64
"""Rows whose bits do not depend on their number."""
ROWS_AT_ONCE = 32
"""Rows of a program with lanes; more take more programs, which would otherwise run out of memory for what they load ahead."""
MEDIUM_ROWS = 16
"""Rows up to which a tile's `medium` serves, and `wide` beyond."""
MOST_TILED_ROWS = 256
"""Rows up to which reading codes again for every tile of rows is cheaper than writing numbers and reading those."""
SLICE_BYTES = 32 * 2**20
"""Numbers of a weight that exist at a time, which the L2 cache of a large GPU holds."""


class Wide(NamedTuple):
    """What a tile has for more than 8 rows; none of it is the order of a sum."""

    columns: int
    rows: int  # of a program at most
    depth: int


class Tile(NamedTuple):
    """How a product is divided among programs, and in a program."""

    columns: int  # of the output, per program
    lanes: int  # into which a program divides its inputs, one per warp; with one there are four warps for all columns
    depth: int  # inputs of a lane per iteration, as far as the weight's runs allow
    stages: int = 4  # most iterations under way at once
    splits: int = 1  # programs among which the inputs are divided, where the caller can add up
    direct: bool = (
        False  # codes come straight to registers, see `specdec.layers.packed.triton_packed_lanes`; depth is the most at once
    )
    medium: Wide | None = None  # if direct, for 9 to `MEDIUM_ROWS` rows
    wide: Wide | None = None  # if direct, for more


_DIRECT = Tile(16, 4, 1024, direct=True)
TILES: dict[int, tuple[tuple[int, Tile], ...]] = {
    8: (
        (16384, _DIRECT._replace(depth=512, medium=Wide(16, 16, 256), wide=Wide(16, 32, 128))),
        (6144, _DIRECT._replace(depth=512, wide=Wide(32, 32, 128))),
        (0, _DIRECT._replace(depth=512, splits=2, medium=Wide(32, 16, 256), wide=Wide(32, 32, 128))),
    ),
    4: (
        (16384, _DIRECT._replace(medium=Wide(16, 16, 256), wide=Wide(16, 32, 128))),
        (6144, _DIRECT._replace(wide=Wide(32, 16, 256))),
        (0, _DIRECT._replace(splits=2, medium=Wide(32, 16, 256), wide=Wide(32, 16, 128))),
    ),
}
"""By bits of a code and least columns of the weight, gate and up counted both, the first that a weight has: what was fastest on an
H200 with few rows of an 8 B model. Lanes and splits are the order of a sum, and depth where codes do not come directly. So all
numbers of rows have the same; columns may differ."""

AMD_TILES: dict[int, tuple[tuple[int, Tile], ...]] = dict.fromkeys((4, 8), ((0, Tile(16, 4, 128)),))
"""On AMD's chips, whose matrix instructions take operands in another order; nobody has measured there."""

MOST_SPLIT_INPUTS = {8: 8192, 4: 4096}
"""By bits, of a program whose tile has splits and whose codes come directly; a lane then asks for many of them at once."""

MOST_SCALES = 8
"""Of a column and lane that are asked for at once with their codes: more would not fit into registers."""

MANY_ROWS = Tile(64, 1, 128, stages=3)
"""For `MOST_ROWS` < rows <= `MOST_TILED_ROWS`, 64 at a time."""


@triton.jit
def _dequantize_kernel(
    words: tl.tensor,  # uint16 [outs, ROW_WORDS]
    scale: tl.tensor,  # [outs, groups]
    zero: tl.tensor,  # the same, or None
    output: tl.tensor,  # [outs, INPUTS]
    num_outs: tl.tensor,
    INPUTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CODE: tl.constexpr,
    MIDDLE: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    OUTS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Program (o, s): some outputs of a span of inputs, as numbers."""
    COUNT: tl.constexpr = 4 if CODE == "int4" or CODE == "e2m1" else 2
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    out = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    exists = out < num_outs
    run = tl.arange(0, RUN)
    begin = tl.program_id(1) * (COUNT * RUN)
    await_previous(OVERLAP)
    place = out.to(tl.int64)[:, None] * ROW_WORDS + (begin // COUNT + run)[None, :]
    numbers = numbers_of(tl.load(words + place, mask=exists[:, None], other=0), CODE, MIDDLE, tl.float32, False)
    for i in tl.static_range(COUNT):
        group = out.to(tl.int64) * GROUPS + tl.minimum((begin + i * RUN) // GROUP, GROUPS - 1)
        values = numbers[i]
        if zero is not None:
            values -= tl.load(zero + group, mask=exists, other=0.0).to(tl.float32)[:, None]
        values *= tl.load(scale + group, mask=exists, other=0.0).to(tl.float32)[:, None]
        depth = begin + i * RUN + run
        target = output + out.to(tl.int64)[:, None] * INPUTS + depth[None, :]
        tl.store(target, values.to(output.dtype.element_ty), mask=exists[:, None] & (depth < INPUTS)[None, :])


def suits(weight: PackedWeight) -> bool:
    """Whether the kernels take a weight: arranged, in groups that they divide into runs, for rows in half precision."""
    return weight.run > 1 and weight.dtype in (torch.bfloat16, torch.float16) and weight.codes.is_contiguous()


@lru_cache(maxsize=256)
def tile_for(code: Code, columns: int, inputs: int, *, may_split: bool, amd: bool = bool(torch.version.hip)) -> Tile:
    """The tile of a weight with so many columns, gate and up counted both, for up to `MOST_ROWS` rows.

    >>> [tile_for("int4", 4096, inputs, may_split=True).splits for inputs in (4096, 12288)]
    [2, 3]
    >>> [tile_for("e4m3", 4096, inputs, may_split=True).splits for inputs in (4096, 12288)]
    [2, 2]
    >>> tile_for("int4", 4096, 4096, may_split=False).splits
    1
    """
    bits = 4 if code in ("int4", "e2m1") else 8
    tile = next(tile for least, tile in (AMD_TILES if amd else TILES)[bits] if columns >= least)
    if not may_split:
        return tile._replace(splits=1)
    least = triton.cdiv(inputs, MOST_SPLIT_INPUTS[bits]) if tile.direct and tile.splits > 1 else 1
    return tile._replace(splits=max(tile.splits, least))


def few_rows(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    may_split: bool = False,
    ahead: Tensor | None = None,
) -> Tensor | None:
    """`x W^T + b`, or the gated activation of its two halves, as
    `specdec.layers.triton_linear.few_rows` has it.

    Args:
        x: [rows, in], in half precision.
        weight: [out, in], arranged.
        bias: [out], or None.
        activation: see `specdec.layers.ops.activation`; the weight then joins gate and up.
        may_split: the caller can add up partial sums.
        ahead: a weight to send hints about.

    Returns:
        [rows, out], or with an activation half as wide, in the type of `x`; with `may_split` perhaps float32 [splits, rows, out],
        whose sum it is, not yet rounded; None for a product that is not this kernel's.
    """
    if x.ndim != 2 or len(x) > MOST_ROWS or x.dtype != weight.dtype or not suits(weight):
        return None
    tile = tile_for(weight.code, weight.out_features, weight.in_features, may_split=may_split and activation is None)
    return multiply(x, weight, bias, tile, activation=activation, ahead=ahead)


def product(x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """`x W^T + b` [rows, out] of any number of rows, for a weight that `suits`; see `few_rows`."""
    if len(x) <= MOST_ROWS:
        return multiply(x, weight, bias, tile_for(weight.code, weight.out_features, weight.in_features, may_split=False))
    if len(x) <= MOST_TILED_ROWS:
        return multiply(x, weight, bias, MANY_ROWS)
    output = x.new_empty(len(x), weight.out_features)
    step = max(64, SLICE_BYTES // (weight.in_features * x.itemsize) // 64 * 64)
    for start in range(0, weight.out_features, step):
        part = dequantized(weight.rows(start, min(start + step, weight.out_features)), x.dtype)
        place = output[:, start : start + step]
        if bias is None:
            torch.mm(x, part.t(), out=place)
        else:
            torch.addmm(bias[start : start + step], x, part.t(), out=place)
    return output


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    tile: Tile,
    *,
    activation: str | None = None,
    ahead: Tensor | None = None,
) -> Tensor:
    """The product with a given division; see `few_rows`."""
    rows, gated = len(x), activation is not None
    width = weight.out_features // (1 + gated)
    launch = launch_of(weight, tile, rows, shared_memory(x.device), gated=gated)
    output = x.new_empty(tile.splits, rows, width, dtype=torch.float32) if tile.splits > 1 else x.new_empty(rows, width)
    grid = (
        triton.cdiv(width, launch["COLUMNS"]) + surplus(ahead, launch["num_warps"]),
        tile.splits,
        triton.cdiv(rows, launch["ROWS"]),
    )
    with on_device(x):
        packed_kernel[grid](
            x,
            weight.codes.view(torch.uint16),
            weight.scale,
            weight.zero,
            bias,
            output,
            rows,
            x.stride(0),
            ACTIVATION=activation,
            **launch,
            **codes_of(weight, x.device),
            **hint_options(ahead),
            **overlap_options(x.device),
        )
    return output


def launch_of(weight: PackedWeight, tile: Tile, rows: int, memory: int, *, gated: bool) -> dict[str, Any]:
    """What a launch for so many rows says of its tile, on processors with so much memory."""
    least = 16 if torch.version.hip else 8  # of which the chip's matrix instructions take rows
    padded = max(least, triton.next_power_of_2(rows))
    columns, depth, stages = tile.columns, tile.depth, 1
    if tile.direct:
        wide = (tile.medium if rows <= MEDIUM_ROWS else tile.wide) if rows > 8 else None
        if wide is not None:
            columns, padded, depth = wide.columns, min(padded, wide.rows), wide.depth
        depth = min(depth, MOST_SCALES * weight.group)
    else:
        padded = min(padded, ROWS_AT_ONCE if tile.lanes > 1 else MOST_ROWS)
        span = weight.run * (4 if weight.halves else 2)
        depth = max(span, depth // span * span)
        loaded = tile.lanes * ((1 + gated) * columns * depth // (1 + weight.halves) + padded * depth * 2)
        stages = num_stages(loaded, memory, most=1 if torch.version.hip else tile.stages)
    return {
        "WIDTH": weight.out_features // (1 + gated),
        "ROWS": padded,
        "COLUMNS": columns,
        "DEPTH": depth,
        "LANES": tile.lanes,
        "SPLITS": tile.splits,
        "DIRECT": tile.direct,
        "num_warps": tile.lanes if tile.lanes > 1 else 4,
        "num_stages": stages,
    }


def codes_of(weight: PackedWeight, device: torch.device) -> dict[str, Any]:
    """What kernels have to know of a weight's codes, and of the machine that reads them."""
    return {
        "INPUTS": weight.in_features,
        "ROW_WORDS": weight.codes.shape[-1] * weight.codes.itemsize // 2,
        "CODE": weight.code,
        "MIDDLE": weight.middle,
        "GROUP": weight.group,
        "RUN": weight.run,
        "ASSEMBLY": device.type == "cuda" and torch.version.hip is None,
    }


def expert_codes(weight: PackedWeight, lanes: int, device: torch.device) -> tuple[Any, ...]:
    """What `specdec.layers.experts.triton_expert_tiles.multiply_packed` has to know of experts'
    codes.
    """
    options = codes_of(weight, device)
    return *(options[name] for name in ("CODE", "MIDDLE", "GROUP", "RUN", "ROW_WORDS")), lanes, options["ASSEMBLY"]


def dequantized(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """The numbers [out, in] of some outputs of an arranged weight, as `PackedWeight.dequantized` has them."""
    output = torch.empty(weight.out_features, weight.in_features, dtype=dtype, device=weight.device)
    options = codes_of(weight, weight.device)
    del options["ASSEMBLY"]
    outs, span = 16, weight.run * (4 if weight.halves else 2)
    with on_device(output):
        _dequantize_kernel[(triton.cdiv(len(output), outs), triton.cdiv(weight.in_features, span))](
            weight.codes.view(torch.uint16),
            weight.scale,
            weight.zero,
            output,
            len(output),
            OUTS=outs,
            num_warps=4,
            **options,
            **overlap_options(weight.device),
        )
    return output
