"""Codes of a few bits within bytes and 32-bit words."""

import torch
from torch import Tensor


def bytes_of(words: Tensor) -> Tensor:
    """The bytes of 32-bit words, uint8 [..., 4] from int32 [...], the lowest first.

    Raises:
        TypeError: they are something else.
    """
    if words.dtype not in (torch.int32, torch.uint32):
        raise TypeError(f"words are {words.dtype}")
    return words.contiguous().view(torch.uint8).view(*words.shape, 4)


def halves(packed: Tensor) -> Tensor:
    """The halves of bytes, the low one first: uint8 [..., 2 * n] from uint8 [..., n].

    >>> halves(torch.tensor([0x21, 0x43], dtype=torch.uint8)).tolist()
    [1, 2, 3, 4]
    """
    return torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)


def paired(codes: Tensor) -> Tensor:
    """Bytes of two codes each, which `halves` splits: uint8 [..., n / 2] from uint8 [..., n]."""
    return codes[..., ::2] | (codes[..., 1::2] << 4)


def unpacked(packed: Tensor, bits: int, count: int) -> Tensor:
    """Codes from a stream of bits, the lowest first: uint8 [..., count] from uint8 [..., ceil(count
    * bits / 8)], or a longer one.

    >>> unpacked(torch.tensor([0b10_001_000, 0b0_100_011_0], dtype=torch.uint8), 3, 5).tolist()
    [0, 1, 2, 3, 4]
    """
    if bits == 8:
        return packed[..., :count]
    if bits == 4:
        return halves(packed)[..., :count]
    missing = -packed.shape[-1] % bits
    # as many bytes hold eight codes
    eights = torch.nn.functional.pad(packed, (0, missing)).unflatten(-1, (-1, bits))
    kind = torch.int32 if bits < 4 else torch.int64
    joined = torch.zeros(eights.shape[:-1], dtype=kind, device=packed.device)
    for place in range(bits):
        joined |= eights[..., place].to(kind) << 8 * place
    codes = [(joined >> bits * place & 2**bits - 1).to(torch.uint8) for place in range(8)]
    return torch.stack(codes, dim=-1).flatten(-2)[..., :count]


def signed(codes: Tensor, middle: int = 128) -> Tensor:
    """Codes from 0 to 255 as int8, all less by the middle one."""
    if middle == 128:
        return (codes ^ 128).view(torch.int8)
    return (codes.short() - middle).to(torch.int8)
