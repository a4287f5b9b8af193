"""Masks of grammars on the kernel; where it runs, see `tests.helpers.triton_interpreter`."""

import pytest
import torch

from specdec.sampling.masks import KERNEL, TokenMasks, check_masks, mask_logits
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.sampling import triton_masks  # noqa: E402 (only where Triton can run)


def test_more_masks_than_are_in_use() -> None:
    """Of memory that is shared by steps, places say what counts; a request without a place keeps
    its logits.
    """
    assert KERNEL.runs_on(DEVICE)
    logits = torch.zeros(3, 2, 40, device=DEVICE)
    words = torch.full((3, 2, 2), 5, dtype=torch.int32, device=DEVICE)
    mask_logits(logits, TokenMasks(words, torch.tensor([-1, 0, -1], device=DEVICE)))
    allowed = [0, 2, 32, 34]
    assert torch.equal((logits[1] == 0).nonzero()[:, 1].cpu(), torch.tensor(allowed * 2))
    assert not logits[0].any() and not logits[2].any()


def test_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every type passes, and a kernel that does nothing is noticed."""
    assert check_masks(DEVICE).error == 0
    monkeypatch.setattr(triton_masks, "mask_logits", lambda logits, words, places: None)
    assert check_masks(DEVICE).error > 0
