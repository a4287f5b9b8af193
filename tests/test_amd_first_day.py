"""The first day on an AMD GPU, rehearsed: every step is run, recorded and resumed, and none keeps
the others from running.
"""

import json
import os
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.base.registry import ATTENTION_BACKENDS
from tests.checks.amd_first_day import __main__ as first_day
from tests.checks.amd_first_day import gpu, run
from tests.checks.amd_first_day.gpu import Gpus
from tests.checks.amd_first_day.record import MOST, page
from tests.checks.amd_first_day.run import run_step
from tests.checks.amd_first_day.steps import BACKENDS, DEVICELESS, Step, all_steps
from tests.helpers.waiting import wait_until

Capture = pytest.CaptureFixture[str]
HANGS = "import os, time; print('so far', os.getpid(), flush=True); time.sleep(600)"
STEPS = [
    Step("works", "a command that works", ("json.tool", "--help")),
    Step("fails", "a command that fails", ("json.tool", "nowhere.json")),
    Step("hangs", "a command without an end", ("timeit", "-n", "1", "-r", "1", HANGS), 0.03),
    Step(
        "figures",
        "a command that leaves figures",
        ("leaves_figures", "--out", "FOLDER/out.json"),
        environ={"PYTHONPATH": "FOLDER"},
    ),
]


class Launched(subprocess.Popen[bytes]):
    """A step whose time is up when it has said what it says before it hangs,
    and never otherwise.
    """

    def __init__(self, command: Any, stdout: Any = None, **options: Any) -> None:
        self._log = stdout
        super().__init__(command, stdout=stdout, **options)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status."""
        if timeout is not None and HANGS in self.args:  # type: ignore[operator]
            wait_until(lambda: "so far" in Path(self._log.name).read_text())
            raise subprocess.TimeoutExpired(HANGS, timeout)
        return super().wait()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the steps above leave what they find, in place of the real ones."""
    (tmp_path / "leaves_figures.py").write_text(
        "import sys; open(sys.argv[2], 'w').write('{\"milliseconds\": 4.2}')"
    )

    def here(text: str) -> str:
        return text.replace("FOLDER", str(tmp_path))

    own = [
        replace(
            step,
            arguments=tuple(map(here, step.arguments)),
            environ={name: here(value) for name, value in step.environ.items()},
        )
        for step in STEPS
    ]
    monkeypatch.setattr(first_day, "all_steps", lambda folder, **options: own)
    monkeypatch.setattr(first_day, "find_gpus", lambda: Gpus(1))
    monkeypatch.setattr(run.subprocess, "Popen", Launched)
    return tmp_path


def record(folder: Path) -> dict[str, Any]:
    steps: dict[str, Any] = json.loads((folder / "result.json").read_text())["steps"]
    return steps


def test_each_step_has_its_verdict(folder: Path, capsys: Capture) -> None:
    """And its output, its figures and its command, in the JSON and on the page."""
    assert first_day.main(["--out", str(folder)]) == 1
    steps = record(folder)
    assert {name: step["verdict"] for name, step in steps.items()} == {
        "works": "passed",
        "fails": "failed (2)",
        "hangs": "no end after 0.03 minutes",
        "figures": "passed",
    }
    assert "nowhere.json" in steps["fails"]["output"] and "so far" in steps["hangs"]["output"]
    with pytest.raises(ProcessLookupError):
        os.kill(int(steps["hangs"]["output"].split()[2]), 0)
    assert (
        steps["figures"]["figures"] == {"milliseconds": 4.2} and steps["works"]["figures"] is None
    )
    page = (folder / "page.md").read_text()
    assert (
        "2 of 4 steps passed, 2 failed." in page
        and "| hangs | a command without an end | no end after 0.03 minutes |" in page
    )
    assert "`python -m json.tool nowhere.json`" in page and "usage: python -m json.tool" in page
    assert "2 of 4 steps passed, 2 failed. Please open an issue" in capsys.readouterr().out


def only(monkeypatch: pytest.MonkeyPatch, *steps: Step) -> None:
    """These in place of all."""
    monkeypatch.setattr(first_day, "all_steps", lambda folder, **options: list(steps))


