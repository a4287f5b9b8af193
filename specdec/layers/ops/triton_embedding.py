"""Embedding rows in Triton: torch's own lookup takes several times as long for the few rows of a
step.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous


@triton.jit
def _embed_kernel(
    table: tl.tensor,  # [V, width]
    token_ids: tl.tensor,  # int64 [rows]
    output: tl.tensor,  # [rows, width]
    table_stride: tl.tensor,
    width: tl.tensor,
    scale: tl.tensor,
    SCALED: tl.constexpr,  # whether the factor is not 1
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < width
    await_previous(OVERLAP)
    rows = tl.load(table + tl.load(token_ids + row) * table_stride + column, mask=exists)
    if SCALED:
        rows = (rows.to(tl.float32) * scale).to(output.dtype.element_ty)
    tl.store(output + row * width + column, rows, mask=exists)


def embed(token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
    """Rows [..., H] of `table` [V, H] times `scale` by int64 ids [...], each below V: none is
    checked.
    """
    width = table.shape[1]
    assert token_ids.dtype == torch.int64 and table.stride(1) == 1
    output = torch.empty(*token_ids.shape, width, dtype=table.dtype, device=table.device)
    block = min(triton.next_power_of_2(width), 1024)
    with on_device(table):
        _embed_kernel[(token_ids.numel(), triton.cdiv(width, block))](
            table,
            token_ids.contiguous(),
            output,
            table.stride(0),
            width,
            scale,
            SCALED=scale != 1,
            BLOCK=block,
            num_warps=4,
            **overlap_options(table.device),
        )
    return output
