"""MiMo-V2-Flash."""

from collections.abc import Mapping
from typing import Any

from verifiers.description import Description, sigmoid_routing
from verifiers.families.qwen import sliding
from verifiers.family import Family, Prediction

_PREDICTION_NAMES = (
    (r"^model\.mtp\.layers\.0\.enorm\.", "embedding_norm."),
    (r"^model\.mtp\.layers\.0\.hnorm\.", "hidden_norm."),
    (r"^model\.mtp\.layers\.0\.eh_proj\.", "projection."),
    (r"^model\.mtp\.layers\.0\.final_layernorm\.", "norm."),
    (r"^model\.mtp\.layers\.0\.pre_mlp_layernorm\.", "model.layers.0.post_attention_layernorm."),
    (r"^model\.mtp\.layers\.0\.", "model.layers.0."),
)
"""As vLLM's `*_mtp.py` and SGLang's `*_nextn.py` read them."""


def _describe(config: Any, common: Mapping[str, Any]) -> Description:
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
    "mimo_v2_flash": Family(
        describe=_describe,
        partial_rope=True,
        sinks=True,
        sliding_kv_heads=2,  # as its module in transformers has it; no entry of the config says so
        renamed=((r"\.attention_sink_bias$", ".sinks"),),
        prediction=Prediction(_PREDICTION_NAMES, sliding, feed_forward="dense"),
    )
}
