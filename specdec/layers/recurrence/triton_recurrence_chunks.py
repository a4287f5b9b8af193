"""Prompts of recurrent layers in Triton: a state takes in some rows at once, by matrix products
(arXiv 2412.06464, section 3.3).

What row i tells the state is `u_i = beta_i (v_i - S^T k_i)`, where S holds what the rows before it
have told. Within a chunk that is a triangular system, whose matrix does not depend on values nor on
the state the chunk begins with. So all matrices are inverted beforehand, side by side, and only the
products with the state remain for the walk from chunk to chunk:

    launch 1    decays within a chunk, K K^T, Q K^T    one program per chunk and value head
    launch 2    inverses, in blocks of 16 rows         the same; the delta rule alone
    launch 3    states and outputs                     one program per request, value head and some
                                                       of its columns

Launches 1 and 2 are in specdec.layers.recurrence.triton_recurrence_systems, and for decays of key
channels (arXiv 2510.26692) launch 1 is in specdec.layers.recurrence.triton_recurrence_key_systems.
Chunks end at multiples of their size in the sequence, not in the forward. So a prompt has the same
bits whether it comes whole or in pieces of whole chunks. Sums are float32, and the triangular
systems are solved in float32. In half precision a float32 operand of another product counts as the
sum of two numbers of the model's type.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import (
    HOPPER_SHARED_MEMORY,
    on_device,
    overlap_options,
    shared_memory,
)
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.triton_recurrence_key_systems import solve_by_key
from specdec.layers.recurrence.triton_recurrence_rows import Layer, Prepared, Rows
from specdec.layers.recurrence.triton_recurrence_systems import CHUNK, solve, span


class Tile(NamedTuple):
    """How the walk over chunks is divided and compiled."""

    columns: int  # of values: a power of two from 16
    num_warps: int
    num_stages: int  # chunks under way at once, see `stages_for`
    # float32 operands count as two numbers in the model's type, instead of being rounded to one
    split: bool


TILE = Tile(32, 4, 2, True)
KEY_TILE = Tile(16, 4, 2, True)
"""Where each key channel has a decay; of more columns registers would spill on CDNA. Never
measured.
"""


def stages_for(memory: int) -> int:
    """Chunks under way at once: more than one where there is as much shared memory as on Hopper. On
    CDNA registers would spill.
    """
    return TILE.num_stages if memory >= HOPPER_SHARED_MEMORY else 1


@triton.jit
def _product(exact: tl.tensor, wide: tl.tensor, SPLIT: tl.constexpr) -> tl.tensor:
    """Numbers in the model's type times float32 ones."""
    high = wide.to(exact.dtype)
    result = tl.dot(exact, high, input_precision="ieee")
    if SPLIT:
        result = tl.dot(
            exact, (wide - high.to(tl.float32)).to(exact.dtype), result, input_precision="ieee"
        )
    return result


@triton.jit
def _wide_product(
    a: tl.tensor, b: tl.tensor, dtype: tl.constexpr, SPLIT: tl.constexpr
) -> tl.tensor:
    """The product of float32 numbers, by way of products in the model's type."""
    high = a.to(dtype)
    result = _product(high, b, SPLIT)
    if SPLIT:
        result = tl.dot(
            (a - high.to(tl.float32)).to(dtype), b.to(dtype), result, input_precision="ieee"
        )
    return result


