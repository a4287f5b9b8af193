"""What configs of Gemma say beyond what all say, from what a GGUF file says."""

from verifiers.gguf.entries import (
    FULL,
    needed,
    windows,
)
from verifiers.gguf.file import Facts
from verifiers.gguf.rope import Entries, numbers_of


def _scalar(facts: Facts, entries: Entries, largest: int) -> int:
    """What queries are divided by the root of; for the largest model `head_dim` does not count."""
    wide = entries["num_hidden_layers"] == largest
    width = entries["hidden_size"] // entries["num_attention_heads"]
    return int(width if wide else entries["head_dim"])


def gemma2(facts: Facts, entries: Entries) -> Entries:
    return {
        "model_type": "gemma2",
        "query_pre_attn_scalar": _scalar(facts, entries, 46),
        "sliding_window": facts("attention.sliding_window", 4096),
        "layer_types": windows(facts, 2),
    }


def gemma3(facts: Facts, entries: Entries) -> Entries:
    local = {"rope_type": "default", "rope_theta": facts("rope.freq_base_swa", 10000.0)}
    full = {"rope_theta": facts("rope.freq_base", 1000000.0)}
    slides = facts("attention.sliding_window")
    return {
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": _scalar(facts, entries, 62),
        "layer_types": windows(facts, 6) if slides else [FULL] * facts.layers,
        "rope_parameters": {
            "sliding_attention": local,
            "full_attention": entries["rope_parameters"] | full,
        },
    }


def gemma4(facts: Facts, entries: Entries) -> Entries:
    widths, inputs = facts.each("feed_forward_length"), facts("embedding_length_per_layer_input", 0)
    kv_heads, kinds = facts.each("attention.head_count_kv"), windows(facts, 6)
    of_kinds = dict(zip(kinds, kv_heads, strict=False)) if isinstance(kv_heads, list) else {}
    experts, local = facts("expert_count", 0), facts("rope.freq_base_swa", 10000.0)
    valued = facts.layers_with("attn_v.weight")
    divisors = numbers_of(facts, "rope_freqs.weight") if facts.has("rope_freqs.weight") else [1.0]
    full = {"rope_type": "proportional", "rope_theta": facts("rope.freq_base", 1000000.0)}
    full["partial_rotary_factor"] = divisors.count(1.0) / len(divisors)
    found = {
        "model_type": "gemma4_text",
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
