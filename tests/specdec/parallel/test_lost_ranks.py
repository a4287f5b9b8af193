"""Ranks that end, stop or are interrupted take the others with them."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.base.errors import SpecDecError
from specdec.parallel import executor as executors
from specdec.parallel.executor import Executor
from specdec.parallel.group import Group
from specdec.parallel.processes import launch, workers
from tests.evals.tiny import save_tiny
from tests.helpers.processes import started
from tests.helpers.waiting import HANG, in_time


def test_a_rank_of_torchrun_that_is_stopped_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those who wait for it are told."""
    monkeypatch.setattr(workers, "LOOK", 0.01)
    executor: Any = SimpleNamespace(ended=None)
    with started(["sleep", "600"]) as stopped, started(["sleep", "600"]) as other:
        monkeypatch.setattr(
            launch, "_lost", lambda executor, line: executor.__dict__.update(ended=line)
        )
        stopped.send_signal(signal.SIGSTOP)
        in_time(lambda: launch._watch(executor, [other.pid, stopped.pid]))
        assert stopped.wait() == -signal.SIGKILL and other.poll() is None
        other.kill()
    assert (
        executor.ended
        == "rank 1 of the tensor-parallel group was stopped for 0.2 s, as by SIGSTOP, and has been"
        " ended"
    )


def test_two_interrupts_of_a_call_end_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one comes while the first is dealt with; the other ranks are in the midst of a
    call, so nothing goes on.
    """
    monkeypatch.setattr(executors, "Wire", lambda *_: SimpleNamespace(say=lambda *_: None))
    executor = Executor(Group(0, 2, None, None))

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(executor, "_fail", interrupted)
    with pytest.raises(KeyboardInterrupt), executor.together():
        interrupted()
    with (
        pytest.raises(SpecDecError, match="ended after an interruption; load the target again"),
        executor.together(),
    ):
        pytest.fail("went on")


@pytest.mark.parametrize("failed", [False, True])
def test_a_device_that_waits_for_a_lost_rank_does_not_keep_the_process(
    failed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    armed: list[float] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(
        launch.faulthandler, "dump_traceback_later", lambda seconds, **_: armed.append(seconds)
    )
    wire = SimpleNamespace(close=lambda *_: None, leave=lambda: None)
    monkeypatch.setattr(executors, "Wire", lambda *_: wire)
    executor = Executor(Group(0, 2, None, None))
    if failed:
        executor.lose("rank 1 has ended")
    launch._leave(executor)
    assert armed == [launch.PATIENCE] * failed and executor.ended is not None


_ALONE = """
import sys
from specdec import EngineConfig, SpecDecoder
from specdec.parallel.executor import current, collective_rpc
from specdec.parallel.processes import launch, workers
from tests.helpers import lockstep_parts
launch.PATIENCE = workers.PATIENCE = 0.1
decoder = SpecDecoder.from_pretrained(
    sys.argv[1], drafter="ngram", device="cpu", dtype="float32", tensor_parallel=2
)
answer = decoder.generate([5, 6, 7], max_tokens=3)
print(current()._ranks._workers._all[0]._process.pid, answer.token_ids, flush=True)
collective_rpc(decoder.verifier, lockstep_parts.wait, 600)
"""


def test_a_rank_that_no_collective_wakes_ends_with_the_other(tmp_path: Path) -> None:
    """Of a program without a guard around what it does; both are in the midst of a call, as when a
    device does not answer. Rank 1 ends with rank 0 in `test_rank_process`.
    """
    program = subprocess.Popen(
        [sys.executable, "-c", _ALONE, str(save_tiny(tmp_path))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert program.stdout is not None
    worker = int(program.stdout.readline().split()[0])
    os.kill(worker, signal.SIGKILL)
    said = program.communicate(timeout=HANG)[1].splitlines()
    line = "specdec: error: rank 1 of the tensor-parallel group was ended by SIGKILL"
    assert line in said and program.returncode == 1
