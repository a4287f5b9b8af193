"""Processes that begin with all that this one has imported, which would take each of them
seconds.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing import get_context

import torch


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
