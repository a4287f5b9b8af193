"""Servers in processes of their own."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import httpx

from specdec.cli.main import main
from specdec.serve.config import ServeConfig
from specdec.serve.processes import fronts as fronts_module
from specdec.serve.processes.fronts import Fronts
from specdec.serve.processes.setup import Setup
from specdec.serve.server import listen, take_connections
from specdec.session.link.channel import Facts
from tests.helpers.forked import Forked
from tests.helpers.live_server import MODEL, tiny_decoder
from tests.helpers.processes import below
from tests.helpers.waiting import HANG, wait_until


@contextmanager
def serving(
    config: ServeConfig, first: str | None = None, prepare: Callable[[], Any] = lambda: None
) -> Iterator[tuple[Forked, str]]:
    """A server with fronts of its own, and where it listens; all of it has ended afterwards.

    Args:
        config: of the server.
        first: program of the fronts that it begins with.
        prepare: called in its process.
    """

    def serve() -> int:
        prepare()
        sock, start = listen(config), fronts_module._START
        fronts_module._START = first or start
        with closing(Fronts(config.num_fronts, sock, config)) as fronts:
            fronts_module._START = start  # of those that follow
            decoder = tiny_decoder()
            url = take_connections(sock)
            setup = Setup(Facts.of(decoder), config, MODEL)
            return fronts.serve(decoder, setup, lambda: print(url, flush=True))

    with closing(Forked(serve)) as server:
        url = server.stdout.readline().strip()
        assert url.startswith("http"), server.stderr.read()
        known = below(server.pid)
        try:
            yield server, url
        finally:
            server.close()
            wait_until(lambda: all(not below(one) for one in known), "not all processes end")


@contextmanager
def command(words: str, *more: str) -> Iterator[str]:
    """Where `specdec` serves that was given these words; it ends in good order at SIGTERM."""
    with closing(Forked(lambda: main([*words.split(), *more]))) as server:
        found = None
        while found is None:
            line = server.stderr.readline()
            assert line, "the server does not start"
            found = re.search(r" at (http://[\d.:]+)/v1", line)
        yield found[1]
        server.send_signal(signal.SIGTERM)
        assert server.wait(HANG) == 0


def is_draining(url: str) -> bool:
    """Or gone."""
    try:
        return httpx.get(url + "/health").status_code == 503
    except httpx.TransportError:
        return True
