"""The families that run on our own decoder stack, each described from its config."""

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any

from specdec.base.errors import InvalidInputError
from specdec.layers.experts.routing import Routing
from specdec.layers.ops.activation import LIMIT, SLOPE
from specdec.layers.rotary.rotary import ROPE_TYPES, Temperature
from verifiers.config.description import (
    AFTER,
    AROUND,
    BEFORE,
    Description,
    Family,
    NormNames,
    sigmoid_routing,
)
from verifiers.config.hybrids import HYBRIDS
from verifiers.config.shape import declared, layer_windows

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
"""From transformers' names to those of `specdec.layers.ops.activation`."""

PARTIAL = frozenset(
    {
        *(
            "bamba",
            "glm",
            "glm4",
            "glm4_moe",
            "glm4_moe_lite",
            "laguna",
            "mellum",
            "mimo_v2_flash",
            "mistral4",
            "phi3",
        ),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    }
)
"""Model types that rotate a part of each head where the config says so; others rotate all, whatever
it says.
"""

AROUND_GLM = NormNames(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def describe(config: Any) -> Description | None:
    """The description of a model; None when it is not one of `FAMILIES`, or has a part that the
    decoder stack lacks.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    activation = ACTIVATIONS.get(
        str(declared(config, "hidden_activation") or getattr(config, "hidden_act", "silu"))
    )
    ropes = _ropes(config)
    known = all(rope is None or rope["rope_type"] in ROPE_TYPES for rope in ropes)
    description = (
        family(config, {"ropes": ropes, "activation": activation}) if activation and known else None
    )
    if description is not None:
        _check_factors(description)
    return description


def _check_factors(description: Description) -> None:
    """Whether every factor is a number, which not every type of config sees to.

    Raises:
        InvalidInputError: one is not.
    """
    for name in (
        "scale",
        "embedding_scale",
        "residual_scale",
        "logits_scale",
        "final_softcap",
        "value_scale",
    ):
        value = getattr(description, name)
        missing = value is None and name in ("scale", "final_softcap")
        if not missing and not (isinstance(value, int | float) and isfinite(value)):
            raise InvalidInputError(
                f"{name} comes to {value!r}, which is no number; fetch config.json again"
            )


def _plain(**options: Any) -> Family:
    """A family that differs from the Llama family in these entries of its description alone."""
    return lambda config, common: Description(**common, **options)


def _mixtral(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(
        **common, routing=Routing(config.num_local_experts, config.num_experts_per_tok)
    )


def _qwen2_moe(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(**common, routing=_qwen_routing(config))


def _qwen3_moe(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(**common, norms_of_queries="each head", routing=_qwen_routing(config))


def _qwen_routing(config: Any) -> Routing:
    return Routing(
        config.num_experts, config.num_experts_per_tok, renormalized=config.norm_topk_prob
    )


def _gpt_oss(config: Any, common: Mapping[str, Any]) -> Description | None:
    if (getattr(config, "swiglu_alpha", SLOPE), getattr(config, "swiglu_limit", LIMIT)) != (
        SLOPE,
        LIMIT,
    ):
        return None
    routing = Routing(config.num_local_experts, config.num_experts_per_tok)
    common = {**common, "activation": "swiglu_oai"}
    return Description(**common, norm_kind="late", routing=routing, interleaved_experts=True)


def _glm4_moe(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(
        **common,
        norms_of_queries="each head" if getattr(config, "use_qk_norm", True) else None,
        routing=sigmoid_routing(config),
        wide_router=True,
    )


def _gemma(config: Any, common: Mapping[str, Any]) -> Description:
    scale = config.hidden_size**0.5
    return Description(
        **common, norm_kind="zero_centered", embedding_scale=scale, rounds_embedding_scale=True
    )


def _gemma2(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(
        **common,
        norms=AROUND,
        norm_kind="zero_centered",
        norms_of_queries="each head" if config.model_type == "gemma3_text" else None,
        scale=config.query_pre_attn_scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
        rounds_embedding_scale=True,
        final_softcap=config.final_logit_softcapping,
    )


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


def _laguna(config: Any, common: Mapping[str, Any]) -> Description | None:
    if config.moe_router_logit_softcapping:
        return None
    scaling = config.moe_routed_scaling_factor
    routing = Routing(
        config.num_experts,
        config.num_experts_per_tok,
        scores="sigmoid",
        biased=True,
        scaling=scaling,
    )
    return Description(**common, norms_of_queries="each head", softplus_gates=True, routing=routing)


def _ernie4_5_moe(config: Any, common: Mapping[str, Any]) -> Description:
    routing = Routing(config.num_experts, config.num_experts_per_tok, biased=True)
    return Description(
        **common,
        names=((r"\.moe_statics\.", "."),),
        interleaved=True,
        routing=routing,
        wide_router=True,
    )


def _hy_v3(config: Any, common: Mapping[str, Any]) -> Description:
    names, experts = (
        ((r"\.mlp\.(?=e_score_correction_bias$)", ".mlp.gate."),),
        config.num_local_experts,
    )
    routing = Routing(
        experts,
        config.num_experts_per_tok,
        scores="sigmoid",
        biased=True,
        scaling=config.router_scaling_factor,
    )
    return Description(
        **common, names=names, norms_of_queries="each head", routing=routing, wide_router=True
    )


def _olmoe(config: Any, common: Mapping[str, Any]) -> Description | None:
    if config.clip_qkv is not None:
        return None
    return Description(**common, norms_of_queries="all heads", routing=_qwen_routing(config))


def _deepseek_v2(config: Any, common: Mapping[str, Any]) -> Description:
    grouped = config.topk_method == "group_limited_greedy"
    routing = config.num_experts_per_tok and Routing(  # a config may say nothing of experts
        config.n_routed_experts,
        config.num_experts_per_tok,
        num_groups=config.n_group if grouped else 1,
        topk_groups=config.topk_group if grouped else 1,
        renormalized=False,  # whatever the config says
        scaling=config.routed_scaling_factor,
    )
    return Description(**common, interleaved=True, routing=routing or None, wide_router=True)


def _deepseek_v3(config: Any, common: Mapping[str, Any]) -> Description:
    # One of them has no experts, and one a norm after them.
    routing = sigmoid_routing(config) if getattr(config, "n_routed_experts", None) else None
    norms = (
        BEFORE._replace(output="mlp.post_mlp_layernorm") if config.model_type == "axk1" else BEFORE
    )
    interleaved = bool(getattr(config, "rope_interleave", True))
    return Description(
        **common, norms=norms, interleaved=interleaved, routing=routing, wide_router=True
    )


def _ministral3(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(**{**common, "ropes": [_tempered(rope) for rope in common["ropes"]]})


def _mistral4(config: Any, common: Mapping[str, Any]) -> Description | None:
    routing = Routing(
        config.n_routed_experts,
        config.num_experts_per_tok,
        renormalized=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
    )
    if config.topk_group < config.n_group:  # groups of which the best two count, of softmax scores
        return None
    # The config's share of what is rotated is that of a whole head, and the part that is has a
    # width of its own.
    ropes = [_tempered({**rope, "partial_rotary_factor": 1.0}) for rope in common["ropes"]]
    return Description(
        **{**common, "ropes": ropes}, interleaved=bool(config.rope_interleave), routing=routing
    )


def _llama4(config: Any, common: Mapping[str, Any]) -> Description | None:
    ropes = common["ropes"]
    if config.use_qk_norm and any(
        rope and rope["rope_type"] in ("yarn", "longrope") for rope in ropes
    ):
        return None  # an amplitude would change what the norms after the rotation have to do
    if config.attn_temperature_tuning:
        still = {
            "rope_type": "none",
            "temperature": Temperature(config.attn_scale, config.floor_scale, offset=1),
        }
        ropes = [still if rope is None else rope for rope in ropes]
    return Description(
        **{**common, "ropes": ropes},
        names=((r"\.feed_forward\.", ".mlp."),),
        interleaved=True,
        norms_of_queries="unweighted" if config.use_qk_norm else None,
        routing=Routing(
            config.num_local_experts,
            config.num_experts_per_tok,
            scores="sigmoid",
            renormalized=False,
        ),
        transposed_experts=True,
        weighs_inputs=True,
    )


def _mimo_v2_flash(config: Any, common: Mapping[str, Any]) -> Description:
    # which transformers takes for granted
    ropes = [{"partial_rotary_factor": 0.334, **rope} for rope in common["ropes"]]
    scale = config.attention_value_scale
    return Description(
        **{**common, "ropes": ropes},
        routing=sigmoid_routing(config),
        wide_router=True,
        value_dim=None if config.v_head_dim == config.head_dim else config.v_head_dim,
        value_scale=1.0 if scale is None else scale,
    )


def _tempered(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE parameters with the factor of queries that stands among them."""
    temperature = Temperature(
        rope["llama_4_scaling_beta"], rope["original_max_position_embeddings"], rounds=True
    )
    return {**rope, "temperature": temperature}


def _granite(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(
        **common,
        scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


FAMILIES: dict[str, Family] = {
    **HYBRIDS,
    "gemma": _gemma,
    "gemma2": _gemma2,
    "gemma3_text": _gemma2,
    "gemma4_text": _gemma4,
    "gemma4_unified_text": _gemma4,
    "axk1": _deepseek_v3,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "deepseek_v32": _deepseek_v3,
    "dots1": _glm4_moe,
    "ernie4_5": _plain(interleaved=True),
    "ernie4_5_moe": _ernie4_5_moe,
    "glm": _plain(interleaved=True),
    "glm4": _plain(norms=AROUND_GLM, interleaved=True),
    "glm4_moe": _glm4_moe,
    "glm4_moe_lite": _deepseek_v3,
    "glm_moe_dsa": _deepseek_v3,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "hy_v3": _hy_v3,
    "laguna": _laguna,
    "llama": _plain(),
    "llama4_text": _llama4,
    "mellum": _qwen3_moe,
    "mimo_v2_flash": _mimo_v2_flash,
    "ministral3": _ministral3,
    "mistral": _plain(),
    "mistral4": _mistral4,
    "mixtral": _mixtral,
    "olmo2": _plain(norms=AFTER, norm_kind="late", norms_of_queries="all heads"),
    "olmo3": _plain(norms=AFTER, norm_kind="late", norms_of_queries="all heads"),
    "olmoe": _olmoe,
    "phi3": _plain(),
    "qwen2": _plain(),
    "qwen2_5_vl_text": _plain(),
    "qwen2_vl_text": _plain(),
    "qwen3": _plain(norms_of_queries="each head"),
    "qwen2_moe": _qwen2_moe,
    "qwen3_moe": _qwen3_moe,
    "qwen3_vl_text": _plain(norms_of_queries="each head"),
    "seed_oss": _plain(),
    "smollm3": _plain(),
    "youtu": _deepseek_v3,
}
"""Model types, as transformers names them."""


def _ropes(config: Any) -> Sequence[Mapping[str, Any] | None]:
    """RoPE parameters of each layer."""
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    # 0 where a layer has no RoPE
    rotated = declared(config, "no_rope_layers") or [True] * config.num_hidden_layers
    parameters: dict[Any, Any] = getattr(config, "rope_parameters", None) or {}
    if not parameters or parameters.get("rope_theta", 0) is None:
        return [None] * config.num_hidden_layers
    by_kind = "rope_type" not in parameters
    ropes = [
        (parameters[kind] if by_kind else parameters) if on else None
        for kind, on in zip(kinds, rotated, strict=True)
    ]
    whole = {} if config.model_type in PARTIAL else {"partial_rotary_factor": None}
    return [
        {**rope, **whole} if rope and rope["rope_type"] != "proportional" else rope
        for rope in ropes
    ]
