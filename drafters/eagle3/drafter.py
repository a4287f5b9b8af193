"""EAGLE-3 and P-EAGLE heads as drafters."""

import logging
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from drafters.checkpoint import check_target
from drafters.eagle3.checkpoint import read_checkpoint
from drafters.eagle3.config import Eagle3Config
from drafters.eagle3.network import Eagle3Network
from drafters.sequential.drafter import SequentialDrafter
from specdec.base.errors import InvalidInputError
from specdec.model.core import Verifier

logger = logging.getLogger(__name__)


def eagle3_drafter(
    config: Eagle3Config, tensors: dict[str, Tensor], verifier: Verifier
) -> SequentialDrafter:
    """A head made ready for a target.

    Raises:
        CheckpointError: the head was trained for another target.
        BackendError: the target's attention backend cannot serve its layers.
    """
    check_fit(config, verifier, borrows=borrows(config, tensors))
    _say_taps(config, verifier)
    placed = {
        name: tensor.to(verifier.device, verifier.dtype if tensor.is_floating_point() else None)
        for name, tensor in tensors.items()
    }
    network = Eagle3Network(config, placed, verifier)
    return SequentialDrafter(network, verifier, max_draft_tokens=config.max_draft_tokens)


def borrows(config: Eagle3Config, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the head reads the target's embeddings or its output head."""
    own_head = "lm_head.weight" in tensors or config.layers.tie_word_embeddings
    return "embed_tokens.weight" not in tensors or not own_head


def check_fit(config: Eagle3Config, verifier: Verifier, *, borrows: bool) -> None:
    """Refuses a target that the head was not trained for.

    Raises:
        CheckpointError: everything that does not fit.
    """
    check_target(
        verifier,
        taps=config.taps(verifier.num_layers),
        tap_width=config.tap_width,
        hidden_size=config.layers.hidden_size if borrows else None,
        vocab_size=config.vocab_size,
        num_layers=None,
        made_for=config.verifier_name,
    )


def _say_taps(config: Eagle3Config, verifier: Verifier) -> None:
    """Logs which layers are tapped: wrong ones lower acceptance without any error."""
    layers = ", ".join(map(str, config.taps(verifier.num_layers)))
    if config.stated_taps.layers is None:
        text = "the drafter's config.json names no tapped layers"
        logger.warning(f"{text}; the usual ones are taken: %s, counted from 0", layers)
    else:
        logger.info("the drafter taps layers %s of %s, counted from 0", layers, verifier.name)


def load_eagle3(path: str | Path | None, *, verifier: Verifier) -> SequentialDrafter:
    """Loads an EAGLE-3 or P-EAGLE head in either layout from a folder or the hub.

    Raises:
        InvalidInputError: no path.
        CheckpointError: see `read_checkpoint`.
    """
    if path is None:
        what = "the eagle3 drafter needs a checkpoint"
        raise InvalidInputError(f"{what}; give its folder or hub name")
    config, tensors = read_checkpoint(path)
    return eagle3_drafter(config, tensors, verifier)
