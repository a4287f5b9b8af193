"""Mixtures of experts as data: how a token's experts are chosen, and what the experts of a layer
are made of.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from specdec.base.errors import InvalidInputError
from specdec.layers.packed.weight import PackedWeight

PLAIN = frozenset({"relu2"})
"""Activations without a gate; see `specdec.layers.ops.activation`."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen: the highest scores win, and of equal ones the lower expert.

    Softmax over the logits of the chosen alone, as gpt-oss and Granite have it, is what
    `renormalized` makes of softmax scores.

    Attributes:
        num_experts: experts to choose from.
        top_k: experts per token.
        scores: what logits become; a softmax goes over all experts.
        biased: a bias per expert joins the choice, not the weights.
        num_groups: groups of neighboring experts, equally large.
        topk_groups: groups per token whose experts may be chosen; a group counts as its best
            expert, with sigmoid as its best two.
        renormalized: weights of a token sum to `scaling`.
        scaling: factor of the weights.
        epsilon: added to the sum by which sigmoid scores are divided.

    Raises:
        InvalidInputError: the numbers do not go together.
    """

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    biased: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    renormalized: bool = True
    scaling: float = 1.0
    epsilon: float = 1e-20

    def __post_init__(self) -> None:
        groups, size = self.num_groups, self.num_experts // max(self.num_groups, 1)
        if groups < 1 or self.num_experts % groups:
            count = self.num_experts
            raise InvalidInputError(f"{count} experts do not divide into {groups} groups")
        if not 1 <= self.topk_groups <= groups:
            what = f"{self.topk_groups} of {groups} groups of experts cannot be chosen"
            raise InvalidInputError(f"{what}; take 1 to {groups}")
        if not 1 <= self.top_k <= size * self.topk_groups:
            allowed = size * self.topk_groups
            what = f"{self.top_k} experts per token, of {allowed} that may be chosen"
            raise InvalidInputError(f"{what}; take 1 to {allowed}")
        if self.grouped and self.scores == "sigmoid" and size < 2:
            what = f"{groups} groups of one expert have no best two"
            raise InvalidInputError(f"{what}; take at most {self.num_experts // 2} groups")

    @property
    def grouped(self) -> bool:
        """Whether some groups are left out."""
        return self.topk_groups < self.num_groups


@dataclass(frozen=True, slots=True, eq=False)
class SharedExperts:
    """What every row has beside the experts it chooses: an MLP like theirs, as parts as wide as
    theirs, whose sum it is.

    A kernel takes them for experts whose numbers follow those of the others.

    Attributes:
        gate_up: [2 * count * I, H], the rows of gate, then those of up; without gates [count * I,
            H]. Contiguous, like `down`.
        down: [H, count * I].
        count: parts.
    """

    gate_up: Tensor
    down: Tensor
    count: int


@dataclass(frozen=True, slots=True)
class Experts:
    """A layer's routed experts: each a gated MLP, `down(activation(gate(x), up(x)))`, or without
    gates `down(activation(up(x)))`.

    Attributes:
        gate_up: [E, 2 * I, H], of each expert the rows of gate, then those of up; contiguous, like
            all of these. Without gates it is [E, I, H]. A packed one may be released once the
            object exists, which keeps another arrangement of it.
        down: [E, H, I], likewise.
        activation: one of `specdec.layers.ops.activation.ACTIVATIONS`, or of `PLAIN` without gates.
        gate_up_bias: [E, 2 * I], or without gates [E, I], or None.
        down_bias: [E, H] or None.
    """

    gate_up: Tensor | PackedWeight
    down: Tensor | PackedWeight
    activation: str
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    def __post_init__(self) -> None:
        for name in ("gate_up", "down"):
            weight = getattr(self, name)
            if isinstance(weight, PackedWeight):
                object.__setattr__(self, name, weight.arranged())

    @property
    def gated(self) -> bool:
        """Whether experts have gates."""
        return self.activation not in PLAIN

    @property
    def num_experts(self) -> int:
        """E."""
        return self.down.shape[0]

    @property
    def width(self) -> int:
        """I, numbers between the two products."""
        return self.down.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all experts together."""
        parts = (self.gate_up, self.down, self.gate_up_bias, self.down_bias)
        return sum(part.nbytes for part in parts if part is not None)

    def to(self, target: torch.device | torch.dtype) -> "Experts":
        """The routing on that device, or in that type."""

        def moved(bias: Tensor | None) -> Tensor | None:
            return None if bias is None else bias.to(target)

        biases = moved(self.gate_up_bias), moved(self.down_bias)
        return Experts(self.gate_up.to(target), self.down.to(target), self.activation, *biases)
