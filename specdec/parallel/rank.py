"""What the process of another rank runs: it joins the group and follows rank 0, and ends with it."""

import ctypes
import logging
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn, TypedDict


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


def main(settings: Settings) -> NoReturn:
    """Follows until rank 0 says that the group ends, and exits; the last line on standard output says what went wrong."""
    _end_with(settings["parent"])
    words = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    quieten()
    status = 0
    try:
        import torch

        from specdec.parallel.launch import join

        torch.set_num_threads(settings["threads"])
        print("ready", file=words, flush=True)
        join(settings).follow()
    except BaseException as error:  # whatever it is, rank 0 has to be told
        if os.environ.get("SPECDEC_DEBUG"):
            traceback.print_exc()
        print(one_line(error), file=words, flush=True)
        status = 1
    os._exit(status)  # without the destructors of a group whose other ranks may have gone


def quieten() -> None:
    """Leaves it to rank 0 to print, and to end in good order when it is told to by a signal, which often goes to all processes."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    sys.stdout.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    logging.disable(logging.WARNING)


def one_line(error: BaseException) -> str:
    """What went wrong."""
    from specdec.errors import SpecDecError

    text = str(error).strip().partition("\n")[0][:300]
    return text if isinstance(error, SpecDecError) and text else f"{type(error).__name__}: {text}"


def _end_with(parent: int) -> None:
    """Ends this process when rank 0 does, however that ends.

    The kernel's signal comes at once, on Linux. The end of standard input comes as soon as no process has rank 0's end of the pipe.
    """
    if sys.platform == "linux":
        libc: Any = ctypes.CDLL(None)
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(1)  # it ended before
    threading.Thread(target=_wait_for_end_of_input, name="specdec rank 0", daemon=True).start()


def _wait_for_end_of_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)
