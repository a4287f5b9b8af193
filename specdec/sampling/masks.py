"""Which tokens a grammar allows, applied to the logits of a step before anything else."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from specdec.device.deviation import Deviation, mismatches, worst
from specdec.kernels.kernel import Kernel


@dataclass(slots=True)
class TokenMasks:
    """Masks of the requests of a batch that have a grammar.

    Attributes:
        words: int32 [n, rows, ceil(V / 32)]; bit b of word w allows token 32 w + b.
        places: int64 [num_reqs], where in `words` a request's masks are; -1 for a request without.
    """

    words: Tensor
    places: Tensor

    @classmethod
    def empty(cls, num_reqs: int, rows: int, vocab_size: int, memory: Tensor) -> TokenMasks:
        """Masks of no request yet, with room for all: in `memory`, int32 [any], or beside it."""
        shape = (num_reqs, rows, -(-vocab_size // 32))
        fits = len(memory) >= prod(shape)
        words = memory[: prod(shape)].view(shape) if fits else memory.new_empty(shape)
        return cls(words, torch.full((num_reqs,), -1, dtype=torch.int64, device=memory.device))


def mask_logits(logits: Tensor, masks: TokenMasks) -> None:
    """Writes -inf where a token is not allowed.

    Args:
        logits: [num_reqs, rows, V], contiguous, overwritten.
    """
    assert logits.is_contiguous() and logits.shape[:2] == (len(masks.places), masks.words.shape[1])
    if KERNEL.runs_on(logits.device):
        from specdec.sampling import triton_masks  # it imports Triton

        triton_masks.mask_logits(logits, masks.words, masks.places)
        return
    _mask_logits(logits, masks)


def _mask_logits(logits: Tensor, masks: TokenMasks) -> None:
    """`mask_logits` in plain torch."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    refused = (~masks.words).view(torch.uint8)[..., None] >> bits & 1
    refused = refused.flatten(-2).bool()[..., : logits.shape[-1]]
    free = (masks.places < 0)[:, None, None]
    logits.masked_fill_(refused.index_select(0, masks.places.clamp(min=0)) & ~free, -torch.inf)


def check_masks(device: torch.device) -> Deviation:
    """Random masks in every type, a vocabulary that ends within a word, rows without a grammar."""
    from specdec.sampling import triton_masks

    generator = torch.Generator().manual_seed(0)
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        vocab_size = 2 * triton_masks.SLICE + 45
        logits = torch.randn(4, 3, vocab_size, generator=generator).to(dtype)
        shape = 2, 3, -(-vocab_size // 32)
        words = torch.randint(-(2**31), 2**31, shape, generator=generator).int()
        masks = TokenMasks(words, torch.tensor([1, -1, 0, -1]))
        masked = logits.to(device, copy=True)
        triton_masks.mask_logits(masked, words.to(device), masks.places.to(device))
        _mask_logits(logits, masks)
        found.append(mismatches(masked, logits))
    return worst(found)


KERNEL = Kernel("masks", check_masks)
