"""The token with the highest logit of every row: by torch, or on CUDA devices by our own kernel."""

from functools import lru_cache

import torch
from torch import Tensor

from specdec.kernels.triton_launch import unavailable_reasons


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row of logits [..., V] is highest, and whether it is finite there.

    Returns:
        int64 [...], of equal logits the first, a NaN above all; bool [...], False for a row that has a NaN or +inf, or only -inf.
    """
    if not _on_triton(logits.device):
        best = logits.max(dim=-1)  # on a CPU faster than argmax
        return best.indices, best.values.abs() < torch.inf  # what isfinite gives, in two operations instead of four
    from specdec.kernels import triton_argmax  # it imports Triton

    return triton_argmax.argmax(logits)


@lru_cache(maxsize=16)
def _on_triton(device: torch.device) -> bool:
    """Whether the kernel runs on `device`; it has not been run on an AMD GPU yet."""
    return torch.version.hip is None and not unavailable_reasons(device)
