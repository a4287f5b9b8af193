"""Codes of a few bits within bytes and 32-bit words."""

import torch
from torch import Tensor


def bytes_of(words: Tensor) -> Tensor:
    """The bytes of 32-bit words, uint8 [..., 4] from int32 [...], the lowest first."""
    return words.contiguous().view(torch.uint8).view(*words.shape, 4)


def halves(packed: Tensor) -> Tensor:
    """The halves of bytes, the low one first: uint8 [..., 2 * n] from uint8 [..., n].

    >>> halves(torch.tensor([0x21, 0x43], dtype=torch.uint8)).tolist()
    [1, 2, 3, 4]
    """
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def paired(codes: Tensor) -> Tensor:
    """Bytes of two codes each, what `halves` takes apart: uint8 [..., n / 2] from uint8 [..., n]."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def signed(codes: Tensor) -> Tensor:
    """Codes from 0 to 255 as int8 from -128 to 127, all less by 128."""
    return (codes ^ 128).view(torch.int8)
