"""Reference latent attention in plain torch: the oracle for every other such backend, and the CPU
path.

Kernel: absorbs the maps of keys into the query and those of values into the output, so that a layer
is attention of many query heads to one cached vector per token, and writes that out: products in
the model's type, softmax in float32. Prefill runs the same way as decoding. Building keys and
values there would save arithmetic, but a second path would need the context built again for every
chunk, and an oracle is better off with one. Positions chosen by an indexer enter through the mask,
so they save nothing here. Shapes: any. Layout: plain; index keys in the model's type. Host: never
waits for the device.
"""

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata, AttentionSpec
from specdec.attention.mla import (
    INDEXED,
    IndexerRows,
    MlaRows,
    MlaSpec,
    SparseMlaBackend,
    UpProjection,
)
from specdec.attention.torch_ref.fa import TorchRefBackend, TorchRefPlan
from specdec.kv_cache import LatentCache, LatentLayerSpec


class TorchRefMlaBackend(SparseMlaBackend):
    """Plain torch on any device."""

    name = "torch_ref"

    def __init__(self, spec: MlaSpec) -> None:
        super().__init__(spec)
        # Absorbed, latent attention has one key head as wide as the latent, and is planned as such.
        self._planner = TorchRefBackend(_absorbed(spec))

    @classmethod
    def unsupported_reasons(cls, spec: MlaSpec) -> list[str]:
        """All reasons why plain torch cannot serve `spec`; empty when it can."""
        return TorchRefBackend.unsupported_reasons(_absorbed(spec))

    @classmethod
    def tree_reasons(cls, spec: MlaSpec) -> list[str]:
        """See `MlaBackend.tree_reasons`."""
        return [INDEXED] if spec.indexer else []

    @classmethod
    def ragged_reasons(cls, spec: MlaSpec) -> list[str]:
        """None: rows that a request does not have are padding."""
        return []

    @property
    def mha_backend(self) -> type[TorchRefBackend]:
        """See `MlaBackend.mha_backend`."""
        return TorchRefBackend

    @property
    def cache_spec(self) -> LatentLayerSpec:
        """See `MlaBackend.cache_spec`."""
        indexer = self.spec.indexer
        index_bytes = indexer.head_dim * self.spec.dtype.itemsize if indexer else 0
        return LatentLayerSpec(width=self.spec.latent_dim, index_bytes=index_bytes)

    def plan(self, metadata: AttentionMetadata) -> TorchRefPlan:
        """Segments of the rows, as for ordinary heads."""
        return self._planner.plan(metadata)

    def select(self, rows: IndexerRows, cache: LatentCache, plan: TorchRefPlan) -> Tensor:
        """See `SparseMlaBackend.select`. Among positions that score the same, any may be chosen."""
        assert self.spec.indexer is not None, "only models with an indexer select"
        topk = self.spec.indexer.topk
        keys = cache.index_key.view(rows.key.dtype)
        keys.flatten(0, 1).index_copy_(0, plan.slot_mapping, rows.key)
        selected = rows.key.new_full((len(rows.key), topk), -1, dtype=torch.int32)
        for segment in plan.segments:
            width, num_keys = segment.width, segment.num_keys
            seen = segment.mask(None, rows.key.dtype, 1)[:, 0] == 0  # [num_reqs, width, num_keys]
            if num_keys <= topk:
                chosen = torch.arange(num_keys, device=seen.device).where(seen, -1)
            else:
                # [num_reqs, width, heads, head_dim]
                query = rows.query[segment.rows].unflatten(0, (-1, width)).float()
                weights = rows.weights[segment.rows].unflatten(0, (-1, width))
                key = _gather(keys, segment.blocks, len(seen))[:, :num_keys].float()
                shape = query.shape[1:3]
                scores = (query.flatten(1, 2) @ key.transpose(1, 2)).relu().unflatten(1, shape)
                # [num_reqs, width, num_keys]
                scores = (weights[:, :, None] @ scores)[:, :, 0].masked_fill(~seen, -torch.inf)
                best = scores.topk(topk, dim=-1)
                chosen = best.indices.masked_fill(best.values == -torch.inf, -1)
            place = selected[:, : chosen.shape[-1]]
            _put(place, segment.rows, segment.kept, chosen.flatten(0, 1).int())
        return selected

    def write(
        self, cache: LatentCache, compressed: Tensor, key_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        """See `MlaBackend.write`."""
        latent = torch.cat([compressed, key_rope], dim=-1)
        cache.latent.flatten(0, 1).index_copy_(0, slot_mapping, latent)

    def run(
        self,
        rows: MlaRows,
        up: UpProjection,
        cache: LatentCache,
        plan: TorchRefPlan,
        *,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        """See `MlaBackend.run`."""
        rank, num_heads = self.spec.kv_lora_rank, self.spec.num_heads
        self.write(cache, rows.compressed, rows.key_rope, plan.slot_mapping)
        # [num_tokens, heads, latent_dim]
        query = torch.cat([_per_head(rows.query_nope, up.key), rows.query_rope], dim=-1)
        attended = query.new_empty(len(query), num_heads, rank)
        for segment in plan.segments:
            # [num_reqs, heads, width, latent_dim]
            q = query[segment.rows].unflatten(0, (-1, segment.width)).transpose(1, 2)
            keys = _gather(cache.latent, segment.blocks, len(q))[:, : segment.num_keys]
            scores = (q.flatten(1, 2) @ keys.transpose(1, 2)).unflatten(1, q.shape[1:3]) * scale
            scores = scores + segment.mask(None, query.dtype, 1)
            if selected is not None:
                chosen = _membership(selected[segment.rows], segment.num_keys)
                chosen = chosen.unflatten(0, (-1, 1, segment.width))
                scores = scores.masked_fill(~chosen, -torch.inf)
            weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
            out = (weights.flatten(1, 2) @ keys[..., :rank]).unflatten(1, q.shape[1:3])
            _put(attended, segment.rows, segment.kept, out.transpose(1, 2).flatten(0, 1))
        return _per_head(attended, up.value)


def _absorbed(spec: MlaSpec) -> AttentionSpec:
    """The attention with ordinary heads that `spec` turns into once its maps are absorbed."""
    return AttentionSpec(
        device=spec.device,
        dtype=spec.dtype,
        num_heads=spec.num_heads,
        num_kv_heads=1,
        head_dim=spec.latent_dim,
        block_size=spec.block_size,
        non_causal=spec.non_causal,
        cache_dtype=spec.cache_dtype,
    )


def _per_head(x: Tensor, maps: Tensor) -> Tensor:
    """Rows [num_tokens, heads, a] times a matrix per head [heads, a, b]: [num_tokens, heads, b]."""
    return torch.bmm(x.transpose(0, 1), maps).transpose(0, 1)


def _gather(cache: Tensor, blocks: Tensor, num_reqs: int) -> Tensor:
    """Cached vectors [num_reqs, keys, width] of all `blocks` int32, equally many per request."""
    return cache.index_select(0, blocks.reshape(-1)).view(num_reqs, -1, cache.shape[-1])


def _membership(selected: Tensor, num_keys: int) -> Tensor:
    """bool [rows, num_keys]: which positions a row of `selected` int32 [rows, topk] names; -1 names
    none.
    """
    chosen = torch.zeros(len(selected), num_keys + 1, dtype=torch.bool, device=selected.device)
    places = torch.where(selected < 0, num_keys, selected).long()
    return chosen.scatter_(1, places, True)[:, :num_keys]


def _put(output: Tensor, places: slice | Tensor, kept: Tensor | None, values: Tensor) -> None:
    """Stores a segment's rows, without its padding, which may be NaN when its positions and its
    mask do not meet.
    """
    if isinstance(places, Tensor) and kept is not None:
        output.index_copy_(0, places[kept], values[kept])
    else:
        output[places] = values
