"""What training takes of one device, by arithmetic: nothing is allocated."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from drafters.dflash.config.checkpoint import tensor_shapes
from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.model import DFlashModel
from drafters.training.config import TrainConfig
from drafters.training.loss.sharding import is_sharded
from drafters.training.optimizer import owners_of
from specdec.device.meta import shapes_alone

LOGIT_BYTES = 16
"""Bytes of a row and token in the loss: logits, their gradient, and three copies in float32."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one process.

    Attributes:
        target: its weights.
        weights: the drafter's, and their gradients; of those that are sharded, two layers' and one
            layer's gradients, twice, as they are summed.
        optimizer: float32 copies, gradients, moments and running mean of this process.
        activations: what the backward pass needs of the drafter's layers, without compilation.
        logits: of `loss_rows` rows.
    """

    target: int
    weights: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        """All of it; the target's own activations are gone by then."""
        return self.target + self.weights + self.optimizer + self.activations + self.logits

    def __str__(self) -> str:
        parts = "target", "weights", "optimizer", "activations", "logits"
        told = ", ".join(f"{name} {getattr(self, name) / 1e9:.1f}" for name in parts)
        return f"about {self.total / 1e9:.1f} GB of memory ({told})"


def memory_of(
    shape: DFlashConfig,
    config: TrainConfig,
    *,
    target_bytes: int,
    length: int,
    world: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> Memory:
    """What a step takes of the fullest process."""
    with shapes_alone():
        model = DFlashModel(shape).to(dtype)
    sequences = config.batch_size // (config.accumulation * world)
    rows = config.anchors * (shape.max_draft_tokens + (not shape.sample_from_anchor))
    once = saved_bytes(model, partial(_forward, model, length, rows))
    shapes = tensor_shapes(shape)
    return memory_of_weights(
        shapes,
        shapes.keys() & {"lm_head.weight", "d2t"},  # of a reduced vocabulary
        config,
        target_bytes=target_bytes,
        activations=sequences * once,
        drafts=shape.max_draft_tokens,
        columns=shape.draft_vocab_size or shape.vocab_size,
        world=world,
        dtype=dtype,
    )


def memory_of_weights(
    shapes: Mapping[str, Sequence[int]],
    frozen: Collection[str],
    config: TrainConfig,
    *,
    target_bytes: int,
    activations: int,
    drafts: int,
    columns: int,
    world: int,
    dtype: torch.dtype,
) -> Memory:
    """What a step of a drafter with weights of these shapes takes of the fullest process.

    Args:
        shapes: by name.
        frozen: names of those that are not trained.
        config: the run.
        target_bytes, activations: as in `Memory`.
        drafts: of a block.
        columns: tokens that can be drafted.
        world: processes.
        dtype: of the weights.
    """
    sizes = {name: math.prod(sides) for name, sides in shapes.items()}
    muon = config.optimizer == "muon"
    copies = {n: 4 - (muon and len(s) == 2) + (config.ema > 0) for n, s in shapes.items()}
    apart = {n: size for n, size in sizes.items() if config.shard and world > 1 and is_sharded(n)}
    whole = {n: size for n, size in sizes.items() if n not in apart and n not in frozen}
    owners = owners_of(whole, world)
    kept = [sum(copies[n] * whole[n] for n in whole if owners[n] == r) for r in range(world)]
    parts = sum(copies[n] * size for n, size in apart.items()) // world
    layer = sum(size for n, size in apart.items() if n.startswith("layers.0."))
    rows = config.batch_size // (config.accumulation * world) * config.anchors * drafts
    resting = sum(sizes[name] for name in frozen if name != "d2t")
    return Memory(
        target=target_bytes,
        weights=2 * dtype.itemsize * sum(whole.values())
        + dtype.itemsize * resting
        + layer * (3 * dtype.itemsize + 4),
        optimizer=4 * (max(kept) + parts),
        activations=activations,
        logits=min(config.loss_rows, rows) * columns * LOGIT_BYTES,
    )


def _forward(model: DFlashModel, length: int, rows: int) -> Tensor:
    """A sequence through the drafter, on the device "meta"."""
    config, dtype = model.config, model.norm.weight.dtype
    features = torch.empty(1, length, config.feature_size, dtype=dtype, device="meta")
    keys, values = model.context_kv(features, torch.arange(length, device="meta"))

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        sides = ((keys, key), (values, value))
        k, v = (torch.cat([context[:, :, layer], own], dim=1) for context, own in sides)
        # In place of attention, which keeps its inputs and its output.
        seen = (k * v).sum(dim=1, keepdim=True).sum(dim=2, keepdim=True)
        return (query * seen).sigmoid()

    embeddings = torch.empty(1, rows, config.hidden_size, dtype=dtype, device="meta")
    return model.block_forward(embeddings, torch.arange(rows, device="meta")[None], attend)


def saved_bytes(model: nn.Module, forward: Callable[[], Any]) -> int:
    """Bytes of the tensors that autograd keeps of a forward, without the model's weights."""
    found: dict[int, Tensor] = {}
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in weights:
            found[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in found.values())
