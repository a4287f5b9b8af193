"""Drafters that go token by token in training: EAGLE-3 heads and layers for multi-token prediction.

A block is unrolled as EAGLE-3 does it (arXiv 2503.01840, "training-time test"): its first row is
made of the target's features of the token before the anchor, every later one of what the drafter
itself gave for the row before. The networks are the very ones that draft in the engine, made anew
of the trained weights for each forward, with `UnrolledAttention` in the place of a paged cache.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from drafters.sequential.network import Rows, SequentialNetwork
from drafters.training.config import TrainConfig
from drafters.training.families.attention import Step, UnrolledAttention
from drafters.training.families.trained import Trained
from drafters.training.loss.blocks import SequenceBatch
from drafters.training.loss.memory import Memory, memory_of_weights, saved_bytes
from drafters.training.target import Target
from specdec.attention.backend import AttentionSpec
from specdec.base.errors import InvalidInputError, shown
from specdec.model.core import Verifier

LEFT_OUT = (
    "head", "convolutions", "tied_tables", "draft_vocab", "confidence", "base_until", "base_share",
    "shard", "pack_length",
)  # fmt: skip
"""Options that only DFlash drafters have."""


@dataclass(frozen=True, slots=True)
class UnrolledConfig:
    """What a drafter that goes token by token is like, as far as training asks.

    Attributes:
        target_layer_ids: tapped decoder layers of the target, 0-based.
        max_draft_tokens: K, steps that it is unrolled for.
        draft_vocab_size: of a reduced vocabulary, or None.
        shapes: of its tensors, by name.
    """

    target_layer_ids: tuple[int, ...]
    max_draft_tokens: int
    draft_vocab_size: int | None
    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    @property
    def block_size(self) -> int:
        """Tokens of a block, the anchor included."""
        return self.max_draft_tokens + 1

    @property
    def mask_token_id(self) -> None:
        """Nothing stands for tokens that are not drafted yet."""


class UnrolledModel(nn.Module, ABC):
    """The weights, by the names of their checkpoint.

    Args:
        config: what they make.
        tensors: floating-point ones are trained, in float32.
        frozen: names of those that are not.
    """

    d2t: Tensor | None

    def __init__(
        self, config: UnrolledConfig, tensors: Mapping[str, Tensor], frozen: Collection[str] = ()
    ) -> None:
        super().__init__()
        self.config = config
        self.register_buffer("d2t", None)
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            place: nn.Module = self
            for part in path:
                if part not in dict(place.named_children()):
                    place.add_module(part, nn.Module())
                place = place.get_submodule(part)
            if tensor.is_floating_point():
                weight = nn.Parameter(tensor.float(), requires_grad=name not in frozen)
                place.register_parameter(leaf, weight)
            else:
                place.register_buffer(leaf, tensor)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them."""
        return {**dict(self.named_parameters()), **dict(self.named_buffers())}

    @abstractmethod
    def network(self, verifier: Verifier) -> SequentialNetwork:
        """The network that these weights make, through which gradients reach them."""

    @abstractmethod
    def export(self, run: Path, verifier: Verifier) -> list[Path]:
        """See `Trained.export`."""


class _Context(NamedTuple):
    """The first step: what it gave [S * T, ...], and of each layer its keys and values."""

    out: Tensor
    caches: list[list[Any]]


