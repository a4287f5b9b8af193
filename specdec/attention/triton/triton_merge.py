"""Attention to two sets of keys as if to their union, and to sinks, in Triton: outputs weighed by
their softmax denominators.
"""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

ROWS = 16
"""Rows of a program."""


@triton.jit
def _merge_two_kernel(
    first: tl.tensor,  # [num_rows, num_heads, HEAD_DIM] or None
    second: tl.tensor,  # [num_rows, num_heads, HEAD_DIM]
    first_sums: tl.tensor,  # float32 [num_heads, num_rows] or None
    second_sums: tl.tensor,  # float32 [num_heads, num_rows]
    sinks: tl.tensor,  # [num_heads] or None
    output: tl.tensor,  # [num_rows, num_heads, HEAD_DIM]
    num_rows: tl.tensor,
    num_heads: tl.tensor,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    dim = tl.arange(0, BLOCK_D)
    exists = row < num_rows
    place = (row.to(tl.int64) * num_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    kept = exists[:, None] & (dim < HEAD_DIM)[None, :]
    await_previous(OVERLAP)
    second_sum = tl.load(second_sums + head * num_rows + row, mask=exists, other=0.0)
    peak = second_sum
    if first is not None:
        first_sum = tl.load(first_sums + head * num_rows + row, mask=exists, other=0.0)
        peak = tl.maximum(peak, first_sum)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32)
        peak = tl.maximum(peak, sink)
    second_weight = tl.exp(second_sum - peak)
    total = second_weight
    merged = tl.load(second + place, mask=kept, other=0.0).to(tl.float32) * second_weight[:, None]
    if first is not None:
        first_weight = tl.exp(first_sum - peak)
        total += first_weight
        merged += (
            tl.load(first + place, mask=kept, other=0.0).to(tl.float32) * first_weight[:, None]
        )
    if sinks is not None:
        total += tl.exp(sink - peak)
    tl.store(output + place, (merged / total[:, None]).to(output.dtype.element_ty), mask=kept)


def merge_two(
    first: tuple[Tensor, Tensor] | None,
    second: tuple[Tensor, Tensor],
    sinks: Tensor | None,
    output: Tensor,
) -> None:
    """Writes attention to the union of two sets of keys.

    Args:
        first, second: outputs [num_rows, num_heads, head_dim], contiguous, and natural logarithms
            of their denominators, float32 [num_heads, num_rows], contiguous; every row has a key
            among those of the second. Without a first there is one set.
        sinks: [num_heads], logits that join the softmax, or None.
        output: like the outputs.
    """
    num_rows, num_heads, head_dim = output.shape
    tensors = [*second, *(first or ())]
    assert output.is_contiguous() and all(tensor.is_contiguous() for tensor in tensors)
    with on_device(output):
        _merge_two_kernel[(triton.cdiv(num_rows, ROWS), num_heads)](
            None if first is None else first[0],
            second[0],
            None if first is None else first[1],
            second[1],
            sinks,
            output,
            num_rows,
            num_heads,
            HEAD_DIM=head_dim,
            BLOCK_D=triton.next_power_of_2(head_dim),
            ROWS=ROWS,
            num_warps=4,
            **overlap_options(output.device),
        )
