"""Building recurrent layers from the tensors of their families."""

from typing import Any

import torch
from torch import Tensor

from specdec.kv_cache import StateLayerSpec
from specdec.layers.linear_attention import LinearAttention
from specdec.layers.norm import Norm
from specdec.layers.recurrence import Recurrence
from verifiers.weights import Weights

LINEAR = "linear_attention"
"""What configs call such a layer."""


def is_recurrent(config: Any, layer: int) -> bool:
    """Whether a decoder layer keeps a state per request in the place of keys and values."""
    kinds = getattr(config, "layer_types", None)
    return kinds is not None and kinds[layer] == LINEAR


def state_layer_spec(config: Any, dtype: torch.dtype) -> StateLayerSpec:
    """What one recurrent layer of the model stores per request."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    width = 2 * key_heads * key_dim + value_heads * value_dim + 2 * value_heads
    return StateLayerSpec(width, config.linear_conv_kernel_dim, value_heads, key_dim, value_dim, dtype)


def delta_net(weights: Weights, config: Any) -> LinearAttention:
    """The Gated DeltaNet layer (arXiv 2412.06464) whose tensors these are."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    if weights.has("in_proj_qkvz.weight"):  # the heads that share a key lie together, as Qwen3-Next has them
        shared = value_heads // key_heads
        query, key, value, gate = _places(key_heads, [key_dim, key_dim, shared * value_dim, shared * value_dim])
        weights.split("in_proj_qkvz", {"in_proj_qkv": torch.cat([query, key, value]), "in_proj_z": gate})
        beta, step = _places(key_heads, [shared, shared])
        weights.split("in_proj_ba", {"in_proj_b": beta, "in_proj_a": step})
    rate = weights.tensor("A_log").float().exp()
    recurrence = Recurrence(
        key_heads,
        value_heads,
        key_dim,
        value_dim,
        kernel=weights.tensor("conv1d.weight").squeeze(1),
        kernel_bias=weights.optional("conv1d.bias"),
        rate=rate,
        time_bias=weights.tensor("dt_bias"),
    )
    norm = Norm(weights.tensor("norm.weight"), config.rms_norm_eps)
    return LinearAttention(weights.linear("in_proj_qkv", "in_proj_b", "in_proj_a", "in_proj_z"), recurrence, norm)


def _places(heads: int, widths: list[int]) -> tuple[Tensor, ...]:
    """Rows of each part where every head has its own of all of them side by side."""
    rows = torch.arange(heads * sum(widths)).view(heads, -1)
    return tuple(part.reshape(-1) for part in rows.split(widths, dim=1))
