"""Layers of which every rank of a group has a part: what the parts give is added up, or put side by
side, once for a sublayer.

A partial product is rounded to the model's type, then added to those of the other ranks; residual
and norm come after that.
"""

from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from specdec.layers.linear import FewRows, Linear
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Ops
from specdec.layers.packed.table import PackedTable
from specdec.parallel.collectives import all_reduce, gather_last
from specdec.parallel.group import Group


class SummedLinear(Linear):
    """A projection whose inputs are divided: every rank multiplies its own, and the products are
    added up.

    Args:
        part: this rank's. A bias is that of rank 0 alone.
    """

    def __init__(self, part: Linear, group: Group) -> None:
        self.part, self.group = part, group
        self.in_features, self.out_features = part.in_features, part.out_features
        self.bias, self.dtype = part.bias, part.dtype

    @property
    def nbytes(self) -> int:
        """See `Linear.nbytes`; of this rank."""
        return self.part.nbytes

    @property
    def prefetchable(self) -> Tensor | None:
        return self.part.prefetchable

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = all_reduce(self.part(x), self.group)
        return out if residual is None else out.add_(residual)

    def few_rows(self, x: Tensor, **how: Unpack[FewRows]) -> Tensor | None:
        """See `Linear.few_rows`; never in partial sums, which would take a launch of their own to
        be added before ranks add.
        """
        how["may_split"] = False
        product = self.part.few_rows(x, **how)
        return None if product is None else all_reduce(product, self.group)


class GatheredLinear(Linear):
    """A projection whose outputs are divided evenly, with padding on the last rank: every rank gets
    them all, in order, without the padding.
    """

    def __init__(self, part: Linear, group: Group, out_features: int) -> None:
        self.part, self.group = part, group
        self.in_features, self.out_features = part.in_features, out_features
        self.bias, self.dtype = part.bias, part.dtype

    @property
    def nbytes(self) -> int:
        """See `Linear.nbytes`; of this rank."""
        return self.part.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        out = gather_last(self.part(x), self.group, self.out_features)
        return out if residual is None else out + residual


@dataclass(frozen=True, slots=True, eq=False)
class Embedding:
    """Rows of a table, of which every rank may have a part.

    Attributes:
        table: [V, H], or this rank's part of it, as long as those of the others.
        group: the ranks; None for a table that is whole.
    """

    table: Tensor | PackedTable
    group: Group | None = None

    def __call__(self, ops: Ops, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows [..., H] times `scale`, for int64 ids [...]; see `Ops.embed`. Of the terms of a sum
        one alone is not 0.
        """
        if self.group is None:
            return self._rows(ops, token_ids, scale)
        places = token_ids - self.group.rank * len(self.table)
        elsewhere = (places < 0) | (places >= len(self.table))
        rows = self._rows(ops, places.masked_fill(elsewhere, 0), scale)
        return all_reduce(rows.masked_fill(elsewhere[..., None], 0), self.group)

    def _rows(self, ops: Ops, places: Tensor, scale: float) -> Tensor:
        if isinstance(self.table, PackedTable):
            return self.table.rows(places, scale)
        return ops.embed(places, self.table, scale)


def norm_divided(parts: tuple[Tensor, ...], norms: tuple[Norm, ...], group: Group) -> list[Tensor]:
    """Rows [T, ...] that the ranks have parts of, normed whole as
    `specdec.layers.ops.norm.rms_norm` does.

    Args:
        parts: this rank's numbers of each kind of row.
        norms: of each kind, with this rank's part of the weight.
    """
    wide = torch.promote_types(parts[0].dtype, torch.float32)
    squares = torch.cat([part.to(wide).square().sum(-1, keepdim=True) for part in parts], dim=-1)
    sums, normed = all_reduce(squares, group).split(1, dim=-1), []
    for part, norm, total in zip(parts, norms, sums, strict=True):
        scaled = part * (total / (part.shape[-1] * group.size) + norm.epsilon).rsqrt()
        if norm.weight.dtype == part.dtype:
            scaled = scaled.to(part.dtype)
        normed.append((scaled * norm.weight).to(part.dtype))
    return normed
