"""Latent attention of Hugging Face models on the latent paged cache: their attention modules are replaced by one of ours."""

from dataclasses import replace
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from specdec.attention.mla import MlaBackend, MlaRows, SparseMlaBackend, UpProjection
from specdec.kv_cache import LatentCache, LatentLayerSpec
from verifiers.hf_attention import PagedForward
from verifiers.indexer import Indexer
from verifiers.rotary import Angles, rotate

INTERLEAVED_INDEXERS = frozenset({"glm_moe_dsa"})
"""Model types whose indexer pairs neighbors in its RoPE; the others pair halves there, whatever their attention does."""


def replace_attention(layers: nn.ModuleList, config: PreTrainedConfig) -> None:
    """Puts a `LatentAttention` in the place of every decoder layer's `self_attn`."""
    for layer in layers:
        layer.self_attn = LatentAttention(layer.self_attn, config)


def latent_layer_specs(config: PreTrainedConfig, spec: LatentLayerSpec) -> list[LatentLayerSpec]:
    """What each decoder layer caches per token: `spec`, without index keys where a layer uses another's selection."""
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    return [replace(spec, index_bytes=0) if kind == "shared" else spec for kind in kinds]


class LatentAttention(nn.Module):
    """Attention of one layer (DeepSeek-V2, arXiv 2405.04434) through an `MlaBackend`.

    Called like the module it replaces, by layers that pass `paged` on.

    Args:
        source: transformers' attention module, whose modules are taken over. The projection out of the latent, never run as a
            layer here, is split into a map to keys and a map to values per head.
        config: the model's.
    """

    up_key: Tensor
    up_value: Tensor

    def __init__(self, source: Any, config: PreTrainedConfig) -> None:
        super().__init__()
        self.layer_idx: int = source.layer_idx
        self.num_heads: int = source.num_heads
        self.query_sizes = (source.qk_nope_head_dim, source.qk_rope_head_dim)
        self.latent_sizes = (source.kv_lora_rank, source.qk_rope_head_dim)
        self.scaling: float = source.scaling  # with YaRN's factor
        self.interleaved = bool(getattr(config, "rope_interleave", True))
        self.hands_on_selection = getattr(config, "indexer_types", None) is not None

        if source.q_lora_rank is None:
            self.q_proj = source.q_proj
        else:
            self.q_a_proj, self.q_a_layernorm, self.q_b_proj = source.q_a_proj, source.q_a_layernorm, source.q_b_proj
        self.compresses_query = source.q_lora_rank is not None
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = source.kv_a_proj_with_mqa, source.kv_a_layernorm
        self.o_proj = source.o_proj
        up = source.kv_b_proj.weight.detach().unflatten(0, (self.num_heads, -1))  # [heads, nope + value, kv_lora_rank]
        key, value = up.split([source.qk_nope_head_dim, source.v_head_dim], dim=1)
        self.register_buffer("up_key", key.contiguous())
        self.register_buffer("up_value", value.transpose(1, 2).contiguous())
        indexer = getattr(source, "indexer", None)
        interleaved = config.model_type in INTERLEAVED_INDEXERS
        self.indexer = None if indexer is None else Indexer(indexer, interleaved=interleaved)

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: Tensor | tuple[Tensor, Tensor],
        paged: PagedForward | None = None,
        prev_topk_indices: Tensor | None = None,
        **_: Any,
    ) -> tuple[Tensor, None] | tuple[Tensor, None, Tensor | None]:
        """Attention of packed rows over the latent paged cache.

        Args:
            hidden_states: [1, num_tokens, H].
            position_embeddings: of the rows, as the model's own rotary module makes them.
            paged: the forward this is part of.
            prev_topk_indices: int32 [num_tokens, topk], positions selected in the layer before, for a layer without an indexer.

        Returns:
            [1, num_tokens, H] and no attention weights; then the selection, in models whose layers share it.

        Raises:
            RuntimeError: the model was called outside `HFVerifier.forward`.
        """
        if paged is None:
            raise RuntimeError("latent attention got no paged cache; call the model through HFVerifier.forward")
        backend, cache = paged.backend, paged.caches[self.layer_idx]
        assert isinstance(backend, MlaBackend)
        assert isinstance(cache, LatentCache)
        hidden, angles = hidden_states[0], Angles.of(position_embeddings)

        residual = self.q_a_layernorm(self.q_a_proj(hidden)) if self.compresses_query else hidden
        query = self.q_b_proj(residual) if self.compresses_query else self.q_proj(residual)
        query_nope, query_rope = query.unflatten(-1, (self.num_heads, -1)).split(self.query_sizes, dim=-1)
        compressed, key_rope = self.kv_a_proj_with_mqa(hidden).split(self.latent_sizes, dim=-1)
        rows = MlaRows(
            query_nope=query_nope,
            query_rope=rotate(query_rope, angles, interleaved=self.interleaved),
            compressed=self.kv_a_layernorm(compressed),
            key_rope=rotate(key_rope[:, None], angles, interleaved=self.interleaved)[:, 0],
        )

        selected = prev_topk_indices
        if self.indexer is not None:
            assert isinstance(backend, SparseMlaBackend)
            selected = backend.select(self.indexer(hidden, residual, angles), cache, paged.plan)
        up = UpProjection(key=self.up_key, value=self.up_value)
        attended = backend.run(rows, up, cache, paged.plan, scale=self.scaling, selected=selected)
        output = self.o_proj(attended.flatten(1))[None]
        return (output, None, selected) if self.hands_on_selection else (output, None)
