"""Latent attention (DeepSeek-V2, arXiv 2405.04434) of an EAGLE-3 head, as for Kimi K2."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from drafters.attention import LatentSizes
from specdec.attention.mla import MlaSpec
from specdec.layers.latent_attention import LatentAttention, halves_first, latent_scale, split_up
from specdec.layers.linear_choice import linear
from specdec.layers.ops.norm import Norm
from specdec.layers.rotary.rotary import Rope

EPSILON = 1e-6
"""Epsilon of the norms inside the attention, whatever config.json says about others."""


def latent_attention(
    tensors: Mapping[str, Tensor],
    name: str,
    sizes: LatentSizes,
    rope: Rope,
    spec: MlaSpec,
    *,
    rope_parameters: Mapping[str, Any],
) -> LatentAttention:
    """The attention whose tensors are called `name`."""

    def weight(part: str) -> Tensor:
        return tensors[f"{name}.{part}.weight"]

    head = sizes.nope + sizes.rope
    query = weight("q_proj" if sizes.query_rank is None else "q_b_proj")
    latent = weight("kv_a_proj_with_mqa")
    if sizes.interleaved:  # neighbors are turned against each other; on the stack, halves are
        query = halves_first(head, sizes.nope, sizes.rope)(query)
        latent = halves_first(sizes.rank + sizes.rope, sizes.rank, sizes.rope)(latent)
    compressed: Any = None
    if sizes.query_rank is not None:
        compressed = Norm(weight("q_a_layernorm"), EPSILON), linear(query)
    return LatentAttention(
        down=linear(torch.cat([query if compressed is None else weight("q_a_proj"), latent])),
        query=compressed,
        latent_norm=Norm(weight("kv_a_layernorm"), EPSILON),
        up=split_up(weight("kv_b_proj"), spec),
        rope=rope,
        scale=latent_scale(rope_parameters, head),
    )
