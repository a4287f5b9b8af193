"""Multi-head latent attention: what its models ask of a backend, and what a backend for them is.

All heads share one cached vector per token, the *latent*: a compressed key and value of
`kv_lora_rank` numbers (R), and a rotated key of `qk_rope_head_dim` numbers (DeepSeek-V2, arXiv
2405.04434). Keys and values of a head are linear maps of it:

    key[h]   = [ up.key[h] @ compressed  |  rotated ]        value[h] = compressed @ up.value[h]

A backend may build them (a prefill, where many rows share the work) or absorb the maps into query
and output and attend to the latents themselves (decoding). With an indexer (DeepSeek-V3.2), a row
attends only to the positions that score best for it.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend, Backend
from specdec.kv_cache import LatentCache, LatentLayerSpec


@dataclass(frozen=True, slots=True)
class IndexerSpec:
    """Shape of an indexer: `num_heads` queries and one key of `head_dim` numbers per token, `topk`
    positions chosen per row.
    """

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True, slots=True)
class MlaSpec:
    """What a model with latent attention asks of its backend.

    Attributes:
        device: where the tensors live.
        dtype: type of query, latent and output.
        num_heads: query heads.
        kv_lora_rank: R, numbers of the compressed key and value.
        qk_nope_head_dim, qk_rope_head_dim: unrotated and rotated numbers of a query head.
        v_head_dim: numbers of a value head.
        block_size: tokens per cache block.
        indexer: None attends to every position.
        non_causal: blocks whose rows see each other in both directions are needed (drafters).
        cache_dtype: type of the cache when it is not `dtype`: an 8-bit float.
        fp8_prefill: prompts, and queries of an 8-bit cache, may be computed in 8-bit floats, where
            a kernel for that exists.
    """

    device: torch.device
    dtype: torch.dtype
    num_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    block_size: int
    indexer: IndexerSpec | None = None
    non_causal: bool = False
    cache_dtype: torch.dtype | None = None
    fp8_prefill: bool = True

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the cache."""
        return self.cache_dtype or self.dtype

    @property
    def latent_dim(self) -> int:
        """Numbers of a latent."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class MlaRows(NamedTuple):
    """Packed rows of one layer; queries and rotated keys after RoPE, the compressed part after its
    norm.
    """

    query_nope: Tensor  # [num_tokens, num_heads, qk_nope_head_dim]
    query_rope: Tensor  # [num_tokens, num_heads, qk_rope_head_dim]
    compressed: Tensor  # [num_tokens, kv_lora_rank]
    key_rope: Tensor  # [num_tokens, qk_rope_head_dim]


class UpProjection(NamedTuple):
    """Maps of one layer from a compressed vector to the keys and values of its heads."""

    key: Tensor  # [num_heads, qk_nope_head_dim, kv_lora_rank]
    value: Tensor  # [num_heads, kv_lora_rank, v_head_dim]


class IndexerRows(NamedTuple):
    """Packed rows of one layer's indexer; the score of a key is the sum over heads of
    `weights * relu(query . key)`.
    """

    query: Tensor  # [num_tokens, indexer.num_heads, indexer.head_dim]
    key: Tensor  # [num_tokens, indexer.head_dim]
    weights: Tensor  # float32 [num_tokens, indexer.num_heads], every scale of the model included


INDEXED = "an indexer chooses among positions, which drafts of a tree share"
"""Why layers with an indexer do not verify trees."""


class MlaBackend(Backend[MlaSpec]):
    """Latent attention."""

    prefill_tokens = 2048  # keys and values of all heads are large

    @property
    def each(self) -> "tuple[MlaBackend, ...]":
        """See `AttentionBackend.each`: the layers have one shape."""
        return (self,)

    @property
    def prefill_dtype(self) -> torch.dtype:
        """The type that prompts are computed in."""
        return self.spec.dtype

    @property
    def query_dtype(self) -> torch.dtype:
        """The type that queries of decoding have once the maps are absorbed."""
        return self.spec.dtype

    @property
    @abstractmethod
    def mha_backend(self) -> type[AttentionBackend]:
        """Backend for layers with ordinary heads beside this one, such as those of a drafter."""

    @property
    @abstractmethod
    def cache_spec(self) -> LatentLayerSpec:
        """What one layer stores per token."""

    @abstractmethod
    def write(
        self, cache: LatentCache, compressed: Tensor, key_rope: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes latents of positions that no row attends from, such as a drafter's context.

        Args:
            cache: the layer's cache.
            compressed: [num_tokens, kv_lora_rank], after its norm.
            key_rope: [num_tokens, qk_rope_head_dim], rotated.
            slot_mapping: int64 [num_tokens].
        """

    @abstractmethod
    def run(
        self,
        rows: MlaRows,
        up: UpProjection,
        cache: LatentCache,
        plan: Any,
        *,
        scale: float,
        selected: Tensor | None = None,
    ) -> Tensor:
        """Writes the latents to the cache, then attends to the cache.

        Args:
            rows: the new rows.
            up: the layer's maps.
            cache: the layer's cache.
            plan: of this forward.
            scale: factor of the scores.
            selected: int32 [num_tokens, topk], positions to attend to as `SparseMlaBackend.select`
                returns them; None for all.

        Returns:
            [num_tokens, num_heads, v_head_dim] in the dtype of the rows.
        """


class SparseMlaBackend(MlaBackend):
    """A backend for models with an indexer."""

    @abstractmethod
    def select(self, rows: IndexerRows, cache: LatentCache, plan: Any) -> Tensor:
        """Writes the indexer's keys to the cache, then chooses for every row the positions it
        attends to. Launches kernels only.

        Returns:
            int32 [num_tokens, topk], distinct positions within the row's own sequence in any order,
            filled up with -1.
        """
