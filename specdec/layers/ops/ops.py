"""What a decoder computes between its matrix products: one interface, in plain torch here, in
Triton in `triton_ops`.

Every operation is written down here first. Plain torch is the oracle of the kernels and the way on
a CPU, where a forward of a few tokens would otherwise spend more time between matrix products than
in them: so residuals are added by the products.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionBackend
from specdec.kv_cache import LayerCache, StateCache
from specdec.layers.experts.experts import apply_experts
from specdec.layers.experts.joined import JoinedExperts
from specdec.layers.experts.router import Router
from specdec.layers.experts.routing import Experts
from specdec.layers.linear import Linear
from specdec.layers.ops.activation import activate
from specdec.layers.ops.grouped_convolution import GroupedConvolution, Side, mix_rows
from specdec.layers.ops.norm import GroupNorm, Norm, gated_norm, rms_norm
from specdec.layers.recurrence.convolution import convolve
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows, recur
from specdec.layers.rotary.rotary import Angles, rotate
from specdec.parallel.collectives import summed
from specdec.parallel.group import Group


class Join(NamedTuple):
    """How the output of a sublayer joins the residual stream, and what the next one is given.

    The stream becomes `factor * (residual + scale * after(output))`; the next sublayer is given
    `norm` of it.
    """

    norm: Norm | None  # None gives the stream itself
    after: Norm | None = None
    scale: float = 1.0
    factor: Tensor | None = None  # [1]; None is 1


class Heads(NamedTuple):
    """What one layer's attention does to its queries, keys and values before they meet, and how
    they meet.
    """

    scale: float  # of the scores
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None  # [num_heads]
    query_norm: Norm | None = None  # of each head
    key_norm: Norm | None = None
    value_norm: Norm | None = None

    @property
    def attention_options(self) -> dict[str, Any]:
        """What `AttentionBackend.run` is told of this layer."""
        options = {"scale": self.scale, "window": self.window, "softcap": self.softcap}
        return {**options, "sinks": self.sinks}


class AttentionInputs(NamedTuple):
    """What one layer's attention is given beside queries, keys and values.

    Attributes:
        backend: attention.
        heads: of the layer.
        angles: of the rows; None rotates nothing.
        cache, plan: of the layer.
        prefetch: the output projection.
    """

    backend: AttentionBackend
    heads: Heads
    angles: Angles | None
    cache: LayerCache
    plan: Any
    prefetch: Linear


class Ops:
    """Operations in plain torch, the oracle of kernels.

    Rows are packed: [T, ...]. A weight called `prefetch` is that of a product soon to come, which a
    kernel may prefetch.
    """

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        """Rows [..., H] of a table [V, H] times `scale`, for int64 ids [...]."""
        rows = F.embedding(token_ids, table)
        return rows if scale == 1 else rows * scale

    def norm(self, x: Tensor, norm: Norm, prefetch: Linear | None = None) -> Tensor:
        """`x` [T, H], normed."""
        return rms_norm(x, norm)

    def project(self, linear: Linear, x: Tensor) -> Tensor:
        """The product of `x` [T, in] with a weight: [T, out]."""
        return linear(x)

    def gated(self, linear: Linear, x: Tensor, activation: str, prefetch: Linear) -> Tensor:
        """The gated activation [T, out / 2] of a product that joins gate and up, or [T, out] of one
        without a gate.
        """
        return activate(linear(x), activation)

    def add(
        self,
        x: Tensor,
        residual: Tensor,
        join: Join,
        prefetch: Linear | None = None,
        group: Group | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What comes after a sublayer with output `x` [T, H], or [parts, T, H] whose sum it is: see
        `Join`.

        Of a group of ranks `x` is what this one gives to a sum over all, in which each part is
        rounded before.

        Returns:
            What the next sublayer is given, and the residual stream, [T, H] each.
        """
        if group is not None:
            x = summed(x, group, residual.dtype)
        if x.ndim == 3:
            x = x.sum(0)
        x = x.to(residual.dtype)
        if join.after is not None:
            x = rms_norm(x, join.after)
        if join.scale != 1:
            x = x * join.scale
        stream = residual + x
        return self._next(stream if join.factor is None else stream * join.factor, join)

    def project_add(
        self, layer: Linear, x: Tensor, residual: Tensor, join: Join, prefetch: Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        """`add` of the product of `x` [T, in] with a weight."""
        if join.after is None and join.scale == 1 and join.factor is None:
            return self._next(layer(x, residual), join)
        return self.add(layer(x), residual, join)

    def route(self, router: Router, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, top_k] and ids of the experts that rows `hidden` [T, H] choose."""
        return router(hidden)

    def experts(self, experts: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """The weighted sum [T, H] of each row's experts for `x` [T, H], or float32 [parts, T, H]
        whose sum it is.
        """
        return apply_experts(x, weights, ids, experts)

    def joined_experts(self, joined: JoinedExperts, hidden: Tensor) -> Tensor | None:
        """Experts of rows `hidden` [T, H] and what these share, as float32 [parts, T, H]; None
        where no kernel has both at once.
        """
        return None

    def attend(self, qkv: Tensor, inputs: AttentionInputs) -> Tensor:
        """Norms and rotates queries and keys, writes keys and values, and attends to the cache.

        Without values in `qkv` the keys before their norm and their rotation are values, too.
        Without keys the cache holds both already.

        Args:
            qkv: [T, heads, head_dim], of num_heads queries, num_kv_heads keys and as many values.
            inputs: beside them.

        Returns:
            [T, num_heads * head_dim].
        """
        backend, heads, angles, cache, plan, _ = inputs
        num_heads, num_kv_heads = backend.spec.num_heads, backend.spec.num_kv_heads
        stored = min(qkv.shape[1] - num_heads, num_kv_heads)
        rotated, value = qkv[:, : num_heads + stored], qkv[:, -num_kv_heads:]
        if heads.query_norm is not None and heads.key_norm is not None:
            query, key = rotated.split_with_sizes([num_heads, stored], dim=1)
            normed = rms_norm(query, heads.query_norm), rms_norm(key, heads.key_norm)
            rotated = torch.cat(normed, dim=1)
        elif heads.query_norm is not None:
            rotated = rms_norm(rotated, heads.query_norm)
        if angles is not None:
            rotated = rotate(rotated, *angles.doubled)
        if not stored:
            return backend.read(rotated, cache, plan, **heads.attention_options).flatten(1)
        if heads.value_norm is not None:
            value = rms_norm(value, heads.value_norm)
        query, key = rotated.split_with_sizes([num_heads, stored], dim=1)
        return backend.run(query, key, value, cache, plan, **heads.attention_options).flatten(1)

    def write(
        self,
        backend: AttentionBackend,
        key: Tensor,
        value: Tensor,
        key_norm: Norm | None,
        angles: Angles,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        """Norms and rotates keys [T, num_kv_heads, head_dim], and writes them and values like them
        to the cache.
        """
        key = key if key_norm is None else rms_norm(key, key_norm)
        backend.write(cache, rotate(key, *angles.doubled), value, slot_mapping)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """`x` [T, width] times the sigmoid of `gate` like it."""
        return x * gate.sigmoid()

    def recur(
        self, x: Tensor, recurrence: Recurrence, cache: StateCache, rows: RecurrentRows
    ) -> Tensor:
        """See `specdec.layers.recurrence.recurrence.recur`."""
        return recur(x, recurrence, cache, rows)

    def convolve(
        self, x: Tensor, kernel: Tensor, bias: Tensor | None, cache: StateCache, rows: RecurrentRows
    ) -> Tensor:
        """See `specdec.layers.recurrence.convolution.convolve`."""
        return convolve(x, kernel, bias, cache, rows)

    def mix_rows(
        self, x: Tensor, dynamic: Tensor, convolution: GroupedConvolution, side: Side
    ) -> Tensor:
        """See `specdec.layers.ops.grouped_convolution.mix_rows`, for [T, H]."""
        return mix_rows(x, dynamic, convolution.base, convolution.width, side)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: GroupNorm) -> Tensor:
        """`x` [T, groups * V], each group normed and before or after that times the SiLU of `gate`
        like it.
        """
        return gated_norm(x, gate, norm)

    def _next(self, residual: Tensor, join: Join) -> tuple[Tensor, Tensor]:
        return residual if join.norm is None else rms_norm(residual, join.norm), residual
