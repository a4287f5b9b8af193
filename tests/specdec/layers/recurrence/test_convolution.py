"""Gated convolutions in plain torch, against the whole sequence at once."""

import pytest

from specdec.layers.recurrence.convolution import convolve
from tests.helpers.convolution_case import check_steps


@pytest.mark.parametrize("biased", [True, False])
def test_steps_and_prompts(biased: bool) -> None:
    """Prompts in pieces and steps of which any number of rows is rejected, of two requests."""
    check_steps(convolve, "cpu", biased=biased)
