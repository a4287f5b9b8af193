"""What configs say of layers that keep a state per request."""

from typing import Any, NamedTuple

import torch

from specdec.kv_cache import StateLayerSpec

STATES = frozenset({"linear_attention", "conv", "hybrid"})
"""What configs call layers that keep something per request; a hybrid one attends, too."""

MIXERS_ALONE = frozenset({"mlp", "moe"})
"""What they call layers that are a feed-forward sublayer and nothing else."""


class Sizes(NamedTuple):
    """See `specdec.layers.recurrence.recurrence.Recurrence`."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    gates: int  # of a value head

    @property
    def width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * (self.value_dim + self.gates)


def is_recurrent(config: Any, layer: int) -> bool:
    """Whether a decoder layer keeps a state per request in the place of keys and values, or beside
    them.
    """
    return _kind(config, layer) in STATES


def attends(config: Any, layer: int) -> bool:
    """Whether a decoder layer has keys and values."""
    return _kind(config, layer) not in (STATES - {"hybrid"}) | MIXERS_ALONE


def _kind(config: Any, layer: int) -> str | None:
    kinds = getattr(config, "layer_types", None)
    return None if kinds is None else kinds[layer]


def state_layer_spec(config: Any, dtype: torch.dtype) -> StateLayerSpec:
    """What one recurrent layer of the model stores per request."""
    if hasattr(config, "conv_L_cache"):
        return StateLayerSpec(
            config.hidden_size // getattr(config, "ranks", 1), config.conv_L_cache, 0, 0, 0, dtype
        )
    sizes = sizes_of(config)
    return StateLayerSpec(
        sizes.width, sizes.taps, sizes.value_heads, sizes.key_dim, sizes.value_dim, dtype
    )


def sizes_of(config: Any) -> Sizes:
    """Of the recurrent layers of a model, or of a rank's part of them; see
    `verifiers.weights.shares.shared`.
    """
    whole, ranks = _whole_sizes(config), getattr(config, "ranks", 1)
    return whole._replace(
        key_heads=whole.key_heads // ranks, value_heads=whole.value_heads // ranks
    )


def _whole_sizes(config: Any) -> Sizes:
    if hasattr(config, "mamba_num_heads"):  # Nemotron-H
        heads, dim = config.mamba_num_heads, config.mamba_head_dim
        return Sizes(config.n_groups, heads, config.ssm_state_size, dim, config.conv_kernel, 1)
    if hasattr(config, "n_mamba_heads"):  # Zamba2
        heads, dim = config.n_mamba_heads, config.mamba_headdim
        return Sizes(config.mamba_ngroups, heads, config.mamba_d_state, dim, config.mamba_d_conv, 1)
    if hasattr(config, "mamba_n_heads"):
        heads, dim = config.mamba_n_heads, config.mamba_d_head
        return Sizes(
            config.mamba_n_groups, heads, config.mamba_d_state, dim, config.mamba_d_conv, 1
        )
    if hasattr(config, "linear_num_heads"):  # Kimi Linear
        heads, dim = config.linear_num_heads, config.linear_head_dim
        return Sizes(heads, heads, dim, dim, config.linear_conv_kernel_dim, 1 + dim)
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    return Sizes(key_heads, value_heads, key_dim, value_dim, config.linear_conv_kernel_dim, 2)
