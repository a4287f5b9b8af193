"""Runs the application: listens, and ends in good order."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from types import FrameType

import uvicorn

from specdec.base.errors import InvalidInputError
from specdec.serve.app import make_app
from specdec.serve.config import ServeConfig
from specdec.serve.connections import Connections, Patient
from specdec.serve.front import Front

BACKLOG = 2048
"""Connections that the kernel keeps for us."""

AT_ONCE = 64
"""Connections that are taken from it between other work."""

LAST_SECONDS = 5
"""For answers to leave after the last output has ended or was cut."""


def listen(config: ServeConfig) -> socket.socket:
    """A socket at the address that the config names, which takes no connections before there is a server.

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


def _cannot_listen(host: str, port: int, error: OSError) -> InvalidInputError:
    return InvalidInputError(f"cannot listen on {host}:{port}: {error.strerror or error}; give another --host or --port")


def _end() -> None:
    """What was to end has not, whatever holds it up."""
    print("specdec: the server does not end by itself, so it is ended now", file=sys.stderr, flush=True)
    os._exit(1)


class Server(uvicorn.Server):
    """A server that takes nothing new on once it is told to end, and gives what is unfinished its time.

    Args:
        front: what it serves.
        sock: of `listen`.
        own_process: it ends the process where that does not end by itself.

    Raises:
        InvalidInputError: somebody else listens there by now. As long as nobody does, several processes can have an address.
    """

    def __init__(self, front: Front, sock: socket.socket, *, own_process: bool = False) -> None:
        super().__init__(
            uvicorn.Config(
                make_app(front),
                log_level="warning",
                access_log=False,
                server_header=False,
                lifespan="off",
                ws="none",
                backlog=AT_ONCE,
                timeout_keep_alive=front.config.keep_alive_seconds,
                timeout_graceful_shutdown=LAST_SECONDS,
            )
        )
        try:
            sock.listen()
        except OSError as error:
            host, port = sock.getsockname()[:2]
            raise _cannot_listen(host, port, error) from error
        self._front, self._sock = front, sock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._own_process = own_process
        self._connections = Connections(front.config, self.server_state)
        front.on_death = self.stop

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._sock.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def serve_until_stopped(self) -> None:
        """Serves; returns once all has ended."""
        self._loop = asyncio.get_running_loop()
        main = threading.current_thread() is threading.main_thread()
        hangs_up = main and signal.getsignal(signal.SIGHUP) is signal.SIG_DFL  # nohup has it ignored
        if hangs_up:
            signal.signal(signal.SIGHUP, self.handle_exit)
        try:
            await self.serve(sockets=[self._sock])
        finally:
            if hangs_up:
                signal.signal(signal.SIGHUP, signal.SIG_DFL)

    async def on_tick(self, counter: int) -> bool:
        """Ten times a second; gives whether the server has been told to end."""
        self._front.check_ranks()
        self._connections.tick(thorough=counter % 10 == 0)
        return await super().on_tick(counter)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens, taking a few connections and bytes of each at a time, so that many never hold up the others."""
        kind = self.config.http_protocol_class
        self.config.http_protocol_class = type("Patient", (Patient, kind), {})
        await super().startup(sockets)
        self._sock.listen(BACKLOG)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Ends connections: at once those that wait for no answer, and then those that do not read theirs."""
        self._connections.close("idle", "headers", "body", "unread")
        last = asyncio.get_running_loop().call_later(LAST_SECONDS - 1, self._connections.close)
        await super().shutdown(sockets)
        last.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM, SIGINT and SIGHUP: the first drains, the second ends the process by itself, at once."""
        if self._front.draining:
            signal.signal(sig, signal.SIG_DFL)
            signal.raise_signal(sig)
        else:
            self.stop()

    def stop(self) -> None:
        """Drains and ends; from any thread, and from the handler of a signal."""
        assert self._loop is not None, "it does not run yet"
        self._front.draining = True
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._drain)

    def _drain(self) -> None:
        if self._draining is None:
            if self._own_process:
                late = threading.Timer(self._front.config.drain_seconds + 2 * LAST_SECONDS, _end)
                late.daemon = True
                late.start()
            self._draining = asyncio.get_running_loop().create_task(self._front.drain())
            self._draining.add_done_callback(lambda task: setattr(self, "should_exit", True))
