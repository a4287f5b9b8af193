"""What rank 0 tells the others: messages of a few numbers, with bytes behind them where there is more to say, over gloo."""

import ctypes
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple

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
        self._under_way: list[tuple[Any, Tensor]] = []  # with what they send

    def say(self, numbers: Sequence[int], payload: bytes = b"") -> None:
        """Sends a message, without waiting for those who are not listening yet.

        Raises:
            RuntimeError: a rank has ended.
        """
        self.flush()
        data = [torch.tensor([len(payload), *numbers, *[0] * (NUMBERS - 1 - len(numbers))])]
        if payload:
            data.append(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._under_way = [(dist.broadcast(one, group_src=0, group=self._group, async_op=True), one) for one in data]

    def flush(self) -> None:
        """Waits until the last message has come to all.

        Raises:
            RuntimeError: a rank has ended.
        """
        under_way, self._under_way = self._under_way, []
        for work, _ in under_way:
            work.wait()

    def close(self, numbers: Sequence[int]) -> None:
        """Sends the last message, and waits until it has come to all.

        What sends it is kept for ever. Else gloo's thread may be the last to let go of it, for which it needs the interpreter;
        where that ends meanwhile, the process aborts.

        Raises:
            RuntimeError: a rank has ended.
        """
        self.say(numbers)
        for work, _ in self._under_way:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(work))
        self.flush()

    def hear(self) -> Message:
        """Waits for the next message, however long.

        Raises:
            RuntimeError: a rank has ended.
        """
        length, *numbers = self._heard(torch.zeros(NUMBERS, dtype=torch.int64)).tolist()
        payload = self._heard(torch.empty(length, dtype=torch.uint8)).numpy().tobytes() if length else b""
        return Message(numbers, payload)

    def _heard(self, data: Tensor) -> Tensor:
        dist.broadcast(data, group_src=0, group=self._group)
        return data
