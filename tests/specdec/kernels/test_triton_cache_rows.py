"""Moving rows of caches on the kernel; where it runs, see `tests.helpers.triton_interpreter`."""

import pytest
import torch

from specdec.model.cache_rows import KERNEL, check_cache_rows
from tests.helpers.cache_rows_case import SPECS, assert_moves, filled
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.model import triton_cache_rows  # noqa: E402 (only where Triton can run)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_paths_move_to_the_front(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """In every layer, a shared one once, and nothing else is touched; also rows of more than a
    piece.
    """
    assert KERNEL.runs_on(DEVICE)
    monkeypatch.setattr(triton_cache_rows, "PIECE", 128)
    assert_moves(filled(SPECS, dtype, DEVICE))


def test_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words of every length pass, and rows that stay where they were are noticed."""
    assert check_cache_rows(DEVICE).error == 0
    monkeypatch.setattr(triton_cache_rows, "move_rows", lambda table, slots, path: None)
    assert check_cache_rows(DEVICE).error > 0
