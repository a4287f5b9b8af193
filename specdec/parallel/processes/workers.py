"""The processes that rank 0 starts, one for each other rank: begun, watched and ended by a thread
each.

A thread stays as long as its process, because the kernel ends a child with the thread that has
started it. A process that ends unasked takes the group along: its last words, or the signal that
ended it, are the one line that rank 0 says.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

from specdec.base.errors import SpecDecError
from specdec.parallel.processes.process import Settings

START = "import json, sys; said = json.loads(sys.stdin.readline()); sys.path[:] = said['path']; \
from specdec.parallel.processes.rank import main; main(said)"
"""What a process runs; not the user's own program, which may have no guard around what it does."""

READY = b"ready\n"
"""What a process writes once all is imported."""

PATIENCE = 5.0
"""Seconds that a process has to end when it is asked to, and a call on rank 0 to notice that a rank
has ended.
"""

LOOK = 0.5
"""Seconds from one look at the processes to the next."""

STOPPED = 20
"""Looks in a row at which a process is stopped before it counts as lost. The watch itself stops
with rank 0, as at Ctrl-Z.
"""

GATHER = 0.5
"""Seconds in which others may end because of the rank that ended first."""


class Worker(threading.Thread):
    """One other rank.

    Args:
        rank: which one.
        settings: what it is told.
        ended: called with it when its process has ended, asked to or not.
    """

    def __init__(self, rank: int, settings: Settings, ended: Callable[["Worker"], None]) -> None:
        super().__init__(name=f"specdec rank {rank}", daemon=True)
        self.rank = rank
        self._settings, self._ended_call = settings, ended
        self._process: subprocess.Popen[bytes] | None = None
        self.ready = threading.Event()
        self._words = ""
        self._stopped = 0  # looks in a row
        self.start()

    def run(self) -> None:
        """Starts the process and stays until it ends."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        }
        command = [sys.executable, "-c", START]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(self._settings).encode() + b"\n")
            # and stays open: its end tells the process that rank 0 has ended
            self._process.stdin.flush()
        except OSError:
            pass  # it has ended already, which the next line finds
        if self._process.stdout.readline() == READY:
            self.ready.set()
        self._words = self._process.stdout.read().decode(errors="replace").strip()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # what it did not read
                pipe.close()
        self._ended_call(self)

    @property
    def status(self) -> int:
        """With which it has ended, negative where a signal has ended it; 0 before."""
        return 0 if self._process is None else self._process.returncode or 0

    @property
    def by_signal(self) -> bool:
        """Whether a signal has ended it, so that no other rank's end can be the cause."""
        return self.status < 0

    def describe(self) -> str:
        """Why it has ended, in one line."""
        code = self.status
        if self._stopped >= STOPPED:
            return stopped(self.rank)
        if self.by_signal:
            why = f"was ended by {signal.Signals(-code).name}"
        else:
            why = (
                f"failed: {self._words.splitlines()[-1]}"
                if self._words
                else f"ended with status {code}"
            )
        return f"rank {self.rank} of the tensor-parallel group {why}"

    def look(self) -> None:
        """Ends it if it has been stopped for long, for it would leave all others waiting."""
        if self._process is not None and self._stopped < STOPPED:
            self._stopped = (self._stopped + 1) * is_stopped(self._process.pid)
            if self._stopped == STOPPED:
                self.kill()

    def kill(self) -> None:
        """Ends it at once, unless it has ended."""
        if self._process is not None:  # which knows
            self._process.kill()


class Workers:
    """All other ranks of a group; see `specdec.parallel.executor.Ranks`.

    Args:
        settings: of each, by rank from 1.

    Attributes:
        on_loss: told one line when a rank has ended unasked.
    """

    def __init__(self, settings: Mapping[int, Settings]) -> None:
        self._lock = threading.Lock()
        self._asked = self._closing = False
        self._lost: list[Worker] = []
        self._line: str | None = None
        self._reported = threading.Event()
        self.on_loss: Callable[[str], None] | None = None
        self._all = [Worker(rank, one, self._ended) for rank, one in settings.items()]
        threading.Thread(target=self._watch, name="specdec ranks", daemon=True).start()

    def wait(self) -> None:
        """Returns when all are ready to meet.

        Raises:
            SpecDecError: one has ended before.
        """
        for worker in self._all:
            while not worker.ready.wait(0.05):
                if self._lost and (line := self.why_ended()):
                    raise SpecDecError(line)

    def may_end(self) -> None:
        """They are about to be told that the group ends: from here on none is lost that ends with
        status 0.
        """
        self._asked = True

    def end(self, *, kill: bool) -> None:
        """Waits for all to end, at most `PATIENCE`, or ends them at once."""
        self._closing = True
        limit = time.monotonic() + PATIENCE
        while (
            not kill and any(worker.is_alive() for worker in self._all) and time.monotonic() < limit
        ):
            time.sleep(0.01)
        for worker in self._all:
            worker.kill()

    def join(self) -> None:
        """Waits for the threads of all, whose processes have ended."""
        for worker in self._all:
            worker.join(PATIENCE)

    def why_ended(self) -> str | None:
        """One line about the rank that ended first unasked; waits a moment for it."""
        self._reported.wait(4 * GATHER)
        return self._line

    def _watch(self) -> None:
        while any(worker.is_alive() for worker in self._all):
            time.sleep(LOOK)
            for worker in self._all:
                worker.look()

    def _ended(self, worker: Worker) -> None:
        """In the sibling's own thread."""
        with self._lock:
            if self._closing or (self._asked and worker.status == 0):
                return
            self._lost.append(worker)
            if len(self._lost) > 1:
                return  # the first one's thread tells
        time.sleep(GATHER)
        with self._lock:
            first = next((one for one in self._lost if one.by_signal), self._lost[0])
            self._line = first.describe()
        self._reported.set()
        self.end(kill=True)  # so that rank 0's own collectives fail
        if self.on_loss is not None:
            self.on_loss(self._line)


def is_stopped(process: int) -> bool:
    """Whether a process has been stopped by a signal; False where the system is not Linux."""
    try:
        with open(f"/proc/{process}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError:
        return False


def stopped(rank: int) -> str:
    """One line about a rank that was stopped for too long."""
    return (
        f"rank {rank} of the tensor-parallel group was stopped for {STOPPED * LOOK:g} s, as by"
        f" SIGSTOP, and has been ended"
    )
