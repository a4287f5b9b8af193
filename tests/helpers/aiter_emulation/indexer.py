"""The indexer of sparse latent attention: its 8-bit keys, their scores, and the best positions of
every row.

A block of the cache holds its keys first and their float32 scales behind them,
`[size * D | size * 4]` bytes. Keys are rows, or, with preshuffling, tiles of 16 tokens times 16
numbers, as the matrix instructions read them; scales are the same in both.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.machine import (
    Machine,
    blocks_of,
    host,
    increasing,
    int32,
    refuse_unless,
)
from tests.helpers.aiter_emulation.signatures import version_key

TILE = 16
"""Tokens, and numbers, of a tile."""

SCORE_BYTES = 2**31
"""Before 0.1.18, what the paged kernel reaches of its output."""


class _Keys(NamedTuple):
    """Views of a cache."""

    tiles: Tensor  # uint8 [blocks, tiles of tokens, tokens, tiles of numbers, numbers]
    scales: Tensor  # float32 [blocks, size]

    def put(self, slot: int, key: Tensor, scale: Tensor) -> None:
        """Stores the bytes of a key [D]."""
        block, token = divmod(slot, self.scales.shape[1])
        row = self.tiles[(block, *divmod(token, self.tiles.shape[2]))]
        row.copy_(key.view(row.shape))
        self.scales[block, token] = scale

    def take(self, blocks: list[int], count: int) -> tuple[Tensor, Tensor]:
        """The first `count` keys of some blocks, bytes [count, D], and their scales [count]."""
        keys = self.tiles[blocks].reshape(-1, self.tiles.shape[3:].numel())
        return keys[:count], self.scales[blocks].flatten()[:count]


def _keys(name: str, kv_cache: Tensor, dim: int, preshuffle: bool) -> _Keys:
    """Views of the cache [blocks, size, D + 4]."""
    refuse_unless(
        kv_cache.element_size() == 1 and kv_cache.is_contiguous(),
        f"{name}: the cache is dense bytes",
    )
    refuse_unless(
        kv_cache.shape[-1] == dim + 4,
        f"{name}: {kv_cache.shape[-1]} bytes per token for keys of {dim}",
    )
    blocks, size = kv_cache.shape[:2]
    whole = size % TILE == dim % TILE == 0
    refuse_unless(
        whole or not preshuffle,
        f"{name}: blocks of {size} keys of {dim} are not whole tiles of {TILE} x {TILE}",
    )
    tokens, numbers = (TILE, TILE) if preshuffle else (size, dim)
    flat = kv_cache.view(torch.uint8).view(blocks, size * (dim + 4))
    tiles = flat[:, : size * dim].view(blocks, size // tokens, dim // numbers, tokens, numbers)
    return _Keys(tiles.transpose(2, 3), flat[:, size * dim :].view(torch.float32))


def _check_dim(machine: Machine, name: str, dim: int) -> None:
    machine.size(name, (dim, 128))
    refuse_unless(dim % 16 == 0, f"{name} moves 16 bytes at once; keys of {dim}")


def indexer_k_quant_and_cache(
    machine: Machine,
    k: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    quant_block_size: int,
    scale_fmt: str,
    preshuffle: bool = False,
) -> None:
    """Keys [N, D] in 8 bits into the cache, one scale per token, rounded up to a power of two when
    `scale_fmt` is "ue8m0".

    Nothing in the cache tells in which order its keys lie: readers have to be told the same.
    """
    name = "indexer_k_quant_and_cache"
    machine.needs_cdna(name)
    machine.record(name)
    machine.activation(name, k)
    refuse_unless(k.is_contiguous(), f"{name} walks dense rows")
    dim = k.shape[1]
    _check_dim(machine, name, dim)
    refuse_unless(
        quant_block_size == dim,
        f"{name}: the readers want one scale per token, not per {quant_block_size}",
    )
    refuse_unless(
        slot_mapping.dtype == torch.int64, f"{name}: slots are {slot_mapping.dtype}, not int64"
    )
    keys = _keys(name, kv_cache, dim, preshuffle)
    machine.compile(name, k.dtype)
    rows = k.float()
    amounts = rows.abs().amax(-1).clamp(min=1e-4) / torch.finfo(machine.fp8).max
    amounts = torch.exp2(torch.ceil(torch.log2(amounts))) if scale_fmt == "ue8m0" else amounts
    stored = (rows / amounts[:, None]).to(machine.fp8).view(torch.uint8)
    for row, slot in enumerate(host(slot_mapping)[: len(k)]):
        if slot < 0:
            continue
        refuse_unless(slot < keys.scales.numel(), f"{name}: slot past the cache")
        keys.put(slot, stored[row], amounts[row])


def cp_gather_indexer_k_quant_cache(
    machine: Machine,
    kv_cache: Tensor,
    dst_k: Tensor,
    dst_scale: Tensor,
    block_table: Tensor,
    cu_seq_lens: Tensor,
    preshuffle: bool = False,
) -> None:
    """Keys [N, D] and scales, float32 [N, 1] or its bytes [N, 4], of packed requests."""
    name = "cp_gather_indexer_k_quant_cache"
    machine.needs_cdna(name)
    machine.record(name)
    total, dim = dst_k.shape
    _check_dim(machine, name, dim)
    keys = _keys(name, kv_cache, dim, preshuffle)
    refuse_unless(
        dst_k.element_size() == 1 and dst_k.is_contiguous(), f"{name}: keys of {dst_k.dtype}"
    )
    fits = (
        dst_scale.is_contiguous()
        and dst_scale.dim() == 2
        and dst_scale.numel() * dst_scale.element_size() == 4 * total
    )
    refuse_unless(
        fits, f"{name}: scales {tuple(dst_scale.shape)} of {dst_scale.dtype} for {total} keys"
    )
    table = host(int32("block_table", block_table, None, None))
    refuse_unless(block_table.is_contiguous(), f"{name} takes the table for dense")
    starts = increasing("cu_seq_lens", host(int32("cu_seq_lens", cu_seq_lens, len(table) + 1)))
    refuse_unless(starts[-1] == total, f"{name}: cu_seq_lens ends at {starts[-1]} of {total} keys")
    machine.compile(name, min(total // 32, 16))
    out_k = dst_k.view(torch.uint8)  # whatever 8-bit type the caller gave it
    out_scale = dst_scale.view(-1).view(torch.float32)
    for i, row in enumerate(table):
        rows = slice(starts[i], starts[i + 1])
        count = rows.stop - rows.start
        out_k[rows], out_scale[rows] = keys.take(
            blocks_of(name, row, count, kv_cache.shape[1], kv_cache.shape[0]), count
        )


def _check_queries(machine: Machine, name: str, query: Tensor, weights: Tensor) -> tuple[int, int]:
    heads, dim = query.shape[-2:]
    plain = {torch.float32} if machine.allow_float32 else set()
    refuse_unless(
        query.dtype in {machine.fp8, *plain},
        f"{name} takes queries of {machine.fp8}, not {query.dtype}",
    )
    rows = query.shape[:-2].numel()
    refuse_unless(
        weights.dtype == torch.float32, f"{name}: weights of {weights.dtype}, not float32"
    )
    refuse_unless(weights.shape == (rows, heads), f"{name}: weights {tuple(weights.shape)}")
    power = heads & (heads - 1) == 0 and dim & (dim - 1) == 0
    refuse_unless(
        power and heads >= 16,
        f"{name}: {heads} heads of {dim}, not powers of two and at least 16 heads",
    )
    return heads, dim


def _score(query: Tensor, weights: Tensor, keys: Tensor, scales: Tensor) -> Tensor:
    """[M, H, D] against [N, D]: float32 [M, N]. Equal keys score the same, as sums in float64
    ensure whatever their order.
    """
    total = torch.zeros(len(query), len(keys), dtype=torch.float64)
    keys, scales = keys.double().T, scales.double()
    for head, weight in zip(query.double().unbind(1), weights.double().unbind(1), strict=True):
        total += (head @ keys).mul_(scales).relu_().mul_(weight[:, None])
    return total.float()


def fp8_mqa_logits(
    machine: Machine,
    Q: Tensor,
    KV: Tensor,
    kv_scales: Tensor,
    weights: Tensor,
    cu_starts: Tensor,
    cu_ends: Tensor,
    clean_logits: bool = True,
) -> Tensor:
    """Scores float32 [M, N] of packed keys; a view of rows padded to 256, so its row stride is not
    N.
    """
    name = "fp8_mqa_logits"
    machine.record(name)
    _check_queries(machine, name, Q, weights)
    num_rows, num_keys = len(Q), len(KV)
    refuse_unless(
        KV.dtype in (machine.fp8, Q.dtype) and KV.shape[1] == Q.shape[2],
        f"{name}: keys of {KV.dtype}",
    )
    refuse_unless(
        kv_scales.dtype == torch.float32 and kv_scales.shape == (num_keys,),
        f"{name}: one float32 scale per key",
    )
    starts, ends = (
        host(int32(f"{name} bounds", bound, num_rows)) for bound in (cu_starts, cu_ends)
    )
    refuse_unless(
        all(a >= 0 and b <= num_keys for a, b in zip(starts, ends, strict=True)),
        f"{name}: bounds past {num_keys}",
    )
    machine.compile(name, Q.shape[1:], num_rows <= 1024)
    logits = torch.full(
        (num_rows, -(-num_keys // 256) * 256), -torch.inf if clean_logits else torch.nan
    )[:, :num_keys]
    scores = _score(Q, weights, KV, kv_scales)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        logits[row, start:end] = scores[row, start:end]
    return logits


def deepgemm_fp8_paged_mqa_logits(
    machine: Machine,
    q_fp8: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    out_logits: Tensor,
    context_lens: Tensor,
    kv_indices: Tensor,
    max_model_len: int,
    Preshuffle: bool = False,
    KVBlockSize: int = 1,
    ChunkK: int = 256,
    TotalCuCount: int | None = None,
    WavePerEU: int = 2,
    VarCtxSchedule: Tensor | None = None,
) -> None:
    """Scores of [B, next_n, H, D] over the paged cache [blocks, size, 1, D + 4]; columns past the
    last block stay as they are.

    Plain, the table has one entry per token. Preshuffled, it has one per block, and only the last
    half chunk is masked: before it, a row may hold scores of keys behind it, and behind the context
    the rest of the block is -inf, however narrow the row.
    """
    name = "deepgemm_fp8_paged_mqa_logits"
    machine.record(name)
    refuse_unless(VarCtxSchedule is None, f"{name}: not emulated: VarCtxSchedule")
    batch, next_n = q_fp8.shape[:2]
    heads, dim = _check_queries(machine, name, q_fp8, weights)
    machine.size(name, (dim, 128))
    refuse_unless(
        machine.any_shape or heads >= 32,
        f"{name}: {heads} heads leave threads without a part of the query",
    )
    refuse_unless(q_fp8.stride(3) == weights.stride(1) == 1, f"{name}: strided queries or weights")
    assert kv_cache.dim() == 4 and kv_cache.shape[1] == KVBlockSize
    assert ChunkK % KVBlockSize == 0 or KVBlockSize % ChunkK == 0
    refuse_unless(
        Preshuffle or KVBlockSize == 1,
        f"{name} reads its table per token unless Preshuffle; blocks of {KVBlockSize}",
    )
    refuse_unless(
        not Preshuffle or ChunkK // 2 % KVBlockSize == 0,
        f"{name}: not emulated: {KVBlockSize} in chunks of {ChunkK}",
    )
    keys = _keys(name, kv_cache.squeeze(2), dim, Preshuffle)
    refuse_unless(
        out_logits.dtype == torch.float32 and len(out_logits) >= batch * next_n,
        f"{name}: out_logits",
    )
    refuse_unless(
        out_logits.shape[1] >= max_model_len and out_logits.stride(1) == 1,
        f"{name}: out_logits is too narrow",
    )
    written = batch * next_n * out_logits.stride(0) * 4
    reaches = version_key(machine.version) >= (0, 1, 18) or written <= SCORE_BYTES
    refuse_unless(
        reaches, f"{name}: scores of {written} bytes overflow the kernel's 32-bit addresses"
    )
    lengths = host(int32("context_lens", context_lens, batch))
    table = host(int32("kv_indices", kv_indices, batch, None))
    refuse_unless(kv_indices.is_contiguous(), f"{name} takes the table for dense")
    machine.compile(name, q_fp8.shape[1:], KVBlockSize, ChunkK, Preshuffle)
    for i, length in enumerate(lengths):
        refuse_unless(
            length <= max_model_len,
            f"{name}: context of {length} beyond max_model_len {max_model_len}",
        )
        blocks = blocks_of(name, table[i], length, KVBlockSize, len(kv_cache))
        end = len(blocks) * KVBlockSize
        refuse_unless(
            end <= out_logits.shape[1],
            f"{name} writes {end} columns of a row of {out_logits.shape[1]}",
        )
        found, scales = keys.take(blocks, length)
        scores = _score(
            q_fp8[i], weights[i * next_n : (i + 1) * next_n], found.view(machine.fp8), scales
        )
        for j in range(next_n):
            own = max(length - next_n + j + 1, 0)
            row, masked = (
                out_logits[i * next_n + j],
                max(own, end - ChunkK // 2) if Preshuffle else own,
            )
            row[:masked], row[masked:end] = scores[j, :masked], -torch.inf


def _top_k(
    name: str,
    logits: Tensor,
    bounds: list[tuple[int, int]],
    indices: Tensor,
    strides: tuple[int, int],
    k: int,
    rows: int,
    stable: bool,
) -> None:
    """Stable, the lower of equal scores is taken and columns ascend. Otherwise neither is said:
    here it is the other way round.
    """
    refuse_unless(logits.dtype == torch.float32, f"{name}: logits of {logits.dtype}")
    refuse_unless(
        logits.stride() == strides and strides[1] == 1,
        f"{name}: strides {strides} of logits with {logits.stride()}",
    )
    fits = (
        indices.dtype == torch.int32
        and indices.is_contiguous()
        and indices.shape[1] == k
        and len(indices) >= rows
    )
    refuse_unless(
        fits, f"{name}: indices {tuple(indices.shape)} of {indices.dtype} for {rows} rows of {k}"
    )
    refuse_unless(rows <= len(logits), f"{name}: {rows} rows of {len(logits)}")
    for row, (start, end) in enumerate(bounds):
        refuse_unless(
            start >= 0 and end <= logits.shape[1],
            f"{name}: row {row} ends at {end} of {logits.shape[1]} columns",
        )
        valid = logits[row, start : max(end, start)]
        refuse_unless(
            not any(value != value for value in host(valid)),
            f"{name}: row {row} holds scores that nobody wrote",
        )
        count = min(k, len(valid))
        indices[row, count:] = -1
        columns = torch.arange(start, start + len(valid))
        valid, columns = (valid, columns) if stable else (valid.flip(0), columns.flip(0))
        chosen = columns[valid.sort(descending=True, stable=True).indices[:count]]
        indices[row, :count] = chosen.sort(descending=not stable).values.int()


def top_k_per_row_prefill(
    machine: Machine,
    logits: Tensor,
    rowStarts: Tensor,
    rowEnds: Tensor,
    indices: Tensor,
    values: Tensor | None,
    numRows: int,
    stride0: int,
    stride1: int,
    k: int = 2048,
    stable: bool = False,
) -> None:
    """Columns, counted from the first one of `logits`, of the `k` largest scores in `[start, end)`,
    filled up with -1.
    """
    name = "top_k_per_row_prefill"
    machine.needs_cdna(name)
    machine.record(name)
    refuse_unless(values is None, f"{name}: not emulated: values")
    starts, ends = (
        host(int32(f"{name} bounds", bound, None))[:numRows] for bound in (rowStarts, rowEnds)
    )
    refuse_unless(
        len(starts) == len(ends) == numRows, f"{name}: bounds of {len(starts)} rows, not {numRows}"
    )
    machine.compile(name, k)
    _top_k(
        name,
        logits,
        list(zip(starts, ends, strict=True)),
        indices,
        (stride0, stride1),
        k,
        numRows,
        stable,
    )


def top_k_per_row_decode(
    machine: Machine,
    logits: Tensor,
    next_n: int,
    seqLens: Tensor,
    indices: Tensor,
    numRows: int,
    stride0: int,
    stride1: int,
    k: int = 2048,
    stable: bool = False,
) -> None:
    """The same when row `r` is query `r % next_n` of request `r // next_n` and sees everything up
    to itself.
    """
    name = "top_k_per_row_decode"
    machine.needs_cdna(name)
    machine.record(name)
    lengths = host(int32("seqLens", seqLens, None))
    refuse_unless(
        numRows <= len(lengths) * next_n, f"{name}: {numRows} rows of {len(lengths)} requests"
    )
    bounds = [
        (0, max(lengths[row // next_n] - next_n + row % next_n + 1, 0)) for row in range(numRows)
    ]
    machine.compile(name, k)
    _top_k(name, logits, bounds, indices, (stride0, stride1), k, numRows, stable)
