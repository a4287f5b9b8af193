"""Routed experts and what all tokens share, for kernels that multiply few rows with both at once.

What is shared is an MLP like an expert's. So it is an expert that every token has: of few rows its
products, its gate and its part of the sum cost no launches of their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.triton_launch import unavailable_reasons
from specdec.layers.experts.router import Router
from specdec.layers.experts.routing import Experts, Routing, SharedExperts
from specdec.layers.linear import DenseLinear, Linear

GATE_ROWS = 64
"""A joined gate has a multiple of these rows: products of few rows divide among as many columns."""


class MLP(Protocol):
    """What all tokens share: see `specdec.layers.mlp.GatedMLP`."""

    @property
    def gate_up(self) -> Linear: ...
    @property
    def down(self) -> Linear: ...
    @property
    def activation(self) -> str: ...


@dataclass(frozen=True, slots=True, eq=False)
class JoinedExperts:
    """What one kernel needs for all of them.

    Attributes:
        gate: to one logit per expert and, if `gated`, to the shared one's; then padding.
        routing, bias: see `specdec.layers.experts.router.Router`.
        experts: to choose from.
        shared: of all tokens.
        gated: the sigmoid of a logit weighs what is shared; else that counts once.
    """

    gate: Linear
    routing: Routing
    bias: Tensor | None
    experts: Experts
    shared: SharedExperts
    gated: bool

    @classmethod
    def of(
        cls, router: Router, experts: Experts, mlp: MLP, mlp_gate: Linear | None
    ) -> JoinedExperts | None:
        """The layers for kernels that take them together; None where none do, or AITER's choose.

        Args:
            mlp_gate: to the number whose sigmoid weighs what `mlp` puts out, or None.
        """
        gate_up, down, gate = mlp.gate_up, mlp.down, router.gate
        if unavailable_reasons(experts.down.device) or router.aiter is not None:
            return None
        if not (isinstance(gate_up, DenseLinear) and isinstance(down, DenseLinear)):
            return None
        if mlp.activation != experts.activation or not isinstance(gate, DenseLinear):
            return None
        plain = isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
        biases = (experts.gate_up_bias, experts.down_bias, gate_up.bias, down.bias)
        count, rest = divmod(down.in_features, experts.width)
        alike = (
            plain
            and down.dtype == experts.down.dtype
            and down.weight.is_contiguous()
            and gate_up.weight.is_contiguous()
        )
        if not alike or rest or any(bias is not None for bias in biases):
            return None
        from specdec.layers.experts.triton_experts import unsupported_reasons  # it imports Triton

        if unsupported_reasons(experts, router.routing.top_k + count):
            return None
        if mlp_gate is not None:
            if not isinstance(mlp_gate, DenseLinear) or mlp_gate.bias is not None:
                return None
            gate = _with_row(gate, mlp_gate.weight)
        shared = SharedExperts(gate_up.weight, down.weight, count)
        return cls(gate, router.routing, router.bias, experts, shared, mlp_gate is not None)


def _with_row(gate: DenseLinear, row: Tensor) -> DenseLinear:
    """The gate with one row [1, H] behind its own, and padding."""
    weight, experts = gate.weight, len(gate.weight)
    joined = weight.new_zeros(-(-(experts + 1) // GATE_ROWS) * GATE_ROWS, weight.shape[1])
    joined[:experts], joined[experts] = weight, row[0]
    bias: Tensor | None = None
    if gate.bias is not None:
        bias = torch.cat([gate.bias, gate.bias.new_zeros(len(joined) - experts)])
    return DenseLinear(joined, bias)
