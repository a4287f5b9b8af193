"""Verdicts of self-checks: made once per machine, told in one line, safe against crashes, damage
and company.
"""

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
from specdec.device.self_check import Verdict, passes, reasons_against, run, times_of, verdict_of
from specdec.kernels.kernel import OURS, TORCH, Kernel
from tests.helpers.waiting import HANG, wait_until

CPU = torch.device("cpu")


RIGHT = Deviation(1e-4, 1e-3)


class Counted:
    """A check that counts its runs."""

    def __init__(self, outcome: Deviation | BaseException = RIGHT) -> None:
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
    """Neither in the same process nor in the next; the file holds the figures; a variant is checked
    by itself.
    """
    check = Counted()
    for _ in range(2):
        assert passes("argmax", CPU, check) and passes("argmax", CPU, check)
        next_start()
    assert check.runs == 1
    content = json.loads(kept().read_text())
    spent = {"milliseconds": content["milliseconds"], "microseconds": None}
    assert content == {"failure": None, "error": 1e-4, "bound": 1e-3, **spent}
    assert (
        passes("argmax", CPU, check, torch.bfloat16)
        and check.runs == 2
        and kept("argmax-bfloat16").exists()
    )
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
def test_what_fails_is_left_out_with_one_line(
    caplog: pytest.LogCaptureFixture, outcome: Deviation | Exception, line: str
) -> None:
    """The same on each start, which names how to take it all the same,
    and how to check it again.
    """
    check = Counted(outcome)
    for _ in range(2):
        caplog.clear()
        for _ in range(3):
            assert reasons_against("argmax", CPU, check) == [f"its self-check failed: {line}"]
        (record,) = (record for record in caplog.records if record.levelno >= logging.WARNING)
        message = record.getMessage()
        assert (
            "\n" not in message and message.startswith("argmax is left out on ") and line in message
        )
        assert (
            "SPECDEC_KERNELS=argmax takes it all the same" in message
            and "specdec doctor --run" in message
        )
        next_start()
    assert check.runs == 1


@pytest.mark.parametrize(
    "damage",
    ["", "{", "[]", "3", '"started"', "{}", '{"error": 1}', '{"failure": null, "more": 1}'],
)
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


def test_a_cache_that_cannot_be_written_is_no_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
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
    monkeypatch.setattr(
        Path,
        "write_text",
        lambda *args, **options: (_ for _ in ()).throw(OSError(28, "No space left")),
    )
    check = Counted()
    assert passes("argmax", CPU, check) and check.runs == 1 and not kept().exists()


def in_another_process(target: Callable[..., object], *args: object) -> ForkProcess:
    """A copy of this process that runs `target`."""
    process = multiprocessing.get_context("fork").Process(target=target, args=args)
    process.start()
    return process


def test_a_check_that_kills_the_process_is_not_run_again(caplog: pytest.LogCaptureFixture) -> None:
    """As a fault of the GPU does; the next start says so in its line, and so does the one after
    that.
    """

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
    """So that `doctor --run`, run once more, comes to what stands behind it; a third time tries it
    anew.
    """
    process = in_another_process(
        lambda: verdict_of("argmax", CPU, lambda: os._exit(134), again=True)
    )
    process.join(HANG)
    assert process.exitcode == 134
    check = Counted()
    assert (
        "a process ended" in str(verdict_of("argmax", CPU, check, again=True).failure)
        and check.runs == 0
    )
    assert verdict_of("argmax", CPU, check, again=True).failure is None and check.runs == 1


@pytest.mark.parametrize(
    "stop", [KeyboardInterrupt(), SystemExit(), MemoryError(), torch.OutOfMemoryError("no room")]
)
def test_what_stops_a_check_from_outside_is_no_verdict(stop: BaseException) -> None:
    """The kernels are not to blame: the next start checks."""
    with pytest.raises(type(stop)):
        passes("argmax", CPU, Counted(stop))
    assert not kept().exists()
    assert passes("argmax", CPU, Counted())


def test_processes_at_once_check_once(tmp_path: Path) -> None:
    """All but one wait for its verdict, and take what is being checked for neither failed
    nor new.
    """
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


def test_a_process_that_never_ends_its_check_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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


@pytest.mark.parametrize(
    "entry", ["card", "architecture", "driver", "hip", "torch", "specdec", "amd-aiter", "triton"]
)
def test_another_machine_or_version_is_checked_anew(
    monkeypatch: pytest.MonkeyPatch, entry: str
) -> None:
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
    assert (
        found["torch"] == torch.__version__
        and found["architecture"] == "gfx942"
        and found["AITER_TRITON_ONLY"] == "1"
    )
    for switch in ("AITER_MLA_USE_OPUS", "AITER_ENABLE_FMHA_OPUS"):
        monkeypatch.setenv(switch, "1")
        assert self_check.machine(CPU) != found, "other kernels of AITER run"
        monkeypatch.delenv(switch)
    assert all(found[name] for name in ("card", "driver", "specdec"))


