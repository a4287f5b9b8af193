"""What the chunks of a prompt need that depends on no state, in Triton; see
`specdec.layers.recurrence.triton_recurrence_chunks`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache.state import StateCache
from specdec.layers.recurrence.triton_recurrence_rows import Layer, Prepared, Rows, pending_rows

CHUNK = tl.constexpr(64)
"""Rows."""
BLOCK = tl.constexpr(16)
"""Rows of a system that are solved one by one."""


@triton.jit
def span(
    slots: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    first_rows: tl.tensor,
    lengths: tl.tensor,
    max_pending: tl.tensor,
    request: tl.tensor,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """A request's pending rows, all its rows, the first of them in `Prepared`, its first chunk, and
    the rows that that lacks.
    """
    start = tl.load(starts + request)
    pending = pending_rows(lengths, tl.load(slots + request), start, max_pending)
    total = pending + tl.load(counts + request).to(tl.int32)
    row = tl.load(first_rows + request).to(tl.int64) + request * max_pending
    # Up to two chunks of a request are not full.
    return pending, total, row, row // CHUNK + 2 * request, ((start - pending) % CHUNK).to(tl.int32)


@triton.jit(do_not_specialize=["max_pending"])
def _within_kernel(
    channels: tl.tensor,  # see Prepared
    factors: tl.tensor,
    gates: tl.tensor,  # logarithms of decays become their sums from the beginning of the chunk
    systems: tl.tensor,  # float32 [chunks, VALUE_HEADS, CHUNK, CHUNK] or None
    scores: tl.tensor,  # that shape, the model's type: how much a later row reads of each row
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
    DELTA: tl.constexpr,
    KEYS: tl.constexpr,  # KEY_DIM, padded
    OVERLAP: tl.constexpr,
) -> None:
    KEY_CHANNELS: tl.constexpr = KEY_HEADS * KEY_DIM
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    await_previous(OVERLAP)
    _, total, first_row, first_chunk, lacking = span(
        slots, starts, counts, first_rows, lengths, max_pending, request
    )
    if chunk * CHUNK - lacking >= total:
        return
    key_head = head // (VALUE_HEADS // KEY_HEADS)
    place = tl.arange(0, CHUNK)
    row = chunk * CHUNK - lacking + place
    exists = (row >= 0) & (row < total)
    row = first_row + row
    keys = tl.arange(0, KEYS)
    is_key = exists[:, None] & (keys < KEY_DIM)[None, :]
    key_places = (
        channels
        + row[:, None] * (2 * KEY_CHANNELS + VALUE_HEADS * VALUE_DIM)
        + key_head * KEY_DIM
        + keys[None, :]
    )
    query = tl.load(key_places, mask=is_key, other=0.0)
    key = tl.load(key_places + KEY_CHANNELS, mask=is_key, other=0.0)
    decay = tl.cumsum(tl.load(gates + row * (2 * VALUE_HEADS) + head, mask=exists, other=0.0), 0)
    tl.store(gates + row * (2 * VALUE_HEADS) + head, decay, mask=exists)
    is_before = place[:, None] >= place[None, :]
    between = tl.exp(tl.where(is_before, decay[:, None] - decay[None, :], float("-inf")))
    corner = ((first_chunk + chunk) * VALUE_HEADS + head) * (CHUNK * CHUNK)
    square = place[:, None] * CHUNK + place[None, :]
    score = tl.dot(query, tl.trans(key), input_precision="ieee") * between
    if DELTA:
        query_factor = tl.load(factors + row * (2 * KEY_HEADS) + key_head, mask=exists, other=0.0)
        key_factor = tl.load(
            factors + row * (2 * KEY_HEADS) + KEY_HEADS + key_head, mask=exists, other=0.0
        )
        beta = tl.load(gates + row * (2 * VALUE_HEADS) + VALUE_HEADS + head, mask=exists, other=0.0)
        score *= query_factor[:, None] * key_factor[None, :]
        system = tl.dot(key, tl.trans(key), input_precision="ieee") * between
        system *= (beta * key_factor)[:, None] * key_factor[None, :]
        tl.store(systems + corner + square, tl.where(place[:, None] > place[None, :], system, 0.0))
    tl.store(scores + corner + square, score.to(scores.dtype.element_ty))


@triton.jit
def _inverse(below: tl.tensor) -> tl.tensor:
    """The inverse of a triangular block with ones on its diagonal, given what is below that: its
    columns are eliminated one after the other.
    """
    row = tl.arange(0, BLOCK)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    inverse = tl.where(row == column, 1.0, 0.0)
    for step in tl.static_range(BLOCK - 1):
        factor = tl.sum(tl.where(column == step, below, 0.0), 1)
        done = tl.sum(tl.where(row == step, inverse, 0.0), 0)
        inverse -= factor[:, None] * done[None, :]
    return inverse


@triton.jit
def _times(a: tl.tensor, b: tl.tensor) -> tl.tensor:
    return tl.dot(a, b, input_precision="ieee")


@triton.jit(do_not_specialize=["max_pending"])
def _invert_kernel(
    # float32 [chunks, VALUE_HEADS, CHUNK, CHUNK]: what is below the diagonal becomes the inverse
    systems: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    first_rows: tl.tensor,
    lengths: tl.tensor,
    max_pending: tl.tensor,
    VALUE_HEADS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    request = tl.program_id(2)
    await_previous(OVERLAP)
    _, total, _, first_chunk, lacking = span(
        slots, starts, counts, first_rows, lengths, max_pending, request
    )
    if chunk * CHUNK - lacking >= total:
        return
    inner = tl.arange(0, BLOCK)
    corner = (
        systems
        + ((first_chunk + chunk) * VALUE_HEADS + head) * (CHUNK * CHUNK)
        + inner[:, None] * CHUNK
        + inner[None, :]
    )
    DOWN: tl.constexpr = BLOCK * CHUNK
    one, two = _inverse(tl.load(corner)), _inverse(tl.load(corner + DOWN + BLOCK))
    three = _inverse(tl.load(corner + 2 * (DOWN + BLOCK)))
    four = _inverse(tl.load(corner + 3 * (DOWN + BLOCK)))
    below_21 = tl.load(corner + DOWN)
    below_31, below_41 = tl.load(corner + 2 * DOWN), tl.load(corner + 3 * DOWN)
    below_32, below_42 = tl.load(corner + 2 * DOWN + BLOCK), tl.load(corner + 3 * DOWN + BLOCK)
    below_43 = tl.load(corner + 3 * DOWN + 2 * BLOCK)
    two_one = -_times(two, _times(below_21, one))
    three_two = -_times(three, _times(below_32, two))
    four_three = -_times(four, _times(below_43, three))
    three_one = -_times(three, _times(below_31, one) + _times(below_32, two_one))
    four_two = -_times(four, _times(below_42, two) + _times(below_43, three_two))
    four_one = -_times(
        four, _times(below_41, one) + _times(below_42, two_one) + _times(below_43, three_one)
    )
    tl.store(corner, one)
    tl.store(corner + DOWN + BLOCK, two)
    tl.store(corner + 2 * (DOWN + BLOCK), three)
    tl.store(corner + 3 * (DOWN + BLOCK), four)
    tl.store(corner + DOWN, two_one)
    tl.store(corner + 2 * DOWN + BLOCK, three_two)
    tl.store(corner + 3 * DOWN + 2 * BLOCK, four_three)
    tl.store(corner + 2 * DOWN, three_one)
    tl.store(corner + 3 * DOWN + BLOCK, four_two)
    tl.store(corner + 3 * DOWN, four_one)


def solve(
    prepared: Prepared, layer: Layer, cache: StateCache, rows: Rows, keys: int
) -> tuple[Tensor | None, Tensor]:
    """Inverses of the triangular systems, and what later rows of a chunk read of what its rows tell
    the state.

    Args:
        prepared: whose gates become sums of the decays' logarithms from the beginning of each
            chunk.

    Returns:
        Float32 [chunks, value heads, 64, 64], None where the rule is "plain", and the same shape in
        the model's type. The chunks of request r begin at
        `(first_rows[r] + r * max_pending) // 64 + 2 * r`.
    """
    channels, delta = prepared.channels, layer.rule == "delta"
    shape = squares(prepared, layer, rows)
    systems = torch.empty(shape, dtype=torch.float32, device=channels.device) if delta else None
    scores = torch.empty(shape, dtype=channels.dtype, device=channels.device)
    with on_device(channels):
        _within_kernel[(max_chunks(rows), layer.num_value_heads, len(rows.slots))](
            *prepared,
            systems,
            scores,
            *places_of(rows, cache),
            KEY_HEADS=layer.num_key_heads,
            VALUE_HEADS=layer.num_value_heads,
            KEY_DIM=layer.key_dim,
            VALUE_DIM=layer.value_dim,
            DELTA=delta,
            KEYS=keys,
            num_warps=4,
            **overlap_options(channels.device),
        )
    if systems is not None:
        invert(systems, layer, cache, rows)
    return systems, scores


def invert(systems: Tensor, layer: Layer, cache: StateCache, rows: Rows) -> None:
    """Makes of triangular systems their inverses, in place."""
    with on_device(systems):
        _invert_kernel[(max_chunks(rows), layer.num_value_heads, len(rows.slots))](
            systems,
            *places_of(rows, cache),
            VALUE_HEADS=layer.num_value_heads,
            num_warps=1,
            **overlap_options(systems.device),
        )


def squares(prepared: Prepared, layer: Layer, rows: Rows) -> tuple[int, int, int, int]:
    """Shape of what there is for each chunk, value head and pair of rows."""
    size = CHUNK.value
    return len(prepared.channels) // size + 2 * len(rows.slots), layer.num_value_heads, size, size


def max_chunks(rows: Rows) -> int:
    """Host bound on the chunks of a request."""
    return triton.cdiv(rows.max_pending + rows.max_rows, CHUNK.value) + 1


def places_of(rows: Rows, cache: StateCache) -> tuple[Tensor | int, ...]:
    """From which kernels tell where the rows of a request lie."""
    return rows.slots, rows.starts, rows.counts, rows.first_rows, cache.lengths, rows.max_pending
