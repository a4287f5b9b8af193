"""Latent attention of an EAGLE-3 head's layer (DeepSeek-V2, arXiv 2405.04434), as heads of Kimi K2 have it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV3Config

from drafters.attention import latent_like
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.core import Verifier
from specdec.layers.latent_attention import LatentAttention, halves_first, latent_scale, split_up
from specdec.layers.linear import linear
from specdec.layers.norm import Norm
from specdec.layers.rotary import Rope

EPSILON = 1e-6
"""Of the norms inside the attention, whatever config.json says about others."""


def latent_backend(layers: DeepseekV3Config, verifier: Verifier) -> MlaBackend:
    """The target's kind of latent attention, for these layers.

    Raises:
        BackendError: the target has none, or it cannot serve them.
    """
    return latent_like(
        verifier,
        num_heads=layers.num_attention_heads,
        rank=layers.kv_lora_rank,
        nope=layers.qk_nope_head_dim,
        rope=layers.qk_rope_head_dim,
        value=layers.v_head_dim,
    )


def latent_attention(
    tensors: Mapping[str, Tensor], name: str, layers: DeepseekV3Config, rope: Rope, spec: MlaSpec
) -> LatentAttention:
    """The attention whose tensors are called `name`."""

    def weight(part: str) -> Tensor:
        return tensors[f"{name}.{part}.weight"]

    size, head = spec.qk_rope_head_dim, spec.qk_nope_head_dim + spec.qk_rope_head_dim
    query = weight("q_proj" if layers.q_lora_rank is None else "q_b_proj")
    latent = weight("kv_a_proj_with_mqa")
    if getattr(layers, "rope_interleave", True):  # neighbors are turned against each other; on the stack, halves are
        query = halves_first(head, spec.qk_nope_head_dim, size)(query)
        latent = halves_first(spec.latent_dim, spec.kv_lora_rank, size)(latent)
    compressed: Any = None
    if layers.q_lora_rank is not None:
        compressed = Norm(weight("q_a_layernorm"), EPSILON), linear(query)
    return LatentAttention(
        down=linear(torch.cat([query if compressed is None else weight("q_a_proj"), latent])),
        query=compressed,
        latent_norm=Norm(weight("kv_a_layernorm"), EPSILON),
        up=split_up(weight("kv_b_proj"), spec),
        rope=rope,
        scale=latent_scale(layers.rope_parameters, head),
    )
