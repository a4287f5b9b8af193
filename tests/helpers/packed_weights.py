"""Random weights of few bits, and products whose order of sums is known."""

import numpy as np
import torch
from torch import Tensor

from specdec.layers.packed.weight import Code, PackedWeight

CODES: tuple[Code, ...] = ("e4m3", "int8", "int4", "e2m1")


def packed(
    code: Code,
    shape: tuple[int, ...],
    group: int,
    *,
    zero: Tensor | float | None = None,
    dtype: torch.dtype = torch.float16,
    device: torch.device | None = None,
) -> PackedWeight:
    """A weight [..., out, in] whose products with normal rows are about normal; its scales are
    bfloat16 numbers in float32.
    """
    *outer, inputs = shape
    groups = (*outer, -(-inputs // group))
    if code == "e4m3":
        codes, size = torch.randn(shape).to(torch.float8_e4m3fn), 1.0
    elif code == "int8":
        codes, size = torch.randint(-128, 128, shape, dtype=torch.int8), 74.0
    else:
        codes, size = (
            torch.randint(0, 256, (*outer, inputs // 2), dtype=torch.uint8),
            3.0 if code == "e2m1" else 4.6,
        )
    scale = ((torch.rand(groups) + 0.5) / (size * inputs**0.5)).bfloat16().float()
    zeros = torch.full(groups, float(zero)) if isinstance(zero, (int, float)) else zero
    weight = PackedWeight(codes, scale, zeros, group, code, dtype)
    return weight if device is None else weight.to(device)


def in_order(a: np.ndarray, b: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A product that adds its terms up one after another, as the chip does for any shape, which a
    CPU's library does not.
    """
    total = np.zeros((*a.shape[:-1], b.shape[-1]), dtype)
    for depth in range(a.shape[-1]):
        total += a[..., depth, None].astype(dtype) * b[..., depth, None, :].astype(dtype)
    return total
