"""Root mean square norm (arXiv 1910.07467): its weight, and plain torch for it."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class Norm(NamedTuple):
    """A norm of a decoder.

    It is computed in float32, rounded, then weighted, as transformers does for most families. A weight in float32 says otherwise:
    then the product is what is rounded, as Gemma and others have it.
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
    return torch.mul(x, scale, out=torch.empty_like(x)).mul_(norm.weight)


@lru_cache(maxsize=64)
def _constant(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number on the device, put there once, in the type that norms of `dtype` are computed in."""
    with torch.inference_mode(False):
        return torch.full((), value, dtype=torch.promote_types(dtype, torch.float32), device=device)
