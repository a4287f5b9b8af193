"""Sorting pairs of rows and experts by expert, in Triton: for many rows' products by expert.

A pair is a row and one of its experts, numbered row by row. Each expert's pairs are put one behind
the other in the order of their numbers and padded to blocks, each of which is one expert's. Shapes
depend on how many rows there are, not on what they chose, so the host does not wait: room is made
for the most blocks there can be, and those that are not needed are marked.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

MAX_CHUNKS = 64
"""Parts in which pairs are counted; every program that sorts reads all counts."""
MAX_SHARES = 16
"""Parts in which an expert's pairs are looked for."""
TILE = 1024
"""Pairs that a program looks at together."""


class Groups(NamedTuple):
    """Pairs by expert, in blocks of equally many places.

    Attributes:
        pairs: int32 [num_blocks, block_rows]: the pair in each place; where there is none, the
            number of pairs.
        experts: int32 [num_blocks]: whose pairs these are; -1 of a block that is not needed, whose
            places hold nothing.
    """

    pairs: Tensor
    experts: Tensor


@triton.jit(do_not_specialize=["num_pairs"])
def _count_kernel(
    ids: tl.tensor,  # int32 [num_pairs]
    counts: tl.tensor,  # int32 [chunks, BINS]
    num_pairs: tl.tensor,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BINS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    chunk = tl.program_id(0)
    total = tl.zeros([BINS], tl.int32)
    await_previous(OVERLAP)
    for start in range(0, CHUNK, TILE):
        pair = chunk * CHUNK + start + tl.arange(0, TILE)
        total += tl.histogram(tl.load(ids + pair, mask=pair < num_pairs, other=0), BINS)
    # which were counted as the first expert's
    missing = tl.maximum((chunk + 1) * CHUNK - num_pairs, 0)
    total -= tl.where(tl.arange(0, BINS) == 0, missing, 0)
    tl.store(counts + chunk * BINS + tl.arange(0, BINS), total)


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def _place_kernel(
    ids: tl.tensor,  # int32 [num_pairs]
    counts: tl.tensor,  # int32 [CHUNKS, BINS]
    pairs: tl.tensor,  # int32 [num_blocks, ROWS]
    experts: tl.tensor,  # int32 [num_blocks]
    num_pairs: tl.tensor,
    num_blocks: tl.tensor,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
    TOGETHER: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    expert = tl.program_id(0)
    chunk = tl.program_id(1) * TOGETHER
    lane = tl.arange(0, TILE)
    part = tl.arange(0, triton.next_power_of_2(CHUNKS))[:, None]
    other = tl.arange(0, BINS)[None, :]
    await_previous(OVERLAP)
    count = tl.load(counts + part * BINS + other, mask=(part < CHUNKS) & (other < EXPERTS), other=0)
    own = tl.where(other == expert, count, 0)
    before = tl.sum(tl.sum(tl.where(part < chunk, own, 0), 1), 0)
    total = tl.sum(tl.sum(own, 1), 0)
    blocks = tl.cdiv(tl.sum(count, 0, keep_dims=True), ROWS)  # [1, BINS]
    first = tl.sum(tl.sum(tl.where(other < expert, blocks, 0), 1), 0)
    last = first + tl.cdiv(total, ROWS)
    place = pairs + first * ROWS + before
    for start in range(0, TOGETHER * CHUNK, TILE):
        pair = chunk * CHUNK + start + lane
        mine = (tl.load(ids + pair, mask=pair < num_pairs, other=-1) == expert).to(tl.int32)
        tl.store(place + tl.cumsum(mine, 0) - 1, pair, mask=mine > 0)
        place += tl.sum(mine, 0)
    if chunk == 0:
        padding = first * ROWS + total + tl.arange(0, ROWS)
        tl.store(pairs + padding, num_pairs, mask=padding < last * ROWS)
        for start in range(first, last, TILE):
            tl.store(experts + start + lane, expert, mask=start + lane < last)
        if expert == EXPERTS - 1:
            for start in range(last, num_blocks, TILE):
                tl.store(experts + start + lane, -1, mask=start + lane < num_blocks)


def max_blocks(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Blocks that suffice whatever is chosen: each expert hit may leave a last block nearly empty.

    >>> max_blocks(8, 128, 16), max_blocks(256, 32, 16), max_blocks(262144, 128, 128)
    (8, 46, 2175)
    """
    return (num_pairs + min(num_pairs, num_experts) * (block_rows - 1)) // block_rows


def group_by_expert(ids: Tensor, num_experts: int, block_rows: int) -> Groups:
    """Sorts the pairs of `ids`, int32 [rows, top_k] and contiguous, into blocks of `block_rows`
    places, a power of two.
    """
    assert ids.dtype == torch.int32 and ids.is_contiguous()
    num_pairs = ids.numel()
    num_blocks = max_blocks(num_pairs, num_experts, block_rows)
    chunk = max(TILE, triton.next_power_of_2(triton.cdiv(num_pairs, MAX_CHUNKS)))
    chunks = triton.cdiv(num_pairs, chunk)
    together = triton.cdiv(chunks, MAX_SHARES)
    bins = triton.next_power_of_2(num_experts)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    groups = Groups(counts.new_empty(num_blocks, block_rows), counts.new_empty(num_blocks))
    sizes = {"BINS": bins, "CHUNK": chunk, "TILE": TILE, "num_warps": 4}
    sizes |= overlap_options(ids.device)
    with on_device(ids):
        _count_kernel[(chunks,)](ids, counts, num_pairs, **sizes)
        _place_kernel[(num_experts, triton.cdiv(chunks, together))](
            ids,
            counts,
            *groups,
            num_pairs,
            num_blocks,
            EXPERTS=num_experts,
            CHUNKS=chunks,
            TOGETHER=together,
            ROWS=block_rows,
            **sizes,
        )
    return groups
