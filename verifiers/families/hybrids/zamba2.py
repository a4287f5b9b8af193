"""Zamba2, with blocks of attention that several layers share."""

from collections.abc import Mapping
from typing import Any

from verifiers.description import Description, NormNames
from verifiers.families.granite import MAMBA
from verifiers.families.hybrids.nemotron_h import min_step
from verifiers.family import Family, Recurrent, Sizes

_NAMES = (
    (r"\.mamba_decoder\.(?=mamba\.|input_layernorm\.)", "."),
    MAMBA,
    (r"^model\.final_layernorm\.", "model.norm."),
)


def _describe(config: Any, common: Mapping[str, Any]) -> Description:
    if not config.use_mem_rope:
        common = {**common, "ropes": [None] * config.num_hidden_layers}
    return Description(
        **common,
        names=_NAMES,
        norms=NormNames("input_layernorm", None, None, None),
        one_sublayer=True,
        shared_blocks=config.num_mem_blocks,
        scale=(config.attention_head_dim / 2) ** -0.5,
    )


def _sizes(config: Any) -> Sizes:
    heads, dim = config.n_mamba_heads, config.mamba_headdim
    return Sizes(config.mamba_ngroups, heads, config.mamba_d_state, dim, config.mamba_d_conv, 1)


FAMILIES = {
    "zamba2": Family(
        describe=_describe, recurrent=Recurrent("mamba", _sizes, epsilon=1e-5, steps=min_step)
    )
}
