"""4-bit floats: MXFP4, whose groups of 32 share a power of two, and NVFP4, whose groups of 16 share
an 8-bit float.
"""

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.weight import PackedWeight
from verifiers.formats.format import Format, Parts, as_number, per_output
from verifiers.formats.settings import Settings

MX_GROUP = 32
"""Inputs that share a power of two in OCP's microscaling formats."""

NV_GROUP = 16
"""Inputs that share an 8-bit float in NVFP4."""

MX_BITS, NV_BITS = 4 + 8 / MX_GROUP, 4 + 8 / NV_GROUP
"""Bits of a number, with its part of the scale."""


class Mxfp4(Format):
    """`quant_method: mxfp4`, experts of gpt-oss: `_blocks` uint8 [E, out, in / 32, 16] and
    `_scales` uint8 [E, out, in / 32].
    """

    required = (("weight_blocks",), ("weight_scales",))

    def __init__(self, quantization: Settings) -> None:
        super().__init__(MX_BITS, group=MX_GROUP)

    def lists_as_plain(self, module: str) -> bool:
        return ".experts." not in f".{module}."

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> PackedWeight:
        blocks = parts["weight_blocks"].flatten(-2)
        return float4(module, blocks, parts["weight_scales"], MX_GROUP, dtype)


def float4(
    module: str, codes: Tensor, scale: Tensor, group: int, dtype: torch.dtype
) -> PackedWeight:
    """A weight of 4-bit floats.

    Args:
        codes: uint8 [..., out, in / 2], the low half first.
        scale: [..., out, in / group], powers of two in bytes, or float32.

    Raises:
        CheckpointError: another type, or scales that do not fit.
    """
    if codes.dtype != torch.uint8:
        what = f"{module!r} holds 4-bit floats as {str(codes.dtype)[6:]}"
        raise CheckpointError(f"{what}; pairs in uint8 are read, so take another checkpoint")
    shape = [*codes.shape[:-1], codes.shape[-1] * 2]
    scales = per_output(as_number(scale), module, shape, (1, group))
    return PackedWeight(codes.contiguous(), scales, None, group, "e2m1", dtype)


def nvfp4(
    module: str, codes: Tensor, scale: Tensor, factor: Tensor, dtype: torch.dtype
) -> PackedWeight:
    """A weight of 4-bit floats with two scales, whose product is taken in float32.

    Args:
        codes: uint8 [..., out, in / 2], the low half first.
        scale: float8_e4m3fn [..., out, in / 16].
        factor: of all scales, one number, or one for each expert.

    Raises:
        CheckpointError: another type, or scales that do not fit.
    """
    experts = scale.shape[:-2]
    if factor.numel() not in (1, experts.numel()):
        what = f"{module!r} has {factor.numel()} second scales, not one"
        raise CheckpointError(f"{what}; fetch the checkpoint again")
    factor = as_number(factor).float().reshape([*experts, 1, 1] if factor.numel() > 1 else [])
    return float4(module, codes, as_number(scale).float() * factor, NV_GROUP, dtype)
