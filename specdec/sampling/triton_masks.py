"""Masking logits in Triton, in place; logits that may stay are neither read nor written."""

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

WORDS = 128
"""Words of a mask that a program reads."""

SLICE = 32 * WORDS
"""Logits that it masks."""


@triton.jit
def _mask_logits_kernel(
    logits: tl.tensor,  # [requests * rows, vocabulary]
    words: tl.tensor,  # int32 [masks * rows, width]
    places: tl.tensor,  # int64 [requests]
    rows: tl.tensor,
    vocab_size: tl.tensor,
    width: tl.tensor,
    WORDS: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    await_previous(OVERLAP)
    place = tl.load(places + row // rows)
    if place >= 0:
        words += (place * rows + row % rows) * width
        mask = tl.load(words + word, mask=word < width, other=-1)
        bit = tl.arange(0, 32)
        token = word[:, None] * 32 + bit[None, :]
        refused = ((mask[:, None] >> bit[None, :]) & 1) == 0
        nothing = tl.full((WORDS, 32), float("-inf"), tl.float32).to(logits.dtype.element_ty)
        tl.store(logits + row * vocab_size + token, nothing, mask=refused & (token < vocab_size))


def mask_logits(logits: Tensor, words: Tensor, places: Tensor) -> None:
    """Writes -inf into `logits` [num_reqs, rows, V] where `TokenMasks` do not allow a token."""
    num_reqs, rows, vocab_size = logits.shape
    assert logits.is_contiguous() and words.is_contiguous() and words.shape[1] == rows
    sizes, options = (rows, vocab_size, words.shape[2]), overlap_options(logits.device)
    with on_device(logits):
        launch = _mask_logits_kernel[(num_reqs * rows, triton.cdiv(vocab_size, SLICE))]
        launch(logits, words, places, *sizes, WORDS=WORDS, num_warps=4, **options)
