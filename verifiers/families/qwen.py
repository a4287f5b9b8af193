"""Qwen2 and Qwen3 with attention in every layer, and Mellum."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import Description
from verifiers.family import Family, Prediction, plain

PREDICTION = Prediction(
    (
        (r"^(?:model\.)?mtp\.fc\.", "projection."),
        (r"^(?:model\.)?mtp\.pre_fc_norm_embedding\.", "embedding_norm."),
        (r"^(?:model\.)?mtp\.pre_fc_norm_hidden\.", "hidden_norm."),
        (r"^(?:model\.)?mtp\.norm\.", "norm."),
        (r"^(?:model\.)?mtp\.layers\.0\.", "model.layers.0."),
    )
)
"""As vLLM's `*_mtp.py` and SGLang's `*_nextn.py` read them."""


def sliding(config: Any) -> tuple[str, ...]:
    """Kinds of layers for multi-token prediction that slide where the config says nothing."""
    return getattr(config, "mtp_layer_types", None) or ("sliding_attention",)


def routing(config: Any) -> Routing:
    """As Qwen's mixtures choose experts."""
    return Routing(
        config.num_experts, config.num_experts_per_tok, renormalized=config.norm_topk_prob
    )


def _qwen2_moe(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(**common, routing=routing(config))


def _qwen3_moe(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(**common, norms_of_queries="each head", routing=routing(config))


_QWEN3 = plain(norms_of_queries="each head")

FAMILIES = {
    "mellum": Family(
        describe=_qwen3_moe,
        partial_rope=True,
        prediction=PREDICTION._replace(kinds=sliding),
    ),
    "qwen2": Family(describe=plain(), wrappers=("internvl",)),
    "qwen2_5_vl_text": Family(describe=plain(), wrappers=("qwen2_5_vl",)),
    "qwen2_moe": Family(describe=_qwen2_moe),
    "qwen2_vl_text": Family(describe=plain(), wrappers=("qwen2_vl",)),
    "qwen3": Family(describe=_QWEN3),
    "qwen3_moe": Family(describe=_qwen3_moe),
    "qwen3_vl_moe_text": Family(wrappers=("qwen3_vl_moe",)),
    "qwen3_vl_text": Family(describe=_QWEN3, wrappers=("qwen3_vl",)),
}
