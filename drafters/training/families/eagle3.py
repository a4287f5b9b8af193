"""EAGLE-3 heads in training: their checkpoints."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from drafters.eagle3.checkpoint import read_checkpoint
from drafters.eagle3.config import MAX_DRAFTS, Eagle3Config
from drafters.eagle3.drafter import borrows, check_fit
from drafters.eagle3.layout import Layout, unwritable, write_checkpoint
from drafters.eagle3.network import Eagle3Network
from drafters.sequential.network import SequentialNetwork
from drafters.training.config import TrainConfig
from drafters.training.families.trained import check_written
from drafters.training.families.unrolled import UnrolledConfig, UnrolledModel, num_steps
from specdec.base.errors import InvalidInputError
from specdec.base.writing import remove
from specdec.layers.rotary.rotary import Rope
from specdec.model.core import Verifier

LAYOUTS: dict[Layout, str] = {"speculators": "drafter", "sglang": "drafter-sglang"}
"""Folder of each layout."""
FROZEN = ("embed_tokens.weight",)
"""Embeddings, which stay as they are."""


class Eagle3Model(UnrolledModel):
    """The weights of a head."""

    def __init__(
        self, own: Eagle3Config, tensors: dict[str, Tensor], target: Verifier, steps: int
    ) -> None:
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in sorted(tensors.items()))
        taps = own.taps(target.num_layers)
        config = UnrolledConfig(taps, steps, own.draft_vocab_size, shapes)
        super().__init__(config, tensors, FROZEN)
        self._rope: Rope | None = None  # making one waits for numbers
        self.own = replace(own, max_draft_tokens=max(steps, own.max_draft_tokens))

    def network(self, verifier: Verifier) -> SequentialNetwork:
        """See `UnrolledModel.network`."""
        network = Eagle3Network(self.own, self.tensors, verifier, self._rope)
        self._rope = network.rope
        return network

    def export(self, run: Path, verifier: Verifier) -> list[Path]:
        """Writes both layouts, as far as they have words for the head."""
        tensors = {name: tensor.detach().cpu() for name, tensor in self.tensors.items()}
        named = replace(self.own, verifier_name=self.own.verifier_name or verifier.name)
        written = list[Path]()
        for layout, name in LAYOUTS.items():
            folder = run / name
            if unwritable(named, layout):
                for file in ("config.json", "model.safetensors"):  # of an earlier, other run
                    remove(folder / file)
                continue
            write_checkpoint(folder, named, tensors, layout, verifier.num_layers, over=True)
            check_written(folder, tensors, read_checkpoint(folder)[1])
            written.append(folder)
        return written


def eagle3_model(config: TrainConfig, verifier: Verifier) -> Eagle3Model:
    """The head that `init` names.

    Raises:
        InvalidInputError: an option, or a kind of head, that is not trained.
        CheckpointError: it cannot be read, or was made for another target.
    """
    assert config.init is not None
    own, tensors = read_checkpoint(config.init)
    peculiar = "masks, by which all drafts are made at once (P-EAGLE)" * (
        own.mask_token_id is not None
    )
    if all(unwritable(own, layout) for layout in LAYOUTS):
        peculiar = peculiar or "layers that no layout has words for"
    if peculiar:
        what = f"drafter {config.init!r} has {peculiar}, which training does not know"
        raise InvalidInputError(f"{what}; leave --init out")
    check_fit(own, verifier, borrows=borrows(own, tensors))
    # what sglang's layout does not say
    most = own.max_draft_tokens if unwritable(own, "speculators") else MAX_DRAFTS
    steps = num_steps(config, own.max_draft_tokens, most)
    return Eagle3Model(own, tensors, verifier, steps)
