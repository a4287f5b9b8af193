"""Fixtures of these tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafters.training.log import TrainLog
from specdec.cli.main import main
from tests.drafters.training.figures import with_answers
from tests.drafters.training.toy import as_flags, toy_config

PLOT = TrainLog._plot


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors this small are slower with more threads, and much slower on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package", autouse=True)
def undrawn() -> Iterator[None]:
    """Curves take longer than all else of so small a run."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TrainLog, "_plot", lambda self: None)
        yield


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for a test of curves."""
    monkeypatch.setattr(TrainLog, "_plot", PLOT)


@pytest.fixture(scope="package")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a target, prompts and a whole run of the command."""
    folder = tmp_path_factory.mktemp("toy")
    assert main(["train", *as_flags(toy_config(folder))]) == 0
    return folder


@pytest.fixture
def answered(toy: Path, tmp_path: Path) -> Path:
    """Another folder with the same target, prompts and answers, and nothing trained."""
    return with_answers(toy, tmp_path)
