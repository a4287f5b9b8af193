"""Nemotron-H, whose layers are one sublayer each."""

from collections.abc import Mapping, Sequence
from typing import Any

from verifiers.description import Description, NormNames, sigmoid_routing
from verifiers.family import Family, Prediction, Recurrent, Sizes

_NAMES = (
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
    (r"\.mixer\.(?=[qkvo]_proj\.)", ".self_attn."),
    (r"\.mixer\.(?=in_proj|out_proj|conv1d|A_log|D$|dt_bias|norm\.)", ".linear_attn."),
    (r"\.mixer\.", ".mlp."),
)

_PREDICTION_NAMES = (
    (r"^(?:model\.)?mtp\.layers\.\d+\.enorm\.", "embedding_norm."),
    (r"^(?:model\.)?mtp\.layers\.\d+\.hnorm\.", "hidden_norm."),
    (r"^(?:model\.)?mtp\.layers\.\d+\.eh_proj\.", "projection."),
    (r"^(?:model\.)?mtp\.layers\.\d+\.final_layernorm\.", "norm."),
    (r"^(?:model\.)?mtp\.layers\.", "model.layers."),
)
"""As vLLM's `*_mtp.py` and SGLang's `*_nextn.py` read them."""


def _describe(config: Any, common: Mapping[str, Any]) -> Description | None:
    if (config.mlp_hidden_act, config.mamba_hidden_act) != ("relu2", "silu"):
        return None
    return Description(
        **{**common, "ropes": [None] * config.num_hidden_layers, "activation": "relu2"},
        names=_NAMES,
        norms=NormNames("norm", None, "norm", None),
        one_sublayer=True,
        routing=sigmoid_routing(config) if "moe" in config.layer_types else None,
        wide_router=True,
    )


def _sizes(config: Any) -> Sizes:
    heads, dim = config.mamba_num_heads, config.mamba_head_dim
    return Sizes(config.n_groups, heads, config.ssm_state_size, dim, config.conv_kernel, 1)


def min_step(config: Any) -> tuple[float, float]:
    """The limits of steps that transformers computes prompts with."""
    return config.time_step_min, float("inf")


def _blocks(config: Any) -> Sequence[str]:
    return config.mtp_layers_block_type or ("full_attention", "moe")


FAMILIES = {
    "nemotron_h": Family(
        describe=_describe,
        recurrent=Recurrent("mamba", _sizes, steps=min_step),
        experts="ungated",
        renamed=((r"^backbone\.", "model."),),
        prediction=Prediction(_PREDICTION_NAMES, _blocks),
    )
}
