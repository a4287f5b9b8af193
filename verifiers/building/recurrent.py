"""Building recurrent layers, and those that only convolve, from the tensors of their families."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.attention import Attention
from specdec.layers.linear import Linear
from specdec.layers.linear_attention import (
    KeyDecayAttention,
    LinearAttention,
    ShortConvolution,
    SideBySide,
)
from specdec.layers.linear_choice import linear
from specdec.layers.ops.norm import GroupNorm
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows
from specdec.model.batch import ForwardInput
from verifiers.config.states import attends, is_recurrent, recurrent_of, sizes_of
from verifiers.description import norm_epsilon
from verifiers.weights.weights import Weights


def recurrent_rows(rows: ForwardInput) -> RecurrentRows:
    """The rows of a forward as recurrent layers see them."""
    assert rows.slots is not None, "a state lies in a slot"
    return RecurrentRows.of(
        rows.slots,
        rows.metadata,
        max_pending=rows.max_pending,
        final=rows.final,
        counts=rows.row_counts,
    )


def mixer(
    weights: Weights, config: Any, layer: int, attention: Callable[[], Attention]
) -> tuple[Attention | None, Linear | None]:
    """What a decoder layer has to mix rows, if anything, and its output projection.

    Args:
        attention: builds its attention, if it has any.
    """
    if not is_recurrent(config, layer):
        if not attends(config, layer):
            return None, None
        return attention(), weights.output("self_attn.o_proj")
    scope = weights.under("linear_attn.")
    rule = recurrent_of(config).rule
    if rule == "convolution":
        return short_convolution(scope), scope.output("out_proj")
    if rule == "key decay":
        return key_decay_attention(scope, config), scope.output("out_proj")
    linear_attention = mamba(scope, config) if rule == "mamba" else delta_net(scope, config)
    if not attends(config, layer):
        return linear_attention, scope.output("out_proj")
    both = SideBySide(attention(), linear_attention)
    return both, _joined(weights, "self_attn.o_proj", "linear_attn.out_proj")


def _joined(weights: Weights, *names: str) -> Linear:
    """Projections as one of what they are given side by side; what they give is added up."""
    biases = [bias for name in names if (bias := weights.optional(f"{name}.bias")) is not None]
    weight = torch.cat([weights.tensor(f"{name}.weight") for name in names], dim=1)
    return weights.summed(linear(weight, torch.stack(biases).sum(0) if biases else None))


def delta_net(weights: Weights, config: Any) -> LinearAttention:
    """The Gated DeltaNet layer (arXiv 2412.06464) whose tensors these are."""
    sizes = sizes_of(config)
    # the heads that share a key lie together, as Qwen3-Next has them
    if weights.has("in_proj_qkvz.weight"):
        heads, shared = sizes.key_heads, sizes.value_heads // sizes.key_heads
        widths = [sizes.key_dim, sizes.key_dim, *[shared * sizes.value_dim] * 2]
        query, key, value, gate = _places(heads, widths)
        qkv = torch.cat([query, key, value])
        weights.split("in_proj_qkvz", {"in_proj_qkv": qkv, "in_proj_z": gate})
        beta, step = _places(heads, [shared, shared])
        weights.split("in_proj_ba", {"in_proj_b": beta, "in_proj_a": step})
    apart = weights.has("q_proj.weight")  # as OLMo has them
    names = ("q_proj", "k_proj", "v_proj") if apart else ("in_proj_qkv",)
    norm = GroupNorm(weights.tensor("norm.weight"), _epsilon(config))
    recurrence = Recurrence(
        *sizes[:4],
        kernel=weights.tensor("conv1d.weight").squeeze(1),
        kernel_bias=weights.optional("conv1d.bias"),
        rate=weights.tensor("A_log").float().exp(),
        time_bias=weights.tensor("dt_bias"),
        beta_scale=2.0 if getattr(config, "linear_allow_neg_eigval", False) else 1.0,
    )
    every = (*names, "in_proj_b", "in_proj_a", "in_proj_z")
    if weights.alike(*every):
        return LinearAttention(weights.linear(*every), recurrence, norm)
    # Quantized checkpoints leave the two of few outputs as they are.
    inputs, gates = weights.linear(*names, "in_proj_z"), weights.linear("in_proj_b", "in_proj_a")
    return LinearAttention(inputs, recurrence, norm, gates)


def _places(heads: int, widths: list[int]) -> tuple[Tensor, ...]:
    """Rows of each part where every head has its own of all of them side by side."""
    rows = torch.arange(heads * sum(widths)).view(heads, -1)
    return tuple(part.reshape(-1) for part in rows.split(widths, dim=1))


def key_decay_attention(weights: Weights, config: Any) -> KeyDecayAttention:
    """The Kimi Delta Attention (arXiv 2510.26692) whose tensors these are."""
    recurrence = Recurrence(
        *sizes_of(config)[:4],
        kernel=weights.tensor("conv1d.weight").squeeze(1),
        kernel_bias=None,
        rate=weights.tensor("A_log").float().exp().flatten(),
        time_bias=weights.tensor("dt_bias"),
        decays_by_key=True,
    )
    return KeyDecayAttention(
        weights.linear("q_proj", "k_proj", "v_proj", "in_proj_b", "in_proj_a", "in_proj_z"),
        decays=weights.linear("a_proj"),
        gates=weights.linear("z_proj"),
        recurrence=recurrence,
        norm=GroupNorm(weights.tensor("norm.weight"), _epsilon(config), sigmoid=True),
    )


def mamba(weights: Weights, config: Any) -> LinearAttention:
    """The Mamba-2 layer (arXiv 2405.21060) whose tensors these are."""
    sizes = sizes_of(config)
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim
    kernel = weights.tensor("conv1d.weight").squeeze(1)
    if len(kernel) != values + 2 * keys:
        raise CheckpointError(
            f"recurrent layers have {sizes.value_heads} heads of {sizes.value_dim} numbers and"
            f" {sizes.key_heads} groups of {sizes.key_dim}, but {len(kernel)} channels; fetch"
            f" config.json again"
        )
    widths = [values, values, keys, keys, sizes.value_heads]
    gate, x, b, c, step = torch.arange(sum(widths)).split(widths)
    channels = torch.cat([c, b, x]) - values
    order = torch.cat([c, b, x, step, gate])
    bias = weights.optional("conv1d.bias")
    least, largest = recurrent_of(config).steps(config)
    recurrence = Recurrence(
        *sizes[:4],
        kernel=kernel[channels],
        kernel_bias=None if bias is None else bias[channels],
        rate=weights.tensor("A_log").float().exp(),
        time_bias=weights.tensor("dt_bias"),
        rule="plain",
        time_limits=(float(least), float(largest)),
        skip=weights.tensor("D").float(),
    )
    norm = _mamba_norm(weights, config, values // sizes.key_heads)
    projection = weights.linear("in_proj", reorder=(lambda rows: rows[order],))
    return LinearAttention(projection, recurrence, norm)


def _mamba_norm(weights: Weights, config: Any, width: int) -> GroupNorm | None:
    """The norm of what Mamba-2 puts out, over groups of that width; None where it is only gated."""
    weight = weights.optional("norm.weight")
    if weight is None:
        return None
    if not hasattr(config, "mamba_norm_before_gate"):
        return GroupNorm(weight, _epsilon(config), width, gate_first=True)
    # Falcon-H1 rounds only once
    weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return GroupNorm(weight, _epsilon(config), width, gate_first=not config.mamba_norm_before_gate)


def _epsilon(config: Any) -> float:
    """Epsilon of the norms of recurrent layers."""
    own = recurrent_of(config).epsilon
    return norm_epsilon(config) if own is None else own


def short_convolution(weights: Weights) -> ShortConvolution:
    """The gated convolution of LFM2 whose tensors these are."""
    kernel, bias = weights.tensor("conv1d.weight").squeeze(1), weights.optional("conv1d.bias")
    return ShortConvolution(weights.linear("in_proj"), kernel, bias)
