"""How much of a head RoPE turns in drafters' layers: what their trainers' modules turn."""

import math
from collections.abc import Mapping
from typing import Any

from drafters.keys import require


def whole_heads(parameters: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """RoPE parameters for layers whose modules turn whole heads: those of Llama, Qwen3 and DeepSeek-V3.

    A `partial_rotary_factor` says nothing there. Trainers copy it from the target's config, and it
    lowers acceptance where it is obeyed. `rope_dim` does say how many numbers were turned in
    training, and type "proportional" has frequencies of its own.

    Args:
        parameters: in the form of Transformers 5.
        head_dim: numbers of a head, or in latent attention of the part that is turned.

    Raises:
        CheckpointError: a `rope_dim` that is no even part of a head.

    >>> whole_heads({"rope_type": "default", "partial_rotary_factor": 0.25}, 128)
    {'rope_type': 'default'}
    """
    if parameters.get("rope_type") == "proportional":
        return dict(parameters)
    said = {name: value for name, value in parameters.items() if name not in ("partial_rotary_factor", "rope_dim")}
    turned = parameters.get("rope_dim")
    if turned not in (None, head_dim):
        valid = type(turned) is int and 2 <= turned < head_dim and turned % 2 == 0
        require(valid, f"RoPE's rope_dim is {turned!r}; it must be even, from 2 to {head_dim}")
        said["partial_rotary_factor"] = math.nextafter(turned / head_dim, 1)  # for it is rounded down
    return said
