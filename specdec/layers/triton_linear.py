"""Products of few rows with a weight, in Triton: decoding reads every weight once per step, so its
bytes are the whole cost.

A program multiplies some columns of the output over a share of the inputs. Where columns are few,
the inputs are split among programs too, or most of the chip would be idle; the partial sums stay in
float32, for the kernel that reads them to add up. In which order a product is summed up depends on
the weight's shape alone: a token decoded alone has the bits it has among drafts.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import (
    num_processors,
    num_stages,
    on_device,
    overlap_options,
    shared_memory,
)
from specdec.kernels.triton_overlap import await_previous, release_next
from specdec.kernels.triton_prefetch import (
    MAX_BYTES,
    hint_options,
    hint_program,
    prefetch_programs,
    send_hints,
)
from specdec.layers.ops.triton_activation import activate

MAX_ROWS = 64
"""Beyond it torch's product is as fast: there is enough arithmetic per byte."""
MAX_SPLITS = 6


class Division(NamedTuple):
    """How a product is divided among programs."""

    columns: int  # of the output, per program
    depth: int  # inputs per iteration
    splits: int  # programs among which the inputs are divided


@triton.jit
def _few_rows_kernel(
    x: tl.tensor,  # [num_rows, INPUTS]
    weight: tl.tensor,  # [WIDTH, INPUTS], or twice that with an activation: gate, then up
    bias: tl.tensor,  # as many numbers as the weight has rows, or None
    output: tl.tensor,  # [num_rows, WIDTH], or float32 [SPLITS, num_rows, WIDTH]
    num_rows: tl.tensor,
    x_stride: tl.tensor,
    prefetch: tl.tensor,  # weight to send hints about, or None
    WIDTH: tl.constexpr,
    INPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,  # a name, or None
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    SPLITS: tl.constexpr,
    SMALL: tl.constexpr,  # see `is_small`
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    if prefetch is not None:
        program = hint_program(PREFETCH)
        if program >= 0:
            send_hints(prefetch, program, PREFETCH)
            return
    SHARE: tl.constexpr = INPUTS // SPLITS
    split = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)
    depth = split * SHARE + tl.arange(0, DEPTH)
    real = (row < num_rows)[None, :]
    weights = weight + column.to(tl.int64)[:, None] * INPUTS + depth[None, :]
    inputs = x + row[None, :] * x_stride + depth[:, None]
    total = tl.zeros([COLUMNS, ROWS], tl.float32)
    up_total = tl.zeros([COLUMNS, ROWS], tl.float32)
    await_previous(OVERLAP)
    if SMALL:
        release_next(OVERLAP)
    for _ in range(0, SHARE, DEPTH):
        tile = tl.load(inputs, mask=real, other=0.0)
        total = tl.dot(tl.load(weights), tile, total)
        if ACTIVATION is not None:
            up_total = tl.dot(tl.load(weights + WIDTH * INPUTS), tile, up_total)
        weights += DEPTH
        inputs += DEPTH
    dtype = output.dtype.element_ty
    if bias is not None:  # of the sum of all splits, so one of them adds it
        total += tl.where(split == 0, tl.load(bias + column).to(tl.float32), 0.0)[:, None]
    if ACTIVATION is not None:  # rounded where the product and the activation would be two kernels
        if bias is not None:
            up_total += tl.load(bias + WIDTH + column).to(tl.float32)[:, None]
        total = activate(
            total.to(dtype).to(tl.float32), up_total.to(dtype).to(tl.float32), ACTIVATION
        )
    place = (split * num_rows + row[None, :]) * WIDTH + column[:, None]
    tl.store(output + place, total.to(dtype), mask=real)


def is_small(width: int, inputs: int, *, gated: bool) -> bool:
    """Whether the weight of a product is one that is asked for before, see `triton_prefetch`."""
    return (1 + gated) * width * inputs * 2 <= MAX_BYTES


