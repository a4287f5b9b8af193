"""What the process of another rank runs: it joins the group, follows rank 0, and ends with it."""

import ctypes
import os
import signal
import sys
import threading
import traceback
from typing import Any, NoReturn

from specdec.parallel.processes.process import Settings, one_line, silence


def main(settings: Settings) -> NoReturn:
    """Follows until rank 0 says that the group ends, and exits; the last line on standard output
    says what went wrong.
    """
    _end_with(settings["parent"])
    words = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    silence()
    status = 0
    try:
        import torch

        from specdec.parallel.processes.launch import join

        torch.set_num_threads(settings["threads"])
        print("ready", file=words, flush=True)
        join(settings).follow()
    except BaseException as error:  # whatever it is, rank 0 has to be told
        if os.environ.get("SPECDEC_DEBUG"):
            traceback.print_exc()
        print(one_line(error), file=words, flush=True)
        status = 1
    os._exit(status)  # without the destructors of a group whose other ranks may have gone


def _end_with(parent: int) -> None:
    """Ends this process when rank 0 does, however that ends.

    The kernel's signal comes at once, on Linux. The end of standard input comes as soon as no
    process has rank 0's end of the pipe.
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
