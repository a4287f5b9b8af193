"""What a model's config says of its attention and its cache."""

from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.mla import IndexerSpec, MlaBackend, MlaSpec
from specdec.kv_cache import KVLayerSpec, LayerSpec
from verifiers.recurrent import is_recurrent, state_layer_spec

INDEXED_MODELS = frozenset({"deepseek_v32", "glm_moe_dsa"})
"""Model types with latent attention to the positions that an indexer selects."""

LATENT_MODELS = INDEXED_MODELS | {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"}
"""Model types with latent attention as `verifiers.latent` builds it."""


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Sliding window of each decoder layer in tokens, None for full attention: a row sees positions less than a window away."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        active = getattr(config, "use_sliding_window", True)
        return [window if active else None] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


def kv_layer_spec(config: PreTrainedConfig) -> KVLayerSpec:
    """What one decoder layer caches per token."""
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    return KVLayerSpec(num_kv_heads=getattr(config, "num_key_value_heads", None) or heads, head_dim=head_dim)


def attention_spec(config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionSpec:
    """What the model asks of an attention backend."""
    kv = kv_layer_spec(config)
    return AttentionSpec(
        device=device,
        dtype=dtype,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv.num_kv_heads,
        head_dim=kv.head_dim,
        block_size=block_size,
        windows=frozenset(layer_windows(config)),
        sinks=config.model_type == "gpt_oss",
        softcap=getattr(config, "attn_logit_softcapping", None),
    )


def mla_spec(config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype, block_size: int) -> MlaSpec:
    """What a model with latent attention asks of a backend."""
    indexer = None
    if config.model_type in INDEXED_MODELS:
        indexer = IndexerSpec(num_heads=config.index_n_heads, head_dim=config.index_head_dim, topk=config.index_topk)
    return MlaSpec(
        device=device,
        dtype=dtype,
        num_heads=config.num_attention_heads,
        kv_lora_rank=config.kv_lora_rank,
        qk_nope_head_dim=config.qk_nope_head_dim,
        qk_rope_head_dim=config.qk_rope_head_dim,
        v_head_dim=config.v_head_dim,
        block_size=block_size,
        indexer=indexer,
    )


def backend_spec(config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype, block_size: int) -> AttentionSpec | MlaSpec:
    """What the model asks of a backend of its kind."""
    make = mla_spec if config.model_type in LATENT_MODELS else attention_spec
    return make(config, device=device, dtype=dtype, block_size=block_size)


def layer_specs(config: PreTrainedConfig, backend: AttentionBackend | MlaBackend) -> list[LayerSpec]:
    """What each decoder layer caches; of latent attention no index keys where a layer uses another's selection."""
    if isinstance(backend, AttentionBackend):
        layers = range(config.num_hidden_layers)
        dtype = backend.spec.dtype
        return [state_layer_spec(config, dtype) if is_recurrent(config, layer) else kv_layer_spec(config) for layer in layers]
    spec = backend.cache_spec
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    return [replace(spec, index_bytes=0) if kind == "shared" else spec for kind in kinds]


def expert_counts(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Routed experts of a layer, and how many of them a row is sent to; None for a model without."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return None if experts is None else (experts, config.num_experts_per_tok)


def max_model_len(config: PreTrainedConfig) -> int:
    """Most tokens of a sequence."""
    return getattr(config, "max_position_embeddings", None) or 8192


def eos_token_ids(*candidates: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """End-of-sequence ids from the first source that names any.

    >>> eos_token_ids(None, [2, 7], 5), eos_token_ids(None)
    ((2, 7), ())
    """
    eos = next((candidate for candidate in candidates if candidate is not None), ())
    return (eos,) if isinstance(eos, int) else tuple(eos)
