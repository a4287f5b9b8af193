"""The training state on disk: one file that is replaced whole, so that a killed run resumes from the last one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from drafters.dflash.model import DFlashModel
from specdec.errors import CapacityError, CheckpointError, InvalidInputError

STATE_FILE = "state.pt"


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns what goes wrong while `path` is written into one line.

    Raises:
        CapacityError: the disk has no room.
        InvalidInputError: the folder cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        # torch.save reports a full disk as a RuntimeError of its archive writer.
        if isinstance(error, RuntimeError) and "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
            raise
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
        denied = isinstance(error, PermissionError | NotADirectoryError | FileExistsError)
        kind, way_out = (InvalidInputError, "choose another --out") if denied else (CapacityError, "make room")
        raise kind(f"cannot write {path} ({reason}); what was written before is kept, so {way_out} and run again") from error


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write(temporary path)` and moves the result to `path`; what stood there before survives any failure.

    Raises:
        CapacityError, InvalidInputError: see `disk_errors`.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write(unfinished)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Replaces the state in `folder`."""
    write_atomically(folder / STATE_FILE, lambda path: torch.save(state, path))


def load_state(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The state in `folder`, None when there is none.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # the kinds of errors a damaged archive raises are many
        reason = " ".join(str(error).split())[:160]
        raise CheckpointError(f"{path} is damaged ({reason}); delete it to train from the start") from error
    return state


@torch.no_grad()
def load_weights(model: DFlashModel, state: dict[str, Any]) -> None:
    """Copies the float32 weights of a saved state into a model of the same configuration.

    Raises:
        CheckpointError: the saved run trained another drafter.
    """
    if state["identity"]["drafter"] != repr(model.config):
        raise CheckpointError(
            f"the saved run trained another drafter, {state['identity']['drafter']}; give the model and drafter options of that run"
        )
    for name, parameter in model.named_parameters():
        parameter.copy_(state["optimizer"]["masters"][name])
