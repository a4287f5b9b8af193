"""Convolutions over the rows of blocks against plain torch; where the kernel runs, see
`tests.helpers.triton_interpreter`.
"""

import pytest
import torch

from specdec.layers.ops.grouped_convolution import Side
from specdec.layers.ops.grouped_convolution import mix_rows as plainly
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

# Imported only where Triton can run.
from specdec.layers.ops.triton_grouped_convolution import (  # noqa: E402
    CHANNELS_PER_PROGRAM,
    mix_rows,
)


def inputs(
    blocks: int, width: int, hidden: int, taps: int, group: int, dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    shapes = (
        (blocks * width, hidden),
        (blocks * width, 2 * taps * hidden // group),
        (2, taps, hidden),
    )
    x, dynamic, base = (torch.randn(shape).to(DEVICE, dtype) for shape in shapes)
    return x, dynamic, base


@pytest.mark.parametrize(
    ("blocks", "width", "hidden", "taps", "group", "dtype", "side"),
    [
        (3, 8, CHANNELS_PER_PROGRAM + 48, 2, 16, torch.float32, 0),
        (2, 3, 40, 3, 4, torch.float16, 1),
        (2, 1, 32, 1, 32, torch.bfloat16, 0),
    ],
)
def test_convolution(
    blocks: int, width: int, hidden: int, taps: int, group: int, dtype: torch.dtype, side: Side
) -> None:
    """As exact as plain torch: more channels than a program takes, blocks of one row,
    either side.
    """
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter does not round to bfloat16")
    x, dynamic, base = inputs(blocks, width, hidden, taps, group, dtype)
    exact = plainly(x.double(), dynamic.double(), base.double(), width, side)
    assert_as_exact(
        mix_rows(x, dynamic, base, width, side), plainly(x, dynamic, base, width, side), exact
    )


def test_no_block_sees_another() -> None:
    """A block has the same bits alone and among others that are not even numbers."""
    x, dynamic, base = inputs(3, 4, 64, 2, 16, torch.float32)
    alone = mix_rows(x[4:8].contiguous(), dynamic[4:8].contiguous(), base, 4, 0)
    x[:4], x[8:] = torch.nan, torch.nan
    assert mix_rows(x, dynamic, base, 4, 0)[4:8].equal(alone)


def test_no_host_wait() -> None:
    """Nothing on the host asks the device for a number."""
    x, dynamic, base = inputs(2, 4, 64, 2, 16, torch.float32)
    with no_host_sync() if DEVICE.type == "cuda" else torch.inference_mode():
        mix_rows(x, dynamic, base, 4, 1)
