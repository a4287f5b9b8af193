"""Integers of few bits with a scale per group of inputs, as compressed-tensors packs them."""

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.weight import PackedWeight
from verifiers.formats.bits import bytes_of, paired, signed, unpacked
from verifiers.formats.format import Parts, Stored, as_number, per_output

WIDTHS = range(2, 9)
"""Bits of a code. In memory those of up to four have half a byte, others a byte."""


ALIGNED = (4, 8)
"""Bits that take the same in files."""


def check_width(bits: int, name: str) -> None:
    """Refuses integers of other widths, which `name` has."""
    if bits not in WIDTHS:
        what = f"{name} has integers of {bits} bits, and 2 to 8 are read"
        raise CheckpointError(f"{what}; take another checkpoint of the model")


def memory_bits(bits: int, group: int | None) -> float:
    """Bits of a number in memory, with its part of a scale in half precision."""
    return (4 if bits <= 4 else 8) + 16 / (group or 1024)


def packed_integers(
    module: str, parts: Parts, bits: int, group: int | None, dtype: torch.dtype
) -> Stored:
    """A weight packed in words: `weight_packed` int32 [out, in * bits / 32], codes offset by half
    of their range, lowest first.

    Args:
        parts: `weight_scale` [out, groups] beside it, and perhaps `weight_shape`,
            `weight_zero_point` int32 [out * bits / 32, groups], packed along the outputs, and
            `weight_g_idx` [in], the group of each input.
        group: inputs of a group; None for one scale per output or one for all.

    Raises:
        CheckpointError: other bits, or an odd number of inputs.
    """
    check_width(bits, repr(module))
    words, scale = parts["weight_packed"], as_number(parts["weight_scale"])
    shape = parts.get("weight_shape")
    out_features, in_features = words.shape[0], words.shape[1] * 32 // bits
    if shape is not None:
        out_features, in_features = (int(size) for size in shape.tolist())
    if words.shape != (out_features, -(-in_features * bits // 32)):
        raise CheckpointError(
            f"{module!r} holds {list(words.shape)} words of {bits}-bit integers for"
            f" [{out_features}, {in_features}]; take a checkpoint that packs them without gaps"
        )
    zeros = parts.get("weight_zero_point")
    if zeros is not None and zeros.dtype == torch.int32:
        zeros = unpacked(bytes_of(zeros.t()).flatten(1), bits, out_features).t()
    elif zeros is not None:  # one for the whole weight is not packed
        zeros = zeros.int() + 2 ** (bits - 1)
    codes = stream(bytes_of(words).flatten(1), bits, in_features, module)
    order = parts.get("weight_g_idx")
    return integers(module, codes, scale, zeros, order, bits, group or in_features, dtype)


def stream(packed: Tensor, bits: int, count: int, module: str) -> Tensor:
    """What `integers` takes, from a stream of bits: uint8 [out, count / 2] for up to four bits,
    else [out, count].

    Raises:
        CheckpointError: halves of bytes, and an odd number of them.
    """
    if bits > 4:
        return unpacked(packed, bits, count).contiguous()
    if count % 2:
        what = f"{module!r} has {count} inputs"
        way_out = "halves of bytes need an even number, so take another checkpoint"
        raise CheckpointError(f"{what}; {way_out}")
    if bits == 4:
        return packed[:, : count // 2].contiguous()
    return paired(unpacked(packed, bits, count))


def integers(
    module: str,
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    groups: Tensor | None,
    bits: int,
    group: int,
    dtype: torch.dtype,
) -> Stored:
    """A weight `scale * (code - zero)`.

    Args:
        codes: uint8 from 0 on, for up to four bits [out, in / 2] low half first, else [out, in].
        scale: float32 or bfloat16 [out, groups], or as `per_output` takes it.
        zeros: integers [out, groups], codes of zero; None for the middle code.
        groups: the group of each input [in], where inputs were sorted by size; None, or all -1, for
            their own order.

    Returns:
        Packed, or in plain numbers where a group's inputs are not neighbors.
    """
    middle, halved = 2 ** (bits - 1), bits <= 4
    out_features, in_features = codes.shape[0], codes.shape[1] * (2 if halved else 1)
    group = min(group, in_features)
    each = None  # the group of each input, where they are sorted by size
    if groups is not None and (groups >= 0).all():
        own = torch.arange(len(groups), device=groups.device) // group
        each = None if torch.equal(groups.long(), own) else groups.long()
    wanted = out_features, in_features
    if each is not None:
        wanted = scale.shape[0], scale.shape[1] * group
    scale = per_output(scale, module, wanted, (1 if scale.numel() > 1 else out_features, group))
    zero, offset = None, 0 if halved else middle  # bytes are signed, so that theirs is none
    if zeros is not None:
        block = (1 if zeros.numel() > 1 else out_features, group)
        zero = per_output(zeros.to(scale.dtype) - offset, module, wanted, block)
    if each is not None:
        if int(each.max()) >= scale.shape[1]:
            raise IndexError(f"an input is of group {int(each.max())} of {scale.shape[1]}")
        values = unpacked(codes, 4 if halved else 8, in_features).float()
        zero_of_each = middle if zero is None else zero.float()[:, each] + offset
        return (values - zero_of_each) * scale.float()[:, each]
    if not halved:
        return PackedWeight(signed(codes, middle), scale, zero, group, "int8", dtype)
    middle = middle if zero is None else 0
    return PackedWeight(codes, scale, zero, group, "int4", dtype, middle=middle)


def byte_integers(module: str, parts: Parts, group: int | None, dtype: torch.dtype) -> PackedWeight:
    """A weight of signed bytes: `weight` int8 [out, in], `weight_scale` and perhaps
    `weight_zero_point` as signed bytes.
    """
    weight = parts["weight"]
    scale = as_number(parts["weight_scale"])
    block = (1 if scale.numel() > 1 else weight.shape[0], group or weight.shape[1])
    scale = per_output(scale, module, weight.shape, block)
    zero = parts.get("weight_zero_point")
    zeros = None if zero is None else per_output(zero.to(scale.dtype), module, weight.shape, block)
    return PackedWeight(weight, scale, zeros, min(block[1], weight.shape[1]), "int8", dtype)
