"""What decoder layers have in the place of attention, or beside it: a recurrence or a convolution
instead of keys and values.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.kv_cache import StateCache
from specdec.layers.attention import Attention, Rows
from specdec.layers.linear import Linear
from specdec.layers.ops.norm import GroupNorm
from specdec.layers.ops.ops import Ops
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows
from specdec.layers.rotary.rotary import Rope


@dataclass(frozen=True, slots=True, eq=False)
class LinearAttention(Attention):
    """Linear attention whose output is normed by group and gated, as in Qwen3-Next and Mamba-2.

    Attributes:
        inputs: to the recurrence's part of a row, then the gates of the outputs [value heads * V].
        recurrence: of the layer.
        norm: of groups of outputs, such as value heads; None gates them alone.
        row_gates: to the gates `b` and `a` of the recurrence, if their weights are stored in
            another way than the others; `inputs` then lack them. None where `inputs` give all.
    """

    inputs: Linear
    recurrence: Recurrence
    norm: GroupNorm | None
    row_gates: Linear | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.inputs,) if self.row_gates is None else (self.inputs, self.row_gates)

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        assert isinstance(rows.cache, StateCache) and isinstance(rows.plan, RecurrentRows)
        joined, width = ops.project(self.inputs, hidden), self.recurrence.width
        gate = joined[:, width:]
        if self.row_gates is not None:
            channels = self.recurrence.channels
            gate = joined[:, channels:]
            joined = torch.cat([joined[:, :channels], ops.project(self.row_gates, hidden)], dim=1)
        out = ops.recur(joined, self.recurrence, rows.cache, rows.plan)
        return out * F.silu(gate) if self.norm is None else ops.gated_norm(out, gate, self.norm)


@dataclass(frozen=True, slots=True, eq=False)
class KeyDecayAttention(Attention):
    """Linear attention with a decay per key channel (Kimi Delta Attention, arXiv 2510.26692).
    Decays and gates come by few numbers.

    Attributes:
        inputs: to channels and `b` of the recurrence, then the few numbers of decays, then as many
            of the gates of the outputs.
        decays: from few numbers to `a` of the recurrence.
        gates: from few numbers to [value heads * V].
        recurrence: of the layer.
        norm: of value heads.
    """

    inputs: Linear
    decays: Linear
    gates: Linear
    recurrence: Recurrence
    norm: GroupNorm

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.inputs, self.decays, self.gates

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        assert isinstance(rows.cache, StateCache) and isinstance(rows.plan, RecurrentRows)
        few = self.decays.in_features
        joined = ops.project(self.inputs, hidden)
        taken, decays, gates = joined.split_with_sizes([joined.shape[1] - 2 * few, few, few], dim=1)
        x = torch.cat([taken, ops.project(self.decays, decays.contiguous())], dim=1)
        out = ops.recur(x, self.recurrence, rows.cache, rows.plan)
        return ops.gated_norm(out, ops.project(self.gates, gates.contiguous()), self.norm)


@dataclass(frozen=True, slots=True, eq=False)
class ShortConvolution(Attention):
    """A convolution over few rows between two gates, as in LFM2 (arXiv 2511.23404):
    `after * convolution(before * value)`.

    Attributes:
        inputs: to [before, after, value], each as wide as the layer.
        kernel: [H, taps], the last tap is the row itself.
        bias: [H], or None.
    """

    inputs: Linear
    kernel: Tensor
    bias: Tensor | None = None

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.inputs,)

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        assert isinstance(rows.cache, StateCache) and isinstance(rows.plan, RecurrentRows)
        joined = ops.project(self.inputs, hidden)
        return ops.convolve(joined, self.kernel, self.bias, rows.cache, rows.plan)


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide(Attention):
    """Attention and linear attention of the same rows, as in Falcon-H1 (arXiv 2507.22448). One
    projection takes what both give.

    Each has a cache and a plan, in this order.
    """

    attention: Attention
    linear: LinearAttention

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (*self.attention.linears, *self.linear.linears)

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        layers = zip((self.attention, self.linear), rows.each(), strict=True)
        return torch.cat([layer(ops, hidden, own, prefetch) for layer, own in layers], dim=1)