def ends(name: str, status: int, said: str = "") -> Step:
    """A command that says something, and ends with a status."""
    code = f"import os; print({said!r}, flush=True); os._exit({status})"
    return Step(name, "a command", ("timeit", "-n", "1", "-r", "1", code))


def test_nothing_is_run_without_a_gpu(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says why there is none, and what to do without."""
    monkeypatch.setattr(first_day, "find_gpus", lambda: Gpus(0, "torch finds no GPU here"))
    assert first_day.main(["--out", str(folder / "new")]) == 2
    said = "no GPU to check: torch finds no GPU here (--rehearse runs the steps without one)\n"
    assert capsys.readouterr().err == said and not (folder / "new").exists()


def test_a_gpu_that_goes_away_ends_the_day(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that fails is asked about; with the GPU back, the same command goes on behind it."""
    found = [Gpus(1), Gpus(0, "HIP error: device lost")]
    monkeypatch.setattr(first_day, "find_gpus", lambda: found.pop(0))
    names = "works", "fails", "figures"
    assert first_day.main(["--out", str(folder), "--only", *names]) == 3
    told = "failed (2), and the GPU has gone: HIP error: device lost"
    assert {name: step["verdict"] for name, step in record(folder).items()} == {
        "works": "passed",
        "fails": told,
    }
    assert "goes on behind this step" in capsys.readouterr().out
    assert told in (folder / "page.md").read_text()
    found[:] = [Gpus(1)]
    assert first_day.main(["--out", str(folder), "--only", *names]) == 1
    assert set(record(folder)) == set(names) and not found
    found[:] = [Gpus(1), Gpus(1)]  # a failure that leaves the GPU alone ends nothing
    assert first_day.main(["--out", str(folder), "--only", *names, "--again", "fails"]) == 1
    assert record(folder)["fails"]["verdict"] == "failed (2)" and not found


def test_what_cannot_run_here_is_no_failure(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it run again with what has failed. A command that was typed wrong has the same
    status.
    """
    only(monkeypatch, STEPS[0], ends("cannot", 2, "rocm_aiter_fa cannot serve this"))
    assert first_day.main(["--out", str(folder)]) == 0
    line = "1 of 2 steps passed, 1 refused by this machine, 0 failed."
    assert line in capsys.readouterr().out and line in (folder / "page.md").read_text()
    assert first_day.main(["--out", str(folder), "--again", "failed"]) == 0
    assert "refused before" in capsys.readouterr().out
    only(monkeypatch, ends("typed wrong", 2, "usage: specdec"), ends("breaks", 1))
    assert first_day.main(["--out", str(folder)]) == 1
    verdicts = {name: step["verdict"] for name, step in record(folder).items()}
    assert verdicts["typed wrong"] == "failed (2)" and verdicts["breaks"] == "failed (1)"


def test_steps_for_two_gpus_need_them(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = replace(STEPS[0], name="pair", gpus=2)
    for count in (1, 2):
        only(monkeypatch, STEPS[0], pair)
        monkeypatch.setattr(first_day, "find_gpus", lambda count=count: Gpus(count))
        assert first_day.main(["--out", str(folder)]) == 0
        assert ("pair" in record(folder)) == (count == 2)
        left_out = "left out: pair, which takes 2 GPUs" in capsys.readouterr().out
        assert left_out == (count == 1)


def test_the_gpu_is_asked_by_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which may end in whatever way, or never."""
    for code, told in (
        ("print(3)", Gpus(3)),
        ("raise SystemExit('no GPU: a reason')", Gpus(0, "no GPU: a reason")),
        ("import os; os.abort()", Gpus(0, "the process ended with -6")),
    ):
        monkeypatch.setattr(gpu, "_ASK", code)
        assert gpu.find_gpus() == told
    monkeypatch.setattr(gpu, "_ASK", "import threading; threading.Event().wait()")
    monkeypatch.setattr(gpu, "PATIENCE", 0.01)
    assert "has not ended" in gpu.find_gpus().why_none


def test_figures_stand_beside_those_that_were_told(tmp_path: Path) -> None:
    """Only where the steps that measure them have passed; what has another form says so."""

    def entry(figures: Any, verdict: str = "passed") -> dict[str, Any]:
        known = {"title": "t", "command": "c", "verdict": verdict, "seconds": 1.0, "output": ""}
        return {**known, "figures": figures}

    steps = {
        "bench-8": entry({"rows": [{"ratio": None}, {"ratio": 1.5}, {"ratio": 2.25}]}),
        "bench-32": entry({"rows": [{"ratio": 9.0}]}, "failed (1)"),
        "real-1": entry({"columns": []}),
        "kernels": entry([{"verdict": "right"}, {"verdict": "WRONG: off"}]),
        "layout-plain": entry({"decode step of 1 x 2,048": 2.0, "first token of 8": 1.0}),
        "layout-shuffled": entry({"decode step of 1 x 2,048": 1.9}),
    }
    text = page({"device": "a device"}, steps)
    assert "| embedded model, 8 at once | 2.63x (H100) | 2.25x | docs/performance.md |" in text
    assert "32 at once" not in text and "| attention calls that are wrong | 0 | 1 |" in text
    assert "| -0.5 % to -12 % (CDNA) | -5.0% (decode step of 1 x 2,048) | [32914](" in text
    assert "have another form: KeyError 'rows'" in text


def test_what_is_finished_is_not_run_again(
    folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is named, has failed and is to be repeated, or was another command."""
    ran: list[str] = []

    def noted(step: Step, folder: Path, launch: Any) -> dict[str, Any]:
        ran.append(step.name)
        return run_step(
            replace(step, minutes=0.01) if step.name == "hangs" else step, folder, launch
        )

    monkeypatch.setattr(first_day, "run_step", noted)
    first_day.main(["--out", str(folder), "--only", "works", "fails"])
    first_day.main(["--out", str(folder)])
    assert (
        ran == ["works", "fails", "hangs", "figures"]
        and "works: a command that works ... passed before" in capsys.readouterr().out
    )
    first_day.main(["--out", str(folder), "--again", "works"])
    assert ran[4:] == ["works"]
    first_day.main(["--out", str(folder), "--again", "failed"])
    assert ran[5:] == ["fails", "hangs"]
    changed = [replace(STEPS[0], arguments=("json.tool", "-h"))]
    monkeypatch.setattr(first_day, "all_steps", lambda folder, **options: changed)
    first_day.main(["--out", str(folder)])
    assert ran[7:] == ["works"] and set(record(folder)) == {step.name for step in STEPS}


@pytest.mark.parametrize("text", ["{", "[1]", "", '{"schema": "another"}', "[" * 100_000, "\0"])
def test_a_record_that_is_none_is_one_line(folder: Path, text: str) -> None:
    """It stays as it is."""
    (folder / "result.json").write_text(text)
    with pytest.raises(SystemExit, match="is not a record of this version; move it away"):
        first_day.main(["--out", str(folder)])
    assert (folder / "result.json").read_text() == text


def test_figures_of_a_step_that_was_cut_short_are_none(tmp_path: Path) -> None:
    """And no end of the day."""
    figures = tmp_path / "figures.json"

    def launch(step: Step, log: Path) -> None:
        figures.write_text('{"milliseconds": 4')
        log.write_text("so far")

    cut = Step("cut", "a step", ("timeit", "--out", str(figures)))
    entry = run_step(cut, tmp_path, launch)
    assert entry["figures"] is None and entry["verdict"].startswith("no end after")


def test_interrupted(folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was finished stays, the step that runs is ended,
    and the same command goes on with it.
    """
    launch = run.launch

    def interrupted(step: Step, log: Path) -> int | None:
        if step.name == "fails":
            raise KeyboardInterrupt
        return launch(step, log)

    monkeypatch.setattr(first_day, "launch", interrupted)
    assert first_day.main(["--out", str(folder)]) == 130
    assert (
        set(record(folder)) == {"works"}
        and "the same command goes on from here" in capsys.readouterr().out
    )
    monkeypatch.setattr(first_day, "launch", launch)
    assert first_day.main(["--out", str(folder), "--only", "works", "fails"]) == 1
    assert set(record(folder)) == {"works", "fails"}


def test_unknown_steps_are_refused(folder: Path, capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        first_day.main(["--out", str(folder), "--only", "bench"])
    assert (
        "no step is called 'bench' (known: failed, works, fails, hangs, figures)"
        in capsys.readouterr().err
    )


def test_every_backend_has_its_steps(tmp_path: Path) -> None:
    """One that is new must not be forgotten; names are told apart."""
    steps = all_steps(tmp_path, tiny=tmp_path, data=None, limit=1)
    names = [step.name for step in steps]
    assert len(set(names)) == len(names) and set(BACKENDS) == set(ATTENTION_BACKENDS)
    assert {f"lossless-{name}" for name in BACKENDS} <= set(names)
    assert {f"bench-{count}" for count in (1, 8, 32, 256)} <= set(names)
    assert {"latent", "memory", "serve", "two-gpus", "lossless-96-triton_fa"} <= set(names)
    for step in steps:  # `auto` would be the CPU once the GPU has gone
        given = " ".join(step.arguments)
        assert given.endswith("--device cuda") or given.startswith(DEVICELESS), given


def test_a_real_target_and_its_drafter(tmp_path: Path, capsys: Capture) -> None:
    """Are measured at four sizes, when both are named."""
    with pytest.raises(SystemExit):
        first_day.main(["--out", str(tmp_path), "--model", "somebody/target"])
    assert "--model and --drafter go together" in capsys.readouterr().err
    pair = ["--model", "somebody/target", "--drafter", "somebody/drafter"]
    assert first_day.main(["--out", str(tmp_path), *pair, "--list"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("real-")]
    assert [line.split()[0] for line in lines] == [f"real-{n}" for n in (1, 8, 16, 32)]
    assert all("--model somebody/target --drafter somebody/drafter" in line for line in lines)


@pytest.mark.parametrize(("num_lines", "shown"), [(30, 30), (300, 10), (0, 0)])
def test_a_page_fits_an_issue(num_lines: int, shown: int) -> None:
    """With as many last lines of each output as leave it short enough."""
    output = "\n".join(f"{number:<150}." for number in range(num_lines))
    entry = {
        "title": "a step",
        "command": "python -m x",
        "verdict": "passed",
        "seconds": 1.0,
        "output": output,
    }
    text = page(
        {"device": "a device"}, {f"step {index}": entry for index in range(28 if shown < 30 else 5)}
    )
    assert len(text) <= MOST
    assert text.count(f"\n{num_lines - shown:<150}.\n") == bool(shown) * (28 if shown < 30 else 5)
    assert f"\n{num_lines - shown - 1:<150}.\n" not in text


def test_a_page_begins_with_what_is_wrong() -> None:
    """However much is said behind it."""
    lines = [f"{number}: {'WRONG' if number in (3, 5, 95) else 'right'}" for number in range(99)]
    entry = {"title": "t", "command": "c", "verdict": "failed (1)", "seconds": 1.0}
    text = page({"device": "a device"}, {"step": {**entry, "output": "\n".join(lines)}})
    _, shown = text.split("```text\n")
    assert shown.split("\n```")[0].splitlines() == [lines[3], lines[5], *lines[-40:]]


@pytest.mark.slow
def test_rehearsal(tmp_path: Path, capsys: Capture) -> None:
    """Every step that can run on the emulation does, and passes; one that needs a GPU says so, and
    the rest goes on.
    """
    refused = {"triton-fused"}
    steps = [
        step.name
        for step in all_steps(tmp_path, tiny=tmp_path, data=None, limit=1)
        if step.small is not None
    ]
    assert first_day.main(["--rehearse", "--out", str(tmp_path)]) == 0
    entries = record(tmp_path)
    verdicts = {name: entry["verdict"] for name, entry in entries.items()}
    assert set(verdicts) == set(steps) and len(verdicts) >= 16
    failed = {name for name, verdict in verdicts.items() if verdict != "passed"}
    assert failed == refused, "\n".join(
        f"{name}: {entries[name]['output'][-1500:]}" for name in failed - refused
    )
    assert "no CUDA or ROCm device here" in entries["triton-fused"]["output"]
    assert "rocm_aiter_fa          chosen by --attention auto" in entries["doctor"]["output"]
    for name in ("kernels", "latent"):
        assert {case["verdict"] for case in entries[name]["figures"]} == {"right"}
    assert all("apart" in case for case in entries["tiers"]["figures"])
    for name in ("steps-rocm_aiter_fa", "prefill-8-bit", "sparse", "bench-8", "gsm8k"):
        assert entries[name]["figures"], name
    assert "prompts in 8 bits" in entries["prefill-8-bit"]["output"]
