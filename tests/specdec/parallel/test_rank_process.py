"""The process of another rank ends with rank 0, by each of its two guards alone, while it waits for
nothing that would wake it.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from specdec.parallel.processes import workers
from specdec.parallel.processes.process import Settings
from specdec.parallel.processes.workers import START
from tests.helpers.waiting import HANG, wait_until

_RANK_0 = """
import json, os, sys, time
from specdec.parallel.processes.workers import Workers
workers = Workers({1: json.loads(sys.argv[1]) | {"parent": os.getpid()}})
workers.wait()
holds_the_pipe = os.fork() or time.sleep(600)
print(workers._all[0]._process.pid, holds_the_pipe, flush=True)
time.sleep(600)
"""


def test_one_that_is_stopped_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would leave all others waiting; one line says so."""
    # The first line are the settings; another one does not come.
    monkeypatch.setattr(workers, "START", "print('ready', flush=True); input(); input()")
    monkeypatch.setattr(workers, "LOOK", 0.05)
    monkeypatch.setattr(workers, "STOPPED", 2)
    lost: list[str] = []
    ranks = workers.Workers({1: settings(tmp_path, os.getpid())})
    ranks.on_loss = lost.append
    ranks.wait()
    process = ranks._all[0]._process
    assert process is not None
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: bool(lost))
    assert process.returncode == -signal.SIGKILL and lost == [ranks.why_ended()]
    assert lost[0].endswith("was stopped for 0.1 s, as by SIGSTOP, and has been ended")


@pytest.mark.parametrize(("asked", "status", "is_lost"), [(1, 0, 0), (1, 3, 1), (0, 0, 1)])
def test_one_that_ends_when_it_is_told_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: int, status: int, is_lost: int
) -> None:
    """It may be gone before rank 0 waits for it. Nobody watches it then."""
    start = f"import sys; print('ready', flush=True); input(); sys.exit({status})"
    monkeypatch.setattr(workers, "START", start)
    monkeypatch.setattr(workers, "GATHER", 0.01)
    lost: list[str] = []
    ranks = workers.Workers({1: settings(tmp_path, os.getpid())})
    ranks.on_loss = lost.append
    if asked:
        ranks.may_end()
    ranks.wait()
    ranks.join()
    assert len(lost) == is_lost and not ranks._all[0].is_alive()


def settings(folder: object, parent: int) -> Settings:
    """Of a rank that waits in a folder where nobody comes, as when rank 0 still imports."""
    return Settings(
        path=sys.path,
        rank=1,
        size=2,
        folder=str(folder),
        secret="00",
        device="cpu",
        threads=1,
        parent=parent,
    )


def lives(process: int) -> bool:
    """Whether the process is there and has not ended; a zombie (Z) has. Whether it runs or sleeps
    is the machine's affair.
    """
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_the_signal_of_the_kernel_ends_it(tmp_path: Path) -> None:
    """Rank 0 is killed, and a fork of it, such as a program's own worker, still holds the other end
    of the pipe.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", _RANK_0, json.dumps(settings(tmp_path, 0))], stdout=subprocess.PIPE
    )
    assert program.stdout is not None
    rank_1, fork = map(int, program.stdout.readline().split())
    try:
        assert lives(rank_1)
        program.kill()
        wait_until(lambda: not lives(rank_1))
        assert lives(fork)
    finally:
        for process in (fork, rank_1):
            if lives(process):
                os.kill(process, signal.SIGKILL)
        program.wait()
        program.stdout.close()


_GUARDED = (
    "import os, sys, time; from specdec.parallel.processes.rank import _end_with;"
    " _end_with(os.getppid()); print(flush=True); time.sleep(600)"
)


@contextmanager
def started(program: str) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes], IO[bytes]]]:
    """A process with its input and its output, which has ended afterwards."""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            yield process, process.stdin, process.stdout
        finally:
            process.kill()


def test_the_end_of_its_input_ends_it() -> None:
    """Though its parent lives."""
    with started(_GUARDED) as (process, given, said):
        said.readline()
        assert process.poll() is None
        given.close()
        assert process.wait(HANG) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="the signal is Linux's")
def test_it_does_not_begin_without_its_parent() -> None:
    """Which ended before the kernel had been asked for a signal."""
    with started(START) as (process, given, said):
        given.write(json.dumps(settings("nowhere", os.getppid())).encode() + b"\n")
        given.flush()  # and stays open
        assert process.wait(HANG) == 1 and not said.read()
