"""Connections that say nothing, never end, hold much, or come from elsewhere; and signals."""

from __future__ import annotations

import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from uvicorn.server import ServerState

from specdec.cli.main import main
from specdec.serve.config import ServeConfig
from specdec.serve.connections import PIECES, Connections
from specdec.serve.processes import fronts
from tests.helpers.live_server import Live, live_server
from tests.helpers.served import is_draining, serving
from tests.helpers.waiting import HANG, wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
ASK = {"prompt": "abc", "max_tokens": 1}


@contextmanager
def connected(live: Live, *, sends: bytes = b"") -> Iterator[socket.socket]:
    """A connection that has sent so much."""
    host, _, port = live.url.removeprefix("http://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=HANG) as connection:
        connection.sendall(sends)
        yield connection


def all_of(connection: socket.socket) -> bytes:
    """What comes until the server closes."""
    came = b""
    with suppress(ConnectionResetError):
        while part := connection.recv(65_536):
            came += part
    return came


def works(live: Live) -> bool:
    return live.post("/v1/completions", json=ASK).status_code == 200


def test_a_head_that_does_not_come_is_not_waited_for() -> None:
    """Neither at first nor after an answer; who has asked and is silent stays."""
    with (
        live_server(header_seconds=0.01) as live,
        httpx.Client(base_url=live.url) as other,
        ExitStack() as stack,
    ):
        other.get("/health")
        (kept,) = other._transport._pool.connections  # type: ignore[attr-defined]
        late = []
        for sends in (b"", b"POST /v1/comp", HEAD, b"G"):
            late.append(stack.enter_context(connected(live)))
            if sends in (HEAD, b"G"):
                late[-1].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                assert late[-1].recv(65_536).startswith(b"HTTP/1.1 200 ")
            late[-1].sendall(sends)
        late.append(stack.enter_context(connected(live, sends=HEAD)))
        assert [all_of(one) for one in late] == [b""] * len(late)
        other.get("/health")
        assert other._transport._pool.connections == [kept]  # type: ignore[attr-defined]


def test_a_body_that_does_not_come_is_not_waited_for() -> None:
    with (
        live_server(body_seconds=0.01) as live,
        connected(live, sends=HEAD + b"Content-Length: 100\r\n\r\n{") as connection,
    ):
        answer = all_of(connection)
        assert (
            answer.startswith(b"HTTP/1.1 408 ")
            and b"the body has not come within 0.01 seconds" in answer
        )


def test_the_largest_of_unfinished_bodies_gives_way() -> None:
    """To others, of which small ones are always taken."""
    with live_server(max_open_body_bytes=200_000) as live, ExitStack() as stack:
        first, second = (
            stack.enter_context(
                connected(live, sends=HEAD + b"Content-Length: 180000\r\n\r\n" + b" " * count)
            )
            for count in (150_000, 0)
        )
        wait_until(lambda: len(live.server.server_state.tasks) == 2)
        assert works(live)
        second.sendall(b" " * 100_000)
        answer = all_of(first)
        assert (
            answer.startswith(b"HTTP/1.1 503 ")
            and b"unfinished requests hold too much, and this one most" in answer
        )
        second.sendall(b" " * 80_000)
        assert second.recv(65_536).startswith(b"HTTP/1.1 400 ")
        assert works(live)


@pytest.mark.parametrize(
    ("content", "options", "words"),
    [
        (
            b'{"prompt": "a", "x": [%s1]}' % (b"[]," * 300),
            {"max_body_values": 1000},
            "more than 1,000 values",
        ),
        (
            b'{"prompt": "a", "x": [%s1]}' % (b"1," * 300),
            {"max_open_body_bytes": 10_000},
            "more than 10,000 bytes and values",
        ),
    ],
    ids=["values", "together"],
)
def test_values_are_counted_before_they_are_read(
    content: bytes, options: dict[str, Any], words: str
) -> None:
    with live_server(**options) as live:
        headers = {"Content-Type": "application/json"}
        answer = live.post("/v1/completions", content=content, headers=headers)
        assert answer.status_code == 413 and words in answer.json()["error"]["message"]
        assert works(live)


def test_a_body_in_pieces_of_a_byte_is_not_read() -> None:
    with live_server() as live:
        with connected(live, sends=HEAD + b"Transfer-Encoding: chunked\r\n\r\n") as connection:
            with suppress(ConnectionError):  # it may be closed meanwhile
                connection.sendall(b"1\r\n \r\n" * PIECES)
            assert all_of(connection) == b""
        assert works(live)


def test_of_too_many_connections_the_longest_waiting_is_closed() -> None:
    with live_server(max_connections=8) as live, ExitStack() as stack:
        first = stack.enter_context(connected(live))
        wait_until(lambda: len(live.server._connections._seen) == 1)
        for _ in range(8):
            stack.enter_context(connected(live))
        assert all_of(first) == b"" and works(live)


class Clock:
    """Time that a test sets."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


def connection(**changes: Any) -> Any:
    """A protocol of uvicorn, as far as `Connections` looks at it."""
    cycle = SimpleNamespace(response_complete=False, response_started=True, more_body=False)
    states: dict[str, Any] = {
        "cycle": cycle,
        "timeout_keep_alive_task": None,
        "flow": SimpleNamespace(write_paused=False),
    }
    made = SimpleNamespace(**{**states, **changes}, aborted=False)
    made.transport = SimpleNamespace(abort=lambda: setattr(made, "aborted", True))
    return Hashable(made)


class Hashable:
    """By identity, as protocols are."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self.state, name)


BODY = SimpleNamespace(response_complete=False, response_started=False, more_body=True)
DONE = SimpleNamespace(response_complete=True, response_started=True, more_body=False)
PAUSED = SimpleNamespace(write_paused=True)


@pytest.mark.parametrize(
    ("changes", "seconds", "evicted"),
    [
        ({"cycle": None}, 30, True),
        ({"cycle": DONE}, 30, True),
        ({"cycle": DONE, "timeout_keep_alive_task": object()}, None, True),
        ({"cycle": BODY}, None, True),
        ({}, None, False),
        ({"flow": PAUSED}, 60, False),
    ],
    ids=["new", "second head", "idle", "body", "answer", "unread"],
)
def test_how_long_a_connection_may_wait(
    changes: dict[str, Any], seconds: int | None, evicted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("specdec.serve.connections.time", clock)
    one, state = connection(**changes), ServerState()
    state.connections = {one}
    connections = Connections(ServeConfig(), state)
    connections.tick(thorough=True)
    clock.now = 1e6 if seconds is None else seconds
    connections.tick(thorough=True)
    assert not one.aborted
    clock.now += 1
    connections.tick(thorough=True)
    assert one.aborted == (seconds is not None)

    one.state.aborted = False
    others: set[Any] = {connection() for _ in range(1024)}
    state.connections = others
    connections.tick(thorough=False)
    state.connections = others | {one}
    connections.tick(thorough=False)
    assert one.aborted == evicted and not any(other.aborted for other in others)


@pytest.mark.parametrize(
    ("host", "options", "status"),
    [
        ("localhost:8000", {}, 200),
        ("app.localhost", {}, 200),
        ("[::1]:8000", {}, 200),
        ("10.0.0.7", {}, 200),
        ("evil.example", {}, 403),
        ("127.0.0.1.evil.example:80", {}, 403),
        ("[evil.example]", {}, 403),
        ("evil.example", {"api_key": "k"}, 401),
        ("chat.example:443", {"allowed_hosts": ("Chat.example",)}, 200),
        ("evil.example", {"allowed_hosts": ("chat.example",), "api_key": "k"}, 403),
    ],
)
def test_a_name_that_leads_here_from_elsewhere_is_refused(
    host: str, options: dict[str, Any], status: int
) -> None:
    """Where anybody may ask who reaches the server, and only this machine does."""
    with live_server(**options) as live:
        assert live.get("/v1/models", headers={"Host": host}).status_code == status


def test_what_is_missing_is_installed_from_here(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No name of a registry, which could become a stranger's."""
    monkeypatch.delitem(sys.modules, "specdec.serve.server", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["serve"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "needs uvicorn, which is not installed; run: python -m pip install -e '" in line


@pytest.mark.slow
def test_the_first_signal_drains_and_the_second_ends() -> None:
    """Without a word, whatever is open."""
    with serving(ServeConfig(port=0)) as (server, url):
        long = {"prompt": "a", "max_tokens": 480, "ignore_eos": True, "n": 256, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=long) as stream:
            next(stream.iter_lines())
            for number in (signal.SIGINT, signal.SIGTERM):
                server.send_signal(number)
                wait_until(lambda: is_draining(url))
            assert server.wait(HANG) == -signal.SIGTERM
        assert server.stderr.read() == ""


@pytest.mark.slow
def test_a_server_that_does_not_end_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever holds it up: here a thread that the interpreter waits for."""
    monkeypatch.setattr(fronts, "LAST_SECONDS", 0.5)
    hold = threading.Thread(target=threading.Event().wait)
    with serving(ServeConfig(port=0, drain_seconds=0.0), prepare=hold.start) as (server, url):
        wait_until(lambda: httpx.get(url + "/health").status_code == 200)
        server.send_signal(signal.SIGTERM)
        assert server.wait(HANG) == 1
        line = "specdec: the server does not end by itself, so it is ended now\n"
        assert server.stderr.read() == line
