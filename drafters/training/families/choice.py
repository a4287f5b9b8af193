"""Which family a drafter in training belongs to."""

from drafters.dflash.model import DFlashModel
from drafters.training.config import TrainConfig
from drafters.training.families.dflash import TrainedDFlash
from drafters.training.families.trained import Trained
from drafters.training.target import Target

TrainedModel = DFlashModel
"""The weights of a drafter, by whose names they are saved."""


def trained(model: TrainedModel, target: Target, config: TrainConfig) -> Trained:
    """A drafter as it is trained; see `Trained`."""
    return TrainedDFlash(model, target, config)
