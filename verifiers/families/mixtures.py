"""Mixtures of experts that have little in common: ERNIE 4.5 with its dense model, gpt-oss, Hy3,
Laguna, MiMo-V2-Flash.
"""

from collections.abc import Mapping
from typing import Any

from specdec.layers.ops.activation import LIMIT, SLOPE
from verifiers.description import Description, routing_of, sigmoid_routing
from verifiers.families.deepseek import PREDICTION
from verifiers.families.qwen import sliding
from verifiers.family import Family, Prediction, plain
from verifiers.gguf.entries import LOCAL_COUNTS, Gguf, expert_width, needed, windows
from verifiers.gguf.file import Entries, Facts

_ERNIE_PREDICTION = (
    (r"^model\.mtp_emb_norm\.0\.", "embedding_norm."),
    (r"^model\.mtp_hidden_norm\.0\.", "hidden_norm."),
    (r"^model\.mtp_linear_proj\.0\.", "projection."),
    (r"^model\.mtp_block\.0\.", "model.layers.0."),
)
"""As FastDeploy's `ernie4_5_mtp.py` reads them."""

_MIMO_PREDICTION = (
    (r"^model\.mtp\.layers\.0\.enorm\.", "embedding_norm."),
    (r"^model\.mtp\.layers\.0\.hnorm\.", "hidden_norm."),
    (r"^model\.mtp\.layers\.0\.eh_proj\.", "projection."),
    (r"^model\.mtp\.layers\.0\.final_layernorm\.", "norm."),
    (r"^model\.mtp\.layers\.0\.pre_mlp_layernorm\.", "model.layers.0.post_attention_layernorm."),
    (r"^model\.mtp\.layers\.0\.", "model.layers.0."),
)
"""As vLLM's `*_mtp.py` and SGLang's `*_nextn.py` read them."""


def _ernie_entries(facts: Facts, entries: Entries) -> Entries:
    sparse = facts.layers_with("ffn_gate_exps.weight")
    return {
        "use_bias": facts.has("attn_q.bias"),
        "moe_num_experts": facts.need("expert_count"),
        "moe_k": facts.need("expert_used_count"),
        "moe_intermediate_size": facts.need("expert_feed_forward_length"),
        "moe_num_shared_experts": facts("expert_shared_count", 0),
        "moe_layer_interval": facts("interleave_moe_layer_step", 1),
        "moe_layer_start_index": min(sparse, default=0),
        "moe_layer_end_index": max(sparse, default=-1),
    }


def _gpt_oss(config: Any, common: Mapping[str, Any]) -> Description | None:
    slope, limit = getattr(config, "swiglu_alpha", SLOPE), getattr(config, "swiglu_limit", LIMIT)
    if (slope, limit) != (SLOPE, LIMIT):
        return None
    common = {**common, "activation": "swiglu_oai"}
    return Description(**common, norm_kind="late", routing=routing_of(config))


def _gpt_oss_entries(facts: Facts, entries: Entries) -> Entries:
    return {
        **needed(facts, LOCAL_COUNTS),
        **expert_width(facts, entries),
        "layer_types": windows(facts, 2),
        "rope_parameters": entries["rope_parameters"] | {"truncate": False},
    }


def _laguna(config: Any, common: Mapping[str, Any]) -> Description | None:
    if config.moe_router_logit_softcapping:
        return None
    scaling = config.moe_routed_scaling_factor
    routing = routing_of(config, scores="sigmoid", biased=True, scaling=scaling)
    return Description(**common, norms_of_queries="each head", gates="softplus", routing=routing)


def _mimo(config: Any, common: Mapping[str, Any]) -> Description:
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


FAMILIES = {
    "ernie4_5": Family(
        describe=plain(interleaved=True), gguf={"ernie4_5": Gguf(has={"use_bias": "attn_q.bias"})}
    ),
    "ernie4_5_moe": Family(
        describe=plain(
            names=((r"\.moe_statics\.", "."),),
            interleaved=True,
            routing=lambda config: routing_of(config, biased=True),
            wide_router=True,
        ),
        renamed=((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),),
        prediction=Prediction(_ERNIE_PREDICTION, feed_forward="dense"),
        gguf={"ernie4_5-moe": Gguf(_ernie_entries)},
    ),
    "gpt_oss": Family(
        describe=_gpt_oss,
        sinks=True,
        experts="interleaved",
        gguf={"gpt-oss": Gguf(_gpt_oss_entries)},
    ),
    "hy_v3": Family(
        describe=plain(
            names=((r"\.mlp\.(?=e_score_correction_bias$)", ".mlp.gate."),),
            norms_of_queries="each head",
            routing=lambda config: routing_of(
                config, scores="sigmoid", biased=True, scaling=config.router_scaling_factor
            ),
            wide_router=True,
        ),
        renamed=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
        ),
        prediction=PREDICTION,
    ),
    "laguna": Family(
        describe=_laguna,
        partial_rope=True,
        renamed=(
            (r"\.experts\.(?=e_score_correction_bias)", ".gate."),
            (r"\.shared_expert\.", ".shared_experts."),
        ),
    ),
    "mimo_v2_flash": Family(
        describe=_mimo,
        partial_rope=True,
        sinks=True,
        sliding_kv_heads=2,  # as its module in transformers has it; no entry of the config says so
        renamed=((r"\.attention_sink_bias$", ".sinks"),),
        prediction=Prediction(_MIMO_PREDICTION, sliding, feed_forward="dense"),
    ),
}
