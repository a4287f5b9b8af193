"""What a model's config says of its attention and its cache."""

import torch
from transformers import PreTrainedConfig

from specdec.attention.backend import AttentionSpec
from specdec.kv_cache import KVLayerSpec


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
