"""Gated convolutions against plain torch; where the kernel runs, see
`tests.helpers.triton_interpreter`.
"""

from typing import Any

import pytest
import torch

from tests.helpers.convolution_case import MAX_ROWS, TAPS, WIDTH, check_steps, empty_cache, weights
from tests.helpers.guards import no_host_sync
from tests.helpers.recurrence_case import forward_rows
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.layers.recurrence import triton_recurrence_ring, triton_short_convolution  # noqa: E402
from specdec.layers.recurrence.triton_short_convolution import convolve  # noqa: E402


@pytest.mark.parametrize(
    ("biased", "dtype", "padding"),
    [(True, torch.float32, 2), (False, torch.float16, 0), (True, torch.bfloat16, 3)],
)
def test_steps_and_prompts(biased: bool, dtype: torch.dtype, padding: int) -> None:
    """Prompts in pieces and steps of which any number of rows is rejected, of two requests."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter does not round to bfloat16")
    check_steps(convolve, DEVICE, biased=biased, dtype=dtype, padding=padding)


def test_bits_do_not_depend_on_company() -> None:
    """A prompt has the same numbers whole, in pieces and row by row, alone and among others."""
    torch.manual_seed(0)
    kernel, bias = weights(True, torch.float32, DEVICE)
    texts = torch.randn(2, 90, 3 * WIDTH, device=DEVICE)
    wholes = []
    for pieces in ([90], [80, 10], [7] * 10 + [1] * 20):
        cache, done, outputs = empty_cache(2, torch.float32, DEVICE), 0, []
        for count in pieces:
            rows = forward_rows(
                [1, 0], [done, 0], [count, 3], DEVICE, max_pending=MAX_ROWS, final=True
            )
            x = torch.cat([texts[0, done : done + count], texts[1, :3]])
            outputs.append(convolve(x, kernel, bias, cache, rows)[:count])
            done += count
        wholes.append(torch.cat(outputs))
    assert wholes[0].equal(wholes[1]) and wholes[0].equal(wholes[2])


@pytest.mark.parametrize("count", [1, 8, 9, 16, 17, 40])
def test_what_is_read_is_not_overwritten(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs, which run in any order, put rows into the ring only if none of its columns has two
    of the positions in use.
    """
    launched = []

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *args, **options: launched.append(
                (self.name, args[9] if self.name == "convolution" else None)
            )

    monkeypatch.setattr(triton_short_convolution, "_convolution_kernel", Recorder("convolution"))
    monkeypatch.setattr(triton_recurrence_ring, "_keep_kernel", Recorder("keep"))
    cache, (kernel, bias) = (
        empty_cache(1, torch.float32, DEVICE),
        weights(True, torch.float32, DEVICE),
    )
    rows = forward_rows([0], [20], [count], DEVICE, max_pending=MAX_ROWS, final=True)
    convolve(torch.zeros(count, 3 * WIDTH, device=DEVICE), kernel, bias, cache, rows)
    used = [position % cache.inputs.shape[1] for position in range(20 - TAPS + 1, 20 + count)]
    alone = len(used) == len(set(used))
    assert [name for name, _ in launched] == ["convolution"] + ["keep"] * (not alone) and (
        launched[0][1] is None
    ) is alone


def test_no_host_wait() -> None:
    """Nothing on the host asks the device for a number."""
    cache, (kernel, bias) = (
        empty_cache(2, torch.float32, DEVICE),
        weights(True, torch.float32, DEVICE),
    )
    rows = forward_rows([1], [0], [4], DEVICE, max_pending=4, final=False)
    with no_host_sync() if DEVICE.type == "cuda" else torch.inference_mode():
        convolve(torch.zeros(4, 3 * WIDTH, device=DEVICE), kernel, bias, cache, rows)
