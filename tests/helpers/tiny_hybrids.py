"""Tiny configs of families of which some layers keep a state per request.

Values are of another width than keys, and groups of heads share a key, so that no state is right
transposed or shared wrongly.
"""

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from transformers import (
    BambaConfig,
    FalconH1Config,
    GraniteMoeHybridConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    PreTrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Zamba2Config,
)
from transformers.models.bamba.modeling_bamba import BambaRMSNormGated

_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
}
_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
_NORMS_BY_GROUP = "group_size" in signature(BambaRMSNormGated.__init__).parameters
"""Older Transformers norm all groups of Bamba and Granite together."""
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2 if _NORMS_BY_GROUP else 1,
    "mamba_d_state": 12,
}  # fmt: skip
_GRANITE: dict[str, Any] = {
    **_MAMBA,
    "mamba_d_conv": 4,
    "shared_intermediate_size": 40,
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
}
_FALCON: dict[str, Any] = {
    **_MAMBA,
    "mamba_d_head": 12,
    "mamba_d_ssm": 48,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "attention_out_multiplier": 0.8,
    "key_multiplier": 0.5,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.1,
    "ssm_multipliers": [0.7, 1.3, 1.2, 0.8, 0.9],
    "mlp_multipliers": [1.2, 0.7],
}
_ZAMBA: dict[str, Any] = {
    "num_hidden_layers": 6,
    # without residuals more would make sharp scores, and those rounding errors that tell nothing
    "initializer_range": 0.1,
    "layers_block_type": [
        "linear_attention",
        "hybrid",
        "hybrid",
        "linear_attention",
        "hybrid",
        "hybrid",
    ],
    "mamba_d_state": 12,
    "mamba_ngroups": 2,
    "n_mamba_heads": 4,
    "adapter_rank": 6,
}
_LFM2: dict[str, Any] = {
    "layer_types": ["conv", "full_attention", "conv", "conv"],
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}


def hybrid_configs(common: Mapping[str, Any]) -> dict[str, Callable[[], PreTrainedConfig]]:
    """One factory per family and feature; `common` is what all tiny models have."""
    whole = dict(common)
    # of which the heads' width follows
    plain = {name: value for name, value in whole.items() if name != "head_dim"}
    return {
        "bamba": lambda: BambaConfig(
            **plain,
            **_MAMBA,
            mamba_d_conv=3,
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            attn_layer_indices=[1],
        ),
        "falcon_h1": lambda: FalconH1Config(**plain, **_FALCON),
        "falcon_h1_normed": lambda: FalconH1Config(
            **plain,
            **_FALCON,
            mamba_rms_norm=True,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
        ),
        "granite_hybrid": lambda: GraniteMoeHybridConfig(
            **plain,
            **_GRANITE,
            num_local_experts=0,
            position_embedding_type="rope",
            mamba_proj_bias=True,
        ),
        "granite_hybrid_moe": lambda: GraniteMoeHybridConfig(
            **plain, **_GRANITE, num_local_experts=4, num_experts_per_tok=2
        ),
        "lfm2": lambda: Lfm2Config(
            **plain, **_LFM2, conv_bias=True, block_auto_adjust_ff_dim=False
        ),
        "lfm2_moe": lambda: Lfm2MoeConfig(
            **plain,
            **_LFM2,
            conv_L_cache=4,
            num_dense_layers=1,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            routed_scaling_factor=1.5,
        ),
        "nemotron_h": lambda: NemotronHConfig(
            **{name: value for name, value in whole.items() if name != "num_hidden_layers"},
            layers_block_type=[
                "linear_attention",
                "moe",
                "full_attention",
                "linear_attention",
                "mlp",
                "linear_attention",
            ],
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=12,
            n_groups=2,
            conv_kernel=4,
            use_bias=True,
            mlp_bias=True,
            n_routed_experts=8,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=20,
            moe_latent_size=16,
            routed_scaling_factor=1.5,
        ),
        "olmo_hybrid": lambda: OlmoHybridConfig(
            **plain,
            linear_num_key_heads=4,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=12,
            layer_types=[
                "linear_attention",
                "linear_attention",
                "full_attention",
                "linear_attention",
            ],
        ),
        "qwen3_5": lambda: Qwen3_5TextConfig(**whole, **_DELTA),
        "qwen3_5_moe": lambda: Qwen3_5MoeTextConfig(**whole, **_DELTA, **_EXPERTS),
        "qwen3_next": lambda: Qwen3NextConfig(**whole, **_DELTA, **_EXPERTS),
        "zamba2": lambda: Zamba2Config(**plain | _ZAMBA),
        "zamba2_adapted": lambda: Zamba2Config(
            **plain | _ZAMBA | {"num_key_value_heads": 4},
            use_shared_attention_adapter=True,
            use_mem_rope=True,
            add_bias_linear=True,
            num_mem_blocks=2,
        ),
    }
