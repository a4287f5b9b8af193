"""Angles of rotary position embeddings (RoFormer, arXiv 2104.09864) in few operations."""

from collections.abc import Callable

import torch
from torch import Tensor

STATIC_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
"""RoPE types, as Transformers names them, whose frequencies stay what they are, however long a sequence grows."""


def half_angles(position_ids: Tensor, frequencies: Tensor, dtype: torch.dtype, *, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosine and sine of every pair of numbers, once each, computed in float32.

    Args:
        position_ids: int64 [...].
        frequencies: float32 [head_dim / 2].
        dtype: of the result.
        amplitude: factor of the cosines and sines.

    Returns:
        Two tensors [..., head_dim / 2].
    """
    angles = position_ids[..., None] * frequencies

    def rounded(turn: Callable[..., Tensor]) -> Tensor:
        # Written in the wanted type at once, since a conversion would be one more kernel.
        out = torch.empty_like(angles, dtype=dtype)
        return turn(angles, out=out) if amplitude == 1 else torch.mul(turn(angles), amplitude, out=out)

    return rounded(torch.cos), rounded(torch.sin)
