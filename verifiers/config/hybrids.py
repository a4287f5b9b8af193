"""Families of which some layers keep a state per request, each described from its config."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.layers.experts.routing import Routing
from verifiers.config.description import (
    AFTER,
    BEFORE,
    Description,
    Family,
    NormNames,
    sigmoid_routing,
)
from verifiers.config.states import sizes_of

MAMBA = (r"\.mamba\.", ".linear_attn.")
FEED_FORWARD = (r"\.feed_forward\.", ".mlp.")

NEMOTRON_NAMES = (
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"\.mixer\.(?=[qkvo]_proj\.)", ".self_attn."),
    (r"\.mixer\.(?=in_proj|out_proj|conv1d|A_log|D$|dt_bias|norm\.)", ".linear_attn."),
    (r"\.mixer\.", ".mlp."),
)
GRANITE_NAMES = (
    MAMBA,
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.shared_mlp\.input_linear", ".mlp.shared_expert.gate_up_proj"),
    (r"\.shared_mlp\.output_linear", ".mlp.shared_expert.down_proj"),
)
BAMBA_NAMES = (MAMBA, FEED_FORWARD, (r"^model\.final_layernorm\.", "model.norm."))
LFM2_NAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.conv\.conv\.", ".linear_attn.conv1d."),
    (r"\.conv\.", ".linear_attn."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.(q|k)_layernorm\.", r".\1_norm."),
    (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    FEED_FORWARD,
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)
KIMI_NAMES = {
    "o_proj": "out_proj",
    "o_norm": "norm",
    "b_proj": "in_proj_b",
    "forget_gate.f_a_proj": "in_proj_a",
    "forget_gate.f_b_proj": "a_proj",
    "forget_gate.dt_bias": "dt_bias",
    "forget_gate.A_log": "A_log",
    "g_a_proj": "in_proj_z",
    "g_b_proj": "z_proj",
}
"""Within a layer of linear attention."""
ZAMBA_NAMES = (
    (r"\.mamba_decoder\.(?=mamba\.|input_layernorm\.)", "."),
    MAMBA,
    (r"^model\.final_layernorm\.", "model.norm."),
)
OLMO_NAMES = (
    (r"\.linear_attn\.o_proj\.", ".linear_attn.out_proj."),
    (r"\.linear_attn\.o_norm\.", ".linear_attn.norm."),
    (r"\.linear_attn\.a_proj\.", ".linear_attn.in_proj_a."),
    (r"\.linear_attn\.b_proj\.", ".linear_attn.in_proj_b."),
    (r"\.linear_attn\.g_proj\.", ".linear_attn.in_proj_z."),
)


def _qwen3_5(config: Any, common: Mapping[str, Any]) -> Description:
    routing = None
    if getattr(config, "num_experts", None):
        # The newer family has no choice.
        renormalized = config.norm_topk_prob if config.model_type == "qwen3_next" else True
        routing = Routing(config.num_experts, config.num_experts_per_tok, renormalized=renormalized)
    return Description(
        **common,
        norm_kind="zero_centered",
        norms_of_queries="each head",
        gated_attention=True,
        routing=routing,
    )


def _nemotron_h(config: Any, common: Mapping[str, Any]) -> Description | None:
    if (config.mlp_hidden_act, config.mamba_hidden_act) != ("relu2", "silu"):
        return None
    return Description(
        **_without_rope(config, common) | {"activation": "relu2"},
        names=NEMOTRON_NAMES,
        norms=NormNames("norm", None, "norm", None),
        one_sublayer=True,
        routing=sigmoid_routing(config) if "moe" in config.layer_types else None,
        wide_router=True,
    )


def _granite_hybrid(config: Any, common: Mapping[str, Any]) -> Description | None:
    experts = config.num_local_experts
    if config.position_embedding_type != "rope":
        common = _without_rope(config, common)
    names = GRANITE_NAMES if experts else (*GRANITE_NAMES, (r"\.mlp\.shared_expert\.", ".mlp."))
    return _convolved_by_silu(
        common,
        names=names,
        scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
        routing=Routing(experts, config.num_experts_per_tok) if experts else None,
    )


def _bamba(config: Any, common: Mapping[str, Any]) -> Description | None:
    return _convolved_by_silu(
        common, names=BAMBA_NAMES, norms=BEFORE._replace(mlp="pre_ff_layernorm")
    )


def _falcon_h1(config: Any, common: Mapping[str, Any]) -> Description | None:
    gate, down = config.mlp_multipliers
    sizes = sizes_of(config)
    inner, keys = sizes.value_heads * sizes.value_dim, sizes.key_heads * sizes.key_dim
    repeats = torch.tensor([inner, inner, keys, keys, sizes.value_heads])
    rows = torch.tensor(config.ssm_multipliers).repeat_interleave(repeats)
    into = config.attention_in_multiplier
    factors: list[tuple[str, float | Tensor]] = [
        ("self_attn.q_proj.weight", into),
        ("self_attn.k_proj.weight", into * config.key_multiplier),
        ("self_attn.k_proj.bias", config.key_multiplier),
        ("self_attn.v_proj.weight", into),
        ("linear_attn.in_proj.weight", (rows * config.ssm_in_multiplier)[:, None]),
        ("linear_attn.in_proj.bias", rows),
    ]
    scaled = {
        "self_attn.o_proj": config.attention_out_multiplier,
        "linear_attn.out_proj": config.ssm_out_multiplier,
        "mlp.gate_proj": gate,
        "mlp.down_proj": down,
    }
    factors += [
        (f"{name}.{field}", factor)
        for name, factor in scaled.items()
        for field in ("weight", "bias")
    ]
    return _convolved_by_silu(
        common,
        names=BAMBA_NAMES,
        norms=BEFORE._replace(mlp="pre_ff_layernorm"),
        factors=factors,
        embedding_scale=config.embedding_multiplier,
        logits_scale=config.lm_head_multiplier,
    )


def _lfm2(config: Any, common: Mapping[str, Any]) -> Description:
    routing = None
    if getattr(config, "num_experts", None):
        routing = Routing(
            config.num_experts,
            config.num_experts_per_tok,
            scores="sigmoid",
            biased=config.use_expert_bias,
            renormalized=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            epsilon=1e-6,
        )
    norms = NormNames("operator_norm", None, "ffn_norm", None)
    return Description(
        **common, names=LFM2_NAMES, norms=norms, norms_of_queries="each head", routing=routing
    )


def _olmo_hybrid(config: Any, common: Mapping[str, Any]) -> Description | None:
    options = {"norms": AFTER, "norm_kind": "late", "norms_of_queries": "all heads"}
    return _convolved_by_silu(common, names=OLMO_NAMES, norms_of_recurrent=BEFORE, **options)


def _kimi_linear(config: Any, common: Mapping[str, Any]) -> Description | None:
    # Attention of both kinds has the same name.
    layers = "|".join(
        str(layer) for layer, kind in enumerate(config.layer_types) if kind == "linear_attention"
    )
    names = [(rf"(?<=\.layers\.)({layers})\.self_attn\.", r"\1.linear_attn.")]
    names += [
        (rf"\.linear_attn\.{re.escape(old)}(?=\.|$)", f".linear_attn.{new}")
        for old, new in KIMI_NAMES.items()
    ]
    return _convolved_by_silu(
        common, names=names, routing=sigmoid_routing(config), wide_router=True
    )


def _zamba2(config: Any, common: Mapping[str, Any]) -> Description:
    if not config.use_mem_rope:
        common = _without_rope(config, common)
    return Description(
        **common,
        names=ZAMBA_NAMES,
        norms=NormNames("input_layernorm", None, None, None),
        one_sublayer=True,
        shared_blocks=config.num_mem_blocks,
        scale=(config.attention_head_dim / 2) ** -0.5,
    )


def _convolved_by_silu(common: Mapping[str, Any], **options: Any) -> Description | None:
    """Of a family whose convolutions have the activation of its feed-forward sublayers, which for
    them is SiLU here.
    """
    return Description(**common, **options) if common["activation"] == "silu" else None


def _without_rope(config: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    return {**common, "ropes": [None] * config.num_hidden_layers}


HYBRIDS: dict[str, Family] = {
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "granitemoehybrid": _granite_hybrid,
    "kimi_linear": _kimi_linear,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_5_moe_text": _qwen3_5,
    "qwen3_5_text": _qwen3_5,
    "qwen3_next": _qwen3_5,
    "zamba2": _zamba2,
}
"""Model types, as transformers names them."""
