"""Messages between an engine's process and its callers', over sockets; nobody waits.

A message is a list of JSON: its kind, what it is about, and bytes at its end where it has any. It
makes nothing but plain values, and its readers check these: a process that was taken over has no
way from here into another one.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec.base.errors import CapacityError, InvalidInputError, SpecDecError, one_line
from specdec.engine.requests.admission import Admission
from specdec.engine.requests.request import Request
from specdec.sampling.logprobs import Top
from specdec.session.prompts import PromptReader
from specdec.session.provenance import origin_of_run

if TYPE_CHECKING:
    from specdec.session.decoder import SpecDecoder

_HEAD = struct.Struct("<Ii")  # bytes of JSON, and those behind it; -1 where the message has none
_READ, _READS = 2**20, 16  # of one look
_ENCODE = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_BUFFER = 2**22
"""Bytes that the kernel may hold for each side, as far as it allows."""


MAX_BYTES = 2**26
"""Most bytes of a message to an engine: prompts fit the context, and grammars are limited."""


class Malformed(RuntimeError):
    """What has come is no message of this program."""


def packed(numbers: Sequence[int], keys: Sequence[int] = ()) -> bytes:
    """Integers as bytes: `keys` with 64 bits each, then `numbers` with 32."""
    return struct.pack(f"={len(keys)}q{len(numbers)}i", *keys, *numbers)


def unpacked(data: bytes, num_keys: int = 0) -> list[int]:
    """The integers that `packed` made bytes of, keys first.

    Raises:
        Malformed: it has made no such bytes.
    """
    try:
        return list(struct.unpack(f"={num_keys}q{(len(data) - 8 * num_keys) // 4}i", data))
    except struct.error as error:
        raise Malformed(f"{len(data)} bytes are no integers") from error


_KINDS = (CapacityError, InvalidInputError, SpecDecError, RuntimeError)
_ERRORS = {kind.__name__: kind for kind in _KINDS}


def plain_error(error: BaseException) -> tuple[str, str]:
    """The first of these kinds that the error is, a RuntimeError where it is none; and its line."""
    known = (name for name, kind in _ERRORS.items() if isinstance(error, kind))
    return next(known, RuntimeError.__name__), str(error)


def error_of(kind: str, line: str) -> Exception:
    """What `plain_error` told of; a SpecDecError is the fault of who asked."""
    return _ERRORS[kind](line)


@dataclass(frozen=True, slots=True)
class Facts:
    """What callers in other processes know of an engine.

    Attributes:
        reader: makes tokens of prompts.
        admission: checks requests.
        max_num_seqs: requests decoded at once.
        num_blocks: of the cache, that requests can have.
        settings: what it may tell of itself, as JSON has it.
    """

    reader: PromptReader
    admission: Admission
    max_num_seqs: int
    num_blocks: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, decoder: SpecDecoder) -> Facts:
        engine, reader = decoder.engine, decoder.reader
        limits = engine.config.max_num_seqs, engine.pool.num_blocks - 1
        return cls(reader, engine.admission.elsewhere(), *limits, _settings(decoder))


def _settings(decoder: SpecDecoder) -> dict[str, Any]:
    """Device, types, versions, choices and sizes; no names of files, nor the command."""
    engine, config = decoder.engine, decoder.engine.config
    origin = origin_of_run(decoder.verifier, decoder.reader)
    names = "device", "dtype", "weights", "attention", "versions", "generation_config"
    depth, nodes = engine.planner.limits
    own = {
        "num_draft_tokens": depth, "tree_nodes": nodes, "chosen": engine.planner.choice is not None,
        "draft_sampling": config.draft_sampling, "max_num_seqs": config.max_num_seqs,
        "cache_blocks": engine.pool.num_blocks - 1, "block_size": engine.kv_cache.block_size,
        "prefix_caching": config.cache.prefix_caching, "pipeline_depth": engine.pipeline_depth,
        "graphs": engine.runner.graphs is not None,
    }  # fmt: skip
    return {name: origin[name] for name in names} | {"engine": own}


def end_of(request: Request) -> dict[str, Any]:
    """What a finished request knows beside its tokens and steps."""
    end: dict[str, Any] = {
        "finish_reason": request.finish_reason,
        "seed": request.seed,
        "num_cached_tokens": request.num_cached_tokens,
    }
    if request.error:
        end |= {"error": request.error, "bad_input": request.bad_input}
    if request.num_by_rank:
        end["num_by_rank"] = [*request.num_by_rank.items()]
    if request.sampling.prompt_logprobs is not None:
        end["prompt_logprobs"] = request.prompt_logprobs
        end["prompt_top_logprobs"] = pairs(request.prompt_top_logprobs)
    return end


def pairs(tops: list[Top]) -> list[list[tuple[int, float]]]:
    """JSON has no keys that are integers."""
    return [[*top.items()] for top in tops]


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


class Rows(NamedTuple):
    """Rows of a step.

    Attributes:
        shape: of its blocks, as reports name it.
        spent: drafts verified and accepted, by request.
    """

    shape: str
    spent: list[tuple[int, int]]


class Channel:
    """One end.

    Args:
        most: bytes of a message that may come.
    """

    def __init__(self, sock: socket.socket, most: int = 2**32) -> None:
        self._sock, self._most = sock, most
        sock.setblocking(False)
        for side in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, side, _BUFFER)
        self._coming, self._going = bytearray(), bytearray()
        self._behind: list[list[Any]] = []  # what came with the first message

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def congested(self) -> bool:
        """Whether the other side has not taken all of what was sent."""
        return bool(self._going)

    def send(self, *messages: tuple[Any, ...]) -> None:
        """Sends messages, as far as the other side takes them; `flush` sends the rest."""
        waits = self.congested
        for message in messages:
            raw = message[-1] if isinstance(message[-1], bytes) else None
            text = _ENCODE(message if raw is None else message[:-1]).encode()
            self._going += _HEAD.pack(len(text), -1 if raw is None else len(raw))
            self._going += text
            self._going += raw or b""
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

    def receive(self) -> list[list[Any]]:
        """What has come.

        Raises:
            EOFError: the other side has ended, and all that it sent was received.
            Malformed: it is too large, or no message.
        """
        ended = False
        with suppress(BlockingIOError):
            for _ in range(_READS):
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
        while len(data) - at >= _HEAD.size:
            length, behind = _HEAD.unpack_from(data, at)
            start = at + _HEAD.size
            middle, end = start + length, start + length + max(0, behind)
            if end - start > self._most:
                raise Malformed(f"a message of {end - start:,} bytes; the limit is {self._most:,}")
            if end > len(data):
                break
            messages.append(_read(data[start:middle]))
            if behind >= 0:
                messages[-1].append(bytes(data[middle:end]))
            at = end
        del data[:at]
        if ended and not messages:
            raise EOFError
        return messages

    def first(self) -> list[Any]:
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


def _read(text: bytearray) -> list[Any]:
    try:
        message = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a message is no JSON: {one_line(error)}") from error
    if not isinstance(message, list):
        raise Malformed("a message is no list")
    return message
