"""The feed-forward sublayer of a decoder layer: a gated one, or a mixture of experts."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.layers.experts.joined import JoinedExperts
from specdec.layers.experts.router import Router
from specdec.layers.experts.routing import Experts
from specdec.layers.linear import Linear
from specdec.layers.ops.grouped_convolution import GroupedConvolution
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Join, Ops
from specdec.parallel.collectives import summed
from specdec.parallel.group import Group


class FeedForward(Protocol):
    """A feed-forward sublayer."""

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's weights that every token reads, the first product's first."""

    def __call__(
        self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, prefetch: Linear | None
    ) -> tuple[Tensor, Tensor]:
        """The output for `hidden` [T, H] joins the stream `residual` [T, H]; see `Ops.add`."""


@dataclass(frozen=True, slots=True, eq=False)
class GatedMLP(FeedForward):
    """A gated activation between two products (arXiv 2002.05202), or one without a gate.

    Attributes:
        gate_up: to gate, then up; without a gate to up alone.
        down: back to H.
        activation: see `specdec.layers.ops.activation`.
    """

    gate_up: Linear
    down: Linear
    activation: str = "silu"

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    def product(self, ops: Ops, hidden: Tensor) -> Tensor:
        """What it puts out [T, H] for `hidden` [T, H], before that joins anything."""
        return ops.project(self.down, ops.gated(self.gate_up, hidden, self.activation, self.down))

    def __call__(
        self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, prefetch: Linear | None
    ) -> tuple[Tensor, Tensor]:
        opened = ops.gated(self.gate_up, hidden, self.activation, self.down)
        return ops.project_add(self.down, opened, residual, join, prefetch)


@dataclass(frozen=True, slots=True, eq=False)
class ConvolvedMLP(FeedForward):
    """A gated MLP between two convolutions, as in DFlash 2.

    Attributes:
        mlp: between them.
        convolution: of what it is given, and of what it puts out.
    """

    mlp: GatedMLP
    convolution: GroupedConvolution

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.convolution.projection, *self.mlp.linears

    def __call__(
        self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, prefetch: Linear | None
    ) -> tuple[Tensor, Tensor]:
        dynamic = ops.project(self.convolution.projection, hidden)
        product = self.mlp.product(ops, ops.mix_rows(hidden, dynamic, self.convolution, 0))
        mixed = ops.mix_rows(product, dynamic, self.convolution, 1)
        return ops.add(mixed, residual, join, prefetch)


@dataclass(frozen=True, slots=True, eq=False)
class MixtureOfExperts(FeedForward):
    """Some experts for each token, and those that all tokens share.

    Attributes:
        router: chooses.
        experts: to choose from.
        shared: of all tokens, or None.
        shared_gate: to one number, whose sigmoid weighs what is shared, or None.
        latent: to what the experts are given, and from what they give back to H; None for H.
        weighs_inputs: weights are factors of what experts are given, not of outputs, as in Llama 4.
        group: ranks that have parts of every expert, and of what is shared; None for whole ones.
        joined: `router`, `experts`, `shared` and `shared_gate` for kernels that have all at once;
            None where there are none.
    """

    router: Router
    experts: Experts
    shared: GatedMLP | None = None
    shared_gate: Linear | None = None
    latent: tuple[Linear, Linear] | None = None
    weighs_inputs: bool = False
    group: Group | None = None
    joined: JoinedExperts | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        shared = () if self.shared is None else self.shared.linears
        gate = () if self.shared_gate is None else (self.shared_gate,)
        return self.router.gate, *shared, *gate, *(self.latent or ())

    def __call__(
        self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, prefetch: Linear | None
    ) -> tuple[Tensor, Tensor]:
        output = None if self.joined is None else ops.joined_experts(self.joined, hidden)
        output = self._apart(ops, hidden) if output is None else output
        return ops.add(output, residual, join, prefetch, self.group)

    def _apart(self, ops: Ops, hidden: Tensor) -> Tensor:
        """What it puts out, or parts of that, see `Ops.add`."""
        weights, ids = ops.route(self.router, hidden)
        if self.weighs_inputs:
            given = (hidden[:, None] * weights[..., None].to(hidden.dtype)).flatten(0, 1)
            ones = torch.ones_like(weights).reshape(-1, 1)
            output = ops.experts(self.experts, given, ones, ids.reshape(-1, 1))
            output = output.unflatten(-2, ids.shape).sum(-2)
        elif self.latent is None:
            output = ops.experts(self.experts, hidden, weights, ids)
        else:
            output = ops.experts(self.experts, ops.project(self.latent[0], hidden), weights, ids)
            output = output.sum(0).to(hidden.dtype) if output.ndim == 3 else output
            output = ops.project(self.latent[1], output)
        if self.shared is not None:
            shared = self.shared.product(ops, hidden)
            if self.shared_gate is not None:
                shared = shared * ops.project(self.shared_gate, hidden).sigmoid()
            if output.ndim == 3:
                return torch.cat([output, shared[None].to(output.dtype)])
            output = output + shared
        return output


@dataclass(frozen=True, slots=True, eq=False)
class MlpBesideExperts(FeedForward):
    """A gated MLP and some experts for each token, both normed before the sum, as in Gemma 4.

    Attributes:
        mlp: of all tokens.
        mlp_norm: of what it puts out.
        router_norm: of what the router is given of the stream.
        router: chooses.
        expert_scale: [num_experts], factors of the weights.
        experts_norm: of what the experts are given of the stream.
        experts: to choose from.
        output_norm: of what they put out.
        group: see `MixtureOfExperts`.
    """

    mlp: GatedMLP
    mlp_norm: Norm
    router_norm: Norm
    router: Router
    expert_scale: Tensor
    experts_norm: Norm
    experts: Experts
    output_norm: Norm
    group: Group | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.mlp.linears, self.router.gate

    def __call__(
        self, ops: Ops, hidden: Tensor, residual: Tensor, join: Join, prefetch: Linear | None
    ) -> tuple[Tensor, Tensor]:
        weights, ids = ops.route(self.router, ops.norm(residual, self.router_norm))
        weights = weights * self.expert_scale[ids]
        routed = ops.experts(self.experts, ops.norm(residual, self.experts_norm), weights, ids)
        if self.group is not None:
            routed = summed(routed, self.group, hidden.dtype)
        elif routed.ndim == 3:
            routed = routed.sum(0).to(hidden.dtype)
        output = ops.norm(self.mlp.product(ops, hidden), self.mlp_norm)
        output = output + ops.norm(routed, self.output_norm)
        return ops.add(output, residual, join, prefetch)
