"""AITER's HIP and assembly kernels for attention, and its writer: one function per route, each
telling the kernel what it asks.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.attention.aiter.fa_triton import Layer, Rows, Setup, window_sides
from specdec.attention.aiter.groups import Group
from specdec.attention.aiter.layout import read_rows, shuffled
from specdec.attention.aiter.varlen import attend, attend_in_chunks
from specdec.kernels.aiter import AiterFa
from specdec.kv_cache import LayerCache

PARTITION = 256
"""Keys per partition of the paged kernels, the only size they are built for."""


def write(
    setup: Setup[AiterFa], cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor
) -> None:
    """Stores rows [num_tokens, num_kv_heads, head_dim] at `slot_mapping`, in the cache's type."""
    if setup.is_fp8:  # the writer converts without saturating
        most = torch.finfo(setup.spec.kv_dtype).max
        key, value = key.clamp(-most, most), value.clamp(-most, most)
    store = setup.ops.reshape_and_cache_flash
    if setup.layout == "shuffle":
        store, cache = partial(setup.ops.reshape_and_cache, asm_layout=True), shuffled(cache)
    store(
        key=key.contiguous(),
        value=value.contiguous(),
        key_cache=cache.key,
        value_cache=cache.value,
        slot_mapping=slot_mapping,
        kv_cache_dtype=_kind(setup),
        k_scale=setup.scale,
        v_scale=setup.scale,
    )


def varlen(setup: Setup[AiterFa], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Rows that are whole sequences."""
    options = _options(group, layer, layer.window)
    out: Tensor = attend(setup.ops, group, *rows, causal=group.causal, **options)
    return out


def windowed_varlen(setup: Setup[AiterFa], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Rows on everything their window shows, their own keys included."""
    assert layer.window is not None
    seen = group.window_context(layer.window)
    key, value = read_rows(layer.cache, seen.slots, setup.layout, rows.query.dtype)
    options = _options(group, layer, layer.window)
    out: Tensor = attend(
        setup.ops, group, rows.query, key, value, seen, causal=group.causal, **options
    )
    return out


def chunked_varlen(setup: Setup[AiterFa], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Rows on their own keys, then on each chunk of the context."""

    def read(slots: Tensor) -> tuple[Tensor, Tensor]:
        return read_rows(layer.cache, slots, setup.layout, rows.query.dtype)

    return attend_in_chunks(setup.ops, group, *rows, read, **_options(group, layer, None))


def paged_v1(setup: Setup[AiterFa], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """One row per request on the plain layout, with a window on a trimmed block table."""
    block_table, seq_lens, most = group.block_table, group.seq_lens, group.max_seq_len
    if layer.window is not None:
        trimmed = group.trimmed(layer.window)
        block_table, seq_lens, most = trimmed.block_table, trimmed.seq_lens, trimmed.max_seq_len
    query, out = rows.query, torch.empty_like(rows.query)
    num_heads, head_dim = query.shape[1:]
    parts = group.num_reqs * num_heads * -(-most // PARTITION)
    num_bytes = parts * (head_dim * query.element_size() + 2 * 4)
    setup.ops.paged_attention_v1(
        out=out,
        workspace_buffer=setup.scratch.take("workspace", num_bytes, torch.uint8),
        query=query,
        key_cache=layer.cache.key,
        value_cache=layer.cache.value,
        scale=layer.scale,
        block_tables=block_table,
        cu_query_lens=None,
        context_lens=seq_lens,
        max_context_len=most,
        alibi_slopes=None,
        kv_cache_dtype=_kind(setup),
        kv_cache_layout="NHD",
        logits_soft_cap=layer.softcap or 0.0,
        k_scale=setup.scale,
        v_scale=setup.scale,
        sliding_window=layer.window or 0,
    )
    return out


def paged_common(setup: Setup[AiterFa], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """One row per request on the shuffled layout; AITER picks HIP or assembly by their number."""
    cache, out = shuffled(layer.cache), torch.empty_like(rows.query)
    table = _scale_table(setup, layer.cache) if setup.is_fp8 else None
    setup.ops.paged_attention_common(
        Q=rows.query,
        K=cache.key,
        V=cache.value,
        **_partitions(setup, group, rows.query),
        block_tables=group.block_table,
        context_lens=group.seq_lens,
        block_tables_stride0=group.block_table.stride(0),
        scale=layer.scale,
        max_seq_len=group.max_seq_len,
        K_QScale_hip=setup.scale,
        V_QScale_hip=setup.scale,
        K_QScale_asm=table,
        V_QScale_asm=table,
        out_=out,
        kv_cache_dtype=_kind(setup),
    )
    return out


def paged_rocm(setup: Setup[AiterFa], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """The same with HIP only, for shapes and scales the assembly kernel does not have."""
    cache, out = shuffled(layer.cache), torch.empty_like(rows.query)
    setup.ops.paged_attention_rocm(
        out=out,
        **_partitions(setup, group, rows.query),
        query=rows.query,
        key_cache=cache.key,
        value_cache=cache.value,
        num_kv_heads=setup.spec.num_kv_heads,
        scale=layer.scale,
        block_tables=group.block_table,
        context_lens=group.seq_lens,
        block_size=setup.spec.block_size,
        max_context_len=group.max_seq_len,
        alibi_slopes=None,
        kv_cache_dtype=_kind(setup),
        k_scale=setup.scale,
        v_scale=setup.scale,
    )
    return out


def _options(group: Group, layer: Layer, window: int | None) -> dict[str, Any]:
    return {
        "softmax_scale": layer.scale,
        "logits_soft_cap": layer.softcap or 0.0,
        "window_size": window_sides(window, group.causal),
    }


def _kind(setup: Setup[AiterFa]) -> str:
    return "fp8" if setup.is_fp8 else "auto"


def _partitions(setup: Setup[AiterFa], group: Group, query: Tensor) -> dict[str, Tensor]:
    """Scratch of the paged kernels: two tables [num_reqs, heads, partitions], and outputs with
    head_dim behind them.
    """
    num_heads, head_dim = query.shape[1:]
    shape = (group.num_reqs, num_heads, -(-group.max_seq_len // PARTITION))
    count, take = math.prod(shape), setup.scratch.take
    return {
        "exp_sums": take("exp_sums", count, torch.float32).view(shape),
        "max_logits": take("max_logits", count, torch.float32).view(shape),
        "tmp_out": take("tmp_out", count * head_dim, query.dtype).view(*shape, head_dim),
    }


def _scale_table(setup: Setup[AiterFa], cache: LayerCache) -> Tensor:
    """The scale as the assembly kernel reads it, once per slot and head: [num_blocks, num_kv_heads,
    block_size].
    """
    num_blocks, size, heads = cache.key.shape[:3]
    scales = setup.scratch.take("scales", num_blocks * heads * size, torch.float32, torch.ones)
    return scales.view(num_blocks, heads, size)
