"""Runs the application: listens, and ends in good order."""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from specdec.base.errors import InvalidInputError
from specdec.serve.answers.stream import CONNECTION
from specdec.serve.app import make_app
from specdec.serve.config import ServeConfig
from specdec.serve.connections import Connections, Patient
from specdec.serve.front import Front

BACKLOG = 2048
"""Connections that the kernel keeps for us."""

AT_ONCE = 64
"""Connections that all fronts together take from it between other work; so each gets some."""

LAST_SECONDS = 5
"""For answers to leave after the last output has ended or was cut."""


def listen(config: ServeConfig) -> socket.socket:
    """A socket at the config's address, which takes no connections before there is a server.

    Raises:
        InvalidInputError: there is no such address here, or somebody else has it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        try:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            made.bind(address)
        except OSError:
            made.close()
            raise
    except OSError as error:
        raise _cannot_listen(config.host, config.port, error) from error
    return made


def take_connections(sock: socket.socket) -> str:
    """Begins to take connections to a socket of `listen`, and gives where.

    Raises:
        InvalidInputError: somebody else does by now; until then processes can share an address.
    """
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(BACKLOG)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _cannot_listen(host: str, port: int, error: OSError) -> InvalidInputError:
    why = error.strerror or error
    line = f"cannot listen on {host}:{port}: {why}; give another --host or --port"
    return InvalidInputError(line)


class Server(uvicorn.Server):
    """A server that takes nothing new on once told to end, and gives the unfinished its time."""

    def __init__(self, front: Front, sock: socket.socket) -> None:
        config = uvicorn.Config(
            _with_connection(make_app(front)),
            log_level="warning",
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            backlog=math.ceil(AT_ONCE / front.config.num_fronts),
            timeout_keep_alive=front.config.keep_alive_seconds,
            timeout_graceful_shutdown=LAST_SECONDS,
        )
        super().__init__(config)
        self.front, self._sock = front, sock
        self._draining: asyncio.Task[None] | None = None
        self._connections = Connections(front.config, self.server_state)
        front.on_end = self.stop

    async def serve_until_stopped(self) -> None:
        """Serves; returns once all has ended."""
        try:
            await self.serve(sockets=[self._sock])
        finally:
            self.front.engine.close()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """None: the process of the engine says when this one ends."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; gives whether the server has been told to end."""
        self._connections.tick(thorough=counter % 10 == 0)
        if counter % 10 == 0:
            self.front.tell_others()
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, taking few connections and bytes at a time, so that none hold others up."""
        kind = self.config.http_protocol_class
        self.config.http_protocol_class = type("Patient", (Patient, kind), {})
        await super().startup(sockets)
        self._sock.listen(BACKLOG)
        self.front.engine.begin()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections: at once those that wait for no answer, then those that do not read."""
        self._connections.close("idle", "headers", "body", "unread")
        last = asyncio.get_running_loop().call_later(LAST_SECONDS - 1, self._connections.close)
        await super().shutdown(sockets)
        last.cancel()

    def stop(self) -> None:
        """Drains and ends; in the event loop."""
        self.front.draining = True
        if self._draining is None:
            self._draining = asyncio.get_running_loop().create_task(self.front.drain())
            self._draining.add_done_callback(lambda task: setattr(self, "should_exit", True))


def _with_connection(app: ASGIApp) -> ASGIApp:
    """Lets the application know which connection a request came over."""

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        scope[CONNECTION] = getattr(send, "__self__", None)
        await app(scope, receive, send)

    return serve
