"""The same as `specdec.layers.recurrence.triton_recurrence_systems` where every key channel has a
decay of its own, in Triton.

What row i has of the key of row j is a sum over key channels c of `k_ic k_jc exp(G_ic - G_jc)`,
where G sums up the logarithms of decays. As a product of matrices it needs `exp(-G_jc)`, which
grows without bound. So rows are taken in blocks of 16: a block is multiplied with those before it
by way of its own beginning, from which all exponents point down, and with itself pair by pair.
Products are float32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.triton_recurrence_rows import Layer, Prepared, Rows
from specdec.layers.recurrence.triton_recurrence_systems import (
    BLOCK,
    CHUNK,
    invert,
    max_chunks,
    places_of,
    span,
    squares,
)

NUM_WARPS = 4


@triton.jit
def _block(
    channels: tl.tensor,  # keys of the head in the first row
    gates: tl.tensor,  # its decays there
    row: tl.tensor,
    exists: tl.tensor,
    keys: tl.tensor,
    WIDTH: tl.constexpr,
    GATES: tl.constexpr,
    KEY_DIM: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Keys and the logarithms of their decays, [BLOCK, KEYS]; nothing where there is no row."""
    mask = exists[:, None] & (keys < KEY_DIM)[None, :]
    key = tl.load(channels + row[:, None] * WIDTH + keys[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    return key, tl.load(gates + row[:, None] * GATES + keys[None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["max_pending"])
def _within_kernel(
    channels: tl.tensor,  # see Prepared
    factors: tl.tensor,
    gates: tl.tensor,
    # float32 [rows, VALUE_HEADS * KEY_DIM], of the logarithms from the beginning of the chunk
    sums: tl.tensor,
    systems: tl.tensor,  # float32 [chunks, VALUE_HEADS, CHUNK, CHUNK]
    scores: tl.tensor,  # the same shape, in the model's type
    slots: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    first_rows: tl.tensor,
    lengths: tl.tensor,
    max_pending: tl.tensor,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, padded
    OVERLAP: tl.constexpr,
) -> None:
    KEY_CHANNELS: tl.constexpr = KEY_HEADS * KEY_DIM
    WIDTH: tl.constexpr = 2 * KEY_CHANNELS + VALUE_HEADS * VALUE_DIM
    GATES: tl.constexpr = VALUE_HEADS * (KEY_DIM + 1)
    BLOCKS: tl.constexpr = CHUNK // BLOCK
    chunk = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    head = tl.program_id(1)
    request = tl.program_id(2)
    await_previous(OVERLAP)
    _, total, first_row, first_chunk, lacking = span(
        slots, starts, counts, first_rows, lengths, max_pending, request
    )
    if chunk * CHUNK - lacking >= total:
        return
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    place = tl.arange(0, BLOCK)
    keys = tl.arange(0, KEYS)
    first = chunk * CHUNK - lacking
    own = first + block * BLOCK + place
    exists = (own >= 0) & (own < total)
    row = first_row + own
    queries = channels + key_head * KEY_DIM
    channels += KEY_CHANNELS + key_head * KEY_DIM
    key, log_decay = _block(
        channels, gates + head * KEY_DIM, row, exists, keys, WIDTH, GATES, KEY_DIM
    )
    query, _ = _block(queries, gates + head * KEY_DIM, row, exists, keys, WIDTH, GATES, KEY_DIM)
    query *= tl.load(factors + row * (2 * KEY_HEADS) + key_head, mask=exists, other=0.0)[:, None]
    key *= tl.load(factors + row * (2 * KEY_HEADS) + KEY_HEADS + key_head, mask=exists, other=0.0)[
        :, None
    ]
    beta = tl.load(gates + row * GATES + VALUE_HEADS * KEY_DIM + head, mask=exists, other=0.0)
    since = tl.cumsum(log_decay, 0)
    corner = (
        ((first_chunk + chunk) * VALUE_HEADS + head) * (CHUNK * CHUNK)
        + (block * BLOCK + place)[:, None] * CHUNK
        + place[None, :]
    )
    # Pair by pair, one column of the diagonal block after the other.
    system, score = tl.zeros([BLOCK, BLOCK], tl.float32), tl.zeros([BLOCK, BLOCK], tl.float32)
    for column in tl.static_range(BLOCK):
        here = (place == column)[:, None]
        other, reached = tl.sum(tl.where(here, key, 0.0), 0), tl.sum(tl.where(here, since, 0.0), 0)
        share = other[None, :] * tl.exp(tl.minimum(since - reached[None, :], 0.0))
        is_column = (place == column)[None, :]
        system += tl.where(
            is_column & (place > column)[:, None], tl.sum(key * share, 1)[:, None], 0.0
        )
        score += tl.where(
            is_column & (place >= column)[:, None], tl.sum(query * share, 1)[:, None], 0.0
        )
    tl.store(systems + corner + block * BLOCK, system * beta[:, None])
    tl.store(scores + corner + block * BLOCK, score.to(scores.dtype.element_ty))
    # Then the blocks before, backwards: decays from a row there to the beginning of this block, and
    # on to a row of it.
    query *= tl.exp(since)
    key *= tl.exp(since)
    before = tl.zeros([KEYS], tl.float32)
    for back in range(1, block + 1):
        other_block = block - back
        own = first + other_block * BLOCK + place
        exists = (own >= 0) & (own < total)
        key_there, log_decay = _block(
            channels, gates + head * KEY_DIM, first_row + own, exists, keys, WIDTH, GATES, KEY_DIM
        )
        factor = tl.load(
            factors + (first_row + own) * (2 * KEY_HEADS) + KEY_HEADS + key_head,
            mask=exists,
            other=0.0,
        )
        whole = tl.sum(log_decay, 0)
        until = tl.minimum(whole[None, :] - tl.cumsum(log_decay, 0), 0.0) + before[None, :]
        there = tl.trans(key_there * factor[:, None] * tl.exp(until))
        system = tl.dot(key, there, input_precision="ieee") * beta[:, None]
        score = tl.dot(query, there, input_precision="ieee")
        tl.store(systems + corner + other_block * BLOCK, system)
        tl.store(scores + corner + other_block * BLOCK, score.to(scores.dtype.element_ty))
        before += whole
    for later in range(block + 1, BLOCKS):
        tl.store(systems + corner + later * BLOCK, tl.zeros([BLOCK, BLOCK], tl.float32))
        tl.store(scores + corner + later * BLOCK, tl.zeros([BLOCK, BLOCK], scores.dtype.element_ty))
    is_key = (
        (row < first_row + total)[:, None] & (row >= first_row)[:, None] & (keys < KEY_DIM)[None, :]
    )
    sums_places = sums + row[:, None] * (VALUE_HEADS * KEY_DIM) + head * KEY_DIM + keys[None, :]
    tl.store(sums_places, since + before[None, :], mask=is_key)


def solve_by_key(
    prepared: Prepared, layer: Layer, cache: StateCache, rows: Rows, keys: int
) -> tuple[Tensor, Tensor, Tensor]:
    """What `specdec.layers.recurrence.triton_recurrence_systems.solve` returns, and the sums of the
    decays' logarithms.

    Args:
        prepared: as it was made; it stays so.
        layer: what it computes; its rule is "delta".

    Returns:
        Inverses and scores, and float32 [rows, value heads * K], summed up from the beginning of
        each chunk.
    """
    channels, shape = prepared.channels, squares(prepared, layer, rows)
    systems = torch.empty(shape, dtype=torch.float32, device=channels.device)
    scores = torch.empty(shape, dtype=channels.dtype, device=channels.device)
    sums = torch.empty(
        len(channels),
        layer.num_value_heads * layer.key_dim,
        dtype=torch.float32,
        device=channels.device,
    )
    with on_device(channels):
        _within_kernel[
            (
                max_chunks(rows) * (CHUNK.value // BLOCK.value),
                layer.num_value_heads,
                len(rows.slots),
            )
        ](
            *prepared,
            sums,
            systems,
            scores,
            *places_of(rows, cache),
            KEY_HEADS=layer.num_key_heads,
            VALUE_HEADS=layer.num_value_heads,
            KEY_DIM=layer.key_dim,
            VALUE_DIM=layer.value_dim,
            KEYS=keys,
            num_warps=NUM_WARPS,
            **overlap_options(channels.device),
        )
    invert(systems, layer, cache, rows)
    return systems, scores, sums
