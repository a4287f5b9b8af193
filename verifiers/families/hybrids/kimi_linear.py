"""Kimi Linear, with latent attention and Kimi Delta Attention (arXiv 2510.26692)."""

import re
from typing import Any

from verifiers.description import sigmoid_routing
from verifiers.family import Family, Recurrent, Sizes, plain

_PARTS = {
    "o_proj": "out_proj", "o_norm": "norm", "b_proj": "in_proj_b",
    "forget_gate.f_a_proj": "in_proj_a", "forget_gate.f_b_proj": "a_proj",
    "forget_gate.dt_bias": "dt_bias", "forget_gate.A_log": "A_log", "g_a_proj": "in_proj_z",
    "g_b_proj": "z_proj",
}  # fmt: skip
"""Within a layer of linear attention."""


def _names(config: Any) -> list[tuple[str, str]]:
    # Attention of both kinds has the same name.
    kinds = enumerate(config.layer_types)
    layers = "|".join(str(layer) for layer, kind in kinds if kind == "linear_attention")
    names = [(rf"(?<=\.layers\.)({layers})\.self_attn\.", r"\1.linear_attn.")]
    return names + [
        (rf"\.linear_attn\.{re.escape(old)}(?=\.|$)", f".linear_attn.{new}")
        for old, new in _PARTS.items()
    ]


def _sizes(config: Any) -> Sizes:
    heads, dim = config.linear_num_heads, config.linear_head_dim
    return Sizes(heads, heads, dim, dim, config.linear_conv_kernel_dim, 1 + dim)


FAMILIES = {
    "kimi_linear": Family(
        describe=plain(names=_names, routing=sigmoid_routing, wide_router=True),
        latent=True,
        recurrent=Recurrent("key decay", _sizes, same_activation=True),
        renamed=((r"(?<=\.self_attn\.)(?=f_a_proj\.|f_b_proj\.|dt_bias$|A_log$)", "forget_gate."),),
    )
}
