"""Keys of `config.json` that say nothing of a drafter: those of copied models' configs.

Trainers copy the target's config and change what they need, while layers are those of Qwen3 or
Llama, whose modules look at none of the rest. So a key that some language model of Transformers has
is a copy, and a key that none has is one of a drafter.
"""

import dataclasses
import re
from collections.abc import Iterator
from functools import cache

_PARTS = re.compile(
    r"_.*|(audio|image|index|linear|mamba|mla|moe|mtp|quantization|router|ssm|unsloth)_.*"
    r"|(video|vision)_.*"
    r"|.*_(dropout|implementation|index|pdrop|token_ids?|version)|.*experts?(_.*|$)"
)
"""Parts that no drafter's layers have, and what only training or Transformers looks at."""

_OTHERS = {
    "add_classification_head", "add_full_attention_sink_bias", "add_swa_attention_sink_bias",
    "attention_backend", "attention_other_setting", "attention_projection_layout",
    "attn_output_gate", "attn_type_list", "auto_map", "aux_loss_alpha", "block_auto_adjust_ff_dim",
    "block_dim", "block_ff_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale",
    "block_use_swiglu", "block_use_xavier_init", "cla_share_factor", "class_num", "conv_dim",
    "conv_dim_out", "conv_use_xavier_init", "dense_list", "embed_requires_grad", "ep_size",
    "experts_per_token", "full_attention_interval", "global_head_dim", "group_norm_size",
    "has_no_defaults_at_init", "hybrid_block_size", "hybrid_layer_pattern",
    "hybrid_override_pattern", "im_end_id", "im_newline_id", "im_start_id",
    "initial_context_length", "language_model_only", "mask_init_id", "mlp_intermediate_size",
    "modal_type", "model_max_length", "model_type", "mup_denominator", "norm_head", "norm_softmax",
    "num_attention_groups", "num_draft_layers", "num_global_key_value_heads", "num_mtp_modules",
    "pool_type", "pruned_heads", "rotary_pct", "score_function", "seq_aux", "shared_moe_mode",
    "swa_v_head_dim", "swiglu_limits", "target_model_name_or_path", "target_model_type",
    "target_text_model_type", "text_config", "text_end_id", "text_start_id", "tf_legacy_loss",
    "theta", "tie_embedding", "torch_dtype", "torchscript", "use_bfloat16", "use_cla",
    "use_grouped_topk", "use_head_wise_attn_gate", "use_mrope", "use_mtp", "use_pos_enc",
    "use_rmsnorm", "use_rotary_pos_emb", "use_routing_bias", "yarn_only_types",
}  # fmt: skip
"""Keys of published configs that no class declares; five are of trainers."""


_COMMON = {
    "architectures", "attention_bias", "attention_dropout", "dtype", "head_dim", "hidden_act",
    "hidden_size", "initializer_range", "intermediate_size", "layer_types",
    "max_position_embeddings", "max_window_layers", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "rope_parameters", "sliding_window",
    "tie_word_embeddings", "use_cache", "use_sliding_window", "vocab_size",
}  # fmt: skip
"""Keys of Qwen3, as which most drafters' layers are: to ask Transformers' classes takes seconds."""


def is_copied(key: str) -> bool:
    """Whether a key is one of language models, or of Transformers itself."""
    return key in _OTHERS | _COMMON or _PARTS.fullmatch(key) is not None or key in _declared()


def _all_kinds() -> tuple[str, ...]:
    """Model types of Transformers' language models, and of the text parts of others."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *(
        kind for kind in CONFIG_MAPPING_NAMES if kind.endswith("_text")
    )


@cache
def _declared() -> frozenset[str]:
    """What configs of language models declare, and what older versions wrote of generation."""
    from transformers import GenerationConfig

    names = frozenset(name for kind in _all_kinds() for name in _fields(kind))
    return names | GenerationConfig().to_dict().keys()


def _fields(kind: str) -> Iterator[str]:
    """Keys of a model type, and of the parts that it is made of."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    whole = CONFIG_MAPPING[kind]
    parts = (part for part in whole.sub_configs.values() if dataclasses.is_dataclass(part))
    for config in (whole, *parts):
        yield from (field.name for field in dataclasses.fields(config))
        yield from config.attribute_map
