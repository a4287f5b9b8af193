"""Sums over ranks in one kernel: each reads all others' terms from memory that they share, in the
order of ranks.

torch's own kernel (`torch.ops.symm_mem`), on NVIDIA's GPUs of one machine, for the few rows of a
step. It can be captured, and gives the same bits whatever the size of a message. NVLink multicast,
which it does not need, is never used.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from specdec.parallel.consent import made_by_all
from specdec.parallel.ordered import sum_in_order

logger = logging.getLogger(__name__)

DTYPES = (torch.bfloat16, torch.float32)

ALIGNMENT = 16
"""Bytes that a message, and where it lies, are a multiple of."""


class OneShot:
    """Made by all ranks together, once; all its sums are launched in the same order on every rank,
    one after another.

    Args:
        size: ranks.
        process_group: of torch, over the device.
        device: of this rank.
        most: bytes of a message; None takes `max_bytes`.

    Raises:
        RuntimeError: the devices do not share memory.
    """

    def __init__(
        self, size: int, process_group: Any, device: torch.device, most: int | None = None
    ) -> None:
        import torch.distributed._symmetric_memory as symmetric

        self._sum = torch.ops.symm_mem.one_shot_all_reduce_copy
        self.max_bytes = most or max_bytes(size)
        self._size, self._process_group, self._name = size, process_group, process_group.group_name
        self._memory = symmetric.empty(self.max_bytes, dtype=torch.uint8, device=device)
        symmetric.rendezvous(self._memory, process_group)

    def takes(self, x: Tensor) -> bool:
        """Whether this kernel adds up such messages."""
        return takes(x, self.max_bytes)

    def __call__(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x` [...], which `takes` has let pass."""
        shared = self._memory[: x.nbytes].view(x.dtype).view(x.shape)
        total: Tensor = self._sum(shared, x, "sum", self._name)
        return total

    def is_right(self) -> bool:
        """Whether sums of one row and of many have the bits of those in order."""
        found = []  # of all, since the other ranks go through them all as well
        for dtype in DTYPES:
            rows = torch.randn(16, 1024, device=self._memory.device).to(dtype)
            found += [self._is_right_for(x) for x in (rows, rows[:1])]
        return all(found)

    def _is_right_for(self, x: Tensor) -> bool:
        expected = sum_in_order(x, self._size, self._process_group)
        try:
            return torch.equal(self(x), expected)
        except RuntimeError as error:  # the kernel refuses before it is launched, and on all ranks
            logger.warning("%s", " ".join(str(error).split())[:200])
            return False


def one_shot(
    size: int, process_group: Any, device: torch.device, least: Callable[[int], int]
) -> OneShot | None:
    """This rank's, once all have agreed with the reference; None where there is none, which one
    line of the log says of a GPU.

    Args:
        size, process_group, device: see `OneShot`.
        least: the smallest of all ranks' numbers.
    """
    if device.type != "cuda" or torch.version.hip:
        return None
    instead = "ranks add up by NCCL alone, not in one kernel"
    return made_by_all(
        lambda: OneShot(size, process_group, device), OneShot.is_right, least, instead
    )


def max_bytes(size: int) -> int:
    """Most bytes of a message: beyond, rings and trees are faster, for here each rank reads all of
    every other one's.
    """
    return 512 * 1024 if size <= 4 else 256 * 1024


def takes(x: Tensor, most: int) -> bool:
    """Whether the kernel is written for such a message.

    >>> x = torch.zeros(65, 4096, dtype=torch.bfloat16)
    >>> [takes(x[:rows], max_bytes(2)) for rows in (0, 1, 64, 65)]
    [False, True, True, False]
    >>> takes(torch.zeros(1, 4, dtype=x.dtype), 1024), takes(x[:1].half(), 1024)
    (False, False)
    """
    fits = 0 < x.nbytes <= most and x.nbytes % ALIGNMENT == 0 and x.data_ptr() % ALIGNMENT == 0
    return x.dtype in DTYPES and fits and x.is_contiguous()
