"""Root mean square norm (arXiv 1910.07467): its weight, and plain torch for it."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F


class Norm(NamedTuple):
    """A norm of a decoder.

    It is computed in float32, rounded, then weighted, as transformers does for most families. A
    weight in float32 says otherwise: then the product is what is rounded, as Gemma and others have
    it.
    """

    weight: Tensor  # [H]
    epsilon: float


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    """`x` [..., H], normed, in its type."""
    epsilon = _constant(norm.epsilon, x.dtype, x.device)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=epsilon.dtype)
    scale = torch.addcmul(epsilon, length, length, value=1 / x.shape[-1]).rsqrt_()
    if norm.weight.dtype != x.dtype:
        return (x * scale * norm.weight).to(x.dtype)
    if torch.is_grad_enabled() and (x.requires_grad or norm.weight.requires_grad):
        return (x * scale).to(x.dtype) * norm.weight
    return torch.mul(x, scale, out=torch.empty_like(x)).mul_(norm.weight)


class GroupNorm(NamedTuple):
    """A norm of groups of columns, such as heads, times the SiLU or sigmoid of gates.

    A weight is one for all groups, or each has its own, where `width` says how wide they are.
    Numbers are rounded before the weight, and with it unless it is in float32; with a sigmoid only
    at the end.
    """

    weight: Tensor  # [V], or [groups * V]
    epsilon: float
    width: int = 0  # V, unless it is that of the weight
    # the norm sees the gated numbers (Mamba-2), instead of being gated itself (Gated DeltaNet)
    gate_first: bool = False
    sigmoid: bool = False  # Kimi Delta Attention


def gated_norm(x: Tensor, gate: Tensor, norm: GroupNorm) -> Tensor:
    """Groups of `x` [T, groups * V], normed and times SiLU or sigmoid of `gate`;
    `specdec.layers.ops.triton_gated_norm` in torch.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    groups = (-1, norm.width or len(norm.weight))
    opened = (torch.sigmoid if norm.sigmoid else F.silu)(gate.to(wide)).unflatten(1, groups)
    rows = x.to(wide).unflatten(1, groups)
    rows = rows * opened if norm.gate_first else rows
    length = torch.linalg.vector_norm(rows, dim=-1, keepdim=True)
    scaled = rows * (length * length / rows.shape[-1] + norm.epsilon).rsqrt()
    scaled = (scaled if norm.sigmoid else scaled.to(x.dtype)) * norm.weight.view(groups)
    return (scaled if norm.gate_first else scaled * opened).to(x.dtype).flatten(1)


@lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on the device, put there once, in the type that norms of `dtype` are computed in."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.promote_types(dtype, torch.float32), device=device)
