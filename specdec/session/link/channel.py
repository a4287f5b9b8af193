"""What goes between the process of an engine and those of its callers: messages over a pair of
sockets, none of which anybody waits for.
"""

from __future__ import annotations

import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.engine.requests.admission import Admission
from specdec.session.prompts import PromptReader

if TYPE_CHECKING:
    from specdec.session.decoder import SpecDecoder

_LENGTH = struct.Struct("<Q")
_READ = 2**20
_BUFFER = 2**22
"""Bytes that the kernel may hold for each side, as far as it allows."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What callers in other processes know of an engine.

    Attributes:
        reader: makes tokens of prompts.
        admission: checks requests.
        max_num_seqs: requests decoded at once.
        num_blocks: of the cache, that requests can have.
    """

    reader: PromptReader
    admission: Admission
    max_num_seqs: int
    num_blocks: int

    @classmethod
    def of(cls, decoder: SpecDecoder) -> Facts:
        """Those of a decoder's engine."""
        engine = decoder.engine
        return cls(
            decoder.reader,
            engine.admission.elsewhere(),
            engine.config.max_num_seqs,
            engine.pool.num_blocks - 1,
        )


class Numbers(NamedTuple):
    """An engine as it is after a step.

    Attributes:
        running: requests in work.
        blocks_used: of the cache.
        queried, found: tokens that were looked for in the prefix cache, and found there.
        preemptions: so far.
        outputs, prompt_tokens: unfinished ones, and tokens of their prompts, of other processes.
    """

    running: int = 0
    blocks_used: int = 0
    queried: int = 0
    found: int = 0
    preemptions: int = 0
    outputs: int = 0
    prompt_tokens: int = 0


class Channel:
    """One end. As with connections of `multiprocessing`, which allow no news without waiting, messages
    are what can be pickled: only processes of this program hold either end.

    Args:
        sock: of a pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        sock.setblocking(False)
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, side, _BUFFER)
        self._coming, self._going = bytearray(), bytearray()
        self._behind: list[Any] = []  # what came with the first message

    def fileno(self) -> int:
        """Of the socket."""
        return self._sock.fileno()

    @property
    def congested(self) -> bool:
        """Whether the other side has not taken all of what was sent."""
        return bool(self._going)

    def send(self, *messages: Any) -> None:
        """Sends messages, as far as the other side takes them; `flush` sends the rest."""
        waits = self.congested
        for message in messages:
            data = ForkingPickler.dumps(message)
            self._going += _LENGTH.pack(len(data))
            self._going += data
        if not waits:
            self.flush()

    def flush(self) -> None:
        """Sends what is left, as far as the other side takes it; nothing once that has ended."""
        try:
            sent = self._sock.send(self._going)
        except BlockingIOError:
            return
        except OSError:
            sent = len(self._going)
        del self._going[:sent]

    def receive(self) -> list[Any]:
        """What has come.

        Raises:
            EOFError: the other side has ended, and all that it sent was received.
        """
        ended = False
        with suppress(BlockingIOError):
            while True:
                try:
                    part = self._sock.recv(_READ)
                except ConnectionError:
                    part = b""
                if not part:
                    ended = True
                    break
                self._coming += part
                if len(part) < _READ:
                    break
        at, data = 0, self._coming
        messages, self._behind = self._behind, []
        while len(data) - at >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(data, at)
            end = at + _LENGTH.size + length
            if end > len(data):
                break
            with memoryview(data) as view:
                messages.append(ForkingPickler.loads(view[at + _LENGTH.size : end]))
            at = end
        del data[:at]
        if ended and not messages:
            raise EOFError
        return messages

    def first(self) -> Any:
        """The first message, waited for.

        Raises:
            EOFError: the other side has ended.
        """
        self._sock.setblocking(True)
        try:
            while not (messages := self.receive()):
                pass
        finally:
            self._sock.setblocking(False)
        message, *self._behind = messages
        return message

    def close(self) -> None:
        """Tells the other side of the end."""
        self._sock.close()
