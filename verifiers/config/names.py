"""Names of tensors: from those that the files of published checkpoints have to those that
transformers gives its parameters.
"""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

DROPPED = re.compile(
    r"^(model\.)?(visual|vision_\w+|audio_\w+|embed_vision|embed_audio|multi_modal_projector"
    r"|multimodal_projector|mm_projector|mtp|mtp_\w+)\."
    r"|^(talker|code2wav|token2wav)\.|rotary_emb\.inv_freq$"
)
"""Towers of composites, layers that draft, and what is computed from the config."""

UNUSED = re.compile(
    r"\.((input|output|prob_output|bias)_(scale|zero_point)(_2)?|input_global_scale"
    r"|input_scale_ub|activation_scale|[qkv]_scale|prob_scale|weight_format)$"
)
"""Scales of activations and of the cache, which keep their own type here, and a mark of
bitsandbytes.
"""

RENAMED = (
    # of composites, old and new
    (re.compile(r"^(model\.)?language_model\.(model\.)?(?!lm_head)"), "model."),
    (re.compile(r"^(model\.)?language_model\.lm_head"), "lm_head"),
    (re.compile(r"^thinker\.(?=model\.|lm_head)"), ""),
    (re.compile(r"^(?=(embed_tokens|layers|norm)\.)"), "model."),  # saved without a head
    (re.compile(r"\.block_sparse_moe\."), ".mlp."),
    (re.compile(r"(?<=\.experts\.)(\d+)\.w1\."), r"\1.gate_proj."),
    (re.compile(r"(?<=\.experts\.)(\d+)\.w3\."), r"\1.up_proj."),
    (re.compile(r"(?<=\.experts\.)(\d+)\.w2\."), r"\1.down_proj."),
)
"""In this order."""

RENAMED_IN = {
    "axk1": ((re.compile(r"(?<=\d\.)post_mlp_layernorm"), "mlp.post_mlp_layernorm"),),
    "ernie4_5_moe": ((re.compile(r"\.mlp\.moe_statics\."), ".mlp.gate.moe_statics."),),
    "granitemoehybrid": (
        (
            re.compile(r"(?<=\d\.)mlp\.input_linear\.weight$"),
            "block_sparse_moe.experts.gate_up_proj",
        ),
        (re.compile(r"(?<=\d\.)mlp\.output_linear\.weight$"), "block_sparse_moe.experts.down_proj"),
        (re.compile(r"(?<=\d\.)mlp\.router\.layer\."), "block_sparse_moe.router."),
    ),
    "hy_v3": (
        (re.compile(r"\.mlp\.router\.gate\."), ".mlp.gate."),
        (re.compile(r"\.mlp\.expert_bias$"), ".mlp.e_score_correction_bias"),
        (re.compile(r"\.mlp\.shared_mlp\."), ".mlp.shared_experts."),
    ),
    "kimi_linear": (
        (
            re.compile(r"(?<=\.self_attn\.)(?=f_a_proj\.|f_b_proj\.|dt_bias$|A_log$)"),
            "forget_gate.",
        ),
    ),
    "laguna": (
        (re.compile(r"\.experts\.(?=e_score_correction_bias)"), ".gate."),
        (re.compile(r"\.shared_expert\."), ".shared_experts."),
    ),
    "mimo_v2_flash": ((re.compile(r"\.attention_sink_bias$"), ".sinks"),),
    "nemotron_h": ((re.compile(r"^backbone\."), "model."),),
    "olmo_hybrid": (
        (re.compile(r"\.attention_layer_norm\."), ".input_layernorm."),
        (re.compile(r"\.feedforward_layer_norm\."), ".post_attention_layernorm."),
    ),
}
"""The same for single model types."""

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

LAYER = re.compile(r"^model\.layers\.(\d+)\.")
EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)$")
MERGED = re.compile(
    r"^(.*\.experts\.(?:gate_up_proj|down_proj))"
    r"(?:_(blocks|scales|scale_inv|scale|packed|scale_2|global_scale))?$"
)

PARTS = (
    *(
        "weight",
        "weight_scale_inv",
        "weight_scale",
        "weight_scale_2",
        "weight_global_scale",
        "weight_packed",
        "weight_shape",
    ),
    *(
        "weight_zero_point",
        "weight_g_idx",
        "qweight",
        "qzeros",
        "scales",
        "g_idx",
        "pre_quant_scale",
        "SCB",
    ),
)
"""What follows the name of a linear layer."""

OF_WEIGHT = re.compile(
    r"^(.*)\.(weight\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+))$"
)
"""The same of bitsandbytes."""

WIDE = {"lfm2_moe": ("expert_bias",), "olmo_hybrid": ("A_log",)}
"""What transformers has in float32 and its class does not name."""


class Place(NamedTuple):
    """What a tensor is."""

    module: str  # the linear layer, or the joined experts, that it is a part of
    # One of `PARTS`, those of joined experts with "weight_" before them; None for a tensor that
    # is whole.
    part: str | None


def name_of(name: str, config: Any, ignored: Sequence[str] = ()) -> str | None:
    """What transformers calls a tensor of a file; None for one that the text model lacks.

    Args:
        name: in the file.
        config: of the text model.
        ignored: expressions for further names that it lacks, beyond its last layer.
    """
    if DROPPED.search(name) or UNUSED.search(name):
        return None
    for expression, replacement in (*RENAMED, *RENAMED_IN.get(config.model_type, ())):
        name = expression.sub(replacement, name, count=1)
    layer = LAYER.match(name)
    if layer and (beyond := int(layer[1]) - config.num_hidden_layers) >= 0:
        drafting = beyond < (getattr(config, "num_nextn_predict_layers", None) or 0)
        if drafting or any(re.search(expression, name) for expression in ignored):
            return None
    return name


def place_of(name: str) -> Place:
    """The layer that a tensor belongs to, and as what.

    >>> place_of("mlp.experts.3.up_proj.weight_scale_inv")
    Place(module='mlp.experts.3.up_proj', part='weight_scale_inv')
    >>> place_of("mlp.experts.down_proj_blocks"), place_of("self_attn.sinks")
    (Place(module='mlp.experts.down_proj', part='weight_blocks'), Place(module='self_attn.sinks',
    part=None))
    """
    if merged := MERGED.match(name):
        return Place(merged[1], f"weight_{merged[2]}" if merged[2] else "weight")
    if of_weight := OF_WEIGHT.match(name):
        return Place(of_weight[1], of_weight[2])
    module, _, part = name.rpartition(".")
    return Place(module, part) if part in PARTS else Place(name, None)


def class_facts(config: Any, dtype: torch.dtype) -> tuple[list[str], list[str]]:
    """What transformers' class of a model says of its tensors: expressions for those in float32,
    and for those to be left out.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    found = found[0] if isinstance(found, tuple) else found
    kept = set(WIDE.get(config.model_type, ()))
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(getattr(found, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        kept |= set(getattr(found, "_keep_in_fp32_modules", None) or ())
    return sorted(kept), list(getattr(found, "_keys_to_ignore_on_load_unexpected", None) or ())


def wide_names(config: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """An expression for the tensors of a model that are float32 whatever `dtype` the others have;
    None where there are none.
    """
    kept = class_facts(config, dtype)[0]
    return re.compile("|".join(name.replace("*", ".*") for name in kept)) if kept else None
