"""What configs of each family say beyond what all say, from what a GGUF file says.

What a file does not say, llama.cpp takes for granted in its code for the family, and so do we.
"""

from specdec.base.errors import UnsupportedModelError
from verifiers.gguf.entries import (
    BIAS,
    BIASES,
    COUNTS,
    FULL,
    LOCAL_COUNTS,
    SIGMOID,
    Family,
    expert_width,
    experts_of,
    first_sparse,
    mixture,
    needed,
    partial_rotation,
    plain,
    present,
    windows,
)
from verifiers.gguf.file import Facts
from verifiers.gguf.gemma import gemma2, gemma3, gemma4
from verifiers.gguf.rope import Entries


def _llama(facts: Facts, entries: Entries) -> Entries:
    if facts("expert_count"):
        return {"model_type": "mixtral", **needed(facts, LOCAL_COUNTS)}
    return {"model_type": "llama", **present(facts, BIASES)}


def _mistral3(facts: Facts, entries: Entries) -> Entries:
    scale = facts("rope.scaling.yarn_log_multiplier")
    more = {
        "mscale": 1.0,
        "mscale_all_dim": scale,
        "llama_4_scaling_beta": facts("attention.temperature_scale"),
    }
    if facts("rope.scaling.type") != "yarn" or None in more.values():
        return _llama(facts, entries)
    return {"model_type": "ministral3", "rope_parameters": entries["rope_parameters"] | more}


def _qwen3_5(facts: Facts, entries: Entries) -> Entries:
    heads, mixture = facts.need("ssm.time_step_rank"), bool(facts("expert_count"))
    full = facts.layers_with("attn_q.weight")
    kinds = [FULL if layer in full else "linear_attention" for layer in range(facts.layers)]
    found = {
        "linear_conv_kernel_dim": facts.need("ssm.conv_kernel"),
        "linear_key_head_dim": facts.need("ssm.state_size"),
        "linear_num_key_heads": facts.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": facts.need("ssm.inner_size") // heads,
        "layer_types": kinds,
        **partial_rotation(facts, entries),
    }
    if facts.files.architecture == "qwen3next":
        found |= _qwen_shared(facts, entries)
        return {"model_type": "qwen3_next", **found, "norm_topk_prob": True}
    if sections := facts("rope.dimension_sections"):
        more = {"mrope_section": [one for one in sections if one], "mrope_interleaved": True}
        found["rope_parameters"] |= more
    kind = "qwen3_5_moe_text" if mixture else "qwen3_5_text"
    return {"model_type": kind, **found, **(_qwen_shared(facts, entries) if mixture else {})}


def _qwen_shared(facts: Facts, entries: Entries) -> Entries:
    """Of a mixture with an expert that all rows have."""
    shared = facts.files.shape(f"blk.{first_sparse(facts)}.ffn_gate_shexp.weight")[0]
    return {**mixture(facts, entries), "shared_expert_intermediate_size": shared}


def _gpt_oss(facts: Facts, entries: Entries) -> Entries:
    return {
        "model_type": "gpt_oss",
        **needed(facts, LOCAL_COUNTS),
        **expert_width(facts, entries),
        "layer_types": windows(facts, 2),
        "rope_parameters": entries["rope_parameters"] | {"truncate": False},
    }


def _glm4(facts: Facts, entries: Entries) -> Entries:
    if facts("rope.dimension_sections"):
        raise UnsupportedModelError(
            f"{facts.name!r} is the text part of GLM-4V, whose rows are in another order; take its"
            f" safetensors files"
        )
    return {"model_type": "glm4", **present(facts, BIAS), **partial_rotation(facts, entries)}


def _granite(facts: Facts, entries: Entries) -> Entries:
    return {
        "model_type": "granite",
        "attention_multiplier": facts("attention.scale", entries["head_dim"] ** -0.5),
        "embedding_multiplier": facts("embedding_scale", 1.0),
        "residual_multiplier": facts("residual_scale", 1.0),
        "logits_scaling": facts("logit_scale", 1.0),
        **present(facts, BIASES),
    }