@lru_cache(maxsize=256)
def divide(
    width: int, inputs: int, *, gated: bool, may_split: bool, processors: int
) -> Division | None:
    """Division of a product over a chip of so many processors; None where the shape does not suit
    the kernel.

    >>> divide(4096, 4096, gated=False, may_split=True, processors=132)
    Division(columns=64, depth=128, splits=2)
    >>> divide(6144, 4096, gated=False, may_split=False, processors=132)
    Division(columns=64, depth=128, splits=1)
    >>> divide(12288, 4096, gated=True, may_split=False, processors=132)
    Division(columns=64, depth=64, splits=1)
    >>> divide(960, 576, gated=False, may_split=False, processors=132)
    Division(columns=64, depth=64, splits=1)
    """
    if width % 16 or inputs % 64:
        return None
    possible = [n for n in range(1, MAX_SPLITS + 1) if may_split and inputs % (64 * n) == 0] or [1]
    tiles = [columns for columns in (64, 32, 16) if width % columns == 0]
    # A small weight comes from the L2 cache, see `triton_prefetch`, where wide tiles are best; a
    # large one takes all processors.
    small = is_small(width, inputs, gated=gated)
    columns = (
        tiles[0]
        if small
        else next((n for n in tiles if 5 * width // n * possible[-1] >= 3 * processors), tiles[-1])
    )
    splits = next((n for n in possible if 4 * width // columns * n >= 3 * processors), possible[-1])
    # Where a processor has one program, that one has to ask for more at a time; where it has
    # several, they must fit side by side.
    deep = (256, 128) if columns <= 32 else (128,)
    alone = not small and width // columns * splits <= processors
    depth = next((n for n in deep if alone and inputs % (n * splits) == 0), 64)
    return Division(columns, depth, splits)


def stages_of(plan: Division, rows: int, *, gated: bool, memory: int) -> int:
    """Iterations under way at once, as measured to be best on Hopper, as far as `memory` goes;
    AMD's compiler plans otherwise.

    >>> stages_of(Division(64, 128, 2), 16, gated=False, memory=227 * 1024)
    5
    >>> stages_of(Division(64, 128, 1), 64, gated=True, memory=99 * 1024)
    1
    """
    most = 1 if torch.version.hip else 3 if gated and plan.depth == 128 else 5
    loaded = ((1 + gated) * plan.columns + rows) * plan.depth * 2
    return num_stages(loaded, memory, most=most)


def few_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str | None = None,
    may_split: bool = False,
    prefetch: Tensor | None = None,
) -> Tensor | None:
    """`x W^T + b`, or the gated activation of its two halves.

    Args:
        x: [rows, in], in half precision.
        weight: [out, in].
        bias: [out], or None.
        activation: see `specdec.layers.ops.activation`; the weight then joins gate and up, and the
            activation is part of the product.
        may_split: the caller can add up partial sums.
        prefetch: a weight to send hints about.

    Returns:
        [rows, out], or with an activation half as wide, in the type of `x`; with `may_split`
        perhaps float32 [splits, rows, out], whose sum it is, not yet rounded; None for a product
        that is not this kernel's.
    """
    rows, inputs = x.shape
    gated = activation is not None
    width = len(weight) // 2 if gated else len(weight)
    half = x.dtype in (torch.bfloat16, torch.float16)
    if rows > MAX_ROWS or not half or not weight.is_contiguous():
        return None
    options = {"may_split": may_split, "processors": num_processors(x.device)}
    plan = divide(width, inputs, gated=gated, **options)
    if plan is None:
        return None
    if plan.splits > 1:
        output = torch.empty(plan.splits, rows, width, dtype=torch.float32, device=x.device)
    else:
        output = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    padded = max(16, triton.next_power_of_2(rows))
    with on_device(x):
        _few_rows_kernel[(width // plan.columns + prefetch_programs(prefetch, 4), plan.splits)](
            x,
            weight,
            bias,
            output,
            rows,
            x.stride(0),
            WIDTH=width,
            INPUTS=inputs,
            ACTIVATION=activation,
            ROWS=padded,
            COLUMNS=plan.columns,
            DEPTH=plan.depth,
            SPLITS=plan.splits,
            SMALL=is_small(width, inputs, gated=gated),
            num_warps=4,
            num_stages=stages_of(plan, padded, gated=gated, memory=shared_memory(x.device)),
            **hint_options(prefetch),
            **overlap_options(x.device),
        )
    return output
