"""Verdicts of self-checks: made once per machine, told in one line, safe against crashes, damage and company."""

import json
import logging
import math
import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest
import torch

import specdec.device.device
from specdec.base.errors import InvalidInputError
from specdec.device import self_check
from specdec.device.deviation import Deviation
from specdec.device.self_check import Verdict, passes, reasons_against, run, verdict_of
from tests.helpers.waiting import HANG, wait_until

CPU = torch.device("cpu")


class Counted:
    """A check that counts its runs."""

    def __init__(self, outcome: Deviation | BaseException = Deviation(1e-4, 1e-3)) -> None:  # noqa: B008 (immutable)
        self.outcome, self.runs = outcome, 0

    def __call__(self) -> Deviation:
        self.runs += 1
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome


@pytest.fixture(autouse=True)
def cdna(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine says that it is an MI300X."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: "gfx942")


def next_start() -> None:
    """Another process would know nothing."""
    self_check._known.clear()


def kept(name: str = "argmax") -> Path:
    """The file of a verdict."""
    return self_check._folder(CPU) / f"{name}.json"


def test_a_second_start_runs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Neither in the same process nor in the next; the file holds the figures; a variant is checked by itself."""
    check = Counted()
    for _ in range(2):
        assert passes("argmax", CPU, check) and passes("argmax", CPU, check)
        next_start()
    assert check.runs == 1
    content = json.loads(kept().read_text())
    assert content == {"failure": None, "error": 1e-4, "bound": 1e-3, "milliseconds": content["milliseconds"]}
    assert passes("argmax", CPU, check, torch.bfloat16) and check.runs == 2 and kept("argmax-bfloat16").exists()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (Deviation(2e-2, 1e-3), "its error is 0.02, where 0.001 is allowed"),
        (Deviation(math.nan, 1e-3), "its error is nan, where 0.001 is allowed"),
        (Deviation(1.0, 0.0), "its error is 1, where 0 is allowed"),
        (RuntimeError("hipcc: not\n  found"), "RuntimeError: hipcc: not found"),
        (AssertionError(), "AssertionError"),
    ],
)
def test_what_fails_is_left_out_with_one_line(caplog: pytest.LogCaptureFixture, outcome: Deviation | Exception, line: str) -> None:
    """The same on each start, which names how to take it all the same, and how to check it again."""
    check = Counted(outcome)
    for _ in range(2):
        caplog.clear()
        for _ in range(3):
            assert reasons_against("argmax", CPU, check) == [f"its self-check failed: {line}"]
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        message = record.getMessage()
        assert "\n" not in message and message.startswith("argmax is left out on ") and line in message
        assert "SPECDEC_KERNELS=argmax takes it all the same" in message and "specdec doctor --run" in message
        next_start()
    assert check.runs == 1


@pytest.mark.parametrize("damage", ["", "{", "[]", "3", '"started"', "{}", '{"error": 1}', '{"failure": null, "more": 1}'])
def test_a_damaged_file_is_no_verdict(damage: str) -> None:
    """It is checked anew, and mended."""
    kept().parent.mkdir(parents=True)
    kept().write_text(damage)
    check = Counted()
    assert passes("argmax", CPU, check) and check.runs == 1
    next_start()
    assert passes("argmax", CPU, check) and check.runs == 1


def test_bytes_that_are_no_text_are_no_verdict() -> None:
    """As after a disk that failed."""
    kept().parent.mkdir(parents=True)
    kept().write_bytes(b"\xff\xfe\x00")
    assert passes("argmax", CPU, Counted())


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each start checks anew."""
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(self_check, "cache_folder", lambda: tmp_path / "file")
    check = Counted()
    for runs in (1, 2):
        assert passes("argmax", CPU, check) and passes("argmax", CPU, check)
        assert check.runs == runs
        next_start()


def test_a_full_disk_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lock is there and the verdict is not."""
    monkeypatch.setattr(Path, "write_text", lambda *args, **options: (_ for _ in ()).throw(OSError(28, "No space left")))
    check = Counted()
    assert passes("argmax", CPU, check) and check.runs == 1 and not kept().exists()


def in_another_process(target: Callable[..., object], *args: object) -> ForkProcess:
    """A copy of this process that runs `target`."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def test_a_check_that_kills_the_process_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """As a fault of the GPU does; the next start says so in its line, and so does the one after that."""

    def die() -> Deviation:
        os._exit(134)

    process = in_another_process(passes, "argmax", CPU, die)
    process.join(HANG)
    assert process.exitcode == 134
    check = Counted()
    for _ in range(2):
        next_start()
        caplog.clear()
        assert not passes("argmax", CPU, check) and check.runs == 0
        (message,) = (record.getMessage() for record in caplog.records)
        assert "a process ended in the midst of it" in message
    assert verdict_of("argmax", CPU, check, again=True).failure is None and check.runs == 1
    next_start()
    assert passes("argmax", CPU, check) and check.runs == 1


def test_checking_again_goes_past_a_check_that_has_just_killed_the_process() -> None:
    """So that `doctor --run`, run once more, comes to what stands behind it; a third time tries it anew."""
    process = in_another_process(lambda: verdict_of("argmax", CPU, lambda: os._exit(134), again=True))
    process.join(HANG)
    assert process.exitcode == 134
    check = Counted()
    assert "a process ended" in str(verdict_of("argmax", CPU, check, again=True).failure) and check.runs == 0
    assert verdict_of("argmax", CPU, check, again=True).failure is None and check.runs == 1


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), SystemExit(), MemoryError(), torch.OutOfMemoryError("no room")])
def test_what_stops_a_check_from_outside_is_no_verdict(stop: BaseException) -> None:
    """The kernels are not to blame: the next start checks."""
    with pytest.raises(type(stop)):
        passes("argmax", CPU, Counted(stop))
    assert not kept().exists()
    assert passes("argmax", CPU, Counted())


def test_processes_at_once_check_once(tmp_path: Path) -> None:
    """All but one wait for its verdict, and take what is being checked for neither failed nor new."""
    runs, arrived = tmp_path / "runs", tmp_path / "arrived"
    arrived.mkdir()

    def check() -> Deviation:
        with runs.open("a") as file:
            file.write("x")
        wait_until(lambda: len(list(arrived.iterdir())) == 4)
        return Deviation(0.0, 0.0)

    def start() -> None:
        next_start()
        (arrived / str(os.getpid())).touch()
        os._exit(0 if passes("argmax", CPU, check) else 1)

    processes = [in_another_process(start) for _ in range(4)]
    for process in processes:
        process.join(HANG)
    assert [process.exitcode for process in processes] == [0] * 4
    assert runs.read_text() == "x"


def test_a_process_that_never_ends_its_check_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that hangs."""
    monkeypatch.setattr(self_check, "PATIENCE", 0.0)
    process = in_another_process(passes, "argmax", CPU, lambda: wait_until(lambda: False))
    try:
        wait_until(kept().exists)
        check = Counted()
        assert "another process" in reasons_against("argmax", CPU, check)[0] and check.runs == 0
    finally:
        process.kill()
        process.join()


def test_a_check_may_ask_for_another() -> None:
    """A captured step has layers."""
    inner = Counted()

    def outer() -> Deviation:
        assert passes("fused_layers", CPU, inner)
        return Deviation(0.0, 0.0)

    assert passes("captured_step", CPU, outer) and inner.runs == 1


@pytest.mark.parametrize("entry", ["card", "architecture", "driver", "hip", "torch", "specdec", "amd-aiter", "triton"])
def test_another_machine_or_version_is_checked_anew(monkeypatch: pytest.MonkeyPatch, entry: str) -> None:
    """Each entry counts."""
    check = Counted()
    assert passes("argmax", CPU, check)
    known = self_check.machine(CPU)
    monkeypatch.setattr(self_check, "machine", lambda device: known | {entry: "another"})
    assert passes("argmax", CPU, check) and check.runs == 2


def test_what_a_verdict_holds_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Versions as they are installed; how AITER is imported."""
    monkeypatch.setenv("AITER_TRITON_ONLY", "1")
    found = self_check.machine(CPU)
    assert found["torch"] == torch.__version__ and found["architecture"] == "gfx942" and found["AITER_TRITON_ONLY"] == "1"
    assert all(found[name] for name in ("card", "driver", "specdec"))


@pytest.mark.parametrize(("architecture", "passed"), [(None, True), ("gfx1100", False), ("gfx1201", False), ("gfx90a", False)])
def test_only_cdna_is_checked(monkeypatch: pytest.MonkeyPatch, architecture: str | None, passed: bool) -> None:
    """NVIDIA and CPUs need none, and no file; elsewhere names alone count."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    check = Counted()
    reasons = reasons_against("argmax", CPU, check)
    assert check.runs == 0 and not kept().parent.exists()
    assert reasons == ([] if passed else [f"on {architecture} it is taken by name alone (SPECDEC_KERNELS=argmax)"])


@pytest.mark.parametrize("architecture", [None, "gfx942", "gfx1100"])
def test_names_overrule(monkeypatch: pytest.MonkeyPatch, architecture: str | None) -> None:
    """What is named is taken unchecked, what has a minus is left out, anywhere."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    monkeypatch.setenv("SPECDEC_KERNELS", "argmax, -fused_layers")
    check = Counted(Deviation(1.0, 0.0))
    assert passes("argmax", CPU, check)
    assert reasons_against("fused_layers", CPU, Counted()) == ["SPECDEC_KERNELS leaves it out"]
    assert check.runs == 0
    monkeypatch.setenv("SPECDEC_KERNELS", "argmax fused")
    with pytest.raises(InvalidInputError, match=r"^SPECDEC_KERNELS names 'fused'; known are .*fused_layers.* leaves it out$"):
        passes("argmax", CPU, check)


def test_run_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time, error and bound; without gradients."""

    now = [0.0]
    monkeypatch.setattr(self_check.time, "perf_counter", lambda: now[0])

    def check() -> Deviation:
        now[0] += 0.02
        assert torch.is_inference_mode_enabled()
        return Deviation(1.0, 2.0)

    verdict = run(check)
    assert verdict == Verdict(None, 1.0, 2.0, 20.0)


@pytest.mark.parametrize("architecture", [None, "gfx942", "gfx1100"])
def test_by_name_and_checked(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, architecture: str | None) -> None:
    """Off unless it is named; then its check decides, anywhere, and no advice is given to insist."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    check = Counted(Deviation(1.0, 0.0))
    assert reasons_against("aiter_layers", CPU, check) == ["it is taken by name alone (SPECDEC_KERNELS=aiter_layers)"]
    monkeypatch.setenv("SPECDEC_KERNELS", "-aiter_layers")
    assert reasons_against("aiter_layers", CPU, check) == ["SPECDEC_KERNELS leaves it out"] and check.runs == 0
    assert not self_check.named("aiter_layers")
    monkeypatch.setenv("SPECDEC_KERNELS", "aiter_layers")
    assert self_check.named("aiter_layers") and not self_check.named("argmax")
    (reason,) = reasons_against("aiter_layers", CPU, check)
    assert "its self-check failed" in reason and check.runs == 1
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("aiter_layers is left out") and line.endswith("(specdec doctor --run checks it again)")
    self_check._known.clear()
    assert passes("aiter_layers", CPU, Counted(), "other")
