"""How near a computation has to come to the right answer: as near as the plain one does, whatever machine both run on."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

FLOOR = 8
"""Units in the last place of the largest number that are always allowed; see `assert_as_exact`."""


def assert_as_exact(actual: Tensor, plain: Tensor, exact: Tensor, *, factor: float = 2) -> None:
    """Checks that the largest error of `actual` is at most `factor` times that of `plain`, plus `FLOOR` units in the last place.

    How large rounding errors are depends on the order of sums, and so on vector widths, libraries and compilers, which a fixed
    tolerance would have to know. Here the plain computation measures it: both round as many numbers of the same type and sizes, on
    the machine at hand, so their largest errors are of one size there and on any other. Where few numbers are added the plain
    one may be exact by luck; the floor, a few roundings of the largest number in the answer, leaves room for that. A key that is
    lost or a wrong factor is off by thousands of such units.

    Args:
        actual: what is tested.
        plain: the same from plain torch, same shape and dtype.
        exact: the same in float64, from the very numbers that both were given.
        factor: more than 1, since the worst of a few thousand roundings is a matter of luck.

    Raises:
        AssertionError: `actual` is too far away, or `plain` has less than half of its digits right and so proves nothing.
    """
    assert exact.dtype == torch.float64, "the right answer has to be better than what is tested"
    assert actual.shape == plain.shape == exact.shape, (actual.shape, plain.shape, exact.shape)
    assert actual.dtype == plain.dtype, (actual.dtype, plain.dtype)
    if not exact.numel():
        return
    found, usual = ((x.double() - exact).abs() for x in (actual, plain))
    scale, unit = float(exact.abs().max()), torch.finfo(actual.dtype).eps
    assert float(usual.max()) <= scale * unit**0.5, f"the plain version is off by {usual.max():.2e} at numbers up to {scale:.3g}"
    most = factor * float(usual.max()) + FLOOR * unit * scale
    assert float(found.max()) <= most, (  # false for NaN, too
        f"off by {found.max():.2e} (the plain version by {usual.max():.2e}, {most:.2e} allowed at numbers up to {scale:.3g}), "
        f"first at {(~(found <= most)).nonzero()[0].tolist()}"
    )


class Float64(TorchFunctionMode):
    """Within it, code that asks torch for float32 gets float64, so that a model cast to float64 is computed in it throughout.

    Norms, softmax and angles of transformers' models are otherwise rounded to float32 whatever the model's type.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        args, kwargs = tuple(map(wide, args)), {name: wide(value) for name, value in (kwargs or {}).items()}
        return torch.Tensor.double(args[0]) if func is torch.Tensor.float else func(*args, **kwargs)
