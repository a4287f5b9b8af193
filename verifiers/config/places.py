"""What the tensors of a checkpoint are parts of, told from their names."""

import re
from typing import NamedTuple

UNUSED = re.compile(
    r"\.((input|output|prob_output|bias)_(scale|zero_point)(_2)?|input_global_scale"
    r"|input_scale_ub|activation_scale|[qkv]_scale|prob_scale|weight_format)$"
)
"""Scales of activations and of the cache, which keep their own type here, and a mark of
bitsandbytes.
"""

EXPERT = re.compile(r"^(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj)$")
MERGED = re.compile(
    r"^(.*\.experts\.(?:gate_up_proj|down_proj))"
    r"(?:_(blocks|scales|scale_inv|scale|packed|scale_2|global_scale))?$"
)

PARTS = (
    *("weight", "weight_scale_inv", "weight_scale", "weight_scale_2", "weight_global_scale"),
    *("weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx"),
    *("qweight", "qzeros", "scales", "g_idx", "pre_quant_scale", "SCB"),
)
"""What follows the name of a linear layer."""

OF_WEIGHT = re.compile(
    r"^(.*)\.(weight\.(?:(?:nested_)?(?:absmax|quant_map)|quant_state\.bitsandbytes__\w+))$"
)
"""The same of bitsandbytes."""


class Place(NamedTuple):
    """What a tensor is."""

    module: str  # the linear layer, or the joined experts, that it is a part of
    # One of `PARTS`, those of joined experts with "weight_" before them; None for a tensor that
    # is whole.
    part: str | None


def place_of(name: str) -> Place:
    """The layer that a tensor belongs to, and as what.

    >>> place_of("mlp.experts.3.up_proj.weight_scale_inv")
    Place(module='mlp.experts.3.up_proj', part='weight_scale_inv')
    >>> place_of("mlp.experts.down_proj_blocks").part, place_of("self_attn.sinks").part
    ('weight_blocks', None)
    """
    if merged := MERGED.match(name):
        return Place(merged[1], f"weight_{merged[2]}" if merged[2] else "weight")
    if of_weight := OF_WEIGHT.match(name):
        return Place(of_weight[1], of_weight[2])
    module, _, part = name.rpartition(".")
    return Place(module, part) if part in PARTS else Place(name, None)
