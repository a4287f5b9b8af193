"""RoPE in front of attention, in one kernel: with the cache write in it where the cache is ours, else before the backend's own."""

from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.kernels.triton_fused import rope_store
from specdec.kv_cache import LayerCache


def attend_rotated(
    attention: AttentionBackend,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cache: LayerCache,
    plan: Any,
    *,
    window: int | None,
    **rotation: Any,
) -> Tensor:
    """Attention of rows that `rotation`, options of `rope_store`, norms and rotates first; see `AttentionBackend.run`.

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    scale = query.shape[-1] ** -0.5
    if isinstance(attention, TritonFaBackend):
        rotated = rope_store(query, key, value, cache, plan.slot_mapping, **rotation)
        return attention.attend(rotated, cache, plan, scale=scale, window=window)
    return attention.run(*rotate(query, key, value, **rotation), cache, plan, scale=scale, window=window)


def write_rotated(
    attention: AttentionBackend, key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor, **rotation: Any
) -> None:
    """Stores rows that `rotation` norms and rotates first; see `AttentionBackend.write`."""
    if isinstance(attention, TritonFaBackend):
        rope_store(None, key, value, cache, slot_mapping, **rotation)
    else:
        attention.write(cache, *rotate(None, key, value, **rotation)[1:], slot_mapping)


def rotate(query: Tensor | None, key: Tensor, value: Tensor, **rotation: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What `rope_store` would write, and the query, each as contiguous rows of their own, in the model's type."""
    rows = LayerCache(*(torch.empty(key.shape, dtype=key.dtype, device=key.device) for _ in "kv"))
    return rope_store(query, key, value, rows, None, **rotation), rows.key, rows.value
