"""The processes of a run: joining those of torchrun, and ending between two steps."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed as dist

from specdec.parallel.group import begin_group
from specdec.parallel.sockets import rank_sockets


@contextmanager
def termination() -> Iterator[list[int]]:
    """A list that SIGTERM or Ctrl-C fills, to end between two steps; in the main thread alone.

    A second Ctrl-C interrupts at once.
    """
    received: list[int] = []

    def note(number: int, frame: object) -> None:
        if number == signal.SIGINT and received:
            raise KeyboardInterrupt
        received.append(number)
        os.write(2, b"\ntrain: ends behind this step and saves; another Ctrl-C ends it at once\n")

    # under Ray Train, which tells its workers otherwise
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def process_group(device: torch.device) -> Iterator[torch.device]:
    """Joins torchrun's processes, unless a group exists; yields the device."""
    joined = dist.is_initialized()
    if not joined and ("RANK" not in os.environ or os.environ.get("WORLD_SIZE", "1") == "1"):
        yield device
        return
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    # A rank without answers left to write waits for the others; torchrun ends all where one fails.
    if not joined:
        with rank_sockets():
            begin_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(days=1))
    try:
        yield device
    finally:
        if not joined:
            dist.destroy_process_group()
