"""Loading the layers that a target, or a checkpoint made for it, has for multi-token prediction."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from drafters.checkpoint import find_folder, naming, read_json
from drafters.keys import LIMITS, Keys, count, section
from drafters.mtp.assistant import AssistantDrafter
from drafters.mtp.network import PredictionNetwork
from drafters.sequential.drafter import USUAL_DRAFTS, SequentialDrafter
from specdec.base.checkpoint.hub import CONFIG
from specdec.base.errors import CheckpointError, SpecDecError, one_line
from specdec.base.registry import PARTS, resolve
from specdec.layers.prediction import PredictionLayers
from specdec.model.core import Verifier


def load_mtp(path: str | Path | None = None, *, verifier: Verifier) -> SequentialDrafter:
    """The drafter in a target's own checkpoint, or in a folder or on the hub.

    Raises:
        CheckpointError: there is none, or it was made for another target.
        BackendError: the target's attention backend cannot serve it.
    """
    read = resolve(PARTS, "prediction", "part")
    if path is None:
        layers: PredictionLayers = read(verifier)
    else:
        folder = find_folder(path)
        with naming(path):
            _check_sizes(read_json(folder / CONFIG))
            try:
                layers = read(verifier, folder)
            except SpecDecError:
                raise
            except Exception as error:  # transformers believes files, whose mistakes end in any
                raise CheckpointError(
                    f"its config.json describes no layers ({type(error).__name__}:"
                    f" {one_line(error)}); fetch it again"
                ) from error
    kind = AssistantDrafter if layers.reads_target else SequentialDrafter
    return kind(PredictionNetwork(layers, verifier), verifier, max_draft_tokens=USUAL_DRAFTS)


def _check_sizes(raw: Mapping[str, Any]) -> None:
    """Refuses sizes of layers that no model has, which would take all memory or all time."""
    for name in ("text_config", "transformer_layer_config"):
        for size in LIMITS:
            count(Keys([section(raw, name)]), size)
