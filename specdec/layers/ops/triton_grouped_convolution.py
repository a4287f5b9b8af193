"""Convolutions over the rows of a drafter's blocks (DFlash 2, z-lab/dflash) in Triton.

A number depends on its own channel in a few rows of its own block, so every row and tile of
channels has a program. Numbers are rounded once, at the end.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

CHANNELS_PER_PROGRAM = 512


@triton.jit
def _mix_kernel(
    x: tl.tensor,  # [T, CHANNELS]
    dynamic: tl.tensor,  # [T, 2, TAPS, CHANNELS // GROUP]
    base: tl.tensor,  # [TAPS, CHANNELS], of this side
    output: tl.tensor,  # [T, CHANNELS]
    SIDE: tl.constexpr,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    place = row % ROWS  # in its block
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = channel < CHANNELS
    GROUPS: tl.constexpr = CHANNELS // GROUP
    line = row.to(tl.int64) * CHANNELS + channel
    own = dynamic + row.to(tl.int64) * 2 * TAPS * GROUPS + SIDE * TAPS * GROUPS + channel // GROUP
    await_previous(OVERLAP)
    mixed = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS):
        value = tl.load(x + line - tap * CHANNELS, mask=exists & (place >= tap), other=0.0).to(
            tl.float32
        )
        kernel = tl.load(base + tap * CHANNELS + channel, mask=exists, other=0.0).to(tl.float32)
        kernel += tl.load(own + tap * GROUPS, mask=exists, other=0.0).to(tl.float32)
        mixed += kernel * value
    tl.store(output + line, mixed.to(output.dtype.element_ty), mask=exists)


def mix_rows(x: Tensor, dynamic: Tensor, base: Tensor, width: int, side: int) -> Tensor:
    """`specdec.layers.ops.grouped_convolution.mix_rows` of rows [T, H]; it can be captured in a
    graph.
    """
    (rows, hidden), taps = x.shape, base.shape[1]
    dense = x.is_contiguous() and dynamic.is_contiguous() and base.is_contiguous()
    assert dense and rows % width == 0
    output = torch.empty_like(x)
    block = min(CHANNELS_PER_PROGRAM, triton.next_power_of_2(hidden))
    with on_device(x):
        _mix_kernel[(rows, triton.cdiv(hidden, block))](
            x,
            dynamic,
            base[side],
            output,
            SIDE=side,
            CHANNELS=hidden,
            TAPS=taps,
            GROUP=hidden * 2 * taps // dynamic.shape[1],
            ROWS=width,
            BLOCK=block,
            num_warps=4,
            **overlap_options(x.device),
        )
    return output