@pytest.mark.parametrize("architecture", ["gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1250"])
def test_every_amd_card_is_checked(monkeypatch: pytest.MonkeyPatch, architecture: str) -> None:
    """Its verdict decides; there is no list of cards that get none."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    right, wrong = Counted(), Counted(Deviation(1.0, 0.0))
    assert passes("argmax", CPU, right) and not passes("sampler", CPU, wrong)
    assert (right.runs, wrong.runs) == (1, 1) and kept("argmax").exists()


def test_other_machines_need_no_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA and CPUs, and there is no file."""
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: None)
    check = Counted()
    assert reasons_against("argmax", CPU, check) == []
    assert check.runs == 0 and not kept().parent.exists()


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
    with pytest.raises(
        InvalidInputError,
        match=r"^SPECDEC_KERNELS names 'fused'; known are .*fused_layers.* leaves it out$",
    ):
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
def test_by_name_and_checked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, architecture: str | None
) -> None:
    """Off unless it is named; then its check decides, anywhere,
    and no advice is given to insist.
    """
    monkeypatch.setattr(specdec.device.device, "rocm_architecture", lambda device: architecture)
    check = Counted(Deviation(1.0, 0.0))
    assert reasons_against("aiter_layers", CPU, check) == [
        "it is taken by name alone (SPECDEC_KERNELS=aiter_layers)"
    ]
    monkeypatch.setenv("SPECDEC_KERNELS", "-aiter_layers")
    assert (
        reasons_against("aiter_layers", CPU, check) == ["SPECDEC_KERNELS leaves it out"]
        and check.runs == 0
    )
    assert not self_check.named("aiter_layers")
    monkeypatch.setenv("SPECDEC_KERNELS", "aiter_layers")
    assert self_check.named("aiter_layers") and not self_check.named("argmax")
    (reason,) = reasons_against("aiter_layers", CPU, check)
    assert "its self-check failed" in reason and check.runs == 1
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line.startswith("aiter_layers is left out") and line.endswith(
        "(specdec doctor --run checks it again)"
    )
    self_check._known.clear()
    assert passes("aiter_layers", CPU, Counted(), "other")


GPU = torch.device("cuda")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """How long each way takes on a pretended GPU, by what a launch returns."""
    spent: dict[str, float] = {}
    monkeypatch.setattr(self_check, "_card", lambda device: "AMD Instinct MI300X")
    monkeypatch.setattr(specdec.device.device, "describe_device", str)
    monkeypatch.setattr(self_check, "microseconds", lambda launch, device: spent[launch()])
    return spent


def test_ways_are_timed_once(clock: dict[str, float]) -> None:
    """Kept for the next start; a variant is timed by itself; nothing is timed off AMD's GPUs."""
    clock.update(ours=20.0, torch=10.0)
    ways = {"ours": lambda: "ours", "torch": lambda: "torch"}
    assert times_of("few_rows", GPU, lambda: ways, torch.bfloat16) == clock
    next_start()
    assert times_of("few_rows", GPU, lambda: pytest.fail("they are known"), torch.bfloat16) == clock
    one = {"ours": ways["ours"]}
    assert times_of("few_rows", GPU, lambda: one, torch.float16) == {"ours": 20.0}
    clock.update(ours=5.0)
    assert times_of("few_rows", GPU, lambda: ways, torch.bfloat16, again=True) == clock
    assert times_of("few_rows", CPU, lambda: pytest.fail("a CPU has one way"), torch.bfloat16) == {}


def test_names_are_not_timed(clock: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are taken, whatever they take."""
    monkeypatch.setenv("SPECDEC_KERNELS", "few_rows")
    assert times_of("few_rows", GPU, lambda: pytest.fail("it is named")) == {}


def test_what_cannot_be_timed_is_told(
    clock: dict[str, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then nothing is known, and the preferred way stays."""

    def refuse() -> str:
        raise RuntimeError("grouped_mm: not on this architecture")

    assert times_of("experts", GPU, lambda: {"ours": refuse}) == {}
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line == "experts cannot be timed: RuntimeError: grouped_mm: not on this architecture"


def test_a_kernel_that_is_slower_than_torch_is_left_out(
    clock: dict[str, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Though it is right; with one line that says both times."""

    def made() -> Kernel:
        right = lambda device: Deviation(0.0, 1.0)  # noqa: E731
        kernel = Kernel("few_rows", right, reasons=lambda device: [], ways=ways)
        Kernel.made.remove(kernel)
        return kernel

    def ways(device: torch.device) -> dict[str, Callable[[], str]]:
        return {OURS: lambda: OURS, TORCH: lambda: TORCH}

    clock.update({OURS: 10.0, TORCH: 10.0})
    assert made().runs_on(GPU) and made().runs_on(CPU)
    clock.update({OURS: 30.0})
    assert made().times(GPU, again=True) == clock and not made().runs_on(GPU)
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "WARNING")
    assert line == "few_rows is left out on cuda: 30 us, where torch takes 10"


def test_the_first_check_says_what_it_compiles_for(
    clock: dict[str, float],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before it begins, once in a process, then each check; nothing at a second start."""
    self_check._say_once.cache_clear()

    def lines() -> list[str]:
        return [record.getMessage() for record in caplog.records]

    def check() -> Deviation:
        assert lines()[0].startswith("on cuda: compiling and checking kernels, once, up to ")
        assert lines()[-1] == "checking argmax"
        return Deviation(0.0, 0.0)

    with caplog.at_level(logging.INFO):
        assert passes("argmax", GPU, check) and passes("sampler", GPU, Counted())
        assert lines()[1:] == ["checking argmax", "checking sampler"]
        caplog.clear()
        next_start()
        assert passes("argmax", GPU, check) and not lines()
