"""Trees out of paths on kernels, against dictionaries and plain torch; where they run, see
`tests.helpers.triton_interpreter`.
"""

import pytest
import torch

from specdec.sampling.trees import triton_tries
from specdec.sampling.trees.trees import best_first
from specdec.sampling.trees.tries import KERNEL, ScoredDrafts, check_tries, merge_trees, trie
from tests.helpers.trie_case import assert_best, case, shares, union_of
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()
HOST = torch.device("cpu")


@pytest.mark.parametrize(
    ("seed", "num_nodes", "keep"), [(0, 8, 0.8), (1, 30, 1.0), (2, 1, 0.5), (3, 64, 0.9)]
)
def test_tries(seed: int, num_nodes: int, keep: float) -> None:
    """The best beginnings of what followed, equal ones together; no draft without occurrences."""
    assert KERNEL.runs_on(DEVICE)
    continuations, lengths, weights = case(seed)
    # of which some columns are read, in strides
    wide = torch.cat([continuations, continuations.flip(2)], dim=2).repeat(1, 2, 1)
    lengths, weights = lengths.repeat(1, 2), torch.cat([weights, weights / 3], dim=1)
    drafts = trie(
        wide.to(DEVICE)[:, :, :5], lengths.to(DEVICE), weights.to(DEVICE), num_nodes, keep=keep
    ).to(HOST)
    for i in range(4):
        tokens = [
            row[:length] for row, length in zip(wide[i].tolist(), lengths[i].tolist(), strict=True)
        ]
        assert_best(drafts, i, shares(tokens, weights[i].tolist(), keep))
    assert (
        drafts.num_drafts[3] == 0
        and drafts.tree.parents[3].eq(0).all()
        and drafts.tree.depths[3].eq(1).all()
    )


@pytest.mark.parametrize("num_nodes", [7, 16, 22])
def test_unions(num_nodes: int) -> None:
    """The best paths of both, the common ones once; whichever comes first, and also where one tree
    is within the other.
    """
    scores = (
        (2 * torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(4)))
        .log_softmax(-1)
        .sort(descending=True)
        .values
    )
    best = best_first(scores.to(DEVICE), 12)
    one = ScoredDrafts(
        best.tree, best.tree.ranks, best.scores, torch.tensor([12, 12, 9, 12], device=DEVICE)
    )
    continuations, lengths, weights = (tensor.to(DEVICE) for tensor in case(5))
    other = trie(continuations, lengths, weights, 10, keep=0.7)
    for first, second in ((one, other), (other, one), (one, one._replace(scores=one.scores - 0.1))):
        drafts = merge_trees(first, second, num_nodes, 5).to(HOST)
        for i in range(4):
            assert_best(drafts, i, union_of([first.to(HOST), second.to(HOST)], i))


def test_scores_that_are_no_numbers() -> None:
    """A tree that has them, as rows that only pad a batch may, counts as none, whichever comes
    first.
    """
    scores = (
        torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(4))
        .log_softmax(-1)
        .sort(descending=True)
        .values
    )
    best = best_first(scores.to(DEVICE), 31)
    full = torch.full((4,), 31, device=DEVICE)
    none = ScoredDrafts(best.tree, best.tree.ranks, torch.full_like(best.scores, torch.nan), full)
    continuations, lengths, weights = (tensor.to(DEVICE) for tensor in case(5))
    other = trie(continuations, lengths, weights, 31, keep=0.7)
    expected = merge_trees(other, none._replace(num_drafts=full * 0), 63, 5).to(HOST)
    for trees in ((other, none), (none, other)):
        drafts = merge_trees(*trees, 63, 5).to(HOST)
        for i in range(4):
            assert_best(drafts, i, union_of([other.to(HOST)], i))
        assert drafts.num_drafts.equal(expected.num_drafts) and drafts.tree.parents.equal(
            expected.tree.parents
        )


def test_the_check_passes() -> None:
    """Every field as in plain torch, those of drafts that do not count as well."""
    found = check_tries(DEVICE)
    assert found.error <= found.bound


def test_many_occurrences() -> None:
    """More than one warp holds pairs of, each of one token."""
    tokens = torch.arange(40, device=DEVICE).view(1, 40, 1) // 2
    weights = torch.linspace(1, 2, 40, device=DEVICE)[None]
    tree, token_ids, _, num_drafts = triton_tries.trie(
        tokens, torch.ones_like(tokens)[..., 0], weights, 40, torch.ones_like(weights)
    )
    assert num_drafts.tolist() == [20] and tree.parents.eq(0).all()
    assert token_ids[0, :20].tolist() == list(range(19, -1, -1))
