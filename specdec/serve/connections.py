"""Connections: how many there are, and how long one may keep the server waiting."""

from __future__ import annotations

import logging
import resource
import time
from typing import Any, Literal

from uvicorn.server import ServerState

from specdec.serve.config import ServeConfig

Phase = Literal["idle", "headers", "body", "answer", "unread"]

_OTHER_FILES = 128
"""Files of the process: weights, libraries, pipes, and connections that come within a tick."""

_FEWEST = 8

logger = logging.getLogger(__name__)


READ_BYTES = 32_768
"""What is read of a connection between other work, so that it takes but milliseconds."""


PIECES = 8192
PIECE_BYTES = 8
"""So many ends of lines with fewer bytes each have no use, and would take all time there is."""


class Patient:
    """A protocol of uvicorn that reads a little at a time."""

    _bytes = _ends = 0

    def connection_made(self, transport: Any) -> None:
        """Begins."""
        if hasattr(transport, "max_size"):  # asyncio's own
            transport.max_size = READ_BYTES
        super().connection_made(transport)  # type: ignore[misc]

    def data_received(self, data: bytes) -> None:
        """Goes on, unless it comes in too many pieces."""
        self._bytes += len(data)
        self._ends += data.count(b"\r\n")
        if self._ends > PIECES and self._bytes < PIECE_BYTES * self._ends:
            self.transport.abort()  # type: ignore[attr-defined]
        else:
            super().data_received(data)  # type: ignore[misc]


class Connections:
    """Closes connections that keep the server waiting; each tick looks at them all."""

    def __init__(self, config: ServeConfig, state: ServerState) -> None:
        self._config, self._state = config, state
        # of each its phase, which request it is in, and since when
        self._seen: dict[Any, tuple[Phase, Any, float]] = {}
        self._most = min(config.max_connections, max(_FEWEST, _files() - _OTHER_FILES))
        if self._most < config.max_connections:
            text = "%d connections at most, which the limit of open files leaves; raise it"
            logger.warning(f"{text} (ulimit -n)", self._most)

    def tick(self, *, thorough: bool) -> None:
        """Closes those that are late, and the longest waiting of too many."""
        if thorough or len(self._state.connections) > self._most:
            self._look()

    def close(self, *phases: Phase) -> None:
        """Closes all that are in one of these phases, or all."""
        for protocol in list(self._state.connections):
            if not phases or _phase(protocol) in phases:
                protocol.transport.abort()

    def _look(self) -> None:
        # Bodies have their limit where they are read, and uvicorn ends the idle.
        config = self._config
        limits = {"headers": config.header_seconds, "unread": config.body_seconds}
        now = time.monotonic()
        seen: dict[Any, tuple[Phase, Any, float]] = {}
        protocols: list[Any] = list(self._state.connections)
        for protocol in protocols:
            phase, request = _phase(protocol), protocol.cycle
            known = self._seen.get(protocol)
            since = known[2] if known is not None and known[:2] == (phase, request) else now
            if now - since > limits.get(phase, float("inf")):
                protocol.transport.abort()
            else:
                seen[protocol] = (phase, request, since)
        self._seen = seen
        asked_for = ("idle", "headers", "body")
        waiting = [protocol for protocol, (phase, _, _) in seen.items() if phase in asked_for]
        waiting.sort(key=lambda protocol: seen[protocol][2])
        for protocol in waiting[: max(0, len(seen) - self._most)]:
            protocol.transport.abort()


def _phase(protocol: Any) -> Phase:
    """What a connection waits for; a request answered before it had come is in its headers."""
    cycle = protocol.cycle
    if cycle is None or cycle.response_complete:
        return "headers" if protocol.timeout_keep_alive_task is None else "idle"
    if cycle.more_body and not cycle.response_started:
        return "body"
    return "unread" if protocol.flow.write_paused else "answer"


def _files() -> int:
    """How many files the process may have open, after asking for as many as it can get."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard > 65_536:
        hard = max(soft, 65_536)
    if soft < hard:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, most))
    return hard
