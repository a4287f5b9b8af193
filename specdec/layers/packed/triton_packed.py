"""Products with weights kept in 8 or 4 bits, in Triton.

Few rows cost the bytes of the codes, which a kernel reads once and turns into numbers in registers.
A program multiplies some columns of the output; its warps divide the inputs among them in lanes,
and add up what they have at the end. So each of them turns other codes into numbers, and a weight
of few columns has programs enough. A prompt's rows are many: its product is torch's, with a slice
of the weight at a time that is turned into numbers in memory, `SLICE_BYTES` of it and never the
whole weight.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import num_stages, on_device, overlap_options, shared_memory
from specdec.kernels.triton_overlap import await_previous
from specdec.kernels.triton_prefetch import hint_options, prefetch_programs
from specdec.layers.packed.triton_packed_codes import codes_of_word, high_bits, numbers_of, scale_at
from specdec.layers.packed.triton_packed_products import packed_kernel
from specdec.layers.packed.weight import Code, PackedWeight

MAX_ROWS = 64
"""Rows whose bits do not depend on their number."""
ROWS_AT_ONCE = 32
"""Rows of a program with lanes; more take more programs, which would otherwise run out of memory
for what they load ahead.
"""
MEDIUM_ROWS = 16
"""Rows up to which a tile's `medium` serves, and `wide` beyond."""
MAX_TILED_ROWS = 256
"""Rows up to which reading codes again for every tile of rows is cheaper than writing numbers and
reading those, with groups of `MIN_TILED_GROUP`.
"""
MIN_TILED_GROUP = 128
"""Inputs that share a scale. A tile of many rows scales a product for each group: with groups of 16
and 32, as in GGUF's blocks, it took 1.3 to 6 times as long on an H200 as numbers first.
"""
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
    # into which a program divides its inputs, one per warp; with one there are four warps for all
    # columns
    lanes: int
    depth: int  # inputs of a lane per iteration, as far as the weight's runs allow
    stages: int = 4  # most iterations under way at once
    splits: int = 1  # programs among which the inputs are divided, where the caller can add up
    direct: bool = (
        # codes come straight to registers, see `specdec.layers.packed.triton_packed_lanes`; depth
        # is the most at once
        False
    )
    medium: Wide | None = None  # if direct, for 9 to `MEDIUM_ROWS` rows
    wide: Wide | None = None  # if direct, for more


_DIRECT = Tile(16, 4, 1024, direct=True)
TILES: dict[int, tuple[tuple[int, Tile], ...]] = {
    8: (
        (16384, _DIRECT._replace(depth=512, medium=Wide(16, 16, 256), wide=Wide(16, 32, 128))),
        (6144, _DIRECT._replace(depth=512, wide=Wide(32, 32, 128))),
        (
            0,
            _DIRECT._replace(depth=512, splits=2, medium=Wide(32, 16, 256), wide=Wide(32, 32, 128)),
        ),
    ),
    4: (
        (16384, _DIRECT._replace(medium=Wide(16, 16, 256), wide=Wide(16, 32, 128))),
        (6144, _DIRECT._replace(wide=Wide(32, 16, 256))),
        (0, _DIRECT._replace(splits=2, medium=Wide(32, 16, 256), wide=Wide(32, 16, 128))),
    ),
}
"""By bits of a code and least columns of the weight, gate and up counted both, the first that a
weight has: what was fastest on an H200 with few rows of an 8 B model. Lanes and splits are the
order of a sum, and depth where codes do not come directly. So all numbers of rows have the same;
columns may differ."""

AMD_TILES: dict[int, tuple[tuple[int, Tile], ...]] = dict.fromkeys((4, 8), ((0, Tile(16, 4, 128)),))
"""On AMD's chips, whose matrix instructions take operands in another order; nobody has measured
there.
"""

MAX_SPLIT_INPUTS = {8: 8192, 4: 4096}
"""By bits, of a program whose tile has splits and whose codes come directly; a lane then asks for
many of them at once.
"""

MAX_SCALES = 8
"""Most scales of a column and lane that are asked for at once with their codes: more would not fit
into registers.
"""

FEW_REGISTERS = 168
"""Registers of a thread that unpacks scales of few rows, so that a processor has room for three
programs.
"""

MANY_ROWS = Tile(64, 1, 128, stages=3)
"""For `MAX_ROWS` < rows <= `MAX_TILED_ROWS`, 64 at a time."""


