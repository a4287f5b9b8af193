"""Decays and betas of a recurrent layer's rows, as functions for
`specdec.layers.recurrence.triton_recurrence_inputs`."""

import triton
import triton.language as tl

from specdec.layers.recurrence.triton_recurrence_ring import input_at


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)) to the last digits also where it is small, which the logarithm of a rounded
    sum is not.
    """
    small = tl.exp(-tl.abs(x))
    # log(1 + e) = 2 artanh(e / (2 + e)), whose argument is a third at most.
    ratio = small / (2.0 + small)
    square = ratio * ratio
    series = 1 / 13 + square * (1 / 15 + square * (1 / 17))
    series = 1 / 7 + square * (1 / 9 + square * (1 / 11 + square * series))
    series = 1.0 + square * (1 / 3 + square * (1 / 5 + square * series))
    return tl.maximum(x, 0.0) + 2.0 * ratio * series


@triton.jit
def gates_of_heads(
    x: tl.tensor,
    ring: tl.tensor,
    rate: tl.tensor,
    time_bias: tl.tensor,
    gates: tl.tensor,
    begin: tl.tensor,  # rows of the program, counted from the first pending one
    end: tl.tensor,
    pending: tl.tensor,
    start: tl.tensor,
    out_row: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    beta_scale: tl.tensor,
    min_step: tl.tensor,
    max_step: tl.tensor,
    VALUE_HEADS: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    DELTA: tl.constexpr,
    KEEPS: tl.constexpr,
) -> None:
    """One decay per value head; all heads in one program."""
    head = tl.arange(0, triton.next_power_of_2(VALUE_HEADS))
    exists = head < VALUE_HEADS
    offset = tl.load(time_bias + head, mask=exists, other=0.0).to(tl.float32)
    speed = tl.load(rate + head, mask=exists, other=0.0).to(tl.float32)
    channel = CHANNELS + VALUE_HEADS * DELTA + head
    for row in range(begin, end):
        position = start - pending + row
        kept = ring + (position % columns) * WIDTH
        a = input_at(x, ring, position, start, channel, exists, x_stride, columns, WIDTH)
        if KEEPS:
            tl.store(kept + channel, a, mask=exists & (row >= pending))
        step = _softplus(a.to(tl.float32) + offset)
        beta = step
        if DELTA:
            b = input_at(
                x, ring, position, start, CHANNELS + head, exists, x_stride, columns, WIDTH
            )
            if KEEPS:
                tl.store(kept + CHANNELS + head, b, mask=exists & (row >= pending))
            beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32) * beta_scale
        else:
            step = tl.minimum(tl.maximum(step, min_step), max_step)
            beta = step
        place = gates + (out_row + row) * (2 * VALUE_HEADS) + head
        tl.store(place, -speed * step, mask=exists)
        tl.store(place + VALUE_HEADS, beta, mask=exists)


@triton.jit
def gates_of_keys(
    x: tl.tensor,
    ring: tl.tensor,
    rate: tl.tensor,
    time_bias: tl.tensor,
    gates: tl.tensor,
    first_head: tl.tensor,  # of the program
    begin: tl.tensor,
    end: tl.tensor,
    pending: tl.tensor,
    start: tl.tensor,
    out_row: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    beta_scale: tl.tensor,
    HEADS: tl.constexpr,  # that there are
    DIM: tl.constexpr,
    TOGETHER: tl.constexpr,  # heads of a program
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    KEEPS: tl.constexpr,
) -> None:
    """One decay per key channel of a value head, and a beta per head; the delta rule."""
    head = first_head + tl.arange(0, TOGETHER)[:, None]
    inner = tl.arange(0, triton.next_power_of_2(DIM))[None, :]
    is_head, exists = head < HEADS, (head < HEADS) & (inner < DIM)
    decay = head * DIM + inner
    offset = tl.load(time_bias + decay, mask=exists, other=0.0).to(tl.float32)
    speed = tl.load(rate + head, mask=is_head, other=0.0).to(tl.float32)
    channel = CHANNELS + HEADS + decay
    for row in range(begin, end):
        position = start - pending + row
        kept = ring + (position % columns) * WIDTH
        a = input_at(x, ring, position, start, channel, exists, x_stride, columns, WIDTH)
        b = input_at(x, ring, position, start, CHANNELS + head, is_head, x_stride, columns, WIDTH)
        if KEEPS:
            tl.store(kept + channel, a, mask=exists & (row >= pending))
            tl.store(kept + CHANNELS + head, b, mask=is_head & (row >= pending))
        beta = tl.sigmoid(b.to(tl.float32)).to(b.dtype).to(tl.float32) * beta_scale
        place = gates + (out_row + row) * (HEADS * (DIM + 1))
        tl.store(place + decay, -speed * _softplus(a.to(tl.float32) + offset), mask=exists)
        tl.store(place + HEADS * DIM + head, beta, mask=is_head)
