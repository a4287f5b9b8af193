"""Tiny configs of every family of targets: where they are in `CONFIGS`, a family is tested.

Values are of another width than keys, and groups of heads share a key, so that no state is right
transposed or shared wrongly.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from inspect import signature
from typing import Any

from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

VOCAB = 97
WINDOW = 8
SHORT_LEN = 37
"""Up to which LongRoPE has its first frequencies: between the lengths of the tests' sequences."""

Entries = dict[str, Any]
Make = Callable[..., PreTrainedConfig]
"""A config, with changes to its entries."""

PLAIN: Entries = {
    **{"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "initializer_range": 0.3},
}
COMMON: Entries = {**PLAIN, "head_dim": 16}


def tiny(model_type: str, *entries: Mapping[str, Any], of: Entries = COMMON, **more: Any) -> Make:
    """A factory; where an entry is stated twice, the last one counts.

    Args:
        model_type: as Transformers names it.
        entries: beside those of all.
        of: those of all.
        more: further entries.
    """
    whole = dict(of)
    for one in entries:
        whole |= one
    return lambda **changes: AutoConfig.for_model(model_type, **deepcopy(whole | more | changes))


def _rope(kind: str = "default", **more: Any) -> Entries:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


_KINDS = ["sliding_attention", "full_attention"] * 2
WINDOWED = {"sliding_window": WINDOW, "layer_types": _KINDS}
_PARTIAL = _rope(partial_rotary_factor=0.5)
_MSCALE = {"mscale": 1.0, "mscale_all_dim": 0.7}
_STRETCHED = {"factor": 4.0, "original_max_position_embeddings": 128, **_MSCALE}
_YARN = _rope("yarn", **_STRETCHED)
_TEMPERED = _rope(
    "yarn", **_STRETCHED | {"original_max_position_embeddings": 7, "llama_4_scaling_beta": 0.8}
)
MOE = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPED = {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 24}
_SCALED = {
    **{"attention_multiplier": 0.2, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "logits_scaling": 2.5,
}

_DELTA: Entries = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16},
    **{"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4},
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    **_rope(partial_rotary_factor=0.25),
}
_SHARED = {**MOE, "shared_expert_intermediate_size": 20}
_NORMS_BY_GROUP = "group_size" in signature(BambaRMSNormGated.__init__).parameters
"""Older Transformers norm all groups of Bamba and Granite together."""
_MAMBA: Entries = {
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2 if _NORMS_BY_GROUP else 1},
    **{"mamba_d_state": 12, "mamba_chunk_size": 16},  # what Transformers pads a text to
}
_GRANITE: Entries = {
    **_MAMBA,
    **_SCALED,
    **{"mamba_d_conv": 4, "shared_intermediate_size": 40},
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_FALCON: Entries = {
    **_MAMBA,
    **{"mamba_d_head": 12, "mamba_d_ssm": 48, "embedding_multiplier": 1.7},
    **{"lm_head_multiplier": 0.6, "attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8},
    **{"key_multiplier": 0.5, "ssm_in_multiplier": 0.9, "ssm_out_multiplier": 1.1},
    **{"ssm_multipliers": [0.7, 1.3, 1.2, 0.8, 0.9], "mlp_multipliers": [1.2, 0.7]},
}
_ZAMBA: Entries = {
    "num_hidden_layers": 6,
    # without residuals more would make sharp scores, and those rounding errors that tell nothing
    "initializer_range": 0.1,
    "layers_block_type": ["linear_attention", "hybrid", "hybrid"] * 2,
    **{"mamba_d_state": 12, "mamba_ngroups": 2, "n_mamba_heads": 4, "adapter_rank": 6},
    "chunk_size": 16,
}
_LFM2: Entries = {"layer_types": ["conv", "full_attention", "conv", "conv"], **_rope()}

_GEMMA4: Entries = {
    **WINDOWED,
    **{"global_head_dim": 24, "final_logit_softcapping": 8.0},
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {
            **{"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e5}
        },
    },
}
_SAME = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}

CONFIGS: dict[str, Make] = {
    "llama": tiny("llama"),
    "llama_tied": tiny("llama", tie_word_embeddings=True),
    "qwen2": tiny("qwen2", of=PLAIN),
    "qwen2_window": tiny(
        "qwen2", of=PLAIN, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    ),
    "qwen3": tiny("qwen3"),
    "qwen3_moe": tiny("qwen3_moe", MOE),
    "mistral": tiny("mistral", sliding_window=WINDOW),
    "gemma2": tiny(
        "gemma2",
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=8.0,
    ),
    "gemma3": tiny("gemma3_text", WINDOWED, query_pre_attn_scalar=16),
    "gpt_oss": tiny("gpt_oss", WINDOWED, _LOCAL),
    "gemma": tiny("gemma"),
    "glm4": tiny("glm4", _PARTIAL, attention_bias=True),
    "granite": tiny("granite", _SCALED),
    "olmo2": tiny("olmo2"),
    "olmo3": tiny("olmo3", WINDOWED),
    "phi3": tiny("phi3", _PARTIAL),
    "phi3_long": tiny(
        "phi3",
        _rope(
            "longrope", partial_rotary_factor=0.5, short_factor=[1.0, 1.5], long_factor=[2.0, 9.0]
        ),
        of=PLAIN,
        original_max_position_embeddings=SHORT_LEN,
    ),
    "llama_dynamic": tiny("llama", _rope("dynamic", factor=3.0)),
    "glm4_moe": tiny(
        "glm4_moe",
        _GROUPED,
        _PARTIAL,
        n_routed_experts=8,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
    ),
    "llama4": tiny(
        "llama4_text",
        _LOCAL,
        intermediate_size_mlp=40,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 0, 1, 1],
        attention_chunk_size=WINDOW,
        floor_scale=5,
        attn_scale=0.7,
    ),
    "ernie4_5": tiny("ernie4_5", use_bias=True),
    "ernie4_5_moe": tiny(
        "ernie4_5_moe",
        use_bias=True,
        moe_intermediate_size=24,
        moe_num_experts=4,
        moe_k=2,
        moe_num_shared_experts=1,
    ),
    "hy_v3": tiny(
        "hy_v3",
        MOE,
        mlp_layer_types=["dense", *["sparse"] * 3],
        num_experts=8,
        num_shared_experts=1,
        router_scaling_factor=1.5,
    ),
    "glm": tiny("glm", _PARTIAL, attention_bias=True),
    "mellum": tiny("mellum", WINDOWED, MOE, mlp_layer_types=["dense", "sparse"] * 2),
    "olmoe": tiny("olmoe", of=PLAIN, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True),
    "seed_oss": tiny("seed_oss", attention_bias=True, attention_out_bias=True, mlp_bias=True),
    "mimo_v2_flash": tiny(
        "mimo_v2_flash",
        _GROUPED,
        v_head_dim=12,
        attention_value_scale=0.6,
        attention_bias=True,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention"] * 2,
        rope_parameters={
            "sliding_attention": {**_PARTIAL["rope_parameters"], "rope_theta": 1e3},
            "full_attention": _PARTIAL["rope_parameters"],
        },
        n_routed_experts=8,
        routed_scaling_factor=1.5,
    ),
    "ministral3": tiny("ministral3", _TEMPERED),
    "mixtral": tiny("mixtral", _LOCAL),
    "qwen2_moe": tiny(
        "qwen2_moe",
        MOE,
        of=PLAIN,
        shared_expert_intermediate_size=48,  # two of the others'
        mlp_only_layers=[2],
    ),
    "smollm3": tiny("smollm3", no_rope_layers=[1, 0, 1, 0]),
    "bamba": tiny(
        "bamba",
        _MAMBA,
        of=PLAIN,
        mamba_d_conv=3,
        mamba_proj_bias=True,
        mamba_conv_bias=False,
        attn_layer_indices=[1],
    ),
    "falcon_h1": tiny("falcon_h1", _FALCON, of=PLAIN),
    "falcon_h1_normed": tiny(
        "falcon_h1",
        _FALCON,
        of=PLAIN,
        mamba_rms_norm=True,
        mamba_proj_bias=True,
        projectors_bias=True,
        attention_bias=True,
        mlp_bias=True,
    ),
    "granite_hybrid": tiny(
        "granitemoehybrid",
        _GRANITE,
        of=PLAIN,
        num_local_experts=0,
        position_embedding_type="rope",
        mamba_proj_bias=True,
    ),
    "granite_hybrid_moe": tiny("granitemoehybrid", _GRANITE, _LOCAL, of=PLAIN),
    "lfm2": tiny("lfm2", _LFM2, of=PLAIN, conv_bias=True, block_auto_adjust_ff_dim=False),
    "lfm2_moe": tiny(
        "lfm2_moe",
        _LFM2,
        MOE,
        of=PLAIN,
        conv_L_cache=4,
        num_dense_layers=1,
        routed_scaling_factor=1.5,
    ),
    "nemotron_h": tiny(
        "nemotron_h",
        _GROUPED,
        of={name: value for name, value in COMMON.items() if name != "num_hidden_layers"},
        layers_block_type=[
            *("linear_attention", "moe", "full_attention", "linear_attention", "mlp"),
            "linear_attention",
        ],
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=12,
        chunk_size=16,
        n_groups=2,
        conv_kernel=4,
        use_bias=True,
        mlp_bias=True,
        n_routed_experts=8,
        moe_shared_expert_intermediate_size=20,
        moe_latent_size=16,
        routed_scaling_factor=1.5,
    ),
    "olmo_hybrid": tiny(
        "olmo_hybrid",
        of=PLAIN,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=12,
        layer_types=_DELTA["layer_types"],
    ),
    "qwen3_5": tiny("qwen3_5_text", _DELTA),
    "qwen3_5_moe": tiny("qwen3_5_moe_text", _DELTA, _SHARED),
    "qwen3_next": tiny("qwen3_next", _DELTA, _SHARED),
    "zamba2": tiny("zamba2", _ZAMBA, of=PLAIN),
    "zamba2_adapted": tiny(
        "zamba2",
        _ZAMBA,
        of=PLAIN,
        num_key_value_heads=4,
        use_shared_attention_adapter=True,
        use_mem_rope=True,
        add_bias_linear=True,
        num_mem_blocks=2,
    ),
    "gemma4": tiny("gemma4_text", _GEMMA4, _SAME, hidden_size_per_layer_input=0),
    "gemma4_shared": tiny(
        "gemma4_text",
        _GEMMA4,
        num_hidden_layers=6,
        layer_types=_KINDS[:2] * 3,
        hidden_size_per_layer_input=12,
        vocab_size_per_layer_input=VOCAB,
        num_kv_shared_layers=3,
        use_double_wide_mlp=True,
    ),
    "gemma4_moe": tiny(
        "gemma4_text",
        _GEMMA4,
        _SAME,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=24,
    ),
    "laguna": tiny(
        "laguna",
        WINDOWED,
        _SHARED,
        num_attention_heads_per_layer=[6, 4, 6, 4],
        moe_routed_scaling_factor=1.5,
    ),
    "gemma4_unified": tiny("gemma4_unified_text", _GEMMA4, _SAME),
    "dots1": tiny(
        "dots1",
        _GROUPED,
        WINDOWED,
        n_routed_experts=8,
        n_shared_experts=1,
        first_k_dense_replace=1,
        norm_topk_prob=True,
        routed_scaling_factor=1.5,
    ),
}
"""One factory per architecture and feature: grouped heads, windows, sinks, softcaps, experts,
multipliers, tied heads, joined projections, norms after sublayers, layers and numbers that RoPE
leaves alone."""

