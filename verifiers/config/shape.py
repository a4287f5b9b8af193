"""What a model's config says of its attention and its cache."""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedConfig

from specdec.attention.backend import AttentionBackend, AttentionSpec, HeadShape
from specdec.attention.mla import IndexerSpec, MlaBackend, MlaSpec
from specdec.base.errors import CheckpointError
from specdec.kv_cache import KVLayerSpec, LayerSpec, SharedLayerSpec
from specdec.layers.rotary.rotary import STATIC_ROPE_TYPES
from specdec.model.core import ContextLimits, LengthRule
from verifiers.config.families import family_of
from verifiers.config.states import attends, is_recurrent, state_layer_spec
from verifiers.entries import declared, layer_windows, own_entries, tokens

STRETCHED = ("dynamic", "linear", "longrope", "yarn")
"""RoPE types whose `factor` is one of lengths."""

CHUNKED = "chunked_attention"
"""What configs call layers that attend within chunks."""


def head_shape(config: PreTrainedConfig, layer: int) -> HeadShape:
    """Heads of one decoder layer."""
    own = own_entries(config, layer)
    per_layer = declared(config, "num_attention_heads_per_layer")
    heads = per_layer[layer] if per_layer else own.num_attention_heads
    kv_heads = declared(own, "num_key_value_heads") or heads
    head_dim = getattr(own, "head_dim", None) or config.hidden_size // heads
    # Releases of transformers without a config per layer have entries of other names for layers of
    # full attention.
    if own is config and layer_windows(config)[layer] is None:
        head_dim = declared(config, "global_head_dim") or head_dim
        if declared(config, "attention_k_eq_v"):
            kv_heads = declared(config, "num_global_key_value_heads") or kv_heads
    if layer_windows(config)[layer] is not None:
        kv_heads *= family_of(config).sliding_kv_heads
    kinds = getattr(config, "layer_types", None)
    chunked = kinds is not None and kinds[layer] == CHUNKED
    ranks = getattr(config, "ranks", 1)  # see `verifiers.weights.shards.sharded`
    if min(heads, kv_heads, head_dim) < 1:
        what = f"layer {layer} has {heads} heads, {kv_heads} for keys, of {head_dim} numbers"
        raise CheckpointError(f"{what}; fetch config.json again")
    return HeadShape(
        heads // ranks,
        max(kv_heads // ranks, 1),  # where there are more ranks, several have the same one
        head_dim,
        tokens(config, "attention_chunk_size") if chunked else None,
    )


def cache_layers(config: PreTrainedConfig) -> list[int]:
    """For each decoder layer the one whose keys and values it reads: its own, or those of the last
    before that is of its kind.

    -1 are those of another model.
    """
    count = config.num_hidden_layers
    own = count - (declared(config, "num_kv_shared_layers") or 0)
    if own == count:
        return list(range(count))
    last = {kind: layer for layer, kind in enumerate(config.layer_types[:own])}
    return [*range(own), *(last.get(kind, -1) for kind in config.layer_types[own:])]


def attention_spec(
    config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype, block_size: int
) -> AttentionSpec:
    """What the model asks of an attention backend."""
    windows: dict[HeadShape, set[int | None]] = {}
    for layer, window in enumerate(layer_windows(config)):
        windows.setdefault(head_shape(config, layer), set()).add(window)
    (first, seen), *further = windows.items()
    return AttentionSpec(
        device=device,
        dtype=dtype,
        **first._asdict(),
        block_size=block_size,
        windows=frozenset(seen),
        further=tuple((shape, frozenset(others)) for shape, others in further),
        reads_others=cache_layers(config)[-1] != config.num_hidden_layers - 1,
        sinks=family_of(config).sinks,
        softcap=declared(config, "attn_logit_softcapping"),
    )


def mla_spec(
    config: PreTrainedConfig, *, device: torch.device, dtype: torch.dtype, block_size: int
) -> MlaSpec:
    """What a model with latent attention asks of a backend."""

    def sizes(*names: str) -> dict[str, Any]:
        found = {name: getattr(config, name) for name in names}
        for name, size in found.items():
            if size < 1:
                what = f"{name} is {size!r} and must be positive"
                raise CheckpointError(f"{what}; fetch config.json again")
        return found

    heads = sizes("num_attention_heads")["num_attention_heads"] // getattr(config, "ranks", 1)
    widths = sizes("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    indexer = None
    if family_of(config).indexer:
        indexer = IndexerSpec(*sizes("index_n_heads", "index_head_dim", "index_topk").values())
    return MlaSpec(
        device=device,
        dtype=dtype,
        num_heads=heads,
        **widths,
        block_size=block_size,
        indexer=indexer,
    )


def backend_spec(
    config: PreTrainedConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    block_size: int,
    cache_dtype: torch.dtype | None = None,
    fp8_prefill: bool = True,
) -> AttentionSpec | MlaSpec:
    """What the model asks of a backend of its kind; `fp8_prefill` is for latent attention."""
    if family_of(config).latent:
        latent = mla_spec(config, device=device, dtype=dtype, block_size=block_size)
        return replace(latent, cache_dtype=cache_dtype, fp8_prefill=fp8_prefill)
    spec = attention_spec(config, device=device, dtype=dtype, block_size=block_size)
    return replace(spec, cache_dtype=cache_dtype)


def layer_specs(
    config: PreTrainedConfig, backend: AttentionBackend | MlaBackend
) -> list[LayerSpec]:
    """What decoder layers cache, see `layer_caches`; of latent attention no index keys where a
    layer uses another's selection.
    """
    if isinstance(backend, AttentionBackend):
        dtype = backend.spec.dtype
        return [
            spec
            for layer, read in enumerate(cache_layers(config))
            for spec in _layer_specs(config, layer, read, dtype)
        ]
    spec, dtype = backend.cache_spec, backend.spec.dtype
    kinds = getattr(config, "indexer_types", None) or ["full"] * config.num_hidden_layers
    own = [replace(spec, index_bytes=0) if kind == "shared" else spec for kind in kinds]
    return [
        state_layer_spec(config, dtype) if is_recurrent(config, layer) else latent
        for layer, latent in enumerate(own)
    ]


def _layer_specs(
    config: PreTrainedConfig, layer: int, read: int, dtype: torch.dtype
) -> list[LayerSpec]:
    """What one layer stores whose keys and values are those of layer `read`: nothing, one thing, or
    keys, values and a state.
    """
    specs: list[LayerSpec] = []
    if attends(config, layer):
        shape = head_shape(config, layer)
        own = KVLayerSpec(shape.num_kv_heads, shape.head_dim)
        specs.append(own if read == layer else SharedLayerSpec(read))
    return [*specs, state_layer_spec(config, dtype)] if is_recurrent(config, layer) else specs


def layer_caches(config: PreTrainedConfig) -> list[list[int]]:
    """For each decoder layer, which of the `layer_specs` are its own."""
    layers = range(config.num_hidden_layers)
    counts = [attends(config, layer) + is_recurrent(config, layer) for layer in layers]
    return [list(range(end - n, end)) for n, end in zip(counts, accumulate(counts), strict=True)]


def layer_kinds(config: PreTrainedConfig, backend: AttentionBackend | MlaBackend) -> list[int]:
    """For each decoder layer which of `backend.each` serves it."""
    if isinstance(backend, MlaBackend):
        return [0] * config.num_hidden_layers
    shapes = [spec.shape for spec in backend.spec.each]
    return [shapes.index(head_shape(config, layer)) for layer in range(config.num_hidden_layers)]


def expert_counts(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Routed experts of a layer, and how many of them a row is sent to; None for others."""

    def first(*names: str) -> int | None:
        return next(filter(None, (getattr(config, name, None) for name in names)), None)

    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    chosen = first("num_experts_per_tok", "top_k_experts")
    return (experts, chosen) if experts and chosen else None


def position_embeddings(config: PreTrainedConfig) -> int:
    """Positions that the config states, and that some types of RoPE look at."""
    return getattr(config, "max_position_embeddings", None) or 8192


def context_limits(config: PreTrainedConfig, *, own: bool) -> ContextLimits:
    """How long sequences may be.

    YaRN and LongRoPE state which length they stretch, and how far. Of linear and dynamic RoPE some
    configs mean the length that they state, others the stretched one: it goes on if asked to. Llama
    3's factor is none of lengths.

    Args:
        own: our own layers run it, none of which has a table of positions.

    Raises:
        CheckpointError: longer than positions can be.
    """
    stated, kinds = position_embeddings(config), rope_kinds(config)
    usual = extended = stated
    for rope in kinds:
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if not factor or rope.get("rope_type") not in STRETCHED:
            continue
        if original:
            usual = max(usual, int(factor * original))
        elif len(kinds) == 1:  # a config with several kinds counts the stretched length
            extended = max(extended, int(factor * stated))
    # Transformers' modules without RoPE have a table of positions, and "dynamic" is kept from
    # stretching in them.
    if not own and not (kinds and all(one.get("rope_type") in STATIC_ROPE_TYPES for one in kinds)):
        return ContextLimits(stated, stated, stated)
    if max(usual, extended) >= 2**31:
        what = f"rope_parameters stretch positions to {max(usual, extended)}, of 2**31 at most"
        raise CheckpointError(f"{what}; fetch config.json again")
    return ContextLimits(usual, max(usual, extended))


def rope_kinds(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """RoPE parameters of all layers, each kind once."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "rope_type" in parameters:
        return [parameters]
    nested = [entry for entry in parameters.values() if isinstance(entry, dict)]
    return nested or [parameters] if parameters else []


def length_rule(config: PreTrainedConfig) -> LengthRule | None:
    """See `Verifier.length_rule`."""
    kinds = rope_kinds(config)
    long = [rope for rope in kinds if rope.get("rope_type") == "longrope"]
    lengths = [rope["original_max_position_embeddings"] for rope in long]
    if lengths:
        return LengthRule(min(lengths), grows=False)
    grows = any(rope.get("rope_type") == "dynamic" for rope in kinds)
    return LengthRule(position_embeddings(config), grows=True) if grows else None


def value_widths(config: PreTrainedConfig) -> tuple[int, int] | None:
    """Numbers of a key head and of a value head where they differ; None where they do not, or where
    attention is latent.
    """
    own: Any = own_entries(config, 0)
    key_dim, value_dim = getattr(own, "head_dim", None), getattr(own, "v_head_dim", None)
    latent = getattr(own, "kv_lora_rank", None)
    if latent or not key_dim or not value_dim or key_dim == value_dim:
        return None
    return key_dim, value_dim


def peculiarity(config: PreTrainedConfig) -> str | None:
    """What of a model our own layers alone can do on our cache, in words, beside latent attention;
    None for nothing.
    """
    if any(is_recurrent(config, layer) for layer in range(config.num_hidden_layers)):
        return "recurrent layers"
    if CHUNKED in (getattr(config, "layer_types", None) or ()):
        return "layers that attend within chunks"
    if value_widths(config) is not None:
        return "keys and values of different widths"
    rule = length_rule(config)
    return None if rule is None or rule.grows else "RoPE that differs between requests"


def eos_token_ids(*candidates: int | list[int] | tuple[int, ...] | None) -> tuple[int, ...]:
    """End-of-sequence ids from the first source that names any.

    >>> eos_token_ids(None, [2, 7], 5), eos_token_ids(None)
    ((2, 7), ())
    """
    eos = next((candidate for candidate in candidates if candidate is not None), ())
    return (eos,) if isinstance(eos, int) else tuple(eos)
