"""A target's layers for multi-token prediction in training: their weights, read and written."""

from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.algorithms import speculators_sections
from drafters.checkpoint import find_folder, naming, write_folder
from drafters.mtp.network import PredictionNetwork
from drafters.sequential.drafter import USUAL_DRAFTS
from drafters.sequential.network import SequentialNetwork
from drafters.training.config import TrainConfig
from drafters.training.families.attention import unrolled
from drafters.training.families.trained import check_written
from drafters.training.families.unrolled import UnrolledConfig, UnrolledModel, num_steps
from specdec.base.registry import PARTS, resolve
from specdec.model.core import Verifier

OWN = "mtp"
"""Name of the layers that a target's own checkpoint has."""


class MtpModel(UnrolledModel):
    """The weights of the layers.

    Args:
        source: a `verifiers.prediction_weights.PredictionWeights`.
        target: the model that they belong to.
        steps: to unroll them for.
    """

    def __init__(self, source: Any, target: Verifier, steps: int) -> None:
        tensors: dict[str, Tensor] = source.tensors
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items()))
        config = UnrolledConfig((target.num_layers - 1,), steps, None, shapes)
        # a bias that only chooses experts has no gradient
        frozen = [name for name in tensors if name.endswith("correction_bias")]
        super().__init__(config, {n: x.float().cpu() for n, x in tensors.items()}, frozen)
        self._source, self._types = source, {n: x.dtype for n, x in tensors.items()}

    def network(self, verifier: Verifier) -> SequentialNetwork:
        """See `UnrolledModel.network`."""
        layers = self._source.layers(verifier, self.tensors, unrolled)
        return PredictionNetwork(layers, verifier)

    def export(self, run: Path, verifier: Verifier) -> list[Path]:
        """Writes the layout of speculators."""
        folder, dtype = run / "drafter", str(verifier.dtype).removeprefix("torch.")
        tensors = {n: x.detach().to("cpu", self._types[n]) for n, x in self.tensors.items()}
        stated = {
            "architectures": ["MTPDraftModel"],
            **speculators_sections("mtp", self.config.max_draft_tokens, verifier.name),
            **self._source.stated(),
            "dtype": dtype,
        }
        write_folder(folder, stated, self._source.named(tensors), over=True)
        back = resolve(PARTS, "prediction weights", "part")(verifier, folder)
        check_written(folder, tensors, {n: x.cpu() for n, x in back.tensors.items()})
        return [folder]


def mtp_model(config: TrainConfig, verifier: Verifier) -> MtpModel:
    """The layers that `init` names.

    Raises:
        InvalidInputError: an option, or layers, that are not trained.
        CheckpointError: there are none, or they belong to another target.
    """
    assert config.init is not None
    read, steps = (
        resolve(PARTS, "prediction weights", "part"),
        num_steps(config, USUAL_DRAFTS, USUAL_DRAFTS),
    )
    folder = None if config.init == OWN else find_folder(config.init)
    with naming(config.init):
        source = read(verifier, folder)
    unrolled(source.spec(verifier))  # what cannot be trained must not wait for answers
    return MtpModel(source, verifier, steps)
