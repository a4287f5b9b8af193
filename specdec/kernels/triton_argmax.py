"""The highest logit's place in every row, in Triton: for the few rows of a step torch takes several
times as long as reading them.

Programs first find the best token of their slice of a row, so that even one row keeps many
processors busy; then one program per row finds the best of those. A logit and its token are
compared as one integer, so how a row is divided changes nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

SLICE = 4096
"""Logits per program; in half precision a thread loads 16 bytes four times."""
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# as the bits of a float32; those of a NaN, without its sign, are higher
_INFINITY = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(0x7FC00000)
_LEAST = tl.constexpr(-(2**63))


@triton.jit
def ordered(x: tl.tensor) -> tl.tensor:
    """float32 as int32 that ascends as the numbers do; both zeros are equal, and a NaN is above
    all, as for torch.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    order = tl.where(bits < 0, -magnitude, magnitude)
    return tl.where(magnitude > _INFINITY, _NAN, order)


@triton.jit
def token_key(x: tl.tensor, token: tl.tensor) -> tl.tensor:
    """int64 that ascends as float32 `x` does, and of equal numbers descends with the token: the
    first is highest.
    """
    return (ordered(x).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _slice_max_kernel(
    logits: tl.tensor,  # [groups, width, vocab_size]
    best: tl.tensor,  # int64 [groups * width, slices]
    width: tl.tensor,
    vocab_size: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    SLICE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    exists = column < vocab_size
    place = logits + (row // width) * group_stride + (row % width) * row_stride
    await_previous(OVERLAP)
    x = tl.load(place + column, mask=exists, other=0.0).to(tl.float32)
    tl.store(
        best + row * tl.num_programs(1) + tl.program_id(1),
        tl.max(tl.where(exists, token_key(x, column), _LEAST), 0),
    )


@triton.jit
def _row_max_kernel(
    best: tl.tensor,  # int64 [rows, SLICES]
    indices: tl.tensor,  # int64 [rows]
    finite: tl.tensor,  # bool [rows]
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, triton.next_power_of_2(SLICES))
    await_previous(OVERLAP)
    key = tl.max(tl.load(best + row * SLICES + part, mask=part < SLICES, other=_LEAST), 0)
    order = key >> 32
    tl.store(indices + row, 0x7FFFFFFF - (key & 0x7FFFFFFF))
    tl.store(finite + row, (order > -_INFINITY) & (order < _INFINITY))


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """What `logits.max(dim=-1)` tells: its indices, always the first of equal logits, and whether
    its values are finite.

    Args:
        logits: [..., V] of at most three axes, bfloat16, float16 or float32; the last axis is
            contiguous.

    Returns:
        Indices int64 [...], that of a NaN for a row that has one, and bool [...].
    """
    shape, vocab_size = logits.shape[:-1], logits.shape[-1]
    assert logits.ndim <= 3 and logits.stride(-1) == 1 and logits.dtype in DTYPES
    rows = logits[(None,) * (3 - logits.ndim)]
    slices = triton.cdiv(vocab_size, SLICE)
    best = torch.empty(shape.numel(), slices, dtype=torch.int64, device=logits.device)
    options = overlap_options(logits.device)
    with on_device(logits):
        _slice_max_kernel[(shape.numel(), slices)](
            rows,
            best,
            rows.shape[1],
            vocab_size,
            *rows.stride()[:2],
            SLICE=SLICE,
            num_warps=4,
            **options,
        )
        return choose_slice(best, shape)


def choose_slice(keys: Tensor, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Where rows are highest, from the keys of their slices, int64 [rows, slices]; results as of
    `argmax`, of `shape`.
    """
    indices = torch.empty(shape, dtype=torch.int64, device=keys.device)
    finite = torch.empty(shape, dtype=torch.bool, device=keys.device)
    options = overlap_options(keys.device)
    _row_max_kernel[(len(keys),)](
        keys, indices, finite, SLICES=keys.shape[1], num_warps=1, **options
    )
    return indices, finite
