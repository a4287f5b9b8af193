"""Tiny configs of models whose layers differ in their heads."""

from collections.abc import Callable, Mapping
from typing import Any

from transformers import AutoConfig, Gemma4TextConfig, LagunaConfig, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

_KINDS = ["sliding_attention", "full_attention"]


def shape_configs(
    common: Mapping[str, Any], window: int, *, global_kv_heads: int = 1
) -> dict[str, Callable[[], PreTrainedConfig]]:
    """Factories by name: Gemma 4 as its 31B, E2B, 26B-A4B and 12B are, as far as this transformers
    has them, and Laguna.

    Args:
        common: entries of all.
        window: of sliding layers.
        global_kv_heads: of layers whose values are their keys.
    """
    gemma4: dict[str, Any] = {
        **common,
        "layer_types": _KINDS * 2,
        "sliding_window": window,
        "global_head_dim": 24,
        "final_logit_softcapping": 8.0,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e5,
            },
        },
    }
    same = {"attention_k_eq_v": True, "num_global_key_value_heads": global_kv_heads}
    no_inputs = {"hidden_size_per_layer_input": 0}
    experts = {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    }
    found: dict[str, Callable[[], PreTrainedConfig]] = {
        "gemma4": lambda: Gemma4TextConfig(**gemma4, **same, **no_inputs),
        "gemma4_shared": lambda: Gemma4TextConfig(
            **gemma4 | {"num_hidden_layers": 6, "layer_types": _KINDS * 3},
            hidden_size_per_layer_input=12,
            vocab_size_per_layer_input=common["vocab_size"],
            num_kv_shared_layers=3,
            use_double_wide_mlp=True,
        ),
        "gemma4_moe": lambda: Gemma4TextConfig(**gemma4, **same, **no_inputs, **experts),
        "laguna": lambda: LagunaConfig(
            **common,
            layer_types=_KINDS * 2,
            sliding_window=window,
            num_attention_heads_per_layer=[6, 4, 6, 4],
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
            num_experts=4,
            num_experts_per_tok=2,
            moe_routed_scaling_factor=1.5,
        ),
    }
    if "gemma4_unified_text" in CONFIG_MAPPING_NAMES:
        found["gemma4_unified"] = lambda: AutoConfig.for_model(
            "gemma4_unified_text", **gemma4, **same
        )
    return found
