"""What configs say of layers that keep a state per request."""

from typing import Any

import torch

from specdec.kv_cache import StateLayerSpec
from verifiers.config.families import family_of
from verifiers.family import Recurrent, Sizes

STATES = frozenset({"linear_attention", "conv", "hybrid"})
"""What configs call layers that keep something per request; a hybrid one attends, too."""

MIXERS_ALONE = frozenset({"mlp", "moe"})
"""What they call layers that are a feed-forward sublayer and nothing else."""


def is_recurrent(config: Any, layer: int) -> bool:
    """Whether a decoder layer keeps a state per request in place of keys and values, or beside."""
    return _kind(config, layer) in STATES


def attends(config: Any, layer: int) -> bool:
    """Whether a decoder layer has keys and values."""
    return _kind(config, layer) not in (STATES - {"hybrid"}) | MIXERS_ALONE


def _kind(config: Any, layer: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else kinds[layer]


def state_layer_spec(config: Any, dtype: torch.dtype) -> StateLayerSpec:
    """What one recurrent layer of the model stores per request."""
    sizes = sizes_of(config)
    state = (sizes.value_heads, sizes.key_dim, sizes.value_dim) if sizes.key_dim else (0, 0, 0)
    return StateLayerSpec(sizes.width, sizes.taps, *state, dtype)


def sizes_of(config: Any) -> Sizes:
    """Sizes of the recurrent layers of a model, or of a rank's part of them."""
    return recurrent_of(config).sizes(config).of_rank(config)


def recurrent_of(config: Any) -> Recurrent:
    """How the recurrent layers of a model are made."""
    recurrent = family_of(config).recurrent
    assert recurrent is not None, "`verifiers.support` refuses others"
    return recurrent
