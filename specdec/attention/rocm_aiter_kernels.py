"""AITER's attention kernels as the backend calls them: one method per route, each filling in what the kernel has to be told."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionSpec
from specdec.attention.rocm_aiter_layout import Layout, read_blocks, read_rows, shuffled
from specdec.attention.rocm_aiter_plan import Context, Group
from specdec.kv_cache import LayerCache, blocks_for
from specdec.ops import aiter

PARTITION = 256
"""Keys per partition of the paged kernels, the only size they are built for."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What distinguishes one layer from the next."""

    cache: LayerCache
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class AiterKernels:
    """The kernels for one model on one device, with the scratch they need.

    Args:
        spec: what the model asks for.
        layout: of the cache.
    """

    def __init__(self, spec: AttentionSpec, layout: Layout) -> None:
        self.spec, self.layout = spec, layout
        self._ops = aiter.load()
        self._is_fp8 = spec.kv_dtype.itemsize == 1
        self._kind = "fp8" if self._is_fp8 else "auto"
        self._scales = tuple(torch.full((1,), scale, dtype=torch.float32, device=spec.device) for scale in spec.cache_scales)
        self._buffers: dict[tuple[str, int, torch.dtype], Tensor] = {}
        self._scale_tables: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Stores rows [num_tokens, num_kv_heads, head_dim] at `slot_mapping`, converted to the type of the cache."""
        if self._is_fp8:  # the writer converts without saturating
            most = torch.finfo(self.spec.kv_dtype).max
            key, value = (
                tensor.clamp(-most * scale, most * scale)
                for tensor, scale in zip((key, value), self.spec.cache_scales, strict=True)
            )
        write = self._ops.reshape_and_cache_flash
        if self.layout == "shuffle":
            write, cache = partial(self._ops.reshape_and_cache, asm_layout=True), shuffled(cache)
        write(
            key=key.contiguous(),
            value=value.contiguous(),
            key_cache=cache.key,
            value_cache=cache.value,
            slot_mapping=slot_mapping,
            kv_cache_dtype=self._kind,
            k_scale=self._scales[0],
            v_scale=self._scales[1],
        )

    def varlen(self, group: Group, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows that are whole sequences."""
        return self._varlen(group, layer, query, key, value, causal=group.causal, window=layer.window)[0]

    def windowed_varlen(self, group: Group, layer: Layer, query: Tensor) -> Tensor:
        """Rows on everything their window shows, their own keys included."""
        assert layer.window is not None
        seen = group.window_context(layer.window)
        key, value = self._read_rows(layer.cache, seen.slots, query.dtype)
        return self._varlen(group, layer, query, key, value, seen, causal=group.causal, window=layer.window)[0]

    def chunked_varlen(self, group: Group, layer: Layer, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Rows on their own keys, then on each chunk of the context, merged by the logarithms of their denominators."""
        out, lse = self._varlen(group, layer, query, key, value, causal=group.causal, return_lse=True)
        merged = out.float()
        for chunk in group.context_chunks():
            key, value = self._read_rows(layer.cache, chunk.slots, query.dtype)
            part, part_lse = self._varlen(group, layer, query, key, value, chunk, causal=False, return_lse=True)
            total = torch.logaddexp(lse, part_lse)  # finite: every row sees itself
            weights, part_weights = ((x - total).exp().t()[..., None] for x in (lse, part_lse))
            merged, lse = merged * weights + part.float() * part_weights, total
        return merged.to(query.dtype)

    def _varlen(
        self,
        group: Group,
        layer: Layer,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        context: Context | None = None,
        *,
        causal: bool,
        window: int | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Rows on packed keys: those of `context`, or the rows' own when there is none.

        Returns:
            [num_tokens, num_heads, head_dim], and log-denominators float32 [num_heads, num_tokens], empty unless asked for.
        """
        result: Any = self._ops.flash_attn_varlen_func(
            q=query,
            k=key,
            v=value,
            cu_seqlens_q=group.query_start_loc,
            cu_seqlens_k=context.cu_seqlens if context else group.query_start_loc,
            max_seqlen_q=group.max_query_len,
            max_seqlen_k=context.max_len if context else group.max_query_len,
            softmax_scale=layer.scale,
            logits_soft_cap=layer.softcap or 0.0,
            causal=causal,
            window_size=_window_size(window, causal),
            return_lse=return_lse,
            sink_ptr=None if layer.sinks is None else layer.sinks.float(),
        )
        return result if return_lse else (result, result.new_empty(0))

    def unified(self, group: Group, layer: Layer, query: Tensor) -> Tensor:
        """Causal rows of any number on the paged cache, in either layout."""
        out = torch.empty_like(query)
        cache, extra = layer.cache, {}
        if self.layout == "shuffle":
            cache, extra = shuffled(cache), {"shuffled_kv_cache": True}
        shape = (group.num_reqs, self.spec.num_kv_heads)
        key_scale, value_scale = (s.expand(shape) for s in self._scales) if self._is_fp8 else (None, None)
        self._ops.unified_attention(
            q=query,
            k=cache.key,
            v=cache.value,
            out=out,
            cu_seqlens_q=group.query_start_loc,
            max_seqlen_q=group.max_query_len,
            seqused_k=group.seq_lens,
            max_seqlen_k=group.max_seq_len,
            softmax_scale=layer.scale,
            causal=True,
            window_size=_window_size(layer.window, causal=True),
            block_table=group.block_table,
            softcap=layer.softcap or 0.0,
            q_descale=None,
            k_descale=key_scale,
            v_descale=value_scale,
            sinks=layer.sinks,
            **extra,
        )
        return out

    def kvcache(self, group: Group, layer: Layer, query: Tensor, *, gathered: bool) -> Tensor:
        """Bidirectional blocks, as many rows per request. This kernel reads neither the shuffled layout nor 8-bit keys: those are
        gathered first, into one stretch per request whose length is rounded up so that few lengths are ever compiled."""
        key, value = layer.cache
        page_table: Tensor | None = group.block_table  # whole: its width is compiled in, and stays the same from step to step
        if gathered:
            width = min(group.block_table.shape[1], _round_up(blocks_for(group.max_seq_len, self.spec.block_size)))
            key, value = read_blocks(layer.cache, group.block_table[:, :width], self.layout)
            key, value = self._dequantised(key, value, query.dtype)
            page_table = None
        out: Tensor = self._ops.flash_attn_with_kvcache(
            q=query.view(group.num_reqs, group.max_query_len, *query.shape[1:]),
            k_cache=key,
            v_cache=value,
            cache_seqlens=group.seq_lens,
            page_table=page_table,
            softmax_scale=layer.scale,
            causal=False,
            window_size=_window_size(layer.window, causal=False),
        )
        return out.view(query.shape)

    def paged_v1(self, group: Group, layer: Layer, query: Tensor) -> Tensor:
        """One row per request on the plain layout."""
        block_table, seq_lens, most = group.block_table, group.seq_lens, group.max_seq_len
        if layer.window is not None:
            trimmed = group.trimmed(layer.window)
            block_table, seq_lens, most = trimmed.block_table, trimmed.seq_lens, trimmed.max_seq_len
        out = torch.empty_like(query)
        num_heads, head_dim = query.shape[1:]
        num_bytes = group.num_reqs * num_heads * -(-most // PARTITION) * (head_dim * query.element_size() + 2 * 4)
        self._ops.paged_attention_v1(
            out=out,
            workspace_buffer=self._buffer("workspace", num_bytes, torch.uint8),
            query=query,
            key_cache=layer.cache.key,
            value_cache=layer.cache.value,
            scale=layer.scale,
            block_tables=block_table,
            cu_query_lens=None,
            context_lens=seq_lens,
            max_context_len=most,
            alibi_slopes=None,
            kv_cache_dtype=self._kind,
            kv_cache_layout="NHD",
            logits_soft_cap=layer.softcap or 0.0,
            k_scale=self._scales[0],
            v_scale=self._scales[1],
            sliding_window=layer.window or 0,
        )
        return out

    def paged_common(self, group: Group, layer: Layer, query: Tensor) -> Tensor:
        """One row per request on the shuffled layout; AITER picks HIP or assembly by the number of rows."""
        cache, out = shuffled(layer.cache), torch.empty_like(query)
        exp_sums, max_logits, partial_out = self._partitions(group, query)
        tables = self._scale_table(layer.cache) if self._is_fp8 else (None, None)
        self._ops.paged_attention_common(
            Q=query,
            K=cache.key,
            V=cache.value,
            exp_sums=exp_sums,
            max_logits=max_logits,
            tmp_out=partial_out,
            block_tables=group.block_table,
            context_lens=group.seq_lens,
            block_tables_stride0=group.block_table.stride(0),
            scale=layer.scale,
            max_seq_len=group.max_seq_len,
            K_QScale_hip=self._scales[0],
            V_QScale_hip=self._scales[1],
            K_QScale_asm=tables[0],
            V_QScale_asm=tables[1],
            out_=out,
            kv_cache_dtype=self._kind,
        )
        return out

    def paged_rocm(self, group: Group, layer: Layer, query: Tensor) -> Tensor:
        """The same with HIP only, for shapes and scales the assembly kernel does not have."""
        cache, out = shuffled(layer.cache), torch.empty_like(query)
        exp_sums, max_logits, partial_out = self._partitions(group, query)
        self._ops.paged_attention_rocm(
            out=out,
            exp_sums=exp_sums,
            max_logits=max_logits,
            tmp_out=partial_out,
            query=query,
            key_cache=cache.key,
            value_cache=cache.value,
            num_kv_heads=self.spec.num_kv_heads,
            scale=layer.scale,
            block_tables=group.block_table,
            context_lens=group.seq_lens,
            block_size=self.spec.block_size,
            max_context_len=group.max_seq_len,
            alibi_slopes=None,
            kv_cache_dtype=self._kind,
            k_scale=self._scales[0],
            v_scale=self._scales[1],
        )
        return out

    def _partitions(self, group: Group, query: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scratch of the paged kernels: two tables [num_reqs, heads, partitions], and outputs with head_dim behind them."""
        num_heads, head_dim = query.shape[1:]
        shape = (group.num_reqs, num_heads, -(-group.max_seq_len // PARTITION))
        count = math.prod(shape)
        exp_sums = self._buffer("exp_sums", count, torch.float32).view(shape)
        max_logits = self._buffer("max_logits", count, torch.float32).view(shape)
        return exp_sums, max_logits, self._buffer("partial_out", count * head_dim, query.dtype).view(*shape, head_dim)

    def _buffer(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        """Scratch of `count` elements. A buffer is never given up, so that captured graphs may go on using its address."""
        size = _round_up(count)
        if (name, size, dtype) not in self._buffers:
            self._buffers[name, size, dtype] = torch.empty(size, dtype=dtype, device=self.spec.device)
        return self._buffers[name, size, dtype][:count]

    def _scale_table(self, cache: LayerCache) -> tuple[Tensor, Tensor]:
        """The scales as the assembly kernel reads them, once per slot and head: [num_blocks, num_kv_heads, block_size]."""
        num_blocks, size, heads = cache.key.shape[:3]
        if num_blocks not in self._scale_tables:
            tables = [scale.expand(num_blocks, heads, size).contiguous() for scale in self._scales]
            self._scale_tables[num_blocks] = (tables[0], tables[1])
        return self._scale_tables[num_blocks]

    def _read_rows(self, cache: LayerCache, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return self._dequantised(*read_rows(cache, slots, self.layout), dtype)

    def _dequantised(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if not self._is_fp8:
            return key, value
        return key.to(dtype) * self._scales[0].to(dtype), value.to(dtype) * self._scales[1].to(dtype)


def _window_size(window: int | None, causal: bool) -> tuple[int, int]:
    """A window as AITER writes it: keys before and after the own position. A right side of 0 would make any call causal."""
    if window is None:
        return -1, -1
    return window - 1, 0 if causal else window - 1


def _round_up(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()
