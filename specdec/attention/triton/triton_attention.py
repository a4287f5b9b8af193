"""Paged attention in Triton: one kernel for every phase of decoding.

A program holds the queries of all heads that share a key head, for a few consecutive rows of one
request, and walks over the keys they see; so keys are read once per key head, and 5 rows of 3 heads
fill 15 of the 16 rows a matrix instruction takes:

    tile rows     r0h0 r0h1 r0h2 r1h0 r1h1 r1h2 ... r4h2  -

With few programs and a long context the keys are divided among `splits` programs, each of which
leaves a partial output and the logarithm of its softmax denominator (as in Flash-Decoding);
`triton_splits` merges them. The division follows the lengths on the device, and the grid depends on
host bounds alone, so a captured graph stays right for any lengths below its bound.

A row of a draft tree has a word with a bit for each draft that it sees. As parents come before
their children, it sees no key that its row would not see in a chain.

The online softmax is FlashAttention's (arXiv 2205.14135), in base 2 with float32 accumulation. No
instruction is tied to a vendor, but for a guarded one.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.triton.triton_splits import merge_splits
from specdec.kernels.triton_launch import (
    HOPPER_SHARED_MEMORY,
    num_stages,
    on_device,
    overlap_options,
    shared_memory,
)
from specdec.kernels.triton_overlap import await_previous, release_next
from specdec.kv_cache import LayerCache

LOG2E = tl.constexpr(1.4426950408889634)
MAX_TILE_ROWS = 128
"""Most rows (heads of a group times query rows) of one program."""
MANY_TILE_ROWS = 512
"""Such rows of a request from which on a program has so many. With fewer it has half of them, as a
processor then has two programs: trees of 8 requests take two thirds of the time on an H100."""
KEY_TILE_BYTES = 16384
"""Keys that one iteration loads; as many values come with them."""
FEW_ROWS = 640
"""Rows of one head up to which the kernel behind is set up meanwhile, see `release_next`."""
MAX_PER_WARPS = 64 * 256
"""Numbers of an output that four warps hold."""


class Tile(NamedTuple):
    """Shape of one program's work, and how it is compiled."""

    block_m: int  # rows: a power of two from 16
    block_n: int  # keys per iteration
    num_warps: int
    num_stages: int


