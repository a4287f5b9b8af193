"""Convolutions around a sublayer of a drafter (DFlash 2, z-lab/dflash): each row of a block is
mixed with the rows before it.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.layers.linear import Linear

Side = Literal[0, 1]
"""Before a sublayer, and after it."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedConvolution:
    """Convolutions before and after one sublayer, with kernels that depend on its input.

    Attributes:
        base: [2, taps, H], the part of both kernels that is always the same; tap `i` is of the row
            `i` before.
        projection: from H to the other part, [2, taps, groups], one for all channels of a group.
        width: rows of a block, beyond whose first nothing is seen.
    """

    base: Tensor
    projection: Linear
    width: int


def mix_rows(x: Tensor, dynamic: Tensor, base: Tensor, width: int, side: Side) -> Tensor:
    """`sum over taps of (base + dynamic) * x of as many rows before`, computed in float32 at least
    and rounded once.

    Args:
        x: [..., n * width, H], blocks of `width` rows one after the other.
        dynamic: [..., n * width, 2 * taps * groups], what `GroupedConvolution.projection` gives.
        base: [2, taps, H].

    Returns:
        [..., n * width, H].
    """
    wide, hidden = torch.promote_types(x.dtype, torch.float32), x.shape[-1]
    dynamic = dynamic.unflatten(-1, (2, base.shape[1], -1))[..., side, :, :].to(wide)
    # [..., rows, taps, H]
    kernels = base[side].to(wide) + dynamic.repeat_interleave(hidden // dynamic.shape[-1], dim=-1)
    blocks = x.to(wide).unflatten(-2, (-1, width))
    # Tap i sees block rows shifted down by i; what comes from before the block is zero.
    earlier = [F.pad(blocks, (0, 0, tap, 0))[..., :width, :] for tap in range(base.shape[1])]
    return (kernels * torch.stack(earlier, dim=-2).flatten(-4, -3)).sum(-2).to(x.dtype)
