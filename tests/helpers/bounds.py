"""How near a computation has to come to the right answer: as near as the plain one does, whatever
machine both run on.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

FLOOR = 1
"""Units in the last place that are always allowed; see `assert_as_exact`."""

LUCK = 100
"""How many times the plain version's error a single row of a whole model may have."""


def assert_as_exact(actual: Tensor, plain: Tensor, exact: Tensor, *, factor: float = 2) -> None:
    """Checks that the error of `actual` is at most `factor` times that of `plain`, plus `FLOOR`
    units in the last place.

    How large rounding errors are depends on the order of sums, and so on vector widths, libraries
    and compilers, which a fixed tolerance would have to know. Here the plain computation measures
    it: both round equally many numbers of the same sizes to the same types, so their errors are of
    one size, on this machine and on any other. Errors are root mean squares, since the worst of a
    few thousand roundings is a matter of luck; sizes are too. Where few numbers are added the plain
    one may be exact by luck; the floor, a rounding or two, leaves room for that. A key that is lost
    or a factor off by 1e-3 is thousands of them.

    Long sums need care: a library that cuts them in pieces errs less than one that does not, by
    more than any factor that would still mean something. A plain version for them adds term by
    term, the worst order, as `attention_case.attention` does.

    Args:
        actual: what is tested.
        plain: the same from plain torch, same shape and dtype.
        exact: the same in float64, from the very numbers that both were given.
        factor: 1.5 is the most that was seen of whole models, and 1.3 of kernels, on vectors of 128
            to 512 bits.

    Raises:
        AssertionError: `actual` is too far away, or `plain` has less than half of its digits right
            and so proves nothing.
    """
    error = error_of(actual, plain, exact, factor=factor)
    worst = (actual.detach().double() - exact.detach()).abs().argmax()
    assert error.found <= error.most, (  # false for NaN, too
        f"off by {error.found:.2e} (the plain version by {error.usual:.2e}, {error.most:.2e}"
        f" allowed at numbers of about {error.size:.3g}), most at"
        f" {[int(i) for i in torch.unravel_index(worst, exact.shape)]}"
    )


def assert_rows_as_exact(
    actual: Tensor, plain: Tensor, exact: Tensor, *, factor: float = 2
) -> None:
    """`assert_as_exact` of the outputs of a whole model, [T, V], row by row.

    A model multiplies the roundings of some rows by a thousand, as where two experts or keys are
    all but equal, so that few rows make up the root mean square of all and luck decides about them.
    The geometric mean of the rows' ratios is to be `factor` at most; none may be `LUCK`, of which
    17 was seen.
    """
    rows = [error_of(*parts) for parts in zip(actual, plain, exact, strict=True)]
    unit = torch.finfo(actual.dtype).eps
    ratios = torch.tensor([row.found / (row.usual + FLOOR * unit * row.size) for row in rows])
    mean, worst = float(ratios.log().mean().exp()), int(ratios.argmax())
    assert mean <= factor and ratios[worst] < LUCK, (  # false for NaN, too
        f"rows are off by {mean:.2g} times as much as of the plain version, and row {worst} by"
        f" {float(ratios[worst]):.2g}"
    )


class Error(NamedTuple):
    """Root mean squares."""

    found: float  # of the error
    most: float  # that is allowed
    usual: float  # of the plain version's error
    size: float  # of the numbers


def error_of(actual: Tensor, plain: Tensor, exact: Tensor, *, factor: float = 2) -> Error:
    """What `assert_as_exact` judges; the arguments are its own."""
    assert exact.dtype == torch.float64, "the right answer has to be better than what is tested"
    assert actual.shape == plain.shape == exact.shape, (actual.shape, plain.shape, exact.shape)
    assert actual.dtype == plain.dtype, (actual.dtype, plain.dtype)
    actual, plain, exact = (x.detach() for x in (actual, plain, exact))
    unit = torch.finfo(actual.dtype).eps
    size, found, usual = (
        float(x.square().mean().sqrt())
        for x in (exact, actual.double() - exact, plain.double() - exact)
    )
    assert usual <= unit**0.5 * size, (
        f"the plain version is off by {usual:.2e} at numbers of about {size:.3g}"
    )
    return Error(found, factor * usual + FLOOR * unit * size, usual, size)


class Float64(TorchFunctionMode):
    """Within it, code that asks torch for float32 gets float64, so that a model cast to float64 is
    computed in it throughout.

    Norms, softmax and angles of transformers' models are otherwise rounded to float32 whatever the
    model's type.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        args, kwargs = (
            tuple(map(wide, args)),
            {name: wide(value) for name, value in (kwargs or {}).items()},
        )
        return torch.Tensor.double(args[0]) if func is torch.Tensor.float else func(*args, **kwargs)


@torch.inference_mode()
def in_float64(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a copy of `model` in float64 returns."""
    wide = copy.deepcopy(model).double()
    config: Any = getattr(wide, "config", None)
    if config is not None:
        # its products of several experts at once have no float64
        config._experts_implementation = "eager"
    with Float64():
        return wide(*args, **kwargs)
