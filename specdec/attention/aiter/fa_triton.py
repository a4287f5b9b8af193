"""AITER's two Triton kernels for attention, with cache writes in plain torch: all there is on GPUs
without its compiled kernels.

Every kernel is a function of what one model, one group of requests, one layer and its rows have to
say.
"""

from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.attention.aiter.groups import Group
from specdec.attention.aiter.layout import Layout, read_blocks, shuffled
from specdec.attention.aiter.scratch import Scratch
from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.base.sizes import power_of_two
from specdec.kernels.aiter import AiterTriton
from specdec.kv_cache import LayerCache, blocks_for

WIDEST_TILE = 128
"""Keys that one step of a draft kernel may load at once; from a dense cache also those behind the
last row.
"""

Ops = TypeVar("Ops", bound=AiterTriton, covariant=True)


@dataclass(frozen=True)
class Setup(Generic[Ops]):
    """What does not change for one model on one device: the model's shape, the cache's layout,
    AITER's functions, scratch, and our own kernels where they read an 8-bit cache that AITER's
    cannot.
    """

    spec: AttentionSpec
    layout: Layout
    ops: Ops
    scratch: Scratch
    own: AttentionBackend | None = None

    @property
    def is_fp8(self) -> bool:
        """Whether the cache holds 8-bit floats."""
        return self.spec.kv_dtype.itemsize == 1

    @property
    def reads_in_place(self) -> bool:
        """Whether the kernel for blocks can read the cache."""
        return self.layout == "plain" and not self.is_fp8

    def as_cached(self, rows: Tensor) -> Tensor:
        """Keys or values as they are read back from the cache: what one of 8 bits cannot hold is
        rounded and saturates.
        """
        if not self.is_fp8:
            return rows
        most = torch.finfo(self.spec.kv_dtype).max
        return rows.clamp(-most, most).to(self.spec.kv_dtype).to(rows.dtype)

    @property
    def scale(self) -> Tensor:
        """float32 [1]: what AITER multiplies keys and values of an 8-bit cache by. We store them as
        they are.
        """
        return self.scratch.take("scale", 1, torch.float32, torch.ones)


class Layer(NamedTuple):
    """What distinguishes one layer from the next."""

    cache: LayerCache
    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


class Rows(NamedTuple):
    """Packed rows."""

    query: Tensor  # [num_tokens, num_heads, head_dim]
    key: Tensor  # [num_tokens, num_kv_heads, head_dim]
    value: Tensor  # [num_tokens, num_kv_heads, head_dim]


def write(
    setup: Setup[AiterTriton], cache: LayerCache, key: Tensor, value: Tensor, slot_mapping: Tensor
) -> None:
    """Stores rows [num_tokens, num_kv_heads, head_dim] at `slot_mapping`, converted to the type of
    the cache.
    """
    assert setup.layout == "plain", "only AITER's own writer knows the shuffled layout"
    for stored, rows in zip(cache, (key, value), strict=True):
        # What is too large would become NaN in some 8-bit types, and no index writes any of them.
        if setup.is_fp8:
            most = torch.finfo(stored.dtype).max
            rows = rows.float().clamp(-most, most).to(stored.dtype).view(torch.uint8)
            stored = stored.view(torch.uint8)
        stored.flatten(0, 1).index_copy_(0, slot_mapping, rows)


def unified(setup: Setup[AiterTriton], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Causal rows of any number on the paged cache, in either layout."""
    out, cache, extra = torch.empty_like(rows.query), layer.cache, {}
    if setup.layout == "shuffle":
        cache, extra = shuffled(cache), {"shuffled_kv_cache": True}
    scales = setup.scale.expand(group.num_reqs, setup.spec.num_kv_heads) if setup.is_fp8 else None
    setup.ops.unified_attention(
        q=rows.query,
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
        k_descale=scales,
        v_descale=scales,
        sinks=layer.sinks,
        **extra,
    )
    return out


def kvcache(setup: Setup[AiterTriton], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Bidirectional blocks, as many rows per request, on the paged cache."""
    out: Tensor = blocks(setup, group, layer, rows.query, in_place(group, layer), group.seq_lens)
    return out.view(rows.query.shape)


def own_kernel(setup: Setup[AiterTriton], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Bidirectional blocks and draft trees by our own kernel."""
    assert setup.own is not None
    return setup.own.read(
        rows.query,
        layer.cache,
        group,
        scale=layer.scale,
        window=layer.window,
        softcap=layer.softcap,
        sinks=layer.sinks,
    )


def gathered_kvcache(setup: Setup[AiterTriton], group: Group, layer: Layer, rows: Rows) -> Tensor:
    """Attends where the kernel cannot read the cache, which is gathered first."""
    cached = gathered(setup, group, layer, rows.query.dtype)
    out: Tensor = blocks(setup, group, layer, rows.query, cached, group.seq_lens)
    return out.view(rows.query.shape)


class Keys(NamedTuple):
    """What the kernel for blocks reads."""

    key: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim]
    value: Tensor
    block_table: Tensor | None  # None where every request has one block


def in_place(group: Group, layer: Layer) -> Keys:
    """The paged cache. From the table's width the kernel derives over how many programs it splits
    the keys.
    """
    return Keys(*layer.cache, group.narrow_table)


def gathered(setup: Setup[AiterTriton], group: Group, layer: Layer, dtype: torch.dtype) -> Keys:
    """One stretch per request, in `dtype`.

    The length is rounded up: few lengths are ever compiled, and no tile reaches past the last
    stretch, where anything may lie.
    """
    width = power_of_two(blocks_for(max(group.max_seq_len, WIDEST_TILE), setup.spec.block_size))
    last = group.block_table.shape[1] - 1
    columns = torch.arange(width, device=group.block_table.device).clamp(max=last)
    key, value = read_blocks(layer.cache, group.block_table.index_select(1, columns), setup.layout)
    return Keys(key.to(dtype), value.to(dtype), None)


def blocks(
    setup: Setup[AiterTriton],
    group: Group,
    layer: Layer,
    query: Tensor,
    keys: Keys,
    seq_lens: Tensor,
    **options: Any,
) -> Any:
    """Rows as the last of `seq_lens` int32 [num_reqs] positions, which see them all, or a window on
    both sides.

    Returns:
        [num_reqs, max_query_len, num_heads, head_dim], and with `return_softmax_lse`
        log-denominators float32 [num_reqs, num_heads, max_query_len] beside it.
    """
    return setup.ops.flash_attn_with_kvcache(
        q=query.view(group.num_reqs, group.max_query_len, *query.shape[1:]),
        k_cache=keys.key,
        v_cache=keys.value,
        cache_seqlens=seq_lens,
        page_table=keys.block_table,
        softmax_scale=layer.scale,
        causal=False,
        window_size=window_sides(layer.window, causal=False),
        **options,
    )


def window_sides(window: int | None, causal: bool) -> tuple[int, int]:
    """A window as AITER writes it: keys before and after the own position. A right side of 0 would
    make any call causal.
    """
    if window is None:
        return -1, -1
    return window - 1, 0 if causal else window - 1