def _granite_hybrid(facts: Facts, entries: Entries) -> Entries:
    heads, inner = facts.need("ssm.time_step_rank"), facts.need("ssm.inner_size")
    attends, experts = facts.layers_with("attn_q.weight"), facts("expert_count", 0)
    kinds = [FULL if layer in attends else "linear_attention" for layer in range(facts.layers)]
    counts = facts.each("attention.head_count_kv")
    mamba = {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // entries["hidden_size"],
        "mamba_n_groups": facts.need("ssm.group_count"),
        "mamba_d_state": facts.need("ssm.state_size"),
        "mamba_d_conv": facts.need("ssm.conv_kernel"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
        "mamba_proj_bias": facts.has("ssm_in.bias"),
    }
    if facts("rope.scaling.finetuned", True):  # Bamba goes by the same name, and rotates
        mamba |= {"attn_layer_indices": attends, **partial_rotation(facts, entries)}
        return {"model_type": "bamba", "num_key_value_heads": max(counts), **mamba}
    return {
        **_granite(facts, entries),
        **mamba,
        "model_type": "granitemoehybrid",
        "layer_types": kinds,
        "num_key_value_heads": max(counts),
        "num_local_experts": experts,
        **({"num_experts_per_tok": facts("expert_used_count")} if experts else {}),
        "shared_intermediate_size": facts(
            "expert_shared_feed_forward_length",
            facts("feed_forward_length"),
        ),
        "position_embedding_type": None,
    }


def _olmo2(facts: Facts, entries: Entries) -> Entries:
    if not facts("attention.sliding_window"):
        return {"model_type": "olmo2"}
    full = entries["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": facts("rope.freq_base_swa", full["rope_theta"])}
    return {
        "model_type": "olmo3",
        "layer_types": windows(facts, 4),
        "rope_parameters": {"sliding_attention": local, "full_attention": full},
    }


def _phi3(facts: Facts, entries: Entries) -> Entries:
    original = facts("rope.scaling.original_context_length", entries["max_position_embeddings"])
    return {
        "model_type": "phi3",
        "original_max_position_embeddings": original,
        "sliding_window": facts("attention.sliding_window") or None,
        **partial_rotation(facts, entries),
    }


def _deepseek(facts: Facts, entries: Entries) -> Entries:
    """The families with latent attention, which are one in llama.cpp."""
    rotated = facts.need("rope.dimension_count")
    key_dim = facts("attention.key_length_mla", facts("attention.key_length"))
    found = {
        "q_lora_rank": facts("attention.q_lora_rank"),
        "kv_lora_rank": facts.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_dim - rotated,
        "v_head_dim": facts("attention.value_length_mla", facts("attention.value_length")),
        "num_key_value_heads": entries["num_attention_heads"],
        "head_dim": rotated,
    }
    if (scale := facts("rope.scaling.yarn_log_multiplier")) is not None:
        stretch = float(f"{10 * scale:.6g}")
        found["rope_parameters"] = entries["rope_parameters"] | {
            "mscale": stretch,
            "mscale_all_dim": stretch,
        }
    experts = facts("expert_count", 0)
    if not experts:
        return {"model_type": "youtu", **found}
    if facts.files.architecture == "glm-dsa":
        found |= _indexed(facts)
    found |= {
        "norm_topk_prob": False,
        **experts_of(facts, entries),
        "n_routed_experts": experts,
        "first_k_dense_replace": first_sparse(facts),
    }
    if facts.files.architecture == "glm-dsa":
        return {"model_type": "glm_moe_dsa", **found}
    if facts("expert_gating_func", 0) == SIGMOID or facts.has("exp_probs_b.bias"):
        return {"model_type": "deepseek_v3", **found, "num_nextn_predict_layers": 0}
    grouped = facts("expert_group_count", 1) > 1
    return {
        "model_type": "deepseek_v2",
        **found,
        "topk_method": "group_limited_greedy" if grouped else "greedy",
    }


def _indexed(facts: Facts) -> Entries:
    """Of attention to the positions that an indexer chooses, in layers that have one."""
    sparse = facts.layers_with("ffn_gate_exps.weight")
    own, layers = facts.layers_with("indexer.proj.weight"), range(facts.layers)
    return {
        "index_n_heads": facts.need("attention.indexer.head_count"),
        "index_head_dim": facts.need("attention.indexer.key_length"),
        "index_topk": facts.need("attention.indexer.top_k"),
        "indexer_types": ["full" if layer in own else "shared" for layer in layers],
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in layers],
    }


