"""Attention over parts of the keys, joined into attention over all of them by the logarithms of the denominators."""

import torch
from torch import Tensor


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Joins the attention over two disjoint sets of keys; every row has to see at least one key of either.

    Args:
        out, part: [num_tokens, num_heads, head_dim], each normalized over its own keys.
        lse, part_lse: float32 [num_heads, num_tokens], natural logarithms of the denominators.

    Returns:
        The joined output, float32, and its logarithms.
    """
    total = torch.logaddexp(lse, part_lse)
    weights, part_weights = ((x - total).exp().t()[..., None] for x in (lse, part_lse))
    return out.float() * weights + part.float() * part_weights, total
