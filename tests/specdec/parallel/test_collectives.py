"""Sums over ranks: the order in which they are added, and so their bits, on four ranks, since a sum
of two has no order.
"""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.layers.linear import DenseLinear
from specdec.layers.ops.norm import Norm, rms_norm
from specdec.layers.ops.ops import Ops
from specdec.layers.sharded import Embedding, GatheredLinear, SummedLinear, norm_divided
from specdec.parallel.collectives import all_agree, all_reduce, broadcast, gather_last, summed
from specdec.parallel.group import Group
from tests.helpers.ranks import run_ranks

RANKS, ROWS, WIDTH = 4, 16, 4096
ROW = 5
"""Of `ROWS`, the one that is also added alone."""


class Sums(NamedTuple):
    """On one rank."""

    part: Tensor
    among_others: Tensor
    alone: Tensor  # as wide as one row


def sums(group: Group) -> dict[tuple[bool, torch.dtype], Sums]:
    """A row of partial products added over the ranks, alone and among others, in either mode."""
    generator = torch.Generator().manual_seed(group.rank)
    made = {}
    for dtype in (torch.float32, torch.bfloat16):
        part = torch.randn(ROWS, WIDTH, generator=generator).to(dtype)
        for ordered in (False, True):
            mode = replace(group, ordered=ordered)
            made[ordered, dtype] = Sums(
                part,
                all_reduce(part.clone(), mode)[ROW],
                all_reduce(part[ROW : ROW + 1].clone(), mode)[0],
            )
    return made


def gathered(group: Group) -> tuple[Tensor, Tensor, bool, bool]:
    """Columns of all ranks but the last one's last, a row of rank 0, and what ranks agree on."""
    own = torch.arange(6).view(2, 3) + 100 * group.rank
    row = broadcast(torch.tensor([group.rank, 7]), group)
    return (
        gather_last(own, group, 3 * group.size - 1),
        row,
        all_agree(True, group),
        all_agree(group.rank != 2, group),
    )


def test_a_rank_that_launches_alone_keeps_its_own() -> None:
    """In the shapes of what it would get; there is nobody to exchange with."""
    group = Group(rank=0, size=RANKS, device_group=None, host_group=None)
    own = torch.arange(6).view(2, 3)
    with group.alone():
        assert all_reduce(own, group) is own and broadcast(own, group) is own
        assert all_reduce(own, replace(group, ordered=True)) is own
        assert gather_last(own, group, 3 * RANKS - 1).shape == (2, 3 * RANKS - 1)
    with pytest.raises((ValueError, RuntimeError, AttributeError)):
        broadcast(own, group)


class FewRows(DenseLinear):
    """A layer with a product of few rows that may be left in partial sums, as on a GPU."""

    def few_rows(
        self,
        x: Tensor,
        *,
        activation: str | None = None,
        may_split: bool = False,
        prefetch: Tensor | None = None,
    ) -> Tensor | None:
        """See `Linear.few_rows`."""
        return (
            torch.stack([self(x), torch.zeros(len(x), self.out_features)]) if may_split else self(x)
        )


WHOLE, INPUTS, BIAS = (
    torch.randn(shape, generator=torch.Generator().manual_seed(9))
    for shape in ((10, 8), (3, 8), (10,))
)
NORM = Norm(torch.linspace(0.5, 1.5, 8), 1e-6)


def divided(group: Group) -> dict[str, Tensor]:
    """What layers give of which each rank has a part."""
    rank, size = group.rank, group.size
    inputs = 8 // size
    columns = slice(rank * inputs, (rank + 1) * inputs)
    row = SummedLinear(FewRows(WHOLE[:, columns].contiguous(), BIAS if rank == 0 else None), group)
    tokens = -(-10 // size)
    rows = F.pad(WHOLE, (0, 0, 0, tokens * size - 10))[rank * tokens : (rank + 1) * tokens]
    few = row.few_rows(INPUTS[:, columns], may_split=True)
    assert few is not None
    (normed,) = norm_divided(
        (INPUTS[:, columns],), (Norm(NORM.weight[columns], NORM.epsilon),), group
    )
    return {
        "product": row(INPUTS[:, columns]),
        "with a residual": row(INPUTS[:, columns], torch.ones(3, 10)),
        "few rows": few,
        "partial sums": summed(torch.stack([INPUTS, INPUTS]), group, torch.float32),
        "outputs": GatheredLinear(DenseLinear(rows), group, 10)(INPUTS),
        "embedding": Embedding(rows, group)(Ops(), torch.tensor([0, 3, 9, 4]), 2.0),
        "norm": gather_last(normed, group, 8),
    }


def work(
    group: Group,
) -> tuple[
    dict[tuple[bool, torch.dtype], Sums], tuple[Tensor, Tensor, bool, bool], dict[str, Tensor]
]:
    """All of it in one start of the ranks."""
    return sums(group), gathered(group), divided(group)


def test_a_row_has_the_same_bits_alone_and_among_others_in_the_ordered_mode() -> None:
    """And not in the backend's own, or this could not fail.
    All ranks have the same bits in either.
    """
    ranks = run_ranks(RANKS, work)
    for key in ranks[0][0]:
        ordered, dtype = key
        made = [rank[0][key] for rank in ranks]
        assert all(
            torch.equal(one.among_others, made[0].among_others)
            and torch.equal(one.alone, made[0].alone)
            for one in made
        )
        assert torch.equal(made[0].alone, made[0].among_others) is ordered, (ordered, dtype)
        exact = sum(one.part[ROW].double() for one in made)
        assert isinstance(exact, Tensor)
        # Three roundings of sums no larger than that of the sizes.
        most = (
            3
            * torch.finfo(dtype).eps
            * torch.stack([one.part[ROW].double().abs() for one in made]).sum(0)
        )
        assert ((made[0].alone.double() - exact).abs() <= most).all()
    check_divided(ranks[RANKS - 1][2])
    for columns, row, agreed, disagreed in (rank[1] for rank in ranks):
        whole = torch.cat([torch.arange(6).view(2, 3) + 100 * rank for rank in range(RANKS)], dim=1)
        assert torch.equal(columns, whole[:, :-1]) and columns.is_contiguous()
        assert row.tolist() == [0, 7] and agreed and not disagreed


def check_divided(found: dict[str, Tensor]) -> None:
    """One rank's, against layers that are whole."""
    product = F.linear(INPUTS, WHOLE, BIAS)
    expected = {
        "product": product, "with a residual": product + 1, "few rows": product,
        "partial sums": 2 * RANKS * INPUTS, "outputs": F.linear(INPUTS, WHOLE),
        "embedding": 2 * WHOLE[[0, 3, 9, 4]], "norm": rms_norm(INPUTS, NORM),
    }  # fmt: skip
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, msg=name)


def test_one_process_is_no_group() -> None:
    """Nothing is copied, nor rounded."""
    x = torch.randn(3)
    assert (
        all_reduce(x, None) is x
        and gather_last(x, None, 3) is x
        and broadcast(x, None) is x
        and all_agree(True, None)
    )
