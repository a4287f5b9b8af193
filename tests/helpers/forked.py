"""Processes that begin with all that this one has imported, which would take each of them seconds;
and servers in such processes.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing import get_context
from typing import Any

import torch

from specdec.cli.main import main
from specdec.serve.config import ServeConfig
from specdec.serve.processes import fronts as fronts_module
from specdec.serve.processes.fronts import Fronts
from specdec.serve.processes.setup import Setup
from specdec.serve.server import listen, take_connections
from specdec.session.link.channel import Facts
from tests.helpers.live_server import MODEL, tiny_decoder
from tests.helpers.processes import below
from tests.helpers.waiting import HANG, wait_until


class Forked:
    """A process that does something and ends with the number that it gives.

    Attributes:
        pid: its number.
        stdout, stderr: what it writes.
    """

    def __init__(self, work: Callable[[], int]) -> None:
        pipes = os.pipe(), os.pipe()
        self._process = get_context("fork").Process(target=_run, args=(work, pipes))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        for _, end in pipes:
            os.close(end)
        self.stdout, self.stderr = (os.fdopen(begin) for begin, _ in pipes)

    def send_signal(self, number: int) -> None:
        """Sends a signal."""
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Its status; None before its end."""
        return self._process.exitcode

    def wait(self, seconds: float) -> int | None:
        """The same, after waiting so long at most."""
        self._process.join(seconds)
        return self._process.exitcode

    def close(self) -> None:
        """Ends it."""
        self._process.kill()
        self._process.join()
        self.stdout.close()
        self.stderr.close()


def _run(work: Callable[[], int], pipes: tuple[tuple[int, int], ...]) -> None:
    """As at the start of a program, whatever pytest has set."""
    for number, (begin, end) in enumerate(pipes, start=1):
        os.close(begin)
        os.dup2(end, number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
    logging.root.handlers.clear()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it would say that there was a fork
    for one in (signal.SIGHUP, signal.SIGTERM):
        signal.signal(one, signal.SIG_DFL)
    torch.set_num_threads(1)
    sys.exit(work())


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
