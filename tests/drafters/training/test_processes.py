"""A process group that somebody else has made, as Ray Train does: it is used and left as it is."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from drafters.training.config import TrainConfig
from drafters.training.processes import process_group, termination
from drafters.training.stages import run_stages
from specdec.base.errors import InvalidInputError
from specdec.cli.main import main


def test_a_group_that_exists_is_used_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a second `init_process_group`, and the end of a group that is not ours."""
    monkeypatch.setenv("WORLD_SIZE", "2")  # which alone would make a group of two processes
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        with process_group(torch.device("cpu")) as device:
            assert (device.type, dist.get_world_size()) == ("cpu", 1)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()


def test_finish_is_refused_to_several_processes_before_they_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a refusal that comes when the training is done."""
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        monkeypatch.setattr(dist, "get_world_size", lambda: 4)
        with pytest.raises(
            InvalidInputError,
            match=r"this run has 4; give them the stages answers and train, then run finish",
        ):
            run_stages(
                ("answers", "train", "finish"), TrainConfig(out=str(tmp_path / "run"), device="cpu")
            )
        assert not (tmp_path / "run").exists()
    finally:
        dist.destroy_process_group()


def test_a_thread_trains_without_a_signal_handler() -> None:
    """Python lets the main thread alone set one."""
    wrong: list[BaseException] = []

    def enter() -> None:
        try:
            with termination() as received:
                assert received == []
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert wrong == []


def test_workers_train_and_one_finishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The stages of `--ray`; an incomplete one ends the run, with the status of one."""
    from specdec.cluster import train

    calls: list[Any] = []

    def run_workers(
        address: str, function: Any, stages: Any, config: Any, *, workers: int | None, folder: Path
    ) -> bool:
        calls.append((address, function.__name__, stages, workers, folder))
        return "answers" in stages or len(calls) > 2

    monkeypatch.setattr(train, "run_workers", run_workers)
    folder = tmp_path / "run"
    assert main(["train", "--out", str(folder), "--workers", "3", "--ray", "head:1"]) == 1
    assert calls == [
        ("head:1", "run_stages", ("answers", "train"), 3, folder),
        ("head:1", "run_stages", ("finish",), 1, folder),
    ]
    assert folder.is_dir()
    assert main(["train", "finish", "--out", str(folder), "--ray"]) == 0
    assert calls[2:] == [("", "run_stages", ("finish",), 1, folder)]
    assert main(["train", "--out", str(folder), "--workers", "2"]) == 2
    assert "together with --ray" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--ray"], ["--workers", "2"]])
@pytest.mark.parametrize("stages", [["learn"], ["bench", "qwen3-8b"]])
def test_what_runs_in_this_process_takes_no_cluster(
    stages: list[str], option: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *stages, *option]) == 2
    assert f"train {stages[0]} runs in this process; leave out --ray" in capsys.readouterr().err
