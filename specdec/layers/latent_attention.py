"""Latent attention of one decoder layer (DeepSeek-V2, arXiv 2405.04434), with an indexer or without
(V3.2, arXiv 2512.02556).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.attention.mla import (
    IndexerRows,
    MlaBackend,
    MlaRows,
    MlaSpec,
    SparseMlaBackend,
    UpProjection,
)
from specdec.layers.attention import Rows
from specdec.layers.linear import Linear
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Ops
from specdec.layers.rotary.rotary import Angles, Rope, rotate

SELECTED = "selected"
"""Under which a layer leaves the positions it selected, for later layers without an indexer."""


@dataclass(frozen=True, slots=True, eq=False)
class Indexer:
    """Small queries and keys beside a layer's attention, which score positions for it.

    The paper's kernels also turn both by a Hadamard matrix, to lose less in 8-bit floats; products,
    and so scores, stay the same.

    Attributes:
        query: from the compressed query of the layer's attention.
        key: from the layer's input.
        key_norm: weight, bias and epsilon of a layer norm of the key.
        weights: from the layer's input to one number per head. Its type may differ: transformers
            has it in float32 for float16.
        rope_dim: numbers of a head that are rotated, the first ones.
    """

    query: Linear
    key: Linear
    key_norm: tuple[Tensor, Tensor, float]
    weights: Linear
    rope_dim: int

    def __call__(self, hidden: Tensor, compressed_query: Tensor, angles: Angles) -> IndexerRows:
        """Rows of the indexer for `hidden` [T, H] and `compressed_query` [T, q_lora_rank]."""
        weight, bias, epsilon = self.key_norm
        head_dim = self.key.out_features
        query = self.query(compressed_query).unflatten(-1, (-1, head_dim))
        key = F.layer_norm(self.key(hidden), (head_dim,), weight, bias, epsilon)[:, None]
        weights = self.weights(hidden.to(self.weights.dtype)).float()
        return IndexerRows(
            query=self._rotate(query, angles),
            key=self._rotate(key, angles)[:, 0],
            weights=weights * (query.shape[1] ** -0.5 * head_dim**-0.5),
        )

    def _rotate(self, heads: Tensor, angles: Angles) -> Tensor:
        turned = rotate(heads[..., : self.rope_dim], *angles.doubled)
        return torch.cat([turned, heads[..., self.rope_dim :]], dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class LatentAttention:
    """Attention to latents that all heads share.

    Attributes:
        down: joins the compressed query, or the query itself, and the latent.
        query: from the compressed query to the heads, and the norm before it; None where the query
            is not compressed.
        latent_norm: of the compressed key and value.
        up: from them to keys and values of the heads.
        rope: of the rotated part of queries and keys; None leaves that part as it is.
        scale: of the scores.
        indexer: chooses the positions that rows attend to; None leaves that to an earlier layer, or
            takes all.
    """

    down: Linear
    query: tuple[Norm, Linear] | None
    latent_norm: Norm
    up: UpProjection
    rope: Rope | None
    scale: float
    indexer: Indexer | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `specdec.layers.attention.Attention.linears`."""
        query = () if self.query is None else (self.query[1],)
        if self.indexer is None:
            return self.down, *query
        return self.down, *query, self.indexer.query, self.indexer.key, self.indexer.weights

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        """See `specdec.layers.attention.Attention`."""
        backend = rows.backend
        assert isinstance(backend, MlaBackend)
        spec = backend.spec
        latent_width = spec.kv_lora_rank + spec.qk_rope_head_dim
        product = ops.project(self.down, hidden)
        widths = [product.shape[1] - latent_width, latent_width]
        first, latent = product.split_with_sizes(widths, dim=1)
        compressed_query = first if self.query is None else ops.norm(first, self.query[0])
        query = first if self.query is None else ops.project(self.query[1], compressed_query)
        angles = None if self.rope is None else rows.angles[self.rope]
        if angles is not None and angles.factors is not None:
            query.mul_(angles.factors)
        widths = [spec.kv_lora_rank, spec.qk_rope_head_dim]
        compressed, key_rope = latent.split_with_sizes(widths, dim=1)
        heads = query.unflatten(-1, (spec.num_heads, -1))
        sizes = [spec.qk_nope_head_dim, spec.qk_rope_head_dim]
        query_nope, query_rope = heads.split_with_sizes(sizes, dim=2)
        if angles is not None:
            query_rope = rotate(query_rope, *angles.doubled)
            key_rope = rotate(key_rope[:, None], *angles.doubled)[:, 0]
        new = MlaRows(query_nope, query_rope, ops.norm(compressed, self.latent_norm), key_rope)
        if self.indexer is not None:
            assert isinstance(backend, SparseMlaBackend) and angles is not None
            index = self.indexer(hidden, compressed_query, angles)
            rows.shared[SELECTED] = backend.select(index, rows.cache, rows.plan)
        selected = rows.shared.get(SELECTED)
        return backend.run(
            new, self.up, rows.cache, rows.plan, scale=self.scale, selected=selected
        ).flatten(1)


def split_up(weight: Tensor, spec: MlaSpec) -> UpProjection:
    """The maps of one layer from its projection out of the latent, [num_heads * (nope + value),
    kv_lora_rank].
    """
    up = weight.unflatten(0, (spec.num_heads, -1))
    key, value = up.split([spec.qk_nope_head_dim, spec.v_head_dim], dim=1)
    return UpProjection(key=key.contiguous(), value=value.transpose(1, 2).contiguous())


def latent_scale(rope: Mapping[str, Any], head_dim: int) -> float:
    """Factor of the scores, with the square of YaRN's amplitude where the RoPE parameters state
    `mscale_all_dim`.
    """
    mscale = rope.get("mscale_all_dim") if rope.get("rope_type", "default") != "default" else None
    amplitude = 1 + 0.1 * mscale * math.log(max(1.0, rope["factor"])) if mscale else 1.0
    return float(head_dim**-0.5 * amplitude**2)


def halves_first(width: int, start: int, size: int) -> Callable[[Tensor], Tensor]:
    """In blocks of `width` rows, puts every second of the `size` from `start` on before the others
    between them.
    """
    numbers = torch.arange(width)
    turned = numbers[start : start + size].view(-1, 2).t().flatten()
    order = torch.cat([numbers[:start], turned, numbers[start + size :]])

    def reorder(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, width))[:, order.to(rows.device)].flatten(0, 1)

    return reorder
