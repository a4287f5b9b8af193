"""A block of attention and a feed-forward sublayer that several layers share, before a recurrence,
as in Zamba2.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.layers.attention import Attention, HeadAttention, Rows
from specdec.layers.linear import Linear
from specdec.layers.linear_attention import LinearAttention
from specdec.layers.mlp import GatedMLP
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Ops
from specdec.layers.rotary.rotary import Rope

EMBEDDINGS = "embeddings"
"""Under which a decoder leaves what its first layer is given."""


class AdaptedLinear(Linear):
    """A projection that several layers share, with what one layer adds to each part of its output
    through few numbers (LoRA).

    Args:
        base: what they share.
        down: to the few numbers of all parts, side by side.
        up: from them to each part, in order.
    """

    def __init__(self, base: Linear, down: Linear, up: tuple[Linear, ...]) -> None:
        self.base, self.down, self.up = base, down, up
        self.in_features, self.out_features = base.in_features, base.out_features
        self.bias, self.dtype = base.bias, base.dtype

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.down.nbytes + sum(one.nbytes for one in self.up)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        few = self.down(x).split_with_sizes([one.in_features for one in self.up], dim=-1)
        added = [one(part.contiguous()) for one, part in zip(self.up, few, strict=True)]
        return self.base(x, residual) + torch.cat(added, dim=-1)


@dataclass(frozen=True, slots=True, eq=False)
class AfterSharedBlock(Attention):
    """Linear attention to the stream and what a shared block makes of it (arXiv 2411.15242), which
    stays out of the stream itself.

    The block sees the stream and the embeddings side by side, and has no residuals. It is given the
    stream without a norm.

    Attributes:
        block_norm: of stream and embeddings together.
        attention: of the block.
        output: its output projection, to [H].
        mlp_norm, mlp: of the block.
        projection: of what the block puts out, which is added to the stream.
        norm: of that sum.
        linear: is given the sum.
    """

    block_norm: Norm
    attention: HeadAttention
    output: Linear
    mlp_norm: Norm
    mlp: GatedMLP
    projection: Linear
    norm: Norm
    linear: LinearAttention

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def linears(self) -> tuple[Linear, ...]:
        block = *self.attention.linears, self.output, *self.mlp.linears
        return *block, self.projection, *self.linear.linears

    def __call__(self, ops: Ops, hidden: Tensor, rows: Rows, prefetch: Linear) -> Tensor:
        first, second = rows.each()
        seen = ops.norm(torch.cat([hidden, rows.shared[EMBEDDINGS]], dim=1), self.block_norm)
        attended = ops.project(self.output, self.attention(ops, seen, first, self.output))
        product = self.mlp.product(ops, ops.norm(attended, self.mlp_norm))
        added = hidden + ops.project(self.projection, product)
        return self.linear(ops, ops.norm(added, self.norm), second, prefetch)
