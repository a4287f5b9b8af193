"""Where texts' ends occurred before, and what followed there, in Triton: what
`drafters.suffix.matches` searches.

Programs first find the best matches of their chunk of the columns, so that even one request keeps
many processors busy; then one program per request finds the best of those. A match's length and
column are compared as one integer, so how columns are divided changes nothing. Columns are those of
the pool of past texts, and behind them those of the request's own text.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

MAX_MATCHES = 64
"""Most matches of which a program keeps what followed."""
MAX_TOKENS = 64
"""Most tokens of an end, and of a continuation."""
CHUNK = 1024
"""Columns per program, or more where there would be too many programs."""
MAX_CHUNKS = 128

_NOTHING = tl.constexpr(-1)
_BEFORE_THE_TEXT = tl.constexpr(-2)  # equal to nothing


@triton.jit
def _tokens(
    pool: tl.tensor, text: tl.tensor, column: tl.tensor, first: tl.tensor, there: tl.tensor
) -> tl.tensor:
    """What is in columns, of which the request's own text begins with `first`."""
    token = tl.load(text + (column - first), mask=there & (column >= first), other=0)
    if pool is not None:
        past = tl.load(pool + column, mask=there & (column < first), other=0)
        token = tl.where(column < first, past, token)
    return token


@triton.jit
def _highest(key: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """The COUNT highest of different keys in falling order, and -1 where there are none."""
    place = tl.arange(0, triton.next_power_of_2(COUNT))
    chosen = tl.full([triton.next_power_of_2(COUNT)], -1, tl.int32)
    highest = tl.max(key, 0)
    number = tl.zeros([], tl.int32)
    while (highest >= 0) & (number < COUNT):
        chosen = tl.where(place == number, highest, chosen)
        key = tl.where(key < highest, key, -1)
        highest = tl.max(key, 0)
        number += 1
    return chosen


@triton.jit(do_not_specialize=["first", "columns"])
def _chunk_matches_kernel(
    pool: tl.tensor,  # int32 [first], or None
    history: tl.tensor,  # int32 [slots, at least columns]
    slots: tl.tensor,  # int64 [requests]
    seq_lens: tl.tensor,  # int64 [requests]
    keys: tl.tensor,  # int32 [requests, chunks, COUNT]
    first: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    COUNT: tl.constexpr,
    COMPARED: tl.constexpr,
    SHORTEST: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    await_previous(OVERLAP)
    text = history + tl.load(slots + request) * row_stride
    last = tl.load(seq_lens + request).to(tl.int32)
    exists = column < first + last  # matches end before the text does
    matched = exists
    length = tl.zeros([CHUNK], tl.int32)
    for j in tl.static_range(COMPARED):
        # All loads are under way at once, whatever has matched so far.
        there = exists & (column >= j)
        wanted = tl.load(text + (last - j), mask=last >= j, other=_BEFORE_THE_TEXT)
        matched = matched & there & (_tokens(pool, text, column - j, first, there) == wanted)
        length += matched.to(tl.int32)
    key = _highest(tl.where(length >= SHORTEST, length * (first + columns) + column, -1), COUNT)
    place = tl.arange(0, triton.next_power_of_2(COUNT))
    tl.store(
        keys + (request * tl.num_programs(1) + tl.program_id(1)) * COUNT + place,
        key,
        mask=place < COUNT,
    )


@triton.jit(do_not_specialize=["first", "columns", "num_keys"])
def _best_matches_kernel(
    pool: tl.tensor,  # these and the next three as in `_chunk_matches_kernel`
    history: tl.tensor,
    slots: tl.tensor,
    seq_lens: tl.tensor,
    keys: tl.tensor,  # int32 [requests, num_keys]
    continuations: tl.tensor,  # int64 [requests, COUNT, DEPTH]
    lengths: tl.tensor,  # int64 [requests, COUNT]
    first: tl.tensor,
    columns: tl.tensor,
    row_stride: tl.tensor,
    num_keys: tl.tensor,
    COUNT: tl.constexpr,
    COMPARED: tl.constexpr,
    LONGEST: tl.constexpr,
    DEPTH: tl.constexpr,
    KEYS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, triton.next_power_of_2(COUNT))
    step = tl.arange(0, triton.next_power_of_2(DEPTH))[None, :]
    entry = tl.arange(0, KEYS)
    width = first + columns
    await_previous(OVERLAP)
    text = history + tl.load(slots + request) * row_stride
    last = tl.load(seq_lens + request).to(tl.int32)
    key = _highest(
        tl.load(keys + request * num_keys + entry, mask=entry < num_keys, other=-1), COUNT
    )
    found = key >= 0
    length = tl.where(found, key // width, 0)
    # without a match the text's last token follows
    end = tl.where(found, key % width, first + last - 1)
    if LONGEST > COMPARED:
        more = COMPARED + tl.arange(0, triton.next_power_of_2(LONGEST - COMPARED))
        wanted = tl.load(
            text + (last - more), mask=(more < LONGEST) & (more <= last), other=_BEFORE_THE_TEXT
        )[None, :]
        more = more[None, :]
        there = (length == COMPARED)[:, None] & (more < LONGEST) & (more <= end[:, None])
        agrees = there & (_tokens(pool, text, end[:, None] - more, first, there) == wanted)
        length = tl.where(length == COMPARED, tl.min(tl.where(agrees, LONGEST, more), 1), length)
    # An overlapping copy goes on from its start; a past text ends before that.
    place = end[:, None] + 1 + step % tl.maximum(first + last - end, 1)[:, None]
    there = (number < COUNT)[:, None] & (step < DEPTH)
    token = _tokens(pool, text, tl.minimum(place, width - 1), first, there)
    if pool is not None:
        token = tl.where(
            step < tl.min(tl.where(token < 0, step, DEPTH), 1)[:, None], token, _NOTHING
        )
    continuations += request * (COUNT * DEPTH)
    tl.store(continuations + (number[:, None] * DEPTH + step), token.to(tl.int64), mask=there)
    tl.store(lengths + request * COUNT + number, length.to(tl.int64), mask=number < COUNT)


def warps_for(chunk: int) -> int:
    """Warps of a chunk's program, so that no thread has too many columns at once."""
    return max(1, min(16, chunk // 256))


def search(
    pool: Tensor | None,
    history: Tensor,
    slots: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    count: int,
    longest: int,
    compared: int,
    shortest: int,
    depth: int,
) -> tuple[Tensor, Tensor]:
    """See `drafters.suffix.matches.search`; these are its `Texts` and `Limits`."""
    device, num_reqs = history.device, len(slots)
    assert (
        history.dtype == torch.int32
        and history.stride(1) == 1
        and slots.is_contiguous()
        and seq_lens.is_contiguous()
    )
    assert pool is None or (pool.dtype == torch.int32 and pool.is_contiguous())
    assert (
        1 <= shortest <= compared <= longest <= MAX_TOKENS
        and 1 <= depth <= MAX_TOKENS
        and 1 <= count <= MAX_MATCHES
    )
    first = 0 if pool is None else len(pool)
    columns, most = min(max_seq_len, history.shape[1]), first + history.shape[1]
    assert (compared + 1) * most < 2**31
    # Of all columns that there are, so that a text that grows asks for no other kernels.
    chunk = max(CHUNK, triton.next_power_of_2(triton.cdiv(most, MAX_CHUNKS)))
    chunks = triton.cdiv(first + columns, chunk)
    keys = torch.empty(num_reqs, chunks, count, dtype=torch.int32, device=device)
    continuations = torch.empty(num_reqs, count, depth, dtype=torch.int64, device=device)
    lengths = torch.empty(num_reqs, count, dtype=torch.int64, device=device)
    texts, sizes = (pool, history, slots, seq_lens, keys), (first, columns, history.stride(0))
    options = {"COUNT": count, "COMPARED": compared, **overlap_options(device)}
    with on_device(history):
        _chunk_matches_kernel[(num_reqs, chunks)](
            *texts, *sizes, SHORTEST=shortest, CHUNK=chunk, num_warps=warps_for(chunk), **options
        )
        max_keys = triton.next_power_of_2(triton.cdiv(most, chunk) * count)
        _best_matches_kernel[(num_reqs,)](
            *texts,
            continuations,
            lengths,
            *sizes,
            chunks * count,
            LONGEST=longest,
            DEPTH=depth,
            KEYS=max_keys,
            num_warps=8,
            **options,
        )
    return continuations, lengths
