"""Rotary position embedding (RoFormer, arXiv 2104.09864) as latent attention has it: on a part of each head, in two pairings."""

from typing import NamedTuple

import torch
from torch import Tensor


class Angles(NamedTuple):
    """Cosine and sine of every pair of numbers, [num_tokens, 1, pairs], the model's own scaling included."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, position_embeddings: Tensor | tuple[Tensor, Tensor]) -> "Angles":
        """From what transformers hands to its layers: complex numbers [1, num_tokens, pairs], or cosines and sines side by side
        for both numbers of each pair, [1, num_tokens, 2 * pairs] each."""
        if isinstance(position_embeddings, Tensor):
            return cls(position_embeddings.real[0, :, None], position_embeddings.imag[0, :, None])
        cos, sin = (part[0, :, None, : part.shape[-1] // 2] for part in position_embeddings)
        return cls(cos, sin)


def rotate(x: Tensor, angles: Angles, *, interleaved: bool) -> Tensor:
    """Rotates [num_tokens, heads, 2 * pairs], in the type of `x`.

    A pair is two neighbors when interleaved, else one number of each half. The result always keeps a pair's numbers in
    different halves: products of rotated queries and keys do not depend on the order.
    """
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, dim=-1)
    cos, sin = angles
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def rotate_first(x: Tensor, size: int, angles: Angles, *, interleaved: bool) -> Tensor:
    """Rotates the first `size` numbers of each head and leaves the others."""
    return torch.cat([rotate(x[..., :size], angles, interleaved=interleaved), x[..., size:]], dim=-1)
