"""AITER's two Triton kernels for attention, with cache writes in plain torch: all there is on GPUs without its compiled kernels."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.attention.aiter.layout import Layout, read_blocks, shuffled
from specdec.attention.aiter.plan import Group
from specdec.attention.backend import AttentionSpec
from specdec.kernels.aiter import Function
from specdec.kv_cache import LayerCache, blocks_for

WIDEST_TILE = 128
"""Keys that one step of a draft kernel may load at once; from a dense cache also those behind the last row."""


class TritonOps(Protocol):
    """AITER's functions that this file calls, from whichever part of AITER is loaded."""

    @property
    def unified_attention(self) -> Function: ...
    @property
    def flash_attn_with_kvcache(self) -> Function: ...


@dataclass(frozen=True, slots=True)
class Layer:
    """What distinguishes one layer from the next."""

    cache: LayerCache
    scale: float
    window: int | None
    softcap: float | None
    sinks: Tensor | None


class TritonKernels:
    """The kernels for one model on one device.

    Args:
        spec: what the model asks for.
        layout: of the cache.
        ops: AITER's functions.
    """

    def __init__(self, spec: AttentionSpec, layout: Layout, ops: TritonOps) -> None:
        self.spec, self.layout = spec, layout
        self._triton = ops
        self._is_fp8 = spec.kv_dtype.itemsize == 1
        self._scales = tuple(torch.full((1,), scale, dtype=torch.float32, device=spec.device) for scale in spec.cache_scales)

    def write(self, cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor) -> None:
        """Stores rows [num_tokens, num_kv_heads, head_dim] at `slot_mapping`, converted to the type of the cache."""
        assert self.layout == "plain", "only AITER's own writer knows the shuffled layout"
        for stored, rows, scale in zip(cache, (key, value), self.spec.cache_scales, strict=True):
            if self._is_fp8:  # what is too large would become NaN in some 8-bit types; and no index writes any of them
                most = torch.finfo(stored.dtype).max
                rows = (rows.float() / scale).clamp(-most, most).to(stored.dtype).view(torch.uint8)
                stored = stored.view(torch.uint8)
            stored.flatten(0, 1).index_copy_(0, slot_mapping, rows)

    def unified(self, group: Group, layer: Layer, query: Tensor) -> Tensor:
        """Causal rows of any number on the paged cache, in either layout."""
        out = torch.empty_like(query)
        cache, extra = layer.cache, {}
        if self.layout == "shuffle":
            cache, extra = shuffled(cache), {"shuffled_kv_cache": True}
        shape = (group.num_reqs, self.spec.num_kv_heads)
        key_scale, value_scale = (s.expand(shape) for s in self._scales) if self._is_fp8 else (None, None)
        self._triton.unified_attention(
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
            window_size=window_sides(layer.window, causal=True),
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
        """Bidirectional blocks, as many rows per request.

        This kernel reads neither the shuffled layout nor 8-bit keys: those are gathered first, into one stretch per request. The
        length is rounded up: few lengths are ever compiled, and no tile reaches past the last stretch, where anything may lie.
        """
        key, value = layer.cache
        page_table: Tensor | None = group.block_table  # whole: its width is compiled in, and stays the same from step to step
        if gathered:
            width = round_up(blocks_for(max(group.max_seq_len, WIDEST_TILE), self.spec.block_size))
            columns = torch.arange(width, device=group.block_table.device).clamp(max=group.block_table.shape[1] - 1)
            key, value = read_blocks(layer.cache, group.block_table.index_select(1, columns), self.layout)
            key, value = self.dequantised(key, value, query.dtype)
            page_table = None
        out: Tensor = self._triton.flash_attn_with_kvcache(
            q=query.view(group.num_reqs, group.max_query_len, *query.shape[1:]),
            k_cache=key,
            v_cache=value,
            cache_seqlens=group.seq_lens,
            page_table=page_table,
            softmax_scale=layer.scale,
            causal=False,
            window_size=window_sides(layer.window, causal=False),
        )
        return out.view(query.shape)

    def dequantised(self, key: Tensor, value: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values read from the cache, in `dtype`."""
        if not self._is_fp8:
            return key, value
        return key.to(dtype) * self._scales[0].to(dtype), value.to(dtype) * self._scales[1].to(dtype)


def window_sides(window: int | None, causal: bool) -> tuple[int, int]:
    """A window as AITER writes it: keys before and after the own position. A right side of 0 would make any call causal."""
    if window is None:
        return -1, -1
    return window - 1, 0 if causal else window - 1


def round_up(count: int) -> int:
    """The next power of two."""
    return 1 << max(0, count - 1).bit_length()
