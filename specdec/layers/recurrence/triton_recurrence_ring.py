"""The ring of inputs of a recurrent layer in Triton: what is read of it, and what prompts that are
longer than it leave there.
"""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.triton_recurrence_rows import Rows

BLOCK = 1024
"""Numbers that a program keeps."""


@triton.jit
def input_at(
    x: tl.tensor,  # the request's first row
    ring: tl.tensor,  # of its slot
    position: tl.tensor,
    start: tl.tensor,
    channel: tl.tensor,
    exists: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
) -> tl.tensor:
    """Inputs of one position: what came before the forward's rows lies in the ring, and before a
    sequence there are zeros.
    """
    row = tl.where(
        position >= start, x + (position - start) * x_stride, ring + (position % columns) * WIDTH
    )
    return tl.load(row + channel, mask=exists & (position >= 0), other=0.0)


@triton.jit(do_not_specialize=["columns"])
def _keep_kernel(
    x: tl.tensor,
    ring: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    first_rows: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    """Puts one of the last rows of a request into the ring."""
    back = tl.program_id(0) + 1
    request = tl.program_id(2)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    await_previous(OVERLAP)
    count = tl.load(counts + request)
    position = tl.load(starts + request) + count - back
    exists = (channel < WIDTH) & (back <= count)
    row = tl.load(first_rows + request).to(tl.int64) + count - back
    values = tl.load(x + row * x_stride + channel, mask=exists)
    place = tl.load(slots + request) * columns + position % columns
    tl.store(ring + place * WIDTH + channel, values, mask=exists)


def keep_last(x: Tensor, taps: int, cache: StateCache, rows: Rows) -> None:
    """Puts the inputs of each request's last rows into the ring, as many as the next step may look
    back to.

    Args:
        x: [T, at least width], inputs of the rows.
        taps: of the convolution.
    """
    _, columns, width = cache.inputs.shape
    # After a final step nothing but a convolution looks back.
    kept = min(rows.max_rows, taps - 1 if rows.final else columns - taps + 1)
    with on_device(x):
        _keep_kernel[(kept, triton.cdiv(width, BLOCK), len(rows.slots))](
            x,
            cache.inputs,
            rows.slots,
            rows.starts,
            rows.counts,
            rows.first_rows,
            x.stride(0),
            columns,
            WIDTH=width,
            BLOCK=BLOCK,
            num_warps=4,
            **overlap_options(x.device),
        )