class TrainedUnrolled(Trained):
    """See `Trained`. Trees grow behind the drafter's own drafts, which blocks do not tell of."""

    draws_trees = False
    compiles = False  # the network is another one in each forward

    def __init__(self, model: UnrolledModel, target: Target, config: TrainConfig) -> None:
        self._model, self._config = model, config
        self._target: Any = copy.copy(target.verifier)
        spec = AttentionSpec(target.device, target.dtype, 1, 1, head_dim=2, block_size=1)
        self._target.attention = UnrolledAttention(spec)
        self._network = model.network(self._target)
        head = model.tensors.get("lm_head.weight")
        self.weights = [head] if isinstance(head, nn.Parameter) and head.requires_grad else []

    def context(self, batch: SequenceBatch, features: Tensor) -> _Context:
        """The first step, over whole sequences."""
        self._network = self._model.network(self._target)
        count, length = batch.token_ids.shape
        caches: list[list[Any]] = [[] for _ in self._network.kv_specs]
        positions = torch.arange(length, device=features.device).expand(count, -1).flatten()
        rows = Rows(
            batch.token_ids.roll(-1, dims=1).flatten(),
            self._network.condense(features.flatten(0, 1)),
            positions,
            Step(count, length),  # type: ignore[arg-type]
        )
        return _Context(self._network.forward(rows, caches, None), caches)

    def hidden(self, batch: SequenceBatch, anchors: Tensor, context: _Context) -> Tensor:
        """See `Trained.hidden`; a row behind the end of its sequence is given anything."""
        network, (count, length) = self._network, batch.token_ids.shape
        starts = torch.arange(0, count * length, length, device=anchors.device)[:, None]
        roots = (anchors - 1).clamp(min=0)
        outs = [context.out.index_select(0, (starts + roots).flatten())]
        caches = [list(cache) for cache in context.caches]  # of these blocks
        for step in range(1, self._model.config.max_draft_tokens):
            known = (anchors + step).clamp(max=length - 1)
            rows = Rows(
                batch.token_ids.gather(1, known).flatten(),
                network.next_features(outs[-1]),
                (roots + step).flatten(),
                Step(count, length, step, anchors),  # type: ignore[arg-type]
            )
            outs.append(network.forward(rows, caches, None))
        return torch.stack(outs, dim=1).unflatten(0, anchors.shape)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Trained.logits`."""
        lead = hidden.shape[:2]
        return self._network.logits(hidden.flatten(0, 1)).unflatten(0, lead)

    def memory(self, length: int, world: int) -> Memory:
        """See `Trained.memory`. One and two sequences are run, since networks are of many kinds;
        what both take is that of joined weights.
        """
        config, shape, tensors = self._config, self._model.config, self._model.tensors
        one, two = (saved_bytes(self._model, partial(self._rows, n, length)) for n in (1, 2))
        sequences = config.batch_size // (config.accumulation * world)
        return memory_of_weights(
            {name: tensor.shape for name, tensor in tensors.items()},
            {name for name, tensor in tensors.items() if not tensor.requires_grad},
            config,
            target_bytes=self._target.weight_bytes,
            activations=one + (sequences - 1) * (two - one),
            drafts=shape.max_draft_tokens,
            columns=shape.draft_vocab_size or self._target.vocab_size,
            world=world,
            dtype=self._target.dtype,
        )

    def _rows(self, count: int, length: int) -> Tensor:
        """Hidden states of the blocks of so many sequences."""
        target, taps = self._target, self._model.config.target_layer_ids
        tokens = torch.zeros(count, length, dtype=torch.int64, device=target.device)
        ends = torch.full_like(tokens[:, 0], length)
        batch = SequenceBatch(tokens, ends - 1, ends, [length] * count, tokens)
        anchors = torch.arange(1, self._config.anchors + 1, device=target.device)
        places = anchors.clamp(max=length - 1).expand(count, -1)
        width = len(taps) * target.hidden_size
        features = tokens.new_zeros(count, length, width, dtype=target.dtype)
        return self.hidden(batch, places, self.context(batch, features))

    def export(self, run: Path) -> list[Path]:
        """See `Trained.export`."""
        return self._model.export(run, self._target)


def num_steps(config: TrainConfig, drafts: int, most: int) -> int:
    """Steps to unroll a drafter for that is known to make so many drafts, and at most `most`.

    Raises:
        InvalidInputError: too many, or an option of DFlash drafters alone.
    """
    usual = {info.name: info.default for info in fields(TrainConfig)}
    for name in LEFT_OUT:
        if (value := getattr(config, name)) != usual[name]:
            raise InvalidInputError(
                f"{name.replace('_', '-')} is {shown(value)}, and drafter {config.init!r} goes"
                f" token by token, for which training has no such option; leave it out"
            )
    steps = drafts if config.unroll is None else config.unroll
    if steps > most:
        raise InvalidInputError(
            f"unroll is {steps}; it must be at most {most}, the drafts that {config.init!r} makes"
        )
    return steps
