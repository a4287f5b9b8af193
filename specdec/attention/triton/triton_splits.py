"""The parts of a row's attention that programs of `triton_attention` made of a split context,
merged in Triton.
"""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import overlap_options
from specdec.kernels.triton_overlap import await_previous, release_next

MANY_ROWS = 1024
"""Rows of one head to merge from which on a program takes several."""


@triton.jit
def _merge_kernel(
    parts: tl.tensor,  # float32 [num_tokens, num_heads, SPLITS, HEAD_DIM]
    log_sums: tl.tensor,  # float32 [num_tokens, num_heads, SPLITS]
    output: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM]
    num_rows: tl.tensor,  # num_tokens * num_heads
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,  # per program
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    await_previous(OVERLAP)
    release_next(OVERLAP)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    split = tl.arange(0, SPLITS)
    dim = tl.arange(0, BLOCK_D)
    place = row[:, None] * SPLITS + split[None, :]
    log_sum = tl.load(log_sums + place, mask=(row < num_rows)[:, None], other=0.0)
    # every row sees itself, so the maximum is finite
    weight = tl.exp2(log_sum - tl.max(log_sum, 1)[:, None])
    weight = weight / tl.sum(weight, 1)[:, None]
    exists = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    part = tl.load(
        parts + place[:, :, None] * HEAD_DIM + dim[None, None, :],
        mask=exists[:, None, :],
        other=0.0,
    )
    merged = tl.sum(part * weight[:, :, None], 1)
    tl.store(
        output + row[:, None] * HEAD_DIM + dim[None, :],
        merged.to(output.dtype.element_ty),
        mask=exists,
    )


def merge_splits(parts: Tensor, log_sums: Tensor, output: Tensor, block_d: int) -> None:
    """Writes the merged parts; for their own device as the current one.

    Args:
        parts: float32 [num_tokens, num_heads, splits, head_dim].
        log_sums: float32 [num_tokens, num_heads, splits], logarithms of softmax denominators to the
            base 2.
        output: [num_tokens, num_heads, head_dim].
        block_d: head_dim, padded.
    """
    num_tokens, num_heads, splits, head_dim = parts.shape
    rows = num_tokens * num_heads
    together = max(1, min(8, 16 // splits)) if rows >= MANY_ROWS else 1
    crowded = together > 1 or splits * max(block_d, 256) > 16 * 256
    _merge_kernel[(triton.cdiv(rows, together),)](
        parts,
        log_sums,
        output,
        rows,
        HEAD_DIM=head_dim,
        SPLITS=splits,
        ROWS=together,
        BLOCK_D=block_d,
        # one warp adds up without a barrier, if its registers suffice
        num_warps=4 if crowded else 1,
        **overlap_options(output.device),
    )
