"""Joining attention over parts of the keys, also where a row sees no key of a part,
or none at all.
"""

import itertools

import pytest
import torch
from torch import Tensor

from specdec.attention.merge import merge
from tests.helpers.bounds import assert_as_exact

INF, NAN = torch.inf, torch.nan


def part(query: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of rows [n, heads, dim] over some keys [m, heads, dim], and the logarithms of the
    denominators [heads, n].
    """
    scores = torch.einsum("ihd,jhd->hij", query, keys)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_parts_make_the_whole(cut: int) -> None:
    """Catches weights of the wrong row, head or part."""
    torch.manual_seed(0)
    query, keys, values = torch.randn(3, 2, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8)
    parts = part(query, keys[:cut], values[:cut]), part(query, keys[cut:], values[cut:])
    joined = merge(*parts[0], *parts[1])
    plain = part(query, keys, values)
    exact = part(query.double(), keys.double(), values.double())
    for got, usual, want in zip(joined, plain, exact, strict=True):
        assert_as_exact(got, usual, want)


@pytest.mark.parametrize("none", [INF, -INF])
@pytest.mark.parametrize("garbage", [0.0, NAN, INF])
@pytest.mark.parametrize("first", [True, False])
def test_a_part_without_keys_changes_nothing(none: float, garbage: float, first: bool) -> None:
    """Kernels write either infinity for it, and anything as its output."""
    out, lse = torch.randn(4, 2, 8).bfloat16(), torch.randn(2, 4)
    empty = torch.full_like(out, garbage), torch.full_like(lse, none)
    joined = merge(*empty, out, lse) if first else merge(out, lse, *empty)
    assert torch.equal(joined[0], out.float()) and torch.equal(joined[1], lse)


@pytest.mark.parametrize("none", list(itertools.product([INF, -INF], repeat=2)))
def test_rows_without_any_key_are_zero(none: tuple[float, float]) -> None:
    """And join what comes after as a part without keys; rows beside them are not touched."""
    out, lse = torch.randn(2, 2, 8), torch.randn(2, 2)
    parts = [(out.clone(), lse.clone()), (out.clone(), lse.clone())]
    for (values, logs), value in zip(parts, none, strict=True):
        values[0], logs[:, 0] = NAN, value
    joined, total = merge(*parts[0], *parts[1])
    assert not joined[0].any() and total[:, 0].tolist() == [-INF, -INF]
    torch.testing.assert_close(joined[1], out[1])
    again, last = merge(joined, total, out, lse)
    assert torch.equal(again[0], out[0]) and torch.equal(last[:, 0], lse[:, 0])


def test_what_is_no_number_is_not_hidden() -> None:
    """A kernel that fails has to be seen."""
    out, lse = torch.randn(1, 1, 8), torch.full((1, 1), NAN)
    assert merge(out, lse, out, torch.zeros(1, 1))[0].isnan().all()
