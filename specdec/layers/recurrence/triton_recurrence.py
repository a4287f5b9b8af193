"""Recurrent layers in Triton: a state per value head that takes in one row after the other, as in
Gated DeltaNet and Mamba-2.

A decay is one number per row and value head, or one for each key channel (Kimi Delta Attention),
that is for each row of the state.

A step reads and writes each state once, however many drafts it has: rows that were accepted since
the state was written are taken in again first, and the state is written before the rows that may
yet be rejected. One loop serves both, so a row has the same bits whether it is new or taken in
again. Programs share nothing, and their shape depends on the layer alone, so a request has the same
bits alone and among others.

    launch 1    convolution, norms, gates    one program per row and heads
                (specdec.layers.recurrence.triton_recurrence_inputs)
    launch 2    states and outputs           one program per request, value head and some columns

Prompts are taken in by chunks (specdec.layers.recurrence.triton_recurrence_chunks).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.triton_recurrence_chunks import take_in_chunks
from specdec.layers.recurrence.triton_recurrence_inputs import prepare
from specdec.layers.recurrence.triton_recurrence_rows import Layer, Prepared, Rows, pending_rows

MAX_SERIAL = 64
"""Rows of a request that are taken in one by one; more of a prompt are taken in by chunks."""


class Tile(NamedTuple):
    """Part of a state that a program has."""

    columns: int  # of values: a power of two
    # of which more than one divide the keys among them, and then wait for each other in every row
    num_warps: int


TILES: dict[tuple[int, int], Tile] = {(128, 128): Tile(32, 2), (128, 64): Tile(16, 1)}
"""By key and value size. The batch must not choose: sums over keys are ordered by the tile. Columns
of 128 bytes are read at the speed of the memory where there are many requests; with fewer columns
the rows of few requests take a little less.
"""


def tile_for(key_dim: int, value_dim: int) -> Tile:
    """What a program of `recur` has: 64 numbers per thread of one warp, unless a measurement says
    otherwise.

    >>> tile_for(128, 128), tile_for(16, 8)
    (Tile(columns=32, num_warps=2), Tile(columns=8, num_warps=1))
    """
    columns = max(8, 2048 // triton.next_power_of_2(key_dim))
    return TILES.get((key_dim, value_dim), Tile(min(columns, triton.next_power_of_2(value_dim)), 1))


@triton.jit
def _row(
    channels: tl.tensor,
    factors: tl.tensor,
    gates: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    exists: tl.tensor,  # the row does
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    DECAYS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Query, key, value, their factors, the logarithm of decays, one or as many as keys, and beta
    of a row.
    """
    KEY_CHANNELS: tl.constexpr = KEY_HEADS * KEY_DIM
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    channels += row * (2 * KEY_CHANNELS + VALUE_HEADS * VALUE_DIM)
    is_key = exists & (keys < KEY_DIM)
    query = tl.load(channels + key_head * KEY_DIM + keys, mask=is_key, other=0.0)
    key = tl.load(channels + KEY_CHANNELS + key_head * KEY_DIM + keys, mask=is_key, other=0.0)
    value = tl.load(
        channels + 2 * KEY_CHANNELS + head * VALUE_DIM + values,
        mask=exists & (values < VALUE_DIM),
        other=0.0,
    )
    gates += row * ((DECAYS + 1) * VALUE_HEADS)
    if DECAYS == 1:
        decay = tl.load(gates + head, mask=exists, other=0.0)
    else:
        decay = tl.load(gates + head * KEY_DIM + keys, mask=is_key, other=0.0)
    beta = tl.load(gates + DECAYS * VALUE_HEADS + head, mask=exists, other=0.0)
    query_factor, key_factor = 1.0, 1.0
    if DELTA:
        query_factor = tl.load(factors + row * (2 * KEY_HEADS) + key_head, mask=exists, other=0.0)
        key_factor = tl.load(
            factors + row * (2 * KEY_HEADS) + KEY_HEADS + key_head, mask=exists, other=0.0
        )
    return query, key, value, query_factor, key_factor, decay, beta


