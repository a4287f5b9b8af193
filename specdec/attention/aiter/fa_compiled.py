"""AITER's attention kernels as the backend calls them: one method per route, each filling in what the kernel has to be told.

The routes to its Triton kernels are in `rocm_aiter_triton`.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.attention.aiter.layout import Layout, read_rows, shuffled
from specdec.attention.aiter.plan import Context, Group
from specdec.attention.aiter.triton import Layer, TritonKernels, round_up, window_sides
from specdec.attention.backend import AttentionSpec
from specdec.attention.merge import merge
from specdec.kernels import aiter
from specdec.kv_cache import LayerCache

PARTITION = 256
"""Keys per partition of the paged kernels, the only size they are built for."""


class AiterKernels(TritonKernels):
    """The kernels for one model on one device, with the scratch they need.

    Args:
        spec: what the model asks for.
        layout: of the cache.
    """

    def __init__(self, spec: AttentionSpec, layout: Layout) -> None:
        self._ops = aiter.load()
        super().__init__(spec, layout, self._ops)
        self._kind = "fp8" if self._is_fp8 else "auto"
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
        for chunk in group.context_chunks():
            key, value = self._read_rows(layer.cache, chunk.slots, query.dtype)
            part, part_lse = self._varlen(group, layer, query, key, value, chunk, causal=False, return_lse=True)
            out, lse = merge(out, lse, part, part_lse)
        return out.to(query.dtype)

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
            window_size=window_sides(window, causal),
            return_lse=return_lse,
            sink_ptr=None if layer.sinks is None else layer.sinks.float(),
        )
        return result if return_lse else (result, result.new_empty(0))

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
        size = round_up(count)
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
        return self.dequantised(*read_rows(cache, slots, self.layout), dtype)
