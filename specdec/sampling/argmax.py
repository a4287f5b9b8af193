"""The token with the highest logit of every row: by torch, or by our own kernel."""

import math

import torch
from torch import Tensor

from specdec.device.deviation import Deviation, mismatches, worst
from specdec.kernels.kernel import Kernel


def argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row of logits [..., V] is highest, and whether it is finite there.

    Returns:
        int64 [...], of equal logits the first, a NaN above all; bool [...], False for a row that
        has a NaN or +inf, or only -inf.
    """
    if not KERNEL.runs_on(logits.device):
        best = logits.max(dim=-1)  # on a CPU faster than argmax
        # what isfinite gives, in two operations instead of four
        return best.indices, best.values.abs() < torch.inf
    from specdec.kernels import triton_argmax  # it imports Triton

    return triton_argmax.argmax(logits)


def check_argmax(device: torch.device) -> Deviation:
    """Rows of several slices: random ones, equal logits, and what is not finite; in every type."""
    from specdec.kernels import triton_argmax

    logits = torch.randn(8, 3 * triton_argmax.SLICE - 5, generator=torch.Generator().manual_seed(0))
    logits[4, [77, 5000]] = 9.0
    logits[5, 5000] = math.nan
    logits[6, 5000] = math.inf
    logits[7] = -math.inf

    def off(dtype: torch.dtype) -> Deviation:
        expected = logits.to(dtype).max(dim=-1)
        indices, finite = triton_argmax.argmax(logits.to(device, dtype))
        return worst(
            [mismatches(indices, expected.indices), mismatches(finite, expected.values.isfinite())]
        )

    return worst(map(off, triton_argmax.DTYPES))


KERNEL = Kernel("argmax", check_argmax)
