"""Attention of prompts in Triton: many causal rows over a paged cache.

A program holds the queries of all heads that share a key head, for a tile of consecutive rows, as
in `specdec.attention.triton.triton_attention`, and walks over blocks of keys, which begin at
multiples of their size:

    keys    | masked | seen by every row | masked |        the first part exists with a window alone
            window begins             diagonal

Only the two ends compare positions. As blocks of keys do not move with the tile, a row has the same
bits in whatever chunk it is computed, and whoever is beside it. The online softmax is
FlashAttention's (arXiv 2205.14135), in base 2 with float32 accumulation; the scale joins the
exponent in one multiplication and addition. Tiles with the most keys start first.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.attention.triton.triton_attention import (
    KEY_TILE_BYTES,
    LOG2E,
    MAX_PER_WARPS,
    Tile,
    padded,
)
from specdec.kernels.triton_launch import (
    HOPPER_SHARED_MEMORY,
    num_stages,
    on_device,
    overlap_options,
    shared_memory,
)
from specdec.kernels.triton_overlap import await_previous
from specdec.kv_cache import LayerCache

LARGE_MEMORY = 192 * 1024
"""Shared memory from which on a program holds many rows of wide heads."""


class Earlier(NamedTuple):
    """Attention of all rows to the first keys of their one request, which somebody else has
    computed.
    """

    output: Tensor  # [num_tokens, num_heads, head_dim], contiguous
    log_sums: Tensor  # float32 [num_heads, num_tokens], natural logarithms of the denominators
    num_keys: int  # a multiple of every tile's `block_n`


@triton.jit(do_not_specialize=["first_key", "num_tiles", "table_stride"])
def _prefill_kernel(
    query: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache: tl.tensor,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM]
    value_cache: tl.tensor,  # the same
    output: tl.tensor,  # [num_tokens, num_heads, HEAD_DIM]
    block_table: tl.tensor,  # int32 [num_reqs, max_blocks]
    seq_lens: tl.tensor,  # int32 [num_reqs]
    query_start_loc: tl.tensor,  # int32 [num_reqs + 1]
    sinks: tl.tensor,  # [num_heads] or None
    # [num_tokens, num_heads, HEAD_DIM], attention to the keys before `first_key`, or None
    earlier: tl.tensor,
    earlier_log_sums: tl.tensor,  # float32 [num_heads, num_tokens], natural
    score_scale: tl.tensor,  # above 0
    softcap: tl.tensor,
    first_key: tl.tensor,  # a multiple of BLOCK_N
    num_tiles: tl.tensor,
    num_heads: tl.tensor,
    query_row_stride: tl.tensor,
    query_head_stride: tl.tensor,
    block_stride: tl.tensor,
    slot_stride: tl.tensor,
    head_stride: tl.tensor,
    table_stride: tl.tensor,
    log_sum_head_stride: tl.tensor,
    log_sum_row_stride: tl.tensor,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # tokens, or None
    SOFTCAP: tl.constexpr,  # whether there is one
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    TILE_ROWS: tl.constexpr = BLOCK_M // GROUP
    await_previous(OVERLAP)
    tile_row = (num_tiles - 1 - tl.program_id(0)) * TILE_ROWS
    kv_head = tl.program_id(1)
    request = tl.program_id(2)
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
    dim = tl.arange(0, BLOCK_D)
    kept = real[:, None] & (dim < HEAD_DIM)[None, :]
    q = tl.load(
        query
        + token[:, None] * query_row_stride
        + head[:, None] * query_head_stride
        + dim[None, :],
        mask=kept,
        other=0.0,
    )

    # Keys that some row sees, and among them whole blocks that every row sees.
    first = seq_len - query_len + tile_row
    last = tl.minimum(first + TILE_ROWS, seq_len) - 1
    open_begin = first_key
    open_end = (first + 1) // BLOCK_N * BLOCK_N
    if WINDOW is not None:
        begin = tl.maximum(first - WINDOW + 1, 0) // BLOCK_N * BLOCK_N
        open_begin = tl.maximum(last - WINDOW + BLOCK_N, 0) // BLOCK_N * BLOCK_N
        open_end = tl.maximum(open_begin, open_end)

    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if sinks is not None:  # a key without a value
        peak = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        total = tl.full([BLOCK_M], 1.0, tl.float32)
    accumulated = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    place = (token * num_heads + head) * HEAD_DIM
    if earlier is not None:  # as if all earlier keys were one
        place_of_sum = head * log_sum_head_stride + token * log_sum_row_stride
        log_sum = tl.load(earlier_log_sums + place_of_sum, mask=real, other=0.0) * LOG2E
        new_peak = tl.maximum(peak, log_sum)
        weight = tl.exp2(log_sum - new_peak)
        total = total * tl.exp2(peak - new_peak) + weight
        accumulated = (
            tl.load(earlier + place[:, None] + dim[None, :], mask=kept, other=0.0).to(tl.float32)
            * weight[:, None]
        )
        peak = new_peak
    exponent_scale = LOG2E if SOFTCAP else score_scale * LOG2E
    table = block_table + request * table_stride
    for part in tl.static_range(1 if WINDOW is None else 0, 3):
        if part == 0:
            part_begin, part_end = begin, tl.minimum(open_begin, last + 1)
        elif part == 1:
            part_begin, part_end = open_begin, open_end
        else:
            part_begin, part_end = open_end, last + 1
        for start in range(part_begin, part_end, BLOCK_N):
            key_position = start + tl.arange(0, BLOCK_N)
            if part != 1:
                exists = key_position <= last
                block = tl.load(table + key_position // BLOCK_SIZE, mask=exists, other=0).to(
                    tl.int64
                )
            else:
                block = tl.load(table + key_position // BLOCK_SIZE).to(tl.int64)
            slot = (
                block * block_stride
                + key_position % BLOCK_SIZE * slot_stride
                + kv_head * head_stride
            )
            numbers = slot[:, None] + dim[None, :]
            if part != 1:
                loaded = exists[:, None] & (dim < HEAD_DIM)[None, :]
                k = tl.load(key_cache + numbers, mask=loaded, other=0.0)
            elif HEAD_DIM < BLOCK_D:
                k = tl.load(key_cache + numbers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            else:
                k = tl.load(key_cache + numbers)
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
            if SOFTCAP:  # tanh through the exponential, which every target has
                scores = (
                    2.0 / (1.0 + tl.exp2(scores * score_scale / softcap * (-2.0 * LOG2E))) - 1.0
                ) * softcap
            if part != 1:
                seen = key_position[None, :] <= position[:, None]
                if WINDOW is not None:
                    seen = seen & (position[:, None] - key_position[None, :] < WINDOW)
                scores = tl.where(seen, scores, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(scores, 1) * exponent_scale)
            shift = new_peak
            if part != 1:
                # a row that has seen nothing yet
                shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
            weights = tl.exp2(scores * exponent_scale - shift[:, None])
            rescale = tl.exp2(peak - shift)
            total = total * rescale + tl.sum(weights, 1)
            if part != 1:
                v = tl.load(value_cache + numbers, mask=loaded, other=0.0)
            elif HEAD_DIM < BLOCK_D:
                v = tl.load(value_cache + numbers, mask=(dim < HEAD_DIM)[None, :], other=0.0)
            else:
                v = tl.load(value_cache + numbers)
            accumulated = tl.dot(
                weights.to(q.dtype),
                v.to(q.dtype),
                accumulated * rescale[:, None],
                input_precision="ieee",
            )
            peak = new_peak

    result = accumulated * (1.0 / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(output + place[:, None] + dim[None, :], result.to(output.dtype.element_ty), mask=kept)


def prefill_tile(
    group: int, head_dim: int, dtype: torch.dtype, memory: int = HOPPER_SHARED_MEMORY
) -> Tile:
    """How programs are cut for prompts, whose key heads serve `group` query heads each, as measured
    to be best on Hopper.

    Small programs of which a processor holds two hide one's exponentials behind the other's
    products; heads of 256 leave room for one. `memory` is what a program can have, see
    `specdec.kernels.triton_launch.shared_memory`; AMD's compiler plans otherwise.

    >>> prefill_tile(group=4, head_dim=128, dtype=torch.bfloat16)
    Tile(block_m=64, block_n=64, num_warps=4, num_stages=2)
    """
    block_d = padded(head_dim)
    is_large = block_d > 128 and memory >= LARGE_MEMORY
    block_m, block_n = (128, 64) if is_large else (64, 64 if block_d <= 128 else 16)
    if block_d > 256:
        block_m, block_n = (64, 32) if is_large else (32, 16)
    if dtype == torch.float32:
        block_m, block_n = 16, max(KEY_TILE_BYTES // (4 * block_d), 16)
    block_m = max(block_m, padded(group))
    queries, loaded = block_m * block_d * dtype.itemsize, 2 * block_n * block_d * dtype.itemsize
    stages = max(
        num_stages(loaded, memory // 2 - queries, most=3),
        num_stages(loaded, memory - queries, most=2),
    )
    num_warps = 8 if block_m > 64 or block_m * block_d > MAX_PER_WARPS else 4
    stages = 1 if torch.version.hip else stages
    return Tile(block_m, block_n, num_warps=num_warps, num_stages=stages)


def prefill_attention(
    query: Tensor,
    cache: LayerCache,
    *,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    earlier: Earlier | None = None,
    output: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """`specdec.attention.triton.triton_attention.paged_attention` for causal rows, in one part, of
    which requests have many.

    Args:
        query: [num_tokens, num_heads, head_dim], packed rows; any strides but the last.
        cache: the layer's, in the type of `query` or in 8-bit floats; the rows' own keys and values
            are there.
        block_table, seq_lens, query_start_loc, max_query_len: see `AttentionMetadata`.
        scale: factor of the scores, above 0.
        window: positions this far away, and farther, are hidden.
        softcap: bound of the scores, or None.
        sinks: [num_heads], logits that join the softmax, or None.
        earlier: what goes before the keys that are read, without a window alone, or None.
        output: where to write, or None.
        tile: shape of a program; None chooses by `prefill_tile`.

    Returns:
        [num_tokens, num_heads, head_dim], contiguous, in the dtype of `query`.
    """
    _, num_heads, head_dim = query.shape
    block_size, num_kv_heads = cache.key.shape[1:3]
    group = num_heads // num_kv_heads
    tile = tile or prefill_tile(group, head_dim, query.dtype, shared_memory(query.device))
    assert cache.key.stride() == cache.value.stride()
    assert cache.key.stride(-1) == query.stride(-1) == 1
    assert scale > 0 and tile.block_m >= group
    assert earlier is None or (
        window is None and earlier.output.is_contiguous() and earlier.num_keys % tile.block_n == 0
    )
    if output is None:
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    assert output.is_contiguous()
    num_tiles = triton.cdiv(max_query_len, tile.block_m // group)
    with on_device(query):
        _prefill_kernel[(num_tiles, num_kv_heads, len(seq_lens))](
            query,
            cache.key,
            cache.value,
            output,
            block_table,
            seq_lens,
            query_start_loc,
            sinks,
            earlier and earlier.output,
            earlier and earlier.log_sums,
            scale,
            softcap or 1.0,
            earlier.num_keys if earlier else 0,
            num_tiles,
            num_heads,
            *query.stride()[:2],
            *cache.key.stride()[:3],
            block_table.stride(0),
            *(earlier.log_sums.stride() if earlier else (0, 0)),
            GROUP=group,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            WINDOW=window,
            SOFTCAP=softcap is not None,
            BLOCK_M=tile.block_m,
            BLOCK_N=tile.block_n,
            BLOCK_D=padded(head_dim),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **overlap_options(query.device),
        )
    return output