def _llama4(facts: Facts, entries: Entries) -> Entries:
    experts = facts("expert_count", 0)
    chunked = facts("attention.sliding_window") != 0
    rotates = [not chunked or (layer + 1) % 4 != 0 for layer in range(facts.layers)]
    return {
        "model_type": "llama4_text",
        "intermediate_size": facts.need("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.need("feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": facts.need("expert_used_count"),
        "interleave_moe_layer_step": facts.need("interleave_moe_layer_step"),
        "use_qk_norm": experts != 128,
        "no_rope_layers": [int(one) for one in rotates],
        "attention_chunk_size": 8192,
        "sliding_window": None,
    }


def _ernie4_5_moe(facts: Facts, entries: Entries) -> Entries:
    sparse = facts.layers_with("ffn_gate_exps.weight")
    return {
        "model_type": "ernie4_5_moe",
        "use_bias": facts.has("attn_q.bias"),
        "moe_num_experts": facts.need("expert_count"),
        "moe_k": facts.need("expert_used_count"),
        "moe_intermediate_size": facts.need("expert_feed_forward_length"),
        "moe_num_shared_experts": facts("expert_shared_count", 0),
        "moe_layer_interval": facts("interleave_moe_layer_step", 1),
        "moe_layer_start_index": min(sparse, default=0),
        "moe_layer_end_index": max(sparse, default=-1),
    }


def _smollm3(facts: Facts, entries: Entries) -> Entries:
    rotated = [int((layer + 1) % 4 != 0) for layer in range(facts.layers)]
    return {"model_type": "smollm3", "no_rope_layers": rotated, **present(facts, BIASES)}


def _lfm2(facts: Facts, entries: Entries) -> Entries:
    heads = facts.each("attention.head_count_kv")
    found = {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": entries["rms_norm_eps"],
        "conv_L_cache": facts.need("shortconv.l_cache"),
        "conv_bias": facts.has("shortconv.in_proj.bias"),
    }
    if not facts("expert_count"):
        return {"model_type": "lfm2", **found, "block_auto_adjust_ff_dim": False}
    return {
        "model_type": "lfm2_moe",
        **found,
        **experts_of(facts, entries),
        "num_experts": facts("expert_count"),
        "num_dense_layers": facts("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": facts.has("exp_probs_b.bias"),
    }


def _gpt2(facts: Facts, entries: Entries) -> Entries:
    names = {
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_embd": "hidden_size",
    }
    names |= {"n_positions": "max_position_embeddings", "n_inner": "intermediate_size"}
    found = {name: entries.pop(entry) for name, entry in names.items()}
    for entry in ("rope_parameters", "num_key_value_heads", "head_dim"):
        entries.pop(entry, None)
    return {
        "model_type": "gpt2",
        **found,
        "layer_norm_epsilon": facts.need("attention.layer_norm_epsilon"),
    }


_QWEN3_MOE = plain("qwen3_moe", mixture, has=BIAS, norm_topk_prob=True, sliding_window=None)

ARCHITECTURES: dict[str, Family] = {
    "deepseek2": _deepseek,
    "dots1": plain(
        "dots1",
        experts_of,
        needs={"n_routed_experts": "expert_count"},
        has=BIAS,
        sliding_window=None,
    ),
    "ernie4_5": plain("ernie4_5", has={"use_bias": "attn_q.bias"}),
    "ernie4_5-moe": _ernie4_5_moe,
    "gemma": plain("gemma", sliding_window=None),
    "gemma2": gemma2,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "glm-dsa": _deepseek,
    "glm4": _glm4,
    "glm4moe": plain(
        "glm4_moe",
        experts_of,
        partial_rotation,
        needs={"n_routed_experts": "expert_count"},
        has={**BIAS, "use_qk_norm": "attn_q_norm.weight"},
        num_nextn_predict_layers=0,
    ),
    "gpt-oss": _gpt_oss,
    "gpt2": _gpt2,
    "granite": _granite,
    "granitehybrid": _granite_hybrid,
    "lfm2": _lfm2,
    "lfm2moe": _lfm2,
    "llama": _llama,
    "llama4": _llama4,
    "minimax-m2": plain(
        "minimax_m2",
        expert_width,
        partial_rotation,
        needs={**LOCAL_COUNTS, "rotary_dim": "rope.dimension_count"},
    ),
    "mistral3": _mistral3,
    "olmo2": _olmo2,
    "olmoe": plain("olmoe", needs=COUNTS, norm_topk_prob=False),
    "phi3": _phi3,
    "qwen2": plain("qwen2", sliding_window=None),
    "qwen2moe": plain("qwen2_moe", _qwen_shared, norm_topk_prob=False),
    "qwen2vl": plain("qwen2", sliding_window=None),
    "qwen3": plain("qwen3", has=BIAS, sliding_window=None),
    "qwen35": _qwen3_5,
    "qwen35moe": _qwen3_5,
    "qwen3moe": _QWEN3_MOE,
    "qwen3next": _qwen3_5,
    "qwen3vl": plain("qwen3", has=BIAS, sliding_window=None),
    "qwen3vlmoe": _QWEN3_MOE,
    "seed_oss": plain("seed_oss", has={**BIASES, "attention_out_bias": "attn_output.bias"}),
    "smollm3": _smollm3,
    "starcoder2": plain(
        "starcoder2",
        needs={"norm_epsilon": "attention.layer_norm_epsilon"},
        has={"use_bias": "attn_q.bias"},
        sliding_window=None,
    ),
}
"""By llama.cpp's name of the architecture."""