@triton.jit
def _attention_kernel(
    query: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache: tl.tensor,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache: tl.tensor,  # the same
    output: tl.tensor,  # [num_tokens, num_heads, SPLITS, HEAD_DIM]
    log_sums: tl.tensor,  # float32 [num_tokens, num_heads, SPLITS], base 2; unused without splits
    block_table: tl.tensor,  # int32 [num_reqs, max_blocks]
    seq_lens: tl.tensor,  # int32 [num_reqs]
    query_start_loc: tl.tensor,  # int32 [num_reqs + 1]
    sinks: tl.tensor,  # [num_heads] or None
    ancestors: tl.tensor,  # int64 [num_tokens] or None
    depths: tl.tensor,  # the same
    score_scale: tl.tensor,
    softcap: tl.tensor,
    num_tiles: tl.tensor,
    num_heads: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    CAUSAL: tl.constexpr,  # with `ancestors`, too
    WINDOW: tl.constexpr,  # tokens, or None
    SOFTCAP: tl.constexpr,  # whether there is one
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FEW: tl.constexpr,  # whether there are so few rows that programs that wait take no room
    OVERLAP: tl.constexpr,
) -> None:
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP
    await_previous(OVERLAP)
    if FEW:
        release_next(OVERLAP)
    request = tl.program_id(0) // num_tiles
    tile_row = tl.program_id(0) % num_tiles * TILE_ROWS
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    request_start = tl.load(query_start_loc + request)
    query_len = tl.load(query_start_loc + request + 1) - request_start
    if tile_row >= query_len:
        return
    seq_len = tl.load(seq_lens + request)

    lane = tl.arange(0, BLOCK_M)
    row = tile_row + lane // GROUP  # within the request
    head = kv_head * GROUP + lane % GROUP
    real = (lane < TILE_ROWS * GROUP) & (row < query_len)
    position = seq_len - query_len + row
    token = (request_start + row).to(tl.int64)
    if ancestors is not None:
        word = tl.load(ancestors + token, mask=real, other=0)
        low, high = word.to(tl.int32), (word >> 32).to(tl.int32)
        position = seq_len - query_len + tl.load(depths + token, mask=real, other=0).to(tl.int32)
    dim = tl.arange(0, BLOCK_D)
    in_head = dim < HEAD_DIM
    q = tl.load(
        query
        + token[:, None] * query_row_stride
        + head[:, None] * query_head_stride
        + dim[None, :],
        mask=real[:, None] & in_head[None, :],
        other=0.0,
    )

    # Keys that any row of the tile sees, divided evenly among the splits.
    first = seq_len - query_len + tile_row
    last = tl.minimum(first + TILE_ROWS, seq_len) - 1
    begin = 0
    end = last + 1 if CAUSAL else seq_len
    if WINDOW is not None:
        if ancestors is not None:
            first = seq_len - query_len  # where no row stands before
        begin = tl.maximum(first - WINDOW + 1, 0)
        end = tl.minimum(last + WINDOW, end)
    per_split = (end - begin + SPLITS * BLOCK_N - 1) // (SPLITS * BLOCK_N) * BLOCK_N
    begin += split * per_split
    end = tl.minimum(begin + per_split, end)
    # All rows see all keys before it.
    masked_from = (
        tl.minimum(end, (first if ancestors is None else seq_len - query_len) + 1)
        if CAUSAL
        else end
    )

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # a key without a value, seen by the first split alone
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        peak = tl.where(split == 0, sink, peak)
        total = tl.where(split == 0, 1.0, total)
    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key_position = start + tl.arange(0, BLOCK_N)
        exists = key_position < end
        block = tl.load(
            block_table + request * table_stride + key_position // BLOCK_SIZE, mask=exists, other=0
        ).to(tl.int64)
        place = (
            block * block_stride + key_position % BLOCK_SIZE * slot_stride + kv_head * head_stride
        )
        k = tl.load(
            key_cache + place[None, :] + dim[:, None],
            mask=exists[None, :] & in_head[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype), input_precision="ieee") * score_scale
        if SOFTCAP:  # tanh through the exponential, which every target has
            scores = (2.0 / (1.0 + tl.exp2(scores / softcap * (-2.0 * LOG2E))) - 1.0) * softcap
        scores = scores * LOG2E
        if WINDOW is not None or start + BLOCK_N > masked_from:
            seen = exists[None, :]
            if ancestors is not None:
                key_row = key_position - (seq_len - query_len)  # below 0 in the context
                bit = tl.minimum(tl.maximum(key_row - 1, 0), 63)
                # shifts of 64 bits are many instructions
                half = tl.where((bit < 32)[None, :], low[:, None], high[:, None])
                seen = seen & ((key_row <= 0)[None, :] | ((half >> (bit & 31)[None, :]) & 1 != 0))
            elif CAUSAL:
                seen = seen & (key_position[None, :] <= position[:, None])
            if WINDOW is not None:
                # Of a tree's drafts the word has those within; their rows lie where their depth is,
                # or nearer to the end.
                seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
                if not CAUSAL:
                    seen = seen & (key_position[None, :] - position[:, None] < WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        # a row that has seen nothing yet
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(peak - shift)
        total = total * rescale + tl.sum(weights, 1)
        v = tl.load(
            value_cache + place[:, None] + dim[None, :],
            mask=exists[:, None] & in_head[None, :],
            other=0.0,
        )
        accumulated = tl.dot(
            weights.to(q.dtype),
            v.to(q.dtype),
            accumulated * rescale[:, None],
            input_precision="ieee",
        )
        peak = new_peak

    result = accumulated * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    place = (token * num_heads + head) * SPLITS + split
    tl.store(
        output + place[:, None] * HEAD_DIM + dim[None, :],
        result.to(output.dtype.element_ty),
        mask=real[:, None] & in_head[None, :],
    )
    if SPLITS > 1:
        log_sum = tl.where(
            total == 0.0, float("-inf"), peak + tl.log2(tl.where(total == 0.0, 1.0, total))
        )
        tl.store(log_sums + place, log_sum, mask=real)


def tile_for(
    group: int,
    query_len: int,
    head_dim: int,
    dtype: torch.dtype,
    memory: int = HOPPER_SHARED_MEMORY,
) -> Tile:
    """How programs are cut for requests of up to `query_len` rows whose key heads serve `group`
    query heads each.

    `memory` is what a program can have, see `specdec.kernels.triton_launch.shared_memory`.

    >>> tile_for(group=3, query_len=5, head_dim=64, dtype=torch.bfloat16)[:2]
    (16, 128)
    """
    block_d = padded(head_dim)
    most = MAX_TILE_ROWS if group * query_len >= MANY_TILE_ROWS else MAX_TILE_ROWS // 2
    most = 16 if dtype == torch.float32 else min(most, 16384 // block_d)  # what the registers hold
    block_m = max(min(padded(group * query_len), most), padded(group))
    block_n = min(max(KEY_TILE_BYTES // (block_d * dtype.itemsize), 16), 128)
    max_stages, num_warps = 3, 8 if block_m > 64 or block_m * block_d > MAX_PER_WARPS else 4
    # two warps with as much under way as the memory holds
    if block_m == 16 and block_d == 128 and dtype.itemsize == 2:
        max_stages, num_warps = 5, 2
    elif (
        block_d > 64 and block_m <= 64
    ):  # few rows of wide heads: shorter iterations, more of them or of programs under way
        block_n, max_stages = min(block_n, 32), 2 if block_m == 16 and block_d == 256 else 5
    elif block_n <= 32:
        max_stages = 5
    queries, loaded = block_m * block_d * dtype.itemsize, 2 * block_n * block_d * dtype.itemsize
    return Tile(block_m, block_n, num_warps, num_stages(loaded, memory - queries, most=max_stages))


def padded(size: int) -> int:
    """The power of two, at least 16, that matrix instructions take for `size`."""
    return max(16, 1 << (size - 1).bit_length())


def paged_attention(
    query: Tensor,
    cache: LayerCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    causal: bool,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    tree: tuple[Tensor, Tensor] | None = None,
    splits: int = 1,
    tile: Tile | None = None,
) -> Tensor:
    """Attends to what the cache holds; the rows' own keys and values have to be there already.

    Args:
        query: [num_tokens, num_heads, head_dim], packed rows; any strides but the last.
        cache: the layer's, in the type of `query` or in 8-bit floats.
        block_table, seq_lens, query_start_loc, max_query_len, causal: see `AttentionMetadata`.
        scale: factor of the scores.
        window: positions this far away, and farther, are hidden.
        softcap: bound of the scores, or None.
        sinks: [num_heads], logits that join the softmax, or None.
        tree: ancestors and depths of causal rows that hang together otherwise than in a chain, see
            `specdec.attention.backend.TreeRows`, of the ancestors those within the window; or None.
        splits: a power of two; programs among which the keys of a row are divided.
        tile: shape of a program; None chooses by `tile_for`.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, in the dtype of `query`.
    """
    num_tokens, num_heads, head_dim = query.shape
    block_size, num_kv_heads = cache.key.shape[1:3]
    group = num_heads // num_kv_heads
    if tile is None:
        memory = shared_memory(query.device)
        tile = tile_for(group, max_query_len, head_dim, query.dtype, memory)
    assert cache.key.stride() == cache.value.stride()
    assert cache.key.stride(-1) == query.stride(-1) == 1
    assert splits & (splits - 1) == 0 and tile.block_m >= group
    assert tree is None or causal
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    parts = log_sums = output
    if splits > 1:
        parts = torch.empty(
            num_tokens, num_heads, splits, head_dim, dtype=torch.float32, device=query.device
        )
        shape = num_tokens, num_heads, splits
        log_sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    num_tiles = -(-max_query_len // (tile.block_m // group))
    with on_device(query):
        _attention_kernel[(len(seq_lens) * num_tiles, num_kv_heads, splits)](
            query,
            cache.key,
            cache.value,
            parts,
            log_sums,
            block_table,
            seq_lens,
            query_start_loc,
            sinks,
            *(tree or (None, None)),
            scale,
            softcap or 1.0,
            num_tiles,
            num_heads,
            *query.stride()[:2],
            *cache.key.stride()[:3],
            block_table.stride(0),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            CAUSAL=causal,
            WINDOW=window,
            SOFTCAP=softcap is not None,
            SPLITS=splits,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=padded(head_dim),
            FEW=num_tokens * num_heads <= FEW_ROWS,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **overlap_options(query.device),
        )
        if splits > 1:
            merge_splits(parts, log_sums, output, padded(head_dim))
    return output
