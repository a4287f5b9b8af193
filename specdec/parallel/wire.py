"""What rank 0 tells the others: messages of a few numbers, with bytes behind them where there is
more to say, over gloo.
"""

import struct
from collections.abc import Sequence
from datetime import timedelta
from hashlib import blake2b
from hmac import compare_digest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from specdec.parallel.group import Group, end_group

NUMBERS = 12
"""Numbers of a message, its length in bytes among them."""

_HEAD = struct.Struct(f"<{NUMBERS}q")
_SEAL = 16  # bytes
_MOST = 2**31  # bytes of a payload

# an idle engine says nothing; that a rank has ended is told by its connection
_FOREVER = timedelta(days=365)


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
        secret: seals each message with its place among all, so that whoever else may reach a rank's
            socket is not heard.
    """

    def __init__(self, group: Group, secret: bytes = b"") -> None:
        # Of its own, so that what hosts exchange within a step cannot be taken for what begins the
        # next one.
        self._group: Any = dist.new_group(backend="gloo", timeout=_FOREVER)
        assert group.size == dist.get_world_size(self._group)
        self._under_way: list[tuple[Any, Tensor]] = []  # with what they send
        self._secret, self._count = secret, 0  # messages so far

    def say(self, numbers: Sequence[int], payload: bytes = b"") -> None:
        """Sends a message, without waiting for those who are not listening yet.

        Raises:
            RuntimeError: a rank has ended.
        """
        self.flush()
        head = _HEAD.pack(len(payload), *numbers, *[0] * (NUMBERS - 1 - len(numbers)))
        data = [_tensor(head + self._seal(head, payload))]
        if payload:
            data.append(_tensor(payload))
        self._under_way = [
            (dist.broadcast(one, group_src=0, group=self._group, async_op=True), one)
            for one in data
        ]

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

        Raises:
            RuntimeError: a rank has ended.
        """
        self.say(numbers)
        self.flush()

    def leave(self) -> None:
        """Ends the group of the messages; see `Group.leave`."""
        self._under_way.clear()
        group, self._group = self._group, None
        end_group(group)

    def hear(self) -> Message:
        """Waits for the next message, however long.

        Raises:
            RuntimeError: a rank has ended, or somebody else has spoken.
        """
        heard = self._heard(_HEAD.size + _SEAL)
        head, seal = heard[: _HEAD.size], heard[_HEAD.size :]
        length, *numbers = _HEAD.unpack(head)
        payload = self._heard(length) if 0 < length <= _MOST else b""
        if not compare_digest(seal, self._seal(head, payload)):
            raise RuntimeError("a message between ranks does not have the seal of this run")
        return Message(numbers, payload)

    def _seal(self, head: bytes, payload: bytes) -> bytes:
        """The seal of the next message."""
        self._count += 1
        seal = blake2b(self._count.to_bytes(8) + head, digest_size=_SEAL, key=self._secret)
        seal.update(payload)
        return seal.digest()

    def _heard(self, length: int) -> bytes:
        data = torch.empty(length, dtype=torch.uint8)
        dist.broadcast(data, group_src=0, group=self._group)
        heard: bytes = data.numpy().tobytes()
        return heard


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
