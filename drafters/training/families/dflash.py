"""DFlash drafters, with a head or without, in training."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from drafters.dflash.config.checkpoint import read_checkpoint, write_checkpoint
from drafters.dflash.config.config_json import misreading
from drafters.dflash.config.heads import ARCHITECTURES
from drafters.dflash.config.layout import Layout
from drafters.dflash.coupling import CouplingTable
from drafters.dflash.model import DFlashModel
from drafters.dflash.tied import checkpoint_names, expanded
from drafters.training.config import TrainConfig
from drafters.training.families.trained import Trained, check_written
from drafters.training.loss.blocks import SequenceBatch, before_anchors, block_hidden
from drafters.training.loss.heads import HEAD_MODULES
from drafters.training.loss.mask import use_flex
from drafters.training.loss.memory import Memory, memory_of
from drafters.training.loss.vocabulary import embed_of, head_of
from drafters.training.target import Target
from specdec.base.writing import remove

LAYOUTS: dict[Layout, str] = {"z-lab": "drafter", "speculators": "drafter-speculators"}
"""Folder of each layout."""


class TrainedDFlash(Trained):
    """See `Trained`.

    Args:
        model: the drafter, on the target's device and in its type.
        target: the target.
        config: the run.
    """

    def __init__(self, model: DFlashModel, target: Target, config: TrainConfig) -> None:
        self._model, self._target, self._config = model, target, config
        self._embed, self._to_logits = embed_of(model, target), head_of(model, target)
        shape = model.config
        self.flex = use_flex(config.mask_path, target.device)
        self.head = None if shape.head is None else shape.head.head(model, self._embed)
        if shape.coupling is not None:
            self.coupling = CouplingTable(shape.coupling, target.device)
        named = model.named_parameters()
        self.weights = [p for name, p in named if name.partition(".")[0] in HEAD_MODULES]
        self.layers, self.unwritten = list(model.layers), misreading(shape, "speculators")

    def context(self, batch: SequenceBatch, features: Tensor) -> Any:
        """Keys and values of all positions."""
        return self._model.context_kv(features, batch.positions)

    def hidden(self, batch: SequenceBatch, anchors: Tensor, context: Any) -> Tensor:
        """See `drafters.training.loss.blocks.block_hidden`."""
        given = self._model, self._embed, batch, anchors, context
        return block_hidden(*given, flex=self.flex, head=self.head)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Trained.logits`."""
        return self._to_logits(hidden)

    def before(self, batch: SequenceBatch, features: Tensor, anchors: Tensor) -> Tensor | None:
        """See `drafters.training.loss.blocks.before_anchors`."""
        return before_anchors(self.head, self._model, batch, features, anchors)

    def memory(self, length: int, world: int) -> Memory:
        """See `Trained.memory`."""
        target, dtype = self._target.verifier.weight_bytes, self._target.dtype
        how = self._model.config, self._config
        return memory_of(*how, target_bytes=target, length=length, world=world, dtype=dtype)

    def export(self, run: Path) -> list[Path]:
        """Writes both layouts, if both know its kind. Tied tables are kept so in z-lab's; the
        second one has them whole.
        """
        state, written = self._model.state_dict(), []
        names = checkpoint_names(self._model)
        own = {name: state[key].detach().cpu() for name, key in names.items()}
        for layout, name in LAYOUTS.items():
            folder, shape, tensors = run / name, self._model.config, own
            if layout not in ARCHITECTURES[shape.algorithm] or misreading(shape, layout):
                for file in ("config.json", "model.safetensors"):  # of an earlier, other run
                    remove(folder / file)
                continue
            if shape.tied_tables and layout == "speculators":
                shape = replace(shape, tied_tables=False)
                whole = expanded(own, self._target.verifier)
                tensors = {n: x.cpu() for n, x in whole.items()}
            write_checkpoint(folder, shape, tensors, layout=layout, over=True)
            check_written(folder, tensors, read_checkpoint(folder)[1])
            written.append(folder)
        return written
