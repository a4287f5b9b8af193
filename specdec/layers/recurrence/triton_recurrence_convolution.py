"""Convolution, SiLU and L2 norms of a recurrent layer's rows, as functions for
`specdec.layers.recurrence.triton_recurrence_inputs`.
"""

import triton
import triton.language as tl

from specdec.layers.recurrence.triton_recurrence_ring import input_at


@triton.jit
def convolve(
    x: tl.tensor,
    ring: tl.tensor,
    kernel: tl.tensor,
    bias: tl.tensor,
    convolved: tl.tensor,
    factors: tl.tensor,
    first_head: tl.tensor,  # of the program
    begin: tl.tensor,  # rows of the program, counted from the first pending one
    end: tl.tensor,
    pending: tl.tensor,
    start: tl.tensor,
    out_row: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    query_scale: tl.tensor,
    FIRST: tl.constexpr,  # channel of the first of such heads
    HEADS: tl.constexpr,  # that there are
    DIM: tl.constexpr,
    TOGETHER: tl.constexpr,  # heads of a program
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    TAPS: tl.constexpr,
    NORMED: tl.constexpr,  # whether these are queries and keys that have factors
    KEEPS: tl.constexpr,
) -> None:
    """Rows of whole heads, rounded where plain torch rounds them."""
    dtype = convolved.dtype.element_ty
    head = first_head + tl.arange(0, TOGETHER)[:, None]
    inner = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    exists = (head < HEADS) & (inner < DIM)
    channel = FIRST + head * DIM + inner
    for row in range(begin, end):
        position = start - pending + row
        mixed = tl.zeros(channel.shape, tl.float32)
        if bias is not None:
            mixed += tl.load(bias + channel, mask=exists, other=0.0).to(tl.float32)
        value = tl.zeros(channel.shape, dtype)
        for tap in tl.static_range(TAPS):
            value = input_at(
                x,
                ring,
                position - (TAPS - 1 - tap),
                start,
                channel,
                exists,
                x_stride,
                columns,
                WIDTH,
            )
            weight = tl.load(kernel + channel * TAPS + tap, mask=exists, other=0.0)
            mixed += value.to(tl.float32) * weight.to(tl.float32)
        if KEEPS:
            tl.store(
                ring + (position % columns) * WIDTH + channel, value, mask=exists & (row >= pending)
            )
        mixed = mixed.to(dtype).to(tl.float32)
        active = (mixed * tl.sigmoid(mixed)).to(dtype)
        tl.store(convolved + (out_row + row) * CHANNELS + channel, active, mask=exists)
        if NORMED:
            wide = active.to(tl.float32)
            factor = tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) + 1e-6)
            factor = tl.where(head < HEADS // 2, factor * query_scale, factor)
            tl.store(factors + (out_row + row) * HEADS + head, factor, mask=head < HEADS)
