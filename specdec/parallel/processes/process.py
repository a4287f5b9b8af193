"""What the process of another rank is told, and how it leaves the words to rank 0."""

import logging
import os
import signal
import sys
from typing import TypedDict


class Settings(TypedDict):
    """What rank 0 tells the process; JSON in one line of its standard input.

    Attributes:
        path: of Python's modules.
        rank, size: its place in the group.
        folder: where the ranks meet, which nobody else may read.
        secret: of the run, in hexadecimal; see `specdec.parallel.wire.Wire`.
        device: "cuda" or "cpu".
        threads: of torch.
        parent: process id of rank 0.
    """

    path: list[str]
    rank: int
    size: int
    folder: str
    secret: str
    device: str
    threads: int
    parent: int


def silence() -> None:
    """Leaves it to rank 0 to print, and to end in good order when it is told to by a signal, which
    often goes to all processes.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    logging.disable(logging.WARNING)


def one_line(error: BaseException) -> str:
    """What went wrong."""
    from specdec.base.errors import SpecDecError

    text = str(error).strip().partition("\n")[0][:300]
    return text if isinstance(error, SpecDecError) and text else f"{type(error).__name__}: {text}"
