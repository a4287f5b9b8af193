"""The training state on disk: one file, replaced whole, from which a killed run resumes."""

from pathlib import Path
from typing import Any

import torch

from drafters.training.families.choice import TrainedModel
from drafters.training.provenance import alike
from specdec.base.errors import CheckpointError, one_line
from specdec.base.writing import check_writable, write_atomically

STATE_FILE = "state.pt"
_PARTS = ("identity", "optimizer", "step", "seconds", "tau", "complete")


def save_state(folder: Path, state: dict[str, Any]) -> None:
    """Replaces the state in `folder`."""
    write_atomically(folder / STATE_FILE, lambda path: torch.save(state, path))


def load_state(folder: Path, device: torch.device) -> dict[str, Any] | None:
    """The state in `folder`, None when there is none.

    Raises:
        CheckpointError: the file is damaged.
        InvalidInputError: it is none that a state can be written to.
    """
    path = folder / STATE_FILE
    if not path.exists():
        return None
    check_writable(path)
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        missing = [name for name in _PARTS if name not in state]
    except Exception as error:  # the kinds of errors a damaged archive raises are many
        what = f"{path} is damaged ({one_line(error)})"
        raise CheckpointError(f"{what}; delete it to train from the start") from error
    if missing:
        what = f"{path} lacks {', '.join(missing)}"
        raise CheckpointError(f"{what}; delete it to train from the start")
    return state


@torch.no_grad()
def load_weights(model: TrainedModel, state: dict[str, Any]) -> None:
    """Copies a saved state's weights, or their running mean, into a model of the same kind.

    Raises:
        CheckpointError: the saved run trained another drafter.
    """
    then, now = state["identity"]["drafter"], repr(model.config)
    if not alike("drafter", then, now):
        written = then.split("(", 1)[1].removesuffix(")").split(", ")
        fields = [part for part in written if part not in now]
        what = f"the saved run trained another drafter, with {', '.join(fields)}"
        raise CheckpointError(f"{what}; give the model and drafter options of that run")
    saved = state["optimizer"]
    weights = saved.get("means", saved["masters"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.copy_(weights[name])
