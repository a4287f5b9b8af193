"""What the trainer, the replay of answers and the last stage ask of a drafter, whatever its family.

All see a drafter in blocks. A block begins at an anchor, the newest token that is known, and its
rows predict the tokens behind that, one each. A row is right only where all rows before it are, so
a drafter that is given its own earlier drafts is given the answer's tokens here.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from drafters.dflash.coupling import CouplingTable
from drafters.head import Head, Lattice
from drafters.training.loss.blocks import SequenceBatch
from drafters.training.loss.memory import Memory
from specdec.base.errors import CheckpointError


class Trained(ABC):
    """A drafter beside its frozen target.

    Attributes:
        head: what corrects its logits, trained with it; None without one.
        coupling: weights of drafts that know the target's noise; None are ones.
        flex: blocks run on FlexAttention.
        draws_trees: tau of trees of drafts follows from what blocks say.
        weights: trained ones that `logits` and the head read, not `hidden`.
        layers: what is compiled where that is asked for.
        compiles: the loss is compiled then, too.
        unwritten: why `export` leaves the layout of speculators out; None where it does not say.
    """

    head: Head | Lattice | None = None
    coupling: CouplingTable | None = None
    flex: bool = False
    draws_trees: bool = True
    weights: Sequence[nn.Parameter] = ()
    layers: Sequence[nn.Module] = ()
    compiles: bool = True
    unwritten: str | None = None

    @abstractmethod
    def context(self, batch: SequenceBatch, features: Tensor) -> Any:
        """What the blocks of a batch share, from the target's features [S, T, taps * H]."""

    @abstractmethod
    def hidden(self, batch: SequenceBatch, anchors: Tensor, context: Any) -> Tensor:
        """Hidden states [S, N, K, ...] of the rows of blocks at anchors int64 [S, N]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [n, K, V'] of n blocks [n, K, ...] of `hidden`."""

    def before(self, batch: SequenceBatch, features: Tensor, anchors: Tensor) -> Tensor | None:
        """What the head asks for of the tokens before anchors int64 [S, N]; None for nothing."""
        return None

    @abstractmethod
    def memory(self, length: int, world: int) -> Memory:
        """What a step of `world` processes takes of each, with sequences of this length."""

    @abstractmethod
    def export(self, run: Path) -> list[Path]:
        """Writes the drafter to folders of a run, over those of an earlier export.

        Returns:
            The folders, the first of which the engine is to load.

        Raises:
            CheckpointError: one cannot be written, or does not read back the same.
        """


def check_written(folder: Path, tensors: Mapping[str, Tensor], back: Mapping[str, Tensor]) -> None:
    """Compares what was written with what was read back.

    Raises:
        CheckpointError: they differ.
    """
    same = back.keys() == tensors.keys()
    if not same or not all(torch.equal(back[name], tensors[name]) for name in tensors):
        what = f"{folder} does not read back as it was written"
        raise CheckpointError(f"{what}; the disk may be damaged")