@triton.jit
def _dequantize_kernel(
    words: tl.tensor,  # uint16 [outs, ROW_WORDS]
    high: tl.tensor,  # high bits of four words each [outs, ROW_WORDS / 4], or None
    scale: tl.tensor,  # [outs, groups], with `outer` four in a word
    zero: tl.tensor,  # the same, or with MINIMA minima, or None
    outer: tl.tensor,  # scales of scales, or None
    order: tl.tensor,  # int64 [num_outs], which outs, or None for the first ones
    output: tl.tensor,  # [num_outs, INPUTS]
    num_outs: tl.tensor,
    factor: tl.tensor,
    INPUTS: tl.constexpr,
    ROW_WORDS: tl.constexpr,
    CODE: tl.constexpr,
    MIDDLE: tl.constexpr,
    MINIMA: tl.constexpr,
    GROUP: tl.constexpr,
    RUN: tl.constexpr,
    OUTS: tl.constexpr,
    SCALED: tl.constexpr,  # whether the factor is not 1
    OVERLAP: tl.constexpr,
) -> None:
    """Program (o, s): some outputs of a span of inputs, as numbers."""
    COUNT: tl.constexpr = codes_of_word(CODE)
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    place = tl.program_id(0) * OUTS + tl.arange(0, OUTS)
    exists = place < num_outs
    run = tl.arange(0, RUN)
    begin = tl.program_id(1) * (COUNT * RUN)
    await_previous(OVERLAP)
    out = place.to(tl.int64)
    target = output + out[:, None] * INPUTS
    if order is not None:
        out = tl.load(order + place, mask=exists, other=0)
    column = tl.where(exists, out, 0)
    word = begin // COUNT + run
    held = tl.load(words + column[:, None] * ROW_WORDS + word[None, :])
    above = None
    if high is not None:
        above = tl.load(high + column[:, None] * (ROW_WORDS // 4) + (word // 4)[None, :])
        above = above.to(tl.uint32) >> (word % 4 * (4 * high_bits(CODE)))[None, :]
    numbers = numbers_of(held, above, CODE, MIDDLE, tl.float32, False)
    first = column * (GROUPS if outer is None else GROUPS // 4)
    outers = None if outer is None else outer + column * (INPUTS // 256)
    for i in tl.static_range(COUNT):
        group = tl.minimum((begin + i * RUN) // GROUP, GROUPS - 1)
        values = numbers[i]
        if zero is not None:
            least = scale_at(zero + first, outers, group, GROUP, True)[:, None]
            if not MINIMA:
                values -= least
        values *= scale_at(scale + first, outers, group, GROUP, False)[:, None]
        if MINIMA:
            values -= least
        if SCALED:
            values = values.to(output.dtype.element_ty).to(tl.float32) * factor
        depth = begin + i * RUN + run
        there = exists[:, None] & (depth < INPUTS)[None, :]
        tl.store(target + depth[None, :], values.to(output.dtype.element_ty), mask=there)


def suits(weight: PackedWeight) -> bool:
    """Whether the kernels take a weight: arranged, in groups that they divide into runs, for rows
    in half precision.
    """
    return (
        weight.run > 1
        and weight.dtype in (torch.bfloat16, torch.float16)
        and weight.codes.is_contiguous()
    )


@lru_cache(maxsize=256)
def tile_for(
    code: Code, columns: int, inputs: int, *, may_split: bool, amd: bool = bool(torch.version.hip)
) -> Tile:
    """The tile of a weight with so many columns, gate and up both, for up to `MAX_ROWS` rows.

    >>> [tile_for("int4", 4096, inputs, may_split=True).splits for inputs in (4096, 12288)]
    [2, 3]
    >>> [tile_for("e4m3", 4096, inputs, may_split=True).splits for inputs in (4096, 12288)]
    [2, 2]
    >>> tile_for("int4", 4096, 4096, may_split=False).splits
    1
    """
    bits = 8 if code in ("e4m3", "int8") else 4
    tile = next(tile for least, tile in (AMD_TILES if amd else TILES)[bits] if columns >= least)
    if not may_split:
        return tile._replace(splits=1)
    least = triton.cdiv(inputs, MAX_SPLIT_INPUTS[bits]) if tile.direct and tile.splits > 1 else 1
    return tile._replace(splits=max(tile.splits, least))


def few_rows(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    may_split: bool = False,
    prefetch: Tensor | None = None,
) -> Tensor | None:
    """`specdec.layers.triton_linear.few_rows` with an arranged weight."""
    if x.ndim != 2 or len(x) > MAX_ROWS or x.dtype != weight.dtype or not suits(weight):
        return None
    tile = tile_for(
        weight.code,
        weight.out_features,
        weight.in_features,
        may_split=may_split and activation is None,
    )
    return multiply(x, weight, bias, tile, activation=activation, prefetch=prefetch)


def product(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None = None,
    *,
    max_tiled_rows: int | None = None,
) -> Tensor:
    """`x W^T + b` [rows, out] of any number of rows, for a weight that `suits`; see `few_rows`.

    Args:
        max_tiled_rows: rows beyond which parts of the weight become numbers in memory first, and
            `MAX_ROWS` at least; None takes what was faster for the weight.
    """
    if max_tiled_rows is None:
        max_tiled_rows = MAX_TILED_ROWS if weight.group >= MIN_TILED_GROUP else MAX_ROWS
    if len(x) <= MAX_ROWS:
        return multiply(
            x,
            weight,
            bias,
            tile_for(weight.code, weight.out_features, weight.in_features, may_split=False),
        )
    if len(x) <= max_tiled_rows:
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
    prefetch: Tensor | None = None,
) -> Tensor:
    """The product with a given division; see `few_rows`."""
    rows, gated = len(x), activation is not None
    width = weight.out_features // (1 + gated)
    launch = launch_of(weight, tile, rows, shared_memory(x.device), gated=gated)
    if tile.splits > 1:
        output = x.new_empty(tile.splits, rows, width, dtype=torch.float32)
    else:
        output = x.new_empty(rows, width)
    grid = (
        triton.cdiv(width, launch["COLUMNS"]) + prefetch_programs(prefetch, launch["num_warps"]),
        tile.splits,
        triton.cdiv(rows, launch["ROWS"]),
    )
    codes = codes_of(weight, x.device)
    if codes["ASSEMBLY"] and weight.outer is not None and rows <= MEDIUM_ROWS:
        launch["maxnreg"] = FEW_REGISTERS
    with on_device(x):
        packed_kernel[grid](
            x,
            *tensors_of(weight),
            bias,
            output,
            rows,
            x.stride(0),
            ACTIVATION=activation,
            **launch,
            **codes,
            **hint_options(prefetch),
            **overlap_options(x.device),
        )
    return output


def launch_of(
    weight: PackedWeight, tile: Tile, rows: int, memory: int, *, gated: bool
) -> dict[str, Any]:
    """What a launch for so many rows says of its tile, on processors with so much memory."""
    least = 16 if torch.version.hip else 8  # of which the chip's matrix instructions take rows
    padded = max(least, triton.next_power_of_2(rows))
    columns, depth, stages = tile.columns, tile.depth, 1
    if tile.direct:
        wide = (tile.medium if rows <= MEDIUM_ROWS else tile.wide) if rows > 8 else None
        if wide is not None:
            columns, padded, depth = wide.columns, min(padded, wide.rows), wide.depth
        # Four scales in a word, beside one of minima and one of their scales, are as many as two.
        depth = min(depth, MAX_SCALES * weight.group * (1 if weight.outer is None else 2))
    else:
        padded = min(padded, ROWS_AT_ONCE if tile.lanes > 1 else MAX_ROWS)
        span = span_of(weight)
        depth = max(span, depth // span * span)
        codes = (1 + gated) * columns * depth // (1 + weight.halves)
        loaded = tile.lanes * (codes + padded * depth * 2)
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
        "MINIMA": weight.minimum is not None,
        "GROUP": weight.group,
        "RUN": weight.run,
        "ASSEMBLY": device.type == "cuda" and torch.version.hip is None,
    }


def tensors_of(weight: PackedWeight) -> tuple[Tensor | None, ...]:
    """Words, high bits, scales, zeros or minima, and scales of scales, as kernels take them."""
    kind = torch.int16 if weight.high_bits == 1 else torch.int32  # of four words
    high = None if weight.high is None else weight.high.view(kind)
    scale, zero, outer = weight.scale, weight.zero, weight.outer
    if weight.minimum is not None:
        zero, outer = weight.minimum, None if outer is None else outer.view(torch.int32)
    if outer is not None:  # four signed bytes in a word
        scale, zero = scale.view(torch.int32), None if zero is None else zero.view(torch.int32)
    return weight.codes.view(torch.uint16), high, scale, zero, outer


def expert_codes(weight: PackedWeight, lanes: int, device: torch.device) -> tuple[Any, ...]:
    """What `specdec.layers.experts.triton_expert_tiles.multiply_packed` has to know of experts'
    codes.
    """
    options = codes_of(weight, device)
    return (
        *(options[name] for name in ("CODE", "MIDDLE", "GROUP", "RUN", "ROW_WORDS")),
        lanes,
        options["ASSEMBLY"],
    )


def dequantized(
    weight: PackedWeight,
    dtype: torch.dtype,
    order: Tensor | None = None,
    factor: float = 1.0,
) -> Tensor:
    """The numbers [out, in] of an arranged weight, as `PackedWeight.dequantized` has them.

    Args:
        weight: [out, in].
        order: int64 [...], outputs that are wanted, [..., in]; none is checked. None for all.
        factor: what multiplies the rounded numbers.
    """
    shape = (weight.out_features,) if order is None else order.shape
    output = torch.empty(*shape, weight.in_features, dtype=dtype, device=weight.device)
    count = output.numel() // weight.in_features
    options = codes_of(weight, weight.device)
    del options["ASSEMBLY"]
    outs = 16 if count > 16 else 1
    grid = (triton.cdiv(count, outs), triton.cdiv(weight.in_features, span_of(weight)))
    with on_device(output):
        _dequantize_kernel[grid](
            *tensors_of(weight),
            None if order is None else order.contiguous(),
            output,
            count,
            factor,
            OUTS=outs,
            SCALED=factor != 1,
            num_warps=4 if outs > 1 else 1,
            **options,
            **overlap_options(weight.device),
        )
    return output


def span_of(weight: PackedWeight) -> int:
    """Inputs of neighboring words."""
    return weight.run * (4 if weight.halves else 2)
