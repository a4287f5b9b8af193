"""How far a kernel is from the right answer, and how far it may be: by what plain torch is off, on
the same numbers.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor


class Deviation(NamedTuple):
    """How far a kernel is off, and how far it may be."""

    error: float
    bound: float


def deviation(actual: Tensor, plain: Tensor, exact: Tensor) -> Deviation:
    """Root mean square error of `actual`, at most twice that of `plain` and one last place.

    Args:
        actual: what is checked, on any device.
        plain: the same from plain torch, in the same type, on any device.
        exact: the same in float64, from the very numbers that both were given.

    Raises:
        ArithmeticError: `plain` has less than half of its digits right, and so proves nothing.
        ValueError: they are of different shapes or types.
    """
    _alike(actual, plain)
    _alike(plain.double(), exact)
    unit = torch.finfo(actual.dtype).eps
    pairs = ((actual, exact), (plain, exact), (exact, 0))
    error, usual, size = (_size(x.cpu().double() - e) for x, e in pairs)
    if not usual <= unit**0.5 * size:
        raise ArithmeticError(f"plain torch is off by {usual:.1e} at numbers of about {size:.2g}")
    return Deviation(error, 2 * usual + unit * size)


def worst(deviations: Iterable[Deviation]) -> Deviation:
    """The one that is nearest to its bound, or farthest beyond it."""

    def excess(found: Deviation) -> float:
        share = found.error / found.bound if found.bound else math.inf if found.error else 0.0
        return math.inf if math.isnan(share) else share

    return max(deviations, key=excess)


def mismatches(actual: Tensor, expected: Tensor) -> Deviation:
    """How many numbers differ, of which none may.

    Raises:
        ValueError: they are of different shapes or types.
    """
    _alike(actual, expected)
    return Deviation(float((actual.cpu() != expected.cpu()).sum()), 0.0)


def normal(*shape: int) -> Tensor:
    """Standard normal numbers in float32 on the CPU, always the same for a shape: what a kernel's
    check computes from.
    """
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def _alike(actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        kinds = (f"{tensor.dtype} {list(tensor.shape)}" for tensor in (actual, expected))
        raise ValueError(" where belongs ".join(kinds))


def _size(numbers: Tensor) -> float:
    return float(numbers.square().mean().sqrt())
