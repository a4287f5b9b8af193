"""RoPE of an EAGLE-3 head's layers: what `config.json` says, and what trainers' modules turn."""

from collections.abc import Mapping
from typing import Any

from drafters.keys import Keys, require, rotary_factor, section
from specdec.layers.rotary.rotary import STATIC_ROPE_TYPES, check_parameters

_KNOWN = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor",
    "mscale", "mscale_all_dim", "original_max_position_embeddings", "partial_rotary_factor",
    "rope_dim", "rope_theta", "truncate",
)  # fmt: skip


def rope_parameters(keys: Keys, default_theta: float) -> dict[str, Any]:
    """RoPE in the form of Transformers 5, from that or from `rope_theta` and `rope_scaling`.

    Raises:
        CheckpointError: a type that no drafter has, or a malformed value.
    """
    names = (name for name in ("rope_parameters", "rope_scaling") if keys.find(name))
    place = next(names, "rope_parameters")
    stated = section(keys.places[0], place)
    flat = not any(isinstance(value, Mapping) for value in stated.values())
    require(
        flat, f"{place} is {dict(stated)!r}; one set of RoPE parameters for all layers is supported"
    )
    kind = stated.get("rope_type") or stated.get("type") or "default"
    kind = "default" if kind == "mrope" else kind  # positions of text are the same on all its axes
    supported = ", ".join(STATIC_ROPE_TYPES)
    known = isinstance(kind, str) and kind in STATIC_ROPE_TYPES
    require(known, f"RoPE type {kind!r} is not supported in a drafter; supported: {supported}")
    parameters = {name: stated[name] for name in _KNOWN if stated.get(name) is not None}
    theta = keys.find("rope_theta")
    parameters.setdefault("rope_theta", default_theta if theta is None else theta)
    check_parameters(parameters)
    return {"rope_type": kind, **parameters}


def whole_heads(parameters: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """RoPE parameters for modules that turn whole heads: Llama's, Qwen3's, DeepSeek-V3's.

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
    said = {
        name: value
        for name, value in parameters.items()
        if name not in ("partial_rotary_factor", "rope_dim")
    }
    turned = parameters.get("rope_dim")
    if turned not in (None, head_dim):
        valid = type(turned) is int and 2 <= turned < head_dim and turned % 2 == 0
        require(valid, f"RoPE's rope_dim is {turned!r}; it must be even, from 2 to {head_dim}")
        said["partial_rotary_factor"] = rotary_factor(turned, head_dim)
    return said
