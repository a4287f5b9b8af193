"""What counts as an error too many."""

import math

import pytest
import torch

from specdec.device.deviation import Deviation, deviation, mismatches, worst


def test_deviations() -> None:
    """Twice the plain error and a rounding are allowed; NaN is worse than anything; a lost number
    is a mismatch.
    """
    exact = torch.linspace(1, 2, 100, dtype=torch.float64)
    plain = exact.bfloat16()
    near = deviation(plain, plain, exact)
    assert 0 < near.error < near.bound < 4 * near.error + 0.02
    far = deviation((exact * 1.1).bfloat16(), plain, exact)
    assert far.error > far.bound
    lost = deviation(plain.clone().fill_(math.nan), plain, exact)
    assert worst([near, far, lost]) is lost and worst([far, near]) is far
    assert worst([Deviation(0.0, 0.0), near]) is near and worst([near, Deviation(1.0, 0.0)]) == (
        1.0,
        0.0,
    )
    with pytest.raises(
        ArithmeticError, match=r"^plain torch is off by 4\.\de-01 at numbers of about 1\.5$"
    ):
        deviation(plain, (exact * 1.3).bfloat16(), exact)
    with pytest.raises(ValueError, match="where belongs"):  # and does not spread over the others
        deviation(plain[:1], plain, exact)
    with pytest.raises(ValueError, match="where belongs"):
        mismatches(exact, plain)
    one, other = torch.tensor([1, 2, 3]), torch.tensor([1, 5, 3])
    assert mismatches(one, one) == (0.0, 0.0) and mismatches(one, other) == (1.0, 0.0)
