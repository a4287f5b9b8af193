"""What a recurrent layer computes before its state takes rows in, in Triton: convolution, SiLU, L2
norms, gates.

Rows of a request that its state has not taken in yet come first. Their inputs lie in the ring of
the cache, by position, and from the same inputs come the same bits as in the step that wrote them.
So nothing that a step computes here is kept for the next one.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.triton_recurrence_convolution import convolve
from specdec.layers.recurrence.triton_recurrence_gates import gates_of_heads, gates_of_keys
from specdec.layers.recurrence.triton_recurrence_ring import keep_last
from specdec.layers.recurrence.triton_recurrence_rows import Layer, Prepared, Rows, pending_rows

CHANNELS_PER_PROGRAM = 1024
"""Channels that a program convolves, as whole heads."""
FEW_ROWS = 64
"""Most rows of a request of which each has programs of its own."""
ROWS_PER_PROGRAM = 16
"""Where there are more."""


@triton.jit(do_not_specialize=["columns", "max_pending"])
def _inputs_kernel(
    x: tl.tensor,  # [T, at least WIDTH]
    ring: tl.tensor,  # [num_slots, columns, WIDTH]
    kernel: tl.tensor,  # [CHANNELS, TAPS]
    bias: tl.tensor,  # [CHANNELS] or None
    rate: tl.tensor,  # [VALUE_HEADS]
    time_bias: tl.tensor,  # [VALUE_HEADS * DECAYS]
    slots: tl.tensor,  # int64 [num_reqs]
    starts: tl.tensor,  # int64 [num_reqs]
    counts: tl.tensor,  # int64 [num_reqs]
    first_rows: tl.tensor,  # int32 [num_reqs + 1]
    lengths: tl.tensor,  # int64 [num_slots]
    convolved: tl.tensor,  # see Prepared
    factors: tl.tensor,
    gates: tl.tensor,
    x_stride: tl.tensor,
    columns: tl.tensor,
    max_pending: tl.tensor,
    query_scale: tl.tensor,
    beta_scale: tl.tensor,
    min_step: tl.tensor,
    max_step: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    DELTA: tl.constexpr,
    DECAYS: tl.constexpr,  # of a value head: 1, or KEY_DIM
    KEEPS: tl.constexpr,  # whether new rows' inputs can go into the ring here
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,  # heads of queries or keys per program
    VALUES: tl.constexpr,  # heads of values per program
    OVERLAP: tl.constexpr,
) -> None:
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    WIDTH: tl.constexpr = CHANNELS + VALUE_HEADS * (DECAYS + DELTA)
    KEY_PARTS: tl.constexpr = (2 * KEY_HEADS + KEYS - 1) // KEYS
    VALUE_PARTS: tl.constexpr = (VALUE_HEADS + VALUES - 1) // VALUES
    part = tl.program_id(1)
    request = tl.program_id(2)
    await_previous(OVERLAP)
    slot, start = tl.load(slots + request), tl.load(starts + request)
    pending = pending_rows(lengths, slot, start, max_pending)
    first_row = tl.load(first_rows + request).to(tl.int64)
    x += first_row * x_stride
    ring += slot * columns * WIDTH
    out_row = first_row + request * max_pending
    begin = tl.program_id(0) * ROWS
    end = tl.minimum(begin + ROWS, pending + tl.load(counts + request).to(tl.int32))
    if part < KEY_PARTS:
        convolve(
            x, ring, kernel, bias, convolved, factors, part * KEYS, begin, end, pending, start,
            out_row, x_stride, columns, query_scale,
            0, 2 * KEY_HEADS, KEY_DIM, KEYS, CHANNELS, WIDTH, TAPS, DELTA, KEEPS,
        )  # fmt: skip
    elif part < KEY_PARTS + VALUE_PARTS:
        convolve(
            x, ring, kernel, bias, convolved, factors, (part - KEY_PARTS) * VALUES, begin, end,
            pending, start, out_row, x_stride, columns, query_scale,
            2 * KEY_HEADS * KEY_DIM, VALUE_HEADS, VALUE_DIM, VALUES, CHANNELS, WIDTH, TAPS, False,
            KEEPS,
        )  # fmt: skip
    elif DECAYS == 1:
        gates_of_heads(
            x, ring, rate, time_bias, gates, begin, end, pending, start, out_row, x_stride, columns,
            beta_scale, min_step, max_step,
            VALUE_HEADS, CHANNELS, WIDTH, DELTA, KEEPS,
        )  # fmt: skip
    else:
        gates_of_keys(
            x, ring, rate, time_bias, gates, (part - KEY_PARTS - VALUE_PARTS) * KEYS, begin, end,
            pending, start, out_row, x_stride, columns, beta_scale,
            VALUE_HEADS, KEY_DIM, KEYS, CHANNELS, WIDTH, KEEPS,
        )  # fmt: skip


def prepare(x: Tensor, layer: Layer, cache: StateCache, rows: Rows) -> Prepared:
    """Convolution, activation, norms and gates of all rows and of those before them; puts the rows'
    inputs into the ring.

    Args:
        x: [T, at least width], inputs of the rows.
    """
    columns, num_reqs = cache.inputs.shape[1], len(rows.slots)
    assert (
        x.stride(1) == 1
        and all(part.is_contiguous() for part in cache)
        and cache.inputs.dtype == x.dtype
    )
    assert layer.kernel.is_contiguous() and cache.inputs.shape[2] == layer.width
    count, total = rows.max_pending + rows.max_rows, len(x) + num_reqs * rows.max_pending
    prepared = Prepared(
        torch.empty(total, layer.channels, dtype=x.dtype, device=x.device),
        torch.empty(total, 2 * layer.num_key_heads, dtype=torch.float32, device=x.device),
        torch.empty(
            total, (layer.decays + 1) * layer.num_value_heads, dtype=torch.float32, device=x.device
        ),
    )
    # Where a ring holds all positions that the forward looks at, no program overwrites what another
    # one reads.
    keeps = layer.taps - 1 + count <= columns
    together = 1 if count <= FEW_ROWS else ROWS_PER_PROGRAM
    keys, values = (
        max(1, CHANNELS_PER_PROGRAM // triton.next_power_of_2(dim))
        for dim in (layer.key_dim, layer.value_dim)
    )
    keys = min(keys, triton.next_power_of_2(2 * layer.num_key_heads))
    values = min(values, triton.next_power_of_2(layer.num_value_heads))
    parts = triton.cdiv(2 * layer.num_key_heads, keys) + triton.cdiv(layer.num_value_heads, values)
    parts += 1 if layer.decays == 1 else triton.cdiv(layer.num_value_heads, keys)
    with on_device(x):
        _inputs_kernel[(triton.cdiv(count, together), parts, num_reqs)](
            x,
            cache.inputs,
            layer.kernel,
            layer.kernel_bias,
            layer.rate,
            layer.time_bias,
            rows.slots,
            rows.starts,
            rows.counts,
            rows.first_rows,
            cache.lengths,
            *prepared,
            x.stride(0),
            columns,
            rows.max_pending,
            layer.key_dim**-0.5,
            layer.beta_scale,
            *layer.time_limits,
            KEY_HEADS=layer.num_key_heads,
            VALUE_HEADS=layer.num_value_heads,
            KEY_DIM=layer.key_dim,
            VALUE_DIM=layer.value_dim,
            TAPS=layer.taps,
            DELTA=layer.rule == "delta",
            DECAYS=layer.decays,
            KEEPS=keeps,
            ROWS=together,
            KEYS=keys,
            VALUES=values,
            num_warps=4,
            **overlap_options(x.device),
        )
    if not keeps:
        keep_last(x, layer.taps, cache, rows)
    return prepared
