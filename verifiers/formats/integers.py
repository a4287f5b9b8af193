"""Integers of 4 and 8 bits with a scale per group of inputs, as compressed-tensors packs them."""

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.kernels.packed import PackedWeight
from verifiers.formats.bits import bytes_of, halves, signed
from verifiers.formats.format import Parts, Stored, as_number, per_output

MIDDLE = {4: 8, 8: 0}
"""What a code of zero is: halves of bytes are read as they are, bytes with their sign."""


def packed_integers(module: str, parts: Parts, bits: int, group: int | None, dtype: torch.dtype) -> Stored:
    """A weight packed in words: `weight_packed` int32 [out, in * bits / 32], codes offset by half of their range, lowest first.

    Args:
        module: it belongs to, for messages.
        parts: `weight_scale` [out, groups] beside it, and perhaps `weight_shape`, `weight_zero_point` int32
            [out * bits / 32, groups], packed along the outputs, and `weight_g_idx` [in], the group of each input.
        bits: 4 or 8.
        group: inputs of a group; None for one scale per output or one for all.
        dtype: of the model.

    Raises:
        CheckpointError: other bits, or an odd number of inputs.
    """
    if bits not in MIDDLE:
        raise CheckpointError(f"{module!r} has integers of {bits} bits; 4 and 8 are read, so take another checkpoint")
    words, scale = parts["weight_packed"], as_number(parts["weight_scale"])
    shape = parts.get("weight_shape")
    out_features, in_features = words.shape[0], words.shape[1] * 32 // bits
    if shape is not None:
        out_features, in_features = (int(size) for size in shape.tolist())
    if in_features * bits % 8:
        raise CheckpointError(
            f"{module!r} has {in_features} inputs; halves of bytes need an even number, so take another checkpoint"
        )
    raw = bytes_of(words).flatten(1)[:, : in_features * bits // 8].contiguous()
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        across = bytes_of(zeros.t()).flatten(1)
        zeros = (halves(across) if bits == 4 else across).t()[:out_features]
    elif zeros is not None:  # one for the whole weight is not packed
        zeros = zeros.int() + 2 ** (bits - 1)
    return integers(module, raw, scale, zeros, parts.get("weight_g_idx"), bits, group or in_features, dtype)


def integers(
    module: str, raw: Tensor, scale: Tensor, zeros: Tensor | None, groups: Tensor | None, bits: int, group: int, dtype: torch.dtype
) -> Stored:
    """A weight `scale * (code - zero)`.

    Args:
        module: it belongs to, for messages.
        raw: uint8 [out, in * bits / 8], codes from 0 on, of two in a byte the low half first.
        scale: float32 or bfloat16 [out, groups], or as `per_output` takes it.
        zeros: integers [out, groups], codes of zero; None for the middle code.
        groups: the group of each input [in], where inputs were sorted by size; None, or all -1, for their own order.
        bits: 4 or 8.
        group: inputs of a group.
        dtype: of the model.

    Returns:
        Packed, or in plain numbers where a group's inputs are not neighbors.
    """
    out_features, in_features = raw.shape[0], raw.shape[1] * 8 // bits
    group = min(group, in_features)
    codes = raw if bits == 4 else signed(raw)
    sorted_by_size = groups is not None and bool((groups >= 0).all()) and not _in_order(groups, group)
    wanted = (scale.shape[0], scale.shape[1] * group) if sorted_by_size else (out_features, in_features)
    scale = per_output(scale, module, wanted, (1 if scale.numel() > 1 else out_features, group))
    zero, middle = None, MIDDLE[bits] if zeros is None else 0
    if zeros is not None:
        offset = 0 if bits == 4 else 128
        zero = per_output(zeros.to(scale.dtype) - offset, module, wanted, (1 if zeros.numel() > 1 else out_features, group))
    if sorted_by_size:
        assert groups is not None
        values = (halves(raw) if bits == 4 else codes).float()
        each = groups.long()
        return (values - (middle if zero is None else zero.float()[:, each])) * scale.float()[:, each]
    return PackedWeight(codes, scale, zero, group, "int4" if bits == 4 else "int8", dtype, middle=middle)


def byte_integers(module: str, parts: Parts, group: int | None, dtype: torch.dtype) -> PackedWeight:
    """A weight of signed bytes: `weight` int8 [out, in], `weight_scale` and perhaps `weight_zero_point` as signed bytes."""
    weight = parts["weight"]
    scale = as_number(parts["weight_scale"])
    block = (1 if scale.numel() > 1 else weight.shape[0], group or weight.shape[1])
    scale = per_output(scale, module, weight.shape, block)
    zero = parts.get("weight_zero_point")
    zeros = None if zero is None else per_output(zero.to(scale.dtype), module, weight.shape, block)
    return PackedWeight(weight, scale, zeros, min(block[1], weight.shape[1]), "int8", dtype)


def _in_order(groups: Tensor, group: int) -> bool:
    """Whether the groups are those that neighbors make."""
    return torch.equal(groups.long(), torch.arange(len(groups), device=groups.device) // group)
