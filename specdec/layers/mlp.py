"""The feed-forward sublayer of a decoder layer: a gated one, or a mixture of experts."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.experts import Experts
from specdec.layers.linear import Linear
from specdec.layers.ops import Join, Ops
from specdec.layers.router import Router


class FeedForward(Protocol):
    """A feed-forward sublayer."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """Its weights that every token reads, the first product's first."""

    def __call__(self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, ahead: Linear | None) -> tuple[Tensor, Tensor]:
        """Its output for `hidden` [T, H] joins the stream `residual` [T, H]; see `Ops.add`."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP:
    """A gated activation between two products (arXiv 2002.05202).

    Attributes:
        gate_up: to gate, then up.
        down: back to H.
        activation: see `specdec.layers.activation`.
    """

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `FeedForward.linears`."""
        return self.gate_up, self.down

    def __call__(self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, ahead: Linear | None) -> tuple[Tensor, Tensor]:
        """See `FeedForward.__call__`."""
        return ops.project_add(self.down, ops.gated(self.gate_up, hidden, self.activation, self.down), residual, join, ahead)


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts:
    """Some experts for each token, and those that all tokens share.

    Attributes:
        router: chooses.
        experts: to choose from.
        shared: of all tokens, or None.
        shared_gate: to one number, whose sigmoid weighs what is shared, or None.
    """

    router: Router
    experts: Experts
    shared: GatedMLP | None = None
    shared_gate: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """See `FeedForward.linears`."""
        shared = () if self.shared is None else self.shared.linears
        return self.router.gate, *shared, *(() if self.shared_gate is None else (self.shared_gate,))

    def __call__(self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, ahead: Linear | None) -> tuple[Tensor, Tensor]:
        """See `FeedForward.__call__`."""
        weights, ids = ops.route(self.router, hidden)
        output = ops.experts(self.experts, hidden, weights, ids)
        if self.shared is not None:
            shared = ops.project(self.shared.down, ops.gated(self.shared.gate_up, hidden, self.shared.activation, self.shared.down))
            if self.shared_gate is not None:
                shared = shared * ops.project(self.shared_gate, hidden).sigmoid()
            output = output + shared if output.ndim == 2 else torch.cat([output, shared[None].to(output.dtype)])
        return ops.add(output, residual, join, ahead)
