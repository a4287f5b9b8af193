"""Loading the layers that a target, or a checkpoint made for it, has for multi-token prediction."""

from pathlib import Path

from drafters.checkpoint import find_folder, naming
from drafters.mtp.assistant import AssistantDrafter
from drafters.mtp.network import PredictionNetwork
from drafters.sequential.drafter import USUAL_DRAFTS, SequentialDrafter
from specdec.core import Verifier
from specdec.layers.prediction import PredictionLayers
from specdec.registry import PARTS, resolve


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
            layers = read(verifier, folder)
    kind = AssistantDrafter if layers.reads_target else SequentialDrafter
    return kind(PredictionNetwork(layers, verifier), verifier, max_draft_tokens=USUAL_DRAFTS)
