"""All families of targets, from the files of `verifiers/families`, and a model's description."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from math import isfinite
from pkgutil import walk_packages
from typing import Any

import verifiers.families
from specdec.base.errors import InvalidInputError
from specdec.layers.rotary.rotary import ROPE_TYPES
from verifiers.description import Description
from verifiers.entries import declared
from verifiers.family import Family

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}  # fmt: skip
"""From transformers' names to those of `specdec.layers.ops.activation`."""

FAMILIES: dict[str, Family] = {
    model_type: family
    for module in walk_packages(verifiers.families.__path__, "verifiers.families.")
    if not module.ispkg
    for model_type, family in import_module(module.name).FAMILIES.items()
}
"""By model type, as transformers names it."""

WRAPPERS = frozenset(name for family in FAMILIES.values() for name in family.wrappers)
"""Model types of composites that are taken as the text model within."""

READ_AS = {alias: model_type for model_type, one in FAMILIES.items() for alias in one.aliases}
"""Model types that transformers does not know, and those that have their layers."""

ARCHITECTURES = {
    name: (model_type, one) for model_type, of in FAMILIES.items() for name, one in of.gguf.items()
}
"""By llama.cpp's name, the model type that it usually is, and what is to be known of its files."""

UNKNOWN = Family()
"""The family of every other type."""


def family_of(config: Any) -> Family:
    """The family of a text model."""
    return FAMILIES.get(getattr(config, "model_type", ""), UNKNOWN)


def describe(config: Any) -> Description | None:
    """The description of a model; None when our own layers do not run its type, or lack a part."""
    family = family_of(config)
    if family.describe is None:
        return None
    recurrent = family.recurrent
    named = str(declared(config, "hidden_activation") or getattr(config, "hidden_act", "silu"))
    activation = ACTIVATIONS.get(named)
    ropes = _ropes(config)
    known = all(rope is None or rope["rope_type"] in ROPE_TYPES for rope in ropes)
    common = {"ropes": ropes, "activation": activation, "experts": family.experts}
    if recurrent is not None and recurrent.same_activation and activation != "silu":
        return None
    description = family.describe(config, common) if activation and known else None
    if description is not None:
        _check_factors(description)
    return description


def _check_factors(description: Description) -> None:
    """Whether every factor is a number, which not every type of config sees to.

    Raises:
        InvalidInputError: one is not.
    """
    scales = ("scale", "embedding_scale", "residual_scale", "logits_scale", "value_scale")
    for name in (*scales, "final_softcap"):
        value = getattr(description, name)
        missing = value is None and name in ("scale", "final_softcap")
        if not missing and not (isinstance(value, int | float) and isfinite(value)):
            what = f"{name} comes to {value!r}, which is no number"
            raise InvalidInputError(f"{what}; fetch config.json again")


def _ropes(config: Any) -> Sequence[Mapping[str, Any] | None]:
    """RoPE parameters of each layer."""
    kinds = getattr(config, "layer_types", None) or [None] * config.num_hidden_layers
    # 0 where a layer has no RoPE
    rotated = declared(config, "no_rope_layers") or [True] * config.num_hidden_layers
    parameters: dict[Any, Any] = getattr(config, "rope_parameters", None) or {}
    if not parameters or parameters.get("rope_theta", 0) is None:
        return [None] * config.num_hidden_layers
    by_kind = "rope_type" not in parameters
    each = zip(kinds, rotated, strict=True)
    ropes = [(parameters[kind] if by_kind else parameters) if on else None for kind, on in each]
    whole = {} if family_of(config).partial_rope else {"partial_rotary_factor": None}
    return [
        {**one, **whole} if one and one["rope_type"] != "proportional" else one for one in ropes
    ]
