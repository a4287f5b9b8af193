"""Quantizing weights in the plainest way: for measuring shapes with random weights, not for
checkpoints that are to be good.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.layers.packed.weight import PackedWeight

GROUP = 128
"""Inputs that share a scale."""


def fp8(weight: Tensor) -> PackedWeight:
    """8-bit floats of a weight [out, in], the largest of a group as large as they can be."""
    groups, scale = _scaled(weight, torch.finfo(torch.float8_e4m3fn).max)
    codes = groups.clamp(-448, 448).to(torch.float8_e4m3fn)
    return PackedWeight(codes, scale, None, GROUP, "e4m3", weight.dtype)


def int4(weight: Tensor) -> PackedWeight:
    """4-bit integers around a zero that all share, from -7 to 7, of a weight [out, in] with an even
    number of inputs.
    """
    groups, scale = _scaled(weight, 7)
    codes = (groups.round().clamp(-7, 7) + 8).to(torch.uint8)
    pairs = codes[:, ::2] | codes[:, 1::2] << 4
    return PackedWeight(pairs, scale, None, GROUP, "int4", weight.dtype, middle=8)


WAYS: dict[str, Callable[[Tensor], PackedWeight]] = {"fp8": fp8, "int4": int4}
"""By name."""


def _scaled(weight: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """The weight in float32 divided by the scales of its groups, and the scales in bfloat16."""
    wide = weight.float()
    peaks = torch.stack([group.abs().amax(1) for group in wide.split(GROUP, dim=1)], dim=1)
    scale = (peaks / largest).clamp(min=2.0**-100).bfloat16()
    return wide / scale.float().repeat_interleave(GROUP, dim=1)[:, : wide.shape[1]], scale
