"""`specdec.layers.ops.ops.Ops` with AITER's kernels in the place of ours where it has them;
everything else is `TritonOps`.

    norm+residual       rmsnorm2d_fwd(_with_add)         before qkv, and before gate and up
    RoPE+cache write    fused_qk_rope_reshape_and_cache  between the product of qkv and attention
    activation          silu_and_mul                     between gate and up, and down

Our products of few rows have the activation in them, and leave partial sums for the norm after
them, which AITER's cannot add up: both stay as they are. AITER's `fused_moe` is not used: it adds
experts up with atomics, in whatever order they come, so that a row would depend on its neighbors;
and it is tuned for shuffled weights, of which nothing else here could make use.
"""

from typing import Any

import torch
from torch import Tensor

from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.aiter.layout import shuffled
from specdec.attention.backend import AttentionBackend
from specdec.base.sizes import power_of_two
from specdec.kernels import aiter
from specdec.kv_cache import LayerCache
from specdec.layers.aiter import check as aiter_layers
from specdec.layers.aiter.check import keep_ours
from specdec.layers.aiter.kernels import VECTOR, WIDEST_NORM, AiterLayers
from specdec.layers.experts.routing import PLAIN
from specdec.layers.linear import Linear
from specdec.layers.ops.kernels import TritonOps
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import AttentionInputs, Heads, Join
from specdec.parallel.collectives import summed
from specdec.parallel.group import Group


class AiterOps(TritonOps):
    """`Ops` in AITER's kernels, and in Triton what they do not have. Which that is is logged once,
    when it first occurs. Arguments are those of `TritonOps`.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, **kinds: Any) -> None:
        super().__init__(device, dtype, **kinds)
        self._aiter = aiter.load(AiterLayers)

    def norm(self, x: Tensor, norm: Norm, prefetch: Linear | None = None) -> Tensor:
        if reason := _against_norm(x, norm):
            keep_ours("a norm", reason)
            return super().norm(x, norm, prefetch)
        return self._aiter.norm(x, norm.weight, norm.epsilon)

    def add(
        self,
        x: Tensor,
        residual: Tensor,
        join: Join,
        prefetch: Linear | None = None,
        group: Group | None = None,
    ) -> tuple[Tensor, Tensor]:
        if group is not None:
            x = summed(x, group, residual.dtype)
        if join.norm is None or (reason := _against_add(x, residual, join.norm, join)):
            keep_ours("a sum", "nothing is normed after it" if join.norm is None else reason)
            return super().add(x, residual, join, prefetch)
        return self._aiter.add_norm(x, residual, join.norm.weight, join.norm.epsilon)

    def activate(self, joined: Tensor, activation: str) -> Tensor:
        width = joined.shape[1] // (1 if activation in PLAIN else 2)
        fits = self._aiter.has_activation(activation) and not width % VECTOR
        if not (fits and joined.is_contiguous()):
            what = f"the activation {activation} of {width}"
            keep_ours(what, f"AITER has silu and gelu_tanh, of multiples of {VECTOR}")
            return super().activate(joined, activation)
        return self._aiter.gated(joined, activation)

    def attend(self, qkv: Tensor, inputs: AttentionInputs) -> Tensor:
        backend, heads, angles, cache, plan, _ = inputs
        if angles is None or (reason := _against_rope(backend, qkv, heads, cache)):
            reason = "queries and keys are not rotated" if angles is None else reason
            keep_ours("the cache write", reason)
            return super().attend(qkv, inputs)
        assert isinstance(backend, RocmAiterFaBackend)
        spec = backend.spec
        counts = [spec.num_heads, spec.num_kv_heads, spec.num_kv_heads]
        query, key, value = qkv.split_with_sizes(counts, dim=1)
        views = shuffled(cache) if backend.layout == "shuffle" else cache
        query, key = self._aiter.rotate_and_store(
            query, key, value, views, plan.slot_mapping, angles.row_index, angles.cos, angles.sin
        )
        return backend.attend(query, key, value, cache, plan, **heads.attention_options).flatten(1)


def _against_norm(x: Tensor, norm: Norm) -> str | None:
    """Why AITER's norm cannot take rows [T, H]; None when it can."""
    width = x.shape[-1]
    if norm.weight.dtype != x.dtype:
        return f"its weight is {norm.weight.dtype}, which is multiplied before rounding"
    if width % VECTOR or width > WIDEST_NORM:
        return f"rows of {width} (AITER's are multiples of {VECTOR} up to {WIDEST_NORM})"
    return None if x.ndim == 2 and x.is_contiguous() else "its rows are parts of longer ones"


def _against_add(x: Tensor, residual: Tensor, norm: Norm, join: Join) -> str | None:
    """Why AITER's norm after a sum cannot take the output `x` of a sublayer; None when it can."""
    if x.ndim == 3:
        return "a product of few rows left partial sums"
    if join.after is not None or join.scale != 1 or join.factor is not None:
        return "what is added, or the sum, is normed or scaled before"
    if x.dtype != residual.dtype:
        return f"a sum of {x.dtype} and {residual.dtype}"
    return _against_norm(x, norm) or _against_norm(residual, norm)


def _against_rope(
    backend: AttentionBackend, qkv: Tensor, heads: Heads, cache: LayerCache
) -> str | None:
    """Why AITER's rotation cannot write the cache; None when it can."""
    if not isinstance(backend, RocmAiterFaBackend):
        return f"{backend.name} has a cache of our own"
    if any(norm is not None for norm in (heads.query_norm, heads.key_norm, heads.value_norm)):
        return "AITER's RoPE norms no heads"
    if qkv.shape[1] != backend.spec.num_heads + 2 * backend.spec.num_kv_heads:
        return "values are those of another layer or the keys"
    if qkv.shape[2] != power_of_two(qkv.shape[2]):
        return f"heads of {qkv.shape[2]} (AITER's RoPE takes powers of two)"
    if cache.key.dtype != qkv.dtype or qkv.dtype not in aiter_layers.STORED_DTYPES:
        return (
            f"rows in {qkv.dtype} and a cache in {cache.key.dtype} (AITER's RoPE writes"
            f" {aiter_layers.STORED_DTYPES[0]} alone)"
        )
    return None
