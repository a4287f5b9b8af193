"""Sums over ranks within a norm, one rank of three at a time: the memory of the others holds what
they would have written.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.layers.linear import DenseLinear
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Join
from specdec.layers.sharded import SummedLinear
from specdec.parallel.shared_rows import MAX_ROWS
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.kernels.triton_norm import add_rms_norm  # noqa: E402 (only where Triton can run)
from specdec.layers.ops.kernels import TritonOps  # noqa: E402

SIZE, WIDTH = 3, 40
FLAGS = 2 * MAX_ROWS * WIDTH  # numbers before them


class Memory:
    """Of all ranks, as each sees it; rows of `dtype` in two places, then flags."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._bytes = torch.zeros(
            SIZE, FLAGS * dtype.itemsize + MAX_ROWS * SIZE * 4, dtype=torch.uint8, device=DEVICE
        )
        self.rows = (
            self._bytes[:, : FLAGS * dtype.itemsize].view(dtype).view(SIZE, 2, MAX_ROWS, WIDTH)
        )
        self.flags = (
            self._bytes[:, FLAGS * dtype.itemsize :].view(torch.int32).view(SIZE, MAX_ROWS, SIZE)
        )
        self.places = torch.tensor([one.data_ptr() for one in self._bytes], device=DEVICE)

    def of(self, rank: int, epochs: Tensor) -> Any:
        """What a rank is given."""
        return SimpleNamespace(
            rank=rank,
            size=SIZE,
            width=WIDTH,
            dtype=self.rows.dtype,
            places=self.places,
            epochs=epochs,
        )


def write(memory: Memory, rank: int, parts: Tensor, epochs: Tensor) -> None:
    """The others of [SIZE, rows, WIDTH] write their rows for the next sum of `rank`, and say so."""
    for row in range(parts.shape[1]):
        epoch = int(epochs[row]) + 1
        for other in set(range(SIZE)) - {rank}:
            memory.rows[other, epoch % 2, row] = parts[other, row]
            memory.flags[rank, row, other].fill_(epoch)


def exchanged(memory: Memory, rank: int, parts: Tensor, epochs: Tensor) -> tuple[Tensor, Tensor]:
    """One rank's norm of the sum of parts [SIZE, (p,) rows, WIDTH]."""
    whole = (parts.sum(1) if parts.ndim == 4 else parts).to(memory.rows.dtype)
    write(memory, rank, whole, epochs)
    residual, weight = (
        torch.ones_like(whole[0]),
        torch.linspace(0.5, 1.5, WIDTH, device=DEVICE).to(whole.dtype),
    )
    return add_rms_norm(
        parts[rank].contiguous(), residual, weight, 1e-6, ranks=memory.of(rank, epochs)
    )


def expected(parts: Tensor) -> tuple[Tensor, Tensor]:
    """The same of a sum in the order of ranks, by the kernel without ranks."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    weight = torch.linspace(0.5, 1.5, WIDTH, device=DEVICE).to(total.dtype)
    return add_rms_norm(total, torch.ones_like(total), weight, 1e-6)


@pytest.mark.parametrize(
    ("rank", "dtype"), [(rank, (torch.float16, torch.float32)[rank % 2]) for rank in range(SIZE)]
)
def test_sums_have_the_bits_of_the_order_of_ranks(rank: int, dtype: torch.dtype) -> None:
    """Catches another order, a place that the sum before still uses, a row that nobody is told of,
    and flags of another row.
    """
    memory, epochs = Memory(dtype), torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    for number, rows in enumerate((3, 1, 2, 1), start=1):
        parts = torch.randn(SIZE, rows, WIDTH, generator=generator).to(DEVICE, dtype)
        got = exchanged(memory, rank, parts, epochs)
        for one, right in zip(got, expected(parts), strict=True):
            assert torch.equal(one, right)
        assert epochs[0] == number
        for other in set(range(SIZE)) - {rank}:
            assert memory.flags[other, 0, rank] == number
        assert torch.equal(memory.rows[rank, number % 2, 0], parts[rank, 0])
    assert epochs.tolist()[:4] == [4, 2, 1, 0]


def test_partial_sums_are_rounded_before_ranks_add() -> None:
    memory, epochs = Memory(torch.float16), torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE)
    parts = torch.randn(SIZE, 2, 3, WIDTH, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = exchanged(memory, 1, parts, epochs)
    for one, other in zip(got, expected(parts.sum(1).half()), strict=True):
        assert torch.equal(one, other)


def test_a_rank_that_says_nothing_is_waited_for() -> None:
    """Catches a sum with what lay there before: with an end to its patience the kernel ends, and is
    wrong.
    """
    memory, epochs = Memory(torch.float32), torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE)
    parts = torch.randn(SIZE, 1, WIDTH, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    flags, looks = memory.flags, 3
    residual, weight = torch.zeros(1, WIDTH, device=DEVICE), torch.ones(WIDTH, device=DEVICE)
    _, stream = add_rms_norm(
        parts[0], residual, weight, 1e-6, ranks=memory.of(0, epochs), max_tries=looks
    )
    assert torch.equal(stream, parts[0])  # nobody else has written
    assert flags[1, 0, 0] == flags[2, 0, 0] == 1
    assert flags[0].eq(0).all()


def test_layers_leave_the_sum_to_the_norm() -> None:
    """Catches a sum before the kernel as well, and more rows than it takes."""
    memory, epochs = Memory(torch.float32), torch.zeros(MAX_ROWS, dtype=torch.int32, device=DEVICE)
    generator = torch.Generator().manual_seed(3)
    x, weights = (
        torch.randn(SIZE, rows, 24, generator=generator).to(DEVICE) for rows in (2, WIDTH)
    )
    parts = torch.stack(
        [DenseLinear(weight)(rows) for rows, weight in zip(x, weights, strict=True)]
    )
    write(memory, 1, parts, epochs)
    ops = TritonOps(DEVICE, torch.float32, ranks=memory.of(1, epochs))
    nobody: Any = object()  # a group that cannot be asked
    linear, residual = (
        SummedLinear(DenseLinear(weights[1]), nobody),
        torch.ones(2, WIDTH, device=DEVICE),
    )
    join = Join(Norm(torch.linspace(0.5, 1.5, WIDTH, device=DEVICE), 1e-6))
    for got, right in zip(
        ops.project_add(linear, x[1], residual, join), expected(parts), strict=True
    ):
        assert torch.equal(got, right)
    write(memory, 1, parts, epochs)
    for got, right in zip(
        ops.add(parts[1], residual, join, None, nobody), expected(parts), strict=True
    ):
        assert torch.equal(got, right)
    many = MAX_ROWS + 1
    with pytest.raises(AttributeError, match="'object' object has no"):  # the group is asked
        ops.project_add(
            linear, x[1, :1].expand(many, -1), residual[:1].expand(many, -1).contiguous(), join
        )
