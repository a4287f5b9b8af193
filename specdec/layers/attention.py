"""Attention of one decoder layer: what a layer asks of its attention, and the kind with heads of
their own keys and values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.layers.linear import Linear
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import AttentionInputs, Heads, Ops
from specdec.layers.rotary.rotary import Angles, Rope
from specdec.layers.sharded import norm_divided
from specdec.parallel.group import Group


class Rows(NamedTuple):
    """What the attention of a layer is told of the rows of a forward beside their hidden states."""

    backend: AttentionBackend | MlaBackend
    cache: Any
    plan: Any
    angles: Mapping[Rope, Angles]
    shared: dict[str, Tensor]  # what a layer leaves for those after it

    def each(self) -> "list[Rows]":
        """For each of several caches of a layer."""
        pairs = zip(self.cache, self.plan, strict=True)
        return [self._replace(cache=cache, plan=plan) for cache, plan in pairs]


class Attention(Protocol):
    """Attention of one layer, without its output projection."""

    @property
    def rope(self) -> Rope | None:
        """How queries and keys are rotated; None, as by default, where nothing is."""
        return None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's weights, the first product's first."""

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        """[T, inputs of the output projection `prefetch`] from `hidden` [T, H]."""


@dataclass(frozen=True, slots=True, eq=False)
class HeadAttention:
    """Attention with groups of query heads that share a key head (GQA, arXiv 2305.13245).

    Attributes:
        qkv: to [num_heads + 2 * num_kv_heads] heads.
        heads: norms of single heads, scale, window, softcap and sinks.
        rope: rotation of queries and keys.
        wide_norms: norms of all query heads together and of all key heads together, as in OLMo 2
            (arXiv 2501.00656).
        gate: behind keys and values `qkv` has gates, of each number that attention puts out (arXiv
            2505.06708) or of each head, and this function of them scales it; None for none.
        value_dim: numbers of a value head where they are fewer than of a key head. The cache holds
            zeros behind them, so that to a backend keys and values are alike. None for as many.
        value_scale: factor of values.
        group: ranks that the heads are divided among; None for one that has them all.
    """

    qkv: Linear
    heads: Heads
    rope: Rope | None
    wide_norms: tuple[Norm, Norm] | None = None
    gate: Literal["sigmoid", "softplus"] | None = None
    value_dim: int | None = None
    value_scale: float = 1.0
    group: Group | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `Attention.linears`."""
        return (self.qkv,)

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        """See `Attention.__call__`."""
        backend = rows.backend
        assert isinstance(backend, AttentionBackend)
        spec = backend.spec
        qkv, gate = ops.project(self.qkv, hidden), None
        if self.gate is not None:
            width = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
            qkv, gate = qkv[:, :width], qkv[:, width:]
        if self.value_dim is not None:
            width = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
            rotated, value = qkv[:, :width], qkv[:, width:].unflatten(1, (spec.num_kv_heads, -1))
            value = F.pad(value, (0, spec.head_dim - self.value_dim))
            qkv = torch.cat([rotated, value.flatten(1)], dim=1)
        if self.wide_norms is not None:
            widths = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
            query, key, value = qkv.split_with_sizes(widths, dim=1)
            if self.group is None:
                query, key = ops.norm(query, self.wide_norms[0]), ops.norm(key, self.wide_norms[1])
            else:
                query, key = norm_divided((query, key), self.wide_norms, self.group)
            qkv = torch.cat([query, key, value], dim=1)
        angles = None if self.rope is None else rows.angles[self.rope]
        if angles is not None and angles.factors is not None:
            qkv[:, : spec.num_heads * spec.head_dim].mul_(angles.factors)
        inputs = AttentionInputs(backend, self.heads, angles, rows.cache, rows.plan, prefetch)
        out = ops.attend(qkv.view(len(hidden), -1, spec.head_dim), inputs)
        if self.value_dim is not None or self.value_scale != 1:
            out = out.unflatten(1, (spec.num_heads, -1))[..., : self.value_dim]
            out = (out * self.value_scale).flatten(1)
        if gate is None:
            return out
        if self.gate == "sigmoid":
            return ops.gate(out, gate)
        factors = F.softplus(gate.float()).to(out.dtype).unflatten(1, (spec.num_heads, -1))
        return (out.view(len(out), spec.num_heads, -1) * factors).flatten(1)
