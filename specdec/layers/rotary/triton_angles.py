"""Cosines and sines of rotations in Triton, in one launch; see
`specdec.layers.rotary.rotary.half_angles`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous, release_next

_NUMBERS = 1024
"""Angles of a program."""


@triton.jit
def _angles_kernel(
    position_ids: tl.tensor,  # int64 [num_rows]
    frequencies: tl.tensor,  # float32 [HALF]
    cos: tl.tensor,  # [num_rows, HALF]
    sin: tl.tensor,  # the same
    amplitude: tl.tensor,
    num_rows: tl.tensor,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, triton.next_power_of_2(HALF))
    frequency = tl.load(frequencies + column, mask=column < HALF, other=0.0)
    await_previous(OVERLAP)
    release_next(OVERLAP)
    position = tl.load(position_ids + row, mask=row < num_rows, other=0).to(tl.float32)
    angle = position[:, None] * frequency[None, :]
    place = row[:, None] * HALF + column[None, :]
    exists = (row < num_rows)[:, None] & (column < HALF)[None, :]
    tl.store(cos + place, (tl.cos(angle) * amplitude).to(cos.dtype.element_ty), mask=exists)
    tl.store(sin + place, (tl.sin(angle) * amplitude).to(sin.dtype.element_ty), mask=exists)


def angles(
    position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype, amplitude: float
) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., head_dim / 2] of positions int64 [...], for frequencies float32
    [head_dim / 2] that all share.
    """
    (half,) = frequencies.shape
    cos, sin = (
        torch.empty(*position_ids.shape, half, dtype=dtype, device=position_ids.device)
        for _ in range(2)
    )
    rows = max(1, _NUMBERS // triton.next_power_of_2(half))
    if position_ids.numel():
        with on_device(position_ids):
            _angles_kernel[(triton.cdiv(position_ids.numel(), rows),)](
                position_ids.contiguous(),
                frequencies.contiguous(),
                cos,
                sin,
                float(amplitude),
                position_ids.numel(),
                HALF=half,
                ROWS=rows,
                num_warps=4,
                **overlap_options(position_ids.device),
            )
    return cos, sin
