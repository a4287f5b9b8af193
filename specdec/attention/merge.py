"""Attention over parts of the keys, joined into attention over all of them by the logarithms of the
denominators.
"""

import math

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the attention over two disjoint sets of keys.

    Args:
        out, part: [num_tokens, num_heads, head_dim], each normalized over its own keys.
        lse, part_lse: float32 [num_heads, num_tokens], natural logarithms of the denominators.
            Where a row sees no key, kernels write either infinity, and anything as output, which is
            not read.

    Returns:
        The joined output, float32, and its logarithms: 0 and minus infinity for rows that see no
        key at all.
    """
    lse, part_lse = (torch.where(x == math.inf, -math.inf, x) for x in (lse, part_lse))
    total = torch.logaddexp(lse, part_lse)
    # minus infinity less itself would be NaN
    finite = total.clamp(min=torch.finfo(total.dtype).min)
    weights, part_weights = ((x - finite).exp().t()[..., None] for x in (lse, part_lse))
    return _weighted(out, weights) + _weighted(part, part_weights), total


def _weighted(out: Tensor, weights: Tensor) -> Tensor:
    return torch.where(weights == 0, 0.0, out.float() * weights)
