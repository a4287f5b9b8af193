"""Convolutions over few rows between two gates, as in LFM2 (arXiv 2511.23404), in Triton:
`after * convolution(before * value)`.

A number of the output depends on its own channel alone, so every tile of rows and channels has a
program, in steps and in prompts. What the convolution is given lies in the ring by position
afterwards. Numbers are rounded where plain torch rounds them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.triton_recurrence_ring import keep_last
from specdec.layers.recurrence.triton_recurrence_rows import Rows

CHANNELS_PER_PROGRAM = 256
FEW_ROWS = 64
"""Most rows of a request of which each has programs of its own."""
ROWS_PER_PROGRAM = 16
"""Where there are more."""


@triton.jit(do_not_specialize=["columns"])
def _convolution_kernel(
    joined: tl.tensor,  # [T, 3 * WIDTH]: before, after, value
    kernel: tl.tensor,  # [WIDTH, TAPS]
    bias: tl.tensor,  # [WIDTH] or None
    ring: tl.tensor,  # [num_slots, columns, WIDTH]
    slots: tl.tensor,  # int64 [num_reqs]
    starts: tl.tensor,  # int64 [num_reqs]
    counts: tl.tensor,  # int64 [num_reqs]
    first_rows: tl.tensor,  # int32 [num_reqs + 1]
    output: tl.tensor,  # [T, WIDTH]
    # [T, WIDTH], what the convolution is given, or None where that can go into the ring here
    given: tl.tensor,
    joined_stride: tl.tensor,
    columns: tl.tensor,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    request = tl.program_id(2)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    is_channel = channel < WIDTH
    await_previous(OVERLAP)
    first_row = tl.load(first_rows + request).to(tl.int64)
    padded = (tl.load(first_rows + request + 1) - first_row).to(tl.int32)
    count, start = tl.load(counts + request).to(tl.int32), tl.load(starts + request)
    exists = is_channel & (row < count)
    line = joined + (first_row + row) * joined_stride + channel
    ring += tl.load(slots + request) * columns * WIDTH + channel
    dtype = output.dtype.element_ty
    mixed = tl.zeros([ROWS, BLOCK], tl.float32)
    if bias is not None:
        mixed += tl.load(bias + channel, mask=is_channel, other=0.0).to(tl.float32)
    product = tl.zeros([ROWS, BLOCK], dtype)
    for tap in tl.static_range(TAPS):
        back = TAPS - 1 - tap
        position = start + row - back
        is_new = exists & (row >= back)
        before = tl.load(line - back * joined_stride, mask=is_new, other=0.0)
        value = tl.load(line - back * joined_stride + 2 * WIDTH, mask=is_new, other=0.0)
        old = tl.load(
            ring + (position % columns) * WIDTH,
            mask=exists & (row < back) & (position >= 0),
            other=0.0,
        )
        product = tl.where(
            row < back, old, (before.to(tl.float32) * value.to(tl.float32)).to(dtype)
        )
        weight = tl.load(kernel + channel * TAPS + tap, mask=is_channel, other=0.0)
        mixed += product.to(tl.float32) * weight.to(tl.float32)
    # rows that only pad become zeros
    after = tl.load(line + WIDTH, mask=exists, other=0.0).to(tl.float32)
    out_places = (first_row + row) * WIDTH + channel
    tl.store(
        output + out_places,
        (after * mixed.to(dtype).to(tl.float32)).to(dtype),
        mask=is_channel & (row < padded),
    )
    if given is None:
        tl.store(ring + ((start + row) % columns) * WIDTH, product, mask=exists)
    else:
        tl.store(given + out_places, product, mask=exists)


def convolve(
    joined: Tensor, kernel: Tensor, bias: Tensor | None, cache: StateCache, rows: Rows
) -> Tensor:
    """`specdec.layers.recurrence.convolution.convolve`, for which nobody waits: it can be captured
    in a graph. Rows that only pad are zeros.
    """
    (width, taps), columns = kernel.shape, cache.inputs.shape[1]
    assert (
        joined.stride(1) == 1
        and kernel.is_contiguous()
        and cache.inputs.is_contiguous()
        and cache.inputs.dtype == joined.dtype
    )
    assert joined.shape[1] == 3 * width == 3 * cache.inputs.shape[2]
    # Where a ring holds all positions that the forward looks at, no program overwrites what another
    # one reads.
    keeps = taps - 1 + rows.max_rows <= columns
    output = torch.empty(len(joined), width, dtype=joined.dtype, device=joined.device)
    given = None if keeps else torch.empty_like(output)
    together = 1 if rows.max_rows <= FEW_ROWS else ROWS_PER_PROGRAM
    block = min(CHANNELS_PER_PROGRAM, triton.next_power_of_2(width))
    with on_device(joined):
        _convolution_kernel[
            (triton.cdiv(rows.max_rows, together), triton.cdiv(width, block), len(rows.slots))
        ](
            joined,
            kernel,
            bias,
            cache.inputs,
            rows.slots,
            rows.starts,
            rows.counts,
            rows.first_rows,
            output,
            given,
            joined.stride(0),
            columns,
            WIDTH=width,
            TAPS=taps,
            ROWS=together,
            BLOCK=block,
            num_warps=4,
            **overlap_options(joined.device),
        )
    if given is not None:
        keep_last(given, taps, cache, rows)
    return output