@triton.jit(do_not_specialize=["max_pending"])
def _serial_kernel(
    channels: tl.tensor,  # see Prepared
    factors: tl.tensor,
    gates: tl.tensor,
    state: tl.tensor,  # [num_slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    skip: tl.tensor,  # [VALUE_HEADS] or None
    slots: tl.tensor,  # int64 [num_reqs]
    starts: tl.tensor,  # int64 [num_reqs]
    counts: tl.tensor,  # int64 [num_reqs]
    first_rows: tl.tensor,  # int32 [num_reqs + 1]
    lengths: tl.tensor,  # int64 [num_slots]
    output: tl.tensor,  # [T, VALUE_HEADS, VALUE_DIM]
    max_pending: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    DECAYS: tl.constexpr,  # of a value head: 1, or KEY_DIM
    FINAL: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    head = tl.program_id(1)
    request = tl.program_id(2)
    keys = tl.arange(0, triton.next_power_of_2(KEY_DIM))
    values = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    # The launch before has waited for all before it and writes none of these, so they need not wait
    # for that one.
    slot, start = tl.load(slots + request), tl.load(starts + request)
    pending = pending_rows(lengths, slot, start, max_pending)
    count = tl.load(counts + request).to(tl.int32)
    first_row = tl.load(first_rows + request).to(tl.int64)
    padded = (tl.load(first_rows + request + 1) - first_row).to(tl.int32)
    places = (
        state
        + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
        + keys[:, None] * VALUE_DIM
        + values[None, :]
    )
    exists = (keys < KEY_DIM)[:, None] & (values < VALUE_DIM)[None, :]
    # a sequence begins with nothing, whatever lies there
    held = tl.load(places, mask=exists & (start > 0), other=0.0)
    skipped = 0.0
    if skip is not None:
        skipped = tl.load(skip + head).to(tl.float32)
    await_previous(OVERLAP)
    in_row = first_row + request * max_pending
    output += first_row * (VALUE_HEADS * VALUE_DIM) + head * VALUE_DIM + values
    total = pending + count
    query, key, value, query_factor, key_factor, decay, beta = _row(
        channels,
        factors,
        gates,
        in_row,
        head,
        keys,
        values,
        total > 0,
        KEY_HEADS,
        VALUE_HEADS,
        KEY_DIM,
        VALUE_DIM,
        DELTA,
        DECAYS,
    )
    for row in range(total):
        wide_query = query.to(tl.float32) * query_factor
        wide_key = key.to(tl.float32) * key_factor
        wide_value, scale, strength = value.to(tl.float32), tl.exp(decay), beta
        # The next row is on its way while this one is taken in.
        query, key, value, query_factor, key_factor, decay, beta = _row(
            channels, factors, gates, in_row + row + 1, head, keys, values, row + 1 < total,
            KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, DELTA, DECAYS,
        )  # fmt: skip
        if not FINAL:  # without pending rows it lies there already, unless the sequence begins
            last = (row == pending) & ((pending > 0) | (start == 0))
            if last:
                tl.store(places, held, mask=exists)
        held *= scale if DECAYS == 1 else scale[:, None]
        v_new = wide_value
        if DELTA:
            v_new -= tl.sum(held * wide_key[:, None], 0)
        held += wide_key[:, None] * (v_new * strength)[None, :]
        out = tl.sum(held * wide_query[:, None], 0)
        if skip is not None:
            out += skipped * wide_value
        place = output + (row - pending).to(tl.int64) * (VALUE_HEADS * VALUE_DIM)
        tl.store(
            place, out.to(output.dtype.element_ty), mask=(values < VALUE_DIM) & (row >= pending)
        )
    if FINAL:
        tl.store(places, held, mask=exists)
    else:
        if count == 0:
            tl.store(places, held, mask=exists)
    output += count.to(tl.int64) * (VALUE_HEADS * VALUE_DIM)
    for _ in range(count, padded):
        tl.store(output, tl.zeros([COLUMNS], output.dtype.element_ty), mask=values < VALUE_DIM)
        output += VALUE_HEADS * VALUE_DIM


def recur(x: Tensor, recurrence: Layer, cache: StateCache, rows: Rows) -> Tensor:
    """Runs rows through one recurrent layer, as `specdec.layers.recurrence.recurrence.recur` does;
    can be captured in a graph.

    The rules are Gated DeltaNet's (arXiv 2412.06464), that with a decay per key channel (arXiv
    2510.26692) and Mamba-2's (arXiv 2405.21060). All arithmetic of states is float32.
    Requests that only pad a batch name the padding slot and start at 0; rows that only pad are
    zeros.
    """
    prepared = prepare(x, recurrence, cache, rows)
    output = torch.empty(
        len(x), recurrence.num_value_heads * recurrence.value_dim, dtype=x.dtype, device=x.device
    )
    take = take_in_chunks if rows.final and rows.max_rows > MAX_SERIAL else take_serially
    take(prepared, recurrence, cache, rows, output)
    return output


def take_serially(
    prepared: Prepared, layer: Layer, cache: StateCache, rows: Rows, output: Tensor
) -> None:
    """States take in row after row; writes `output` [T, value heads * V]."""
    tile = tile_for(layer.key_dim, layer.value_dim)
    with on_device(output):
        _serial_kernel[
            (triton.cdiv(layer.value_dim, tile.columns), layer.num_value_heads, len(rows.slots))
        ](
            *prepared,
            cache.state,
            layer.skip,
            rows.slots,
            rows.starts,
            rows.counts,
            rows.first_rows,
            cache.lengths,
            output,
            rows.max_pending,
            KEY_HEADS=layer.num_key_heads,
            VALUE_HEADS=layer.num_value_heads,
            KEY_DIM=layer.key_dim,
            VALUE_DIM=layer.value_dim,
            DELTA=layer.rule == "delta",
            DECAYS=layer.decays,
            FINAL=rows.final,
            COLUMNS=tile.columns,
            num_warps=tile.num_warps,
            **overlap_options(output.device),
        )
