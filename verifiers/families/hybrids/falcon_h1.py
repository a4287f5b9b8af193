"""Falcon-H1, with attention and Mamba-2 side by side in every layer."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from verifiers.description import BEFORE, Description
from verifiers.families.granite import BAMBA_NAMES, MAMBA_LAYERS, mamba_sizes
from verifiers.family import Family


def _describe(config: Any, common: Mapping[str, Any]) -> Description:
    gate, down = config.mlp_multipliers
    sizes = mamba_sizes(config).of_rank(config)
    inner, keys = sizes.value_heads * sizes.value_dim, sizes.key_heads * sizes.key_dim
    repeats = torch.tensor([inner, inner, keys, keys, sizes.value_heads])
    rows = torch.tensor(config.ssm_multipliers, dtype=torch.float32).repeat_interleave(repeats)
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
    return Description(
        **common,
        names=BAMBA_NAMES,
        norms=BEFORE._replace(mlp="pre_ff_layernorm"),
        factors=factors,
        embedding_scale=config.embedding_multiplier,
        logits_scale=config.lm_head_multiplier,
    )


FAMILIES = {"falcon_h1": Family(describe=_describe, recurrent=MAMBA_LAYERS)}
