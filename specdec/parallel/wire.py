"""What rank 0 tells the others: messages of a few numbers, with bytes behind them where there is more to say, over gloo."""

from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.parallel.group import Group

NUMBERS = 12
"""Of a message, its length in bytes among them."""

_FOREVER = timedelta(days=365)  # an idle engine says nothing; that a rank has ended is told by its connection


class Message(NamedTuple):
    """What was said.

    Attributes:
        numbers: `NUMBERS - 1` of them, 0 where fewer were said.
        payload: what does not fit them; empty for most steps.
    """

    numbers: list[int]
    payload: bytes


class Wire:
    """From rank 0 to all others; made by all ranks at once.

    Args:
        group: the ranks.
    """

    def __init__(self, group: Group) -> None:
        # Of its own, so that what hosts exchange within a step cannot be taken for what begins the next one.
        self._group = dist.new_group(backend="gloo", timeout=_FOREVER)
        assert group.size == dist.get_world_size(self._group)
        self._numbers = torch.zeros(NUMBERS, dtype=torch.int64)

    def say(self, numbers: Sequence[int], payload: bytes = b"") -> None:
        """Sends a message; returns once it is on its way, whatever the others do.

        Raises:
            RuntimeError: a rank has ended.
        """
        self._numbers.copy_(torch.tensor([len(payload), *numbers, *[0] * (NUMBERS - 1 - len(numbers))]))
        self._broadcast(self._numbers)
        if payload:
            self._broadcast(torch.frombuffer(bytearray(payload), dtype=torch.uint8))

    def hear(self) -> Message:
        """Waits for the next message, however long.

        Raises:
            RuntimeError: a rank has ended.
        """
        self._broadcast(self._numbers)
        length, *numbers = self._numbers.tolist()
        payload = torch.empty(length, dtype=torch.uint8)
        if length:
            self._broadcast(payload)
        return Message(numbers, payload.numpy().tobytes())

    def _broadcast(self, data: Tensor) -> None:
        dist.broadcast(data, group_src=0, group=self._group)