@triton.jit(do_not_specialize=["max_pending"])
def _walk_kernel(
    channels: tl.tensor,  # see Prepared
    factors: tl.tensor,
    gates: tl.tensor,
    inverses: tl.tensor,  # float32 [chunks, VALUE_HEADS, CHUNK, CHUNK] or None
    scores: tl.tensor,
    # float32 [rows, VALUE_HEADS * KEY_DIM] where each key channel has a decay, or None: see `gates`
    sums: tl.tensor,
    state: tl.tensor,  # [num_slots, VALUE_HEADS, KEY_DIM, VALUE_DIM]
    skip: tl.tensor,  # [VALUE_HEADS] or None
    slots: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    first_rows: tl.tensor,
    lengths: tl.tensor,
    output: tl.tensor,  # [T, VALUE_HEADS, VALUE_DIM]
    max_pending: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DELTA: tl.constexpr,
    KEYS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLIT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    KEY_CHANNELS: tl.constexpr = KEY_HEADS * KEY_DIM
    DECAYS: tl.constexpr = 1 if sums is None else KEY_DIM
    head = tl.program_id(1)
    request = tl.program_id(2)
    await_previous(OVERLAP)
    pending, total, first_row, first_chunk, lacking = span(
        slots, starts, counts, first_rows, lengths, max_pending, request
    )
    dtype = channels.dtype.element_ty
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    place = tl.arange(0, CHUNK)
    keys = tl.arange(0, KEYS)
    values = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_value = (values < VALUE_DIM)[None, :]
    places = tl.load(slots + request) * VALUE_HEADS + head
    places = state + places * (KEY_DIM * VALUE_DIM) + keys[:, None] * VALUE_DIM + values[None, :]
    in_state = (keys < KEY_DIM)[:, None] & is_value
    held = tl.load(places, mask=in_state & (tl.load(starts + request) > 0), other=0.0)
    square = place[:, None] * CHUNK + place[None, :]
    out_row = tl.load(first_rows + request).to(tl.int64) - pending
    output += head * VALUE_DIM + values[None, :]
    for chunk in range(tl.cdiv(total + lacking, CHUNK)):
        own = place - lacking + chunk * CHUNK
        exists = (own >= 0) & (own < total)
        row = first_row + own
        line = channels + row[:, None] * (2 * KEY_CHANNELS + VALUE_HEADS * VALUE_DIM)
        is_key = exists[:, None] & (keys < KEY_DIM)[None, :]
        query = tl.load(line + key_head * KEY_DIM + keys[None, :], mask=is_key, other=0.0)
        key = tl.load(
            line + KEY_CHANNELS + key_head * KEY_DIM + keys[None, :], mask=is_key, other=0.0
        )
        value_places = line + 2 * KEY_CHANNELS + head * VALUE_DIM + values[None, :]
        value = tl.load(value_places, mask=exists[:, None] & is_value, other=0.0).to(tl.float32)
        corner = ((first_chunk + chunk) * VALUE_HEADS + head) * (CHUNK * CHUNK)
        score = tl.load(scores + corner + square)
        beta = tl.load(
            gates + row * ((DECAYS + 1) * VALUE_HEADS) + DECAYS * VALUE_HEADS + head,
            mask=exists,
            other=0.0,
        )
        # Decays since the chunk began, and from each row to its end; rows that do not exist decay
        # nothing.
        end = tl.minimum(total, -lacking + (chunk + 1) * CHUNK)
        if sums is None:
            log_end = tl.load(gates + (first_row + end - 1) * (2 * VALUE_HEADS) + head)
            log_decay = tl.load(gates + row * (2 * VALUE_HEADS) + head, mask=exists, other=0.0)
            since, until = tl.exp(log_decay), tl.exp(tl.minimum(log_end - log_decay, 0.0))
        else:
            decays = sums + head * KEY_DIM + keys
            log_end = tl.load(
                decays + (first_row + end - 1) * (VALUE_HEADS * KEY_DIM),
                mask=keys < KEY_DIM,
                other=0.0,
            )[None, :]
            log_decay = tl.load(
                decays[None, :] + row[:, None] * (VALUE_HEADS * KEY_DIM), mask=is_key, other=0.0
            )
            since, until = tl.exp(log_decay), tl.exp(tl.minimum(log_end - log_decay, 0.0))
        reads = since
        v_new = value
        if DELTA:
            query_factor = tl.load(
                factors + row * (2 * KEY_HEADS) + key_head, mask=exists, other=0.0
            )
            key_factor = tl.load(
                factors + row * (2 * KEY_HEADS) + KEY_HEADS + key_head, mask=exists, other=0.0
            )
            inverse = tl.load(inverses + corner + square)
            if sums is None:
                v_new -= _product(key, held, SPLIT) * (since * key_factor)[:, None]
            else:
                v_new -= _wide_product(key * since * key_factor[:, None], held, dtype, SPLIT)
            v_new *= beta[:, None]
            v_new = _wide_product(inverse, v_new, dtype, SPLIT)
            reads *= query_factor if sums is None else query_factor[:, None]
            until *= key_factor if sums is None else key_factor[:, None]
        else:
            v_new *= beta[:, None]
        if sums is None:
            out = _product(query, held, SPLIT) * reads[:, None] + _product(score, v_new, SPLIT)
        else:
            out = _wide_product(query * reads, held, dtype, SPLIT) + _product(score, v_new, SPLIT)
        if skip is not None:
            out += tl.load(skip + head).to(tl.float32) * value
        if sums is None:
            held = held * tl.exp(log_end) + _product(tl.trans(key), v_new * until[:, None], SPLIT)
        else:
            held = held * tl.trans(tl.exp(log_end)) + _wide_product(
                tl.trans(key * until), v_new, dtype, SPLIT
            )
        is_new = exists & (own >= pending)
        out_places = output + (out_row + own)[:, None] * (VALUE_HEADS * VALUE_DIM)
        tl.store(out_places, out.to(output.dtype.element_ty), mask=is_new[:, None] & is_value)
    tl.store(places, held, mask=in_state)
    padded = (tl.load(first_rows + request + 1) - out_row).to(tl.int32)
    for begin in range(total, padded, CHUNK):
        own = begin + place
        out_places = output + (out_row + own)[:, None] * (VALUE_HEADS * VALUE_DIM)
        zeros = tl.zeros([CHUNK, COLUMNS], output.dtype.element_ty)
        tl.store(out_places, zeros, mask=(own < padded)[:, None] & is_value)


def take_in_chunks(
    prepared: Prepared, layer: Layer, cache: StateCache, rows: Rows, output: Tensor
) -> None:
    """States take in all rows; writes `output` [T, value heads * V].

    The gates of `prepared` are sums from the beginning of each chunk afterwards, unless decays are
    those of key channels.
    """
    assert rows.final, "a state after a chunk is all that there is"
    device, keys = output.device, max(16, triton.next_power_of_2(layer.key_dim))
    tile, sums = TILE if layer.decays == 1 else KEY_TILE, None
    columns = min(tile.columns, max(16, triton.next_power_of_2(layer.value_dim)))
    if layer.decays == 1:
        inverses, scores = solve(prepared, layer, cache, rows, keys)
    else:
        inverses, scores, sums = solve_by_key(prepared, layer, cache, rows, keys)
    with on_device(output):
        _walk_kernel[
            (triton.cdiv(layer.value_dim, columns), layer.num_value_heads, len(rows.slots))
        ](
            *prepared,
            inverses,
            scores,
            sums,
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
            KEYS=keys,
            COLUMNS=columns,
            SPLIT=tile.split and output.dtype != torch.float32,
            num_warps=tile.num_warps,
            num_stages=stages_for(shared_memory(device)),
            **overlap_options(device),
        )
