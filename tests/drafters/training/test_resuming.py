"""`specdec train` goes on where it stopped, and what it makes of damaged or foreign folders."""

import csv
import errno
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.training import state
from drafters.training.log import TrainLog
from drafters.training.optimizer import MasterOptimizer
from drafters.training.stages import run_stages
from drafters.training.trainer import Trainer
from specdec.base.errors import CapacityError, CheckpointError, InvalidInputError, SpecDecError
from specdec.cli.main import main
from tests.drafters.tiny import write_tiny_dflash
from tests.drafters.training.figures import figures, log_rows
from tests.drafters.training.small import CPU, small_trainer
from tests.drafters.training.toy import as_flags, toy_config
from tests.helpers.nodes import REFUSED

pytestmark = pytest.mark.slow


def test_a_complete_run_is_not_repeated(toy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Catches stages that start again, or change what is there, when the command is given twice."""
    files = [
        path
        for path in sorted((toy / "run").rglob("*"))
        if path.is_file() and path.parent.name in ("answers", "training")
    ]
    before = [(path, path.read_bytes()) for path in files]
    assert main(["train", "answers", "train", *as_flags(toy_config(toy))]) == 0
    assert [(path, path.read_bytes()) for path in files] == before
    assert "to write" not in capsys.readouterr().err


def resumable(folder: Path, **changes: Any) -> Trainer:
    """A run that saves its state every second step, or goes on from what another has saved."""
    options: dict[str, Any] = {"log_every": 2, "save_every": 0.0, "eval_every": 1e9, "max_steps": 8}
    return small_trainer(folder, **options | changes)


def saved(folder: Path) -> dict[str, Any]:
    found = state.load_state(folder / "run" / "training", CPU)
    assert found is not None
    return found


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("how", ["killed", "terminated", "interrupted", "stopped"])
def test_an_interrupted_run_resumes_to_the_same_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Catches unsaved state (optimizer, order, anchors, step), and lost log lines."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert resumable(whole).run()
    save = Trainer._save
    signals = {"terminated": [signal.SIGTERM], "interrupted": [signal.SIGINT]}.get(how, [])

    def interrupt(self: Trainer) -> None:
        if self.step == 6 and how == "killed":
            raise KeyboardInterrupt  # the log has step 6, the state only step 4
        if self.step == 6 and signals:
            os.kill(os.getpid(), signals.pop())
        save(self)

    with monkeypatch.context() as patched:
        patched.setattr(Trainer, "_save", interrupt)
        if how in ("killed", "interrupted"):
            with pytest.raises(KeyboardInterrupt):
                resumable(cut).run()
            assert saved(cut)["step"] == (4 if how == "killed" else 6), "Ctrl-C saves"
        else:
            assert not resumable(cut, stop_after=1e-9 if how == "stopped" else None).run()
    assert 0 <= int(log_rows(cut)[-1]["step"]) < 8
    assert resumable(cut).run()
    assert figures(cut) == figures(whole)


class Killed(BaseException):
    """In place of a kill, which nothing in the run hears of."""


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("changes", [{}, {"optimizer": "muon", "ema": 0.9, "replay": 0.5}])
def test_ten_kills_at_any_moment_leave_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    """Catches state that a kill loses or leaves by halves: within a step, between an update and
    the save, or in the middle of writing a file.
    """
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert resumable(whole, max_steps=40, **changes).run()
    chosen, left = random.Random(0), [0]

    def mortal(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            left[0] -= 1
            if not left[0]:
                raise Killed
            return call(*args, **kwargs)

        return called

    def half(content: Any, path: Path) -> None:
        Path(path).write_bytes(b"half")
        save(content, path)

    save = mortal(torch.save)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", half)
        for owner, name in (
            (Trainer, "_forward_backward"),
            (Trainer, "_save"),
            (MasterOptimizer, "accumulate"),
            (MasterOptimizer, "step"),
            (MasterOptimizer, "publish"),
            (TrainLog, "write"),
        ):
            patched.setattr(owner, name, mortal(getattr(owner, name)))
        for _ in range(10):
            left[0] = chosen.randrange(1, 40)
            with pytest.raises(Killed):
                resumable(cut, max_steps=40, **changes).run()
        left[0] = 0
        assert resumable(cut, max_steps=40, **changes).run()
    ended = saved(cut), saved(whole)
    assert [one["step"] for one in ended] == [40, 40]
    leaves = [tree_leaves(one["optimizer"]) for one in ended]
    for one, other in zip(*leaves, strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@pytest.mark.usefixtures("drawn")
def test_a_kill_while_curves_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run draws them: none is complete without."""
    canvas = pytest.importorskip("matplotlib.backends.backend_agg").FigureCanvasAgg

    def killed(*_: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(canvas, "print_png", killed)
        with pytest.raises(Killed):
            resumable(tmp_path).run()
    assert resumable(tmp_path).run()
    assert (tmp_path / "run" / "training" / "curves.png").stat().st_size


def test_a_full_disk_keeps_what_was_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a state that is overwritten in place, and a traceback instead of a line."""
    assert resumable(tmp_path, max_steps=2).run()
    path = tmp_path / "run" / "training" / state.STATE_FILE
    before = path.read_bytes()

    def full(state: Any, file: Path) -> None:
        file.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(CapacityError, match=r"No space left on device.*make room and run again"):
        resumable(tmp_path, max_steps=4).run()
    assert path.read_bytes() == before
    assert sorted(p.name for p in path.parent.iterdir() if p.suffix not in (".csv", ".png")) == [
        state.STATE_FILE
    ]
    monkeypatch.undo()
    assert resumable(tmp_path, max_steps=4).run()


def test_other_settings_are_not_mixed_into_a_run(toy: Path) -> None:
    with pytest.raises(
        InvalidInputError, match=r"holds a run with lr 0.005, not 0.1; give the same"
    ):
        run_stages(("train",), toy_config(toy, lr=0.1))
    with pytest.raises(
        InvalidInputError, match=r"answers that were written with another max-tokens"
    ):
        run_stages(("answers",), toy_config(toy, max_tokens=47))


def written(content: Any) -> Callable[[Path], object]:
    return lambda path: torch.save(content, path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"PK cut short"), "state.pt is damaged .* delete it"),
        (
            written({"step": 1}),
            "state.pt lacks identity, optimizer, seconds, tau, complete; delete it",
        ),
        (written([1]), "state.pt lacks identity"),
        (written(5), "state.pt is damaged"),
        *(
            (REFUSED[kind], f"cannot write .*state.pt.*{kind}")
            for kind in ("a FIFO", "a socket", "a folder")
        ),
    ],
)
def test_states_that_nobody_saved_are_one_line(
    make: Callable[[Path], object], message: str, tmp_path: Path
) -> None:
    """Catches a FIFO that is read for ever, too."""
    make(tmp_path / state.STATE_FILE)
    with pytest.raises(SpecDecError, match=message):
        state.load_state(tmp_path, CPU)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"step\n" + b"x" * 200_000, b"a,b\n1,2\n"])
def test_a_log_of_another_kind_is_one_line_or_has_no_rows(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_bytes(content)
    if content.startswith(b"a"):
        assert TrainLog(tmp_path, last_step=5).rows == []
    else:
        with pytest.raises(CheckpointError, match=r"log\.csv cannot be read \(.*\); move it away"):
            TrainLog(tmp_path, last_step=5)
        assert (tmp_path / "log.csv").read_bytes() == content


def test_a_log_goes_on_behind_the_saved_step(tmp_path: Path) -> None:
    """And through a link, which stays."""
    (tmp_path / "log.csv").symlink_to("far.csv")
    log = TrainLog(tmp_path, last_step=0)
    for step in (0, 10, 20):
        log.write({"step": step, "loss": 1.5}, 0.0)
    again = TrainLog(tmp_path, last_step=10)
    assert [row["step"] for row in again.rows] == ["0", "10"]
    again.write({"step": 15}, 0.0)
    assert (tmp_path / "log.csv").is_symlink()
    rows = list(csv.DictReader((tmp_path / "far.csv").open(newline="")))
    assert [row["step"] for row in rows] == ["0", "10", "15"] and rows[1]["loss"] == "1.5"


def test_an_earlier_export_survives_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a drafter removed before there is another; the folder's rest stays."""
    path = write_tiny_dflash(tmp_path / "d")
    (path / "README.md").write_text("own")
    before = {one.name: one.read_bytes() for one in path.iterdir()}
    config, tensors = read_checkpoint(path)

    def full(file: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    others = {name: tensor + 1 for name, tensor in tensors.items()}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(CapacityError, match="No space left"):
            write_checkpoint(path, config, others, over=True)
    assert {one.name: one.read_bytes() for one in path.iterdir()} == before
    write_checkpoint(path, config, others, over=True)
    assert (path / "model.safetensors").read_bytes() != before["model.safetensors"]
    assert len(list(path.iterdir())) == 3
