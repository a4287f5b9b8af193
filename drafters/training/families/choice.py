"""Which family a drafter in training belongs to."""

from drafters.algorithms import algorithm_of
from drafters.checkpoint import CONFIG, find_folder, read_json
from drafters.dflash.model import DFlashModel
from drafters.training.config import TrainConfig
from drafters.training.families.dflash import TrainedDFlash
from drafters.training.families.eagle3 import eagle3_model
from drafters.training.families.mtp import OWN, mtp_model
from drafters.training.families.trained import Trained
from drafters.training.families.unrolled import TrainedUnrolled, UnrolledModel
from drafters.training.target import Target
from specdec.base.errors import CheckpointError
from specdec.model.core import Verifier

TrainedModel = DFlashModel | UnrolledModel
"""The weights of a drafter, by whose names they are saved."""


def trained(model: TrainedModel, target: Target, config: TrainConfig) -> Trained:
    """A drafter as it is trained; see `Trained`."""
    if isinstance(model, UnrolledModel):
        return TrainedUnrolled(model, target, config)
    return TrainedDFlash(model, target, config)


def unrolled_model(config: TrainConfig, verifier: Verifier) -> UnrolledModel | None:
    """The drafter that `init` names if it goes token by token, in float32 on the CPU.

    Raises:
        InvalidInputError: an option, or a kind of drafter, that is not trained.
        CheckpointError: it cannot be read, or was made for another target.
    """
    algorithm = _algorithm(config.init)
    if algorithm == "mtp":
        return mtp_model(config, verifier)
    return eagle3_model(config, verifier) if algorithm in ("eagle3", "peagle") else None


def takes_stack(init: str | None) -> bool:
    """Whether a drafter to begin with takes a target on our own layers, which it shares."""
    return _algorithm(init) == "mtp"


def _algorithm(init: str | None) -> str | None:
    """The algorithm of a drafter to begin with; None where there is none, or none that says it."""
    if init is None or init == OWN:
        return init
    try:
        return algorithm_of(read_json(find_folder(init) / CONFIG))
    except CheckpointError:  # which is said when it is read
        return None