if "gemma4_unified_text" not in CONFIG_MAPPING_NAMES:  # as in older Transformers
    del CONFIGS["gemma4_unified"]

TOPK = 8

_LATENT: Entries = {
    **PLAIN,
    **{"num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16},
    **{"qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10},
}
LATENT_MOE: Entries = {**_LATENT, **_GROUPED, "n_routed_experts": 8, "n_shared_experts": 1}
# With few heads in the indexer, a position often scores exactly 0 in all of them, and which of
# several such a row takes is chance.
_INDEXER: Entries = {"index_n_heads": 16, "index_head_dim": 12, "index_topk": TOPK}
_DENSE_FIRST = {"first_k_dense_replace": 1}

LATENT_CONFIGS: dict[str, Make] = {
    "deepseek_v2": tiny("deepseek_v2", _DENSE_FIRST, of=LATENT_MOE, q_lora_rank=None),
    "deepseek_v2_yarn": tiny(
        "deepseek_v2", _DENSE_FIRST, _YARN, of=LATENT_MOE, topk_method="group_limited_greedy"
    ),
    "deepseek_v3": tiny("deepseek_v3", _DENSE_FIRST, _YARN, of=LATENT_MOE),
    "deepseek_v3_halves": tiny(
        "deepseek_v3",
        _DENSE_FIRST,
        of=LATENT_MOE,
        q_lora_rank=None,
        rope_interleave=False,
        attention_bias=True,
    ),
    "deepseek_v32": tiny("deepseek_v32", _INDEXER, _DENSE_FIRST, _YARN, of=LATENT_MOE),
    "glm_moe_dsa": tiny(
        "glm_moe_dsa",
        _INDEXER,
        _DENSE_FIRST,
        of=LATENT_MOE,
        indexer_types=["full", "shared", "full", "shared"],
    ),
    "glm4_moe_lite": tiny("glm4_moe_lite", of=LATENT_MOE),
    "axk1": tiny("axk1", of=LATENT_MOE),
    "mistral4": tiny(
        "mistral4", _DENSE_FIRST, _TEMPERED, of=LATENT_MOE, n_group=1, routed_scaling_factor=1.7
    ),
    "youtu": tiny("youtu", of=_LATENT),
    "kimi_linear": tiny(
        "kimi_linear",
        of={name: value for name, value in LATENT_MOE.items() if name != "n_routed_experts"},
        q_lora_rank=None,
        num_local_experts=8,
        linear_num_heads=3,
        linear_head_dim=8,
        layer_types=_DELTA["layer_types"],
    ),
}
"""The same for latent attention: with a compressed query and without, YaRN, both pairings of RoPE,
indexers of every layer and shared ones that choose far fewer positions than there are, a dense
layer before experts, states beside latents.
"""
