"""Gemma."""

from collections.abc import Iterator, Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import AROUND, Description
from verifiers.entries import layer_windows
from verifiers.family import Family, plain
from verifiers.gguf.entries import FULL, NO_WINDOW, Gguf, needed, windows
from verifiers.gguf.file import Entries, Facts
from verifiers.gguf.rope import numbers_of

_EMBEDDINGS: dict[str, Any] = {
    "embedding_scale": lambda config: config.hidden_size**0.5,
    "rounds_embedding_scale": True,
}
_GEMMA2: dict[str, Any] = {
    "norms": AROUND,
    "norm_kind": "zero_centered",
    "scale": lambda config: config.query_pre_attn_scalar**-0.5,
    "final_softcap": lambda config: config.final_logit_softcapping,
}


def _gemma4(config: Any, common: Mapping[str, Any]) -> Description:
    experts = getattr(config, "enable_moe_block", False)
    windows = layer_windows(config)
    same = getattr(config, "attention_k_eq_v", False)
    return Description(
        **common,
        norms=AROUND,
        norm_kind="late",
        norms_of_queries="each head",
        norms_values=True,
        keys_as_values=frozenset(
            layer for layer, window in enumerate(windows) if same and window is None
        ),
        scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        rounds_embedding_scale=True,
        final_softcap=config.final_logit_softcapping,
        routing=Routing(config.num_experts, config.top_k_experts) if experts else None,
        experts_beside_mlp=experts,
        scales_layers=True,
        layer_inputs=getattr(config, "hidden_size_per_layer_input", None) or 0,
    )


def _against_caps(config: Any) -> Iterator[str]:
    if config.attn_logit_softcapping is not None:  # at which transformers' class does not look
        yield "its scores are capped (attn_logit_softcapping), and those of its type are not"


def _scalar(facts: Facts, entries: Entries, largest: int) -> int:
    """What queries are divided by the root of; for the largest model `head_dim` does not count."""
    wide = entries["num_hidden_layers"] == largest
    width = entries["hidden_size"] // entries["num_attention_heads"]
    return int(width if wide else entries["head_dim"])


def _gemma2_entries(facts: Facts, entries: Entries) -> Entries:
    return {
        "query_pre_attn_scalar": _scalar(facts, entries, 46),
        "sliding_window": facts("attention.sliding_window", 4096),
        "layer_types": windows(facts, 2),
    }


def _gemma3_entries(facts: Facts, entries: Entries) -> Entries:
    local = {"rope_type": "default", "rope_theta": facts("rope.freq_base_swa", 10000.0)}
    full = {"rope_theta": facts("rope.freq_base", 1000000.0)}
    slides = facts("attention.sliding_window")
    ropes = {"sliding_attention": local, "full_attention": entries["rope_parameters"] | full}
    return {
        "query_pre_attn_scalar": _scalar(facts, entries, 62),
        "layer_types": windows(facts, 6) if slides else [FULL] * facts.layers,
        "rope_parameters": ropes,
    }


def _gemma4_entries(facts: Facts, entries: Entries) -> Entries:
    widths, inputs = facts.each("feed_forward_length"), facts("embedding_length_per_layer_input", 0)
    kv_heads, kinds = facts.each("attention.head_count_kv"), windows(facts, 6)
    of_kinds = dict(zip(kinds, kv_heads, strict=False)) if isinstance(kv_heads, list) else {}
    experts, local = facts("expert_count", 0), facts("rope.freq_base_swa", 10000.0)
    valued = facts.layers_with("attn_v.weight")
    divisors = numbers_of(facts, "rope_freqs.weight") if facts.has("rope_freqs.weight") else [1.0]
    full = {"rope_type": "proportional", "rope_theta": facts("rope.freq_base", 1000000.0)}
    full["partial_rotary_factor"] = divisors.count(1.0) / len(divisors)
    found = {
        "head_dim": facts("attention.key_length_swa", entries["head_dim"]),
        "global_head_dim": facts.need("attention.key_length"),
        "num_key_value_heads": of_kinds.get("sliding_attention", entries["num_key_value_heads"]),
        "num_global_key_value_heads": of_kinds.get(FULL),
        "attention_k_eq_v": facts.layers_with("attn_k.weight") != valued,
        "num_kv_shared_layers": facts("attention.shared_kv_layers", 0),
        "intermediate_size": min(widths) if isinstance(widths, list) else widths,
        "use_double_wide_mlp": isinstance(widths, list) and min(widths) < max(widths),
        "hidden_size_per_layer_input": inputs,
        "layer_types": kinds,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": local},
            FULL: full,
        },
        "enable_moe_block": bool(experts),
    }
    if inputs:
        found["vocab_size_per_layer_input"] = facts.files.shape("per_layer_token_embd.weight")[0]
    if experts:
        names = {"num_experts": "expert_count", "top_k_experts": "expert_used_count"}
        names["moe_intermediate_size"] = "expert_feed_forward_length"
        found |= needed(facts, names)
    return found


FAMILIES = {
    "gemma": Family(
        describe=plain(norm_kind="zero_centered", **_EMBEDDINGS),
        gguf={"gemma": Gguf(fixed=NO_WINDOW, adds_one=True)},
    ),
    "gemma2": Family(
        describe=plain(**_EMBEDDINGS, **_GEMMA2),
        gguf={"gemma2": Gguf(_gemma2_entries, adds_one=True)},
    ),
    "gemma3_text": Family(
        describe=plain(norms_of_queries="each head", **_EMBEDDINGS, **_GEMMA2),
        against=_against_caps,
        wrappers=("gemma3",),
        gguf={"gemma3": Gguf(_gemma3_entries, adds_one=True)},
    ),
    "gemma4_text": Family(
        describe=_gemma4, wrappers=("gemma4",), gguf={"gemma4": Gguf(_gemma4_entries)}
    ),
    "gemma4_unified_text": Family(describe=_gemma4, wrappers=("gemma4_unified",)),
}
