"""Trees from several occurrences, and unions of trees, against dictionaries in plain Python."""

import pytest
import torch

from specdec.sampling.trees.trees import best_first, walk
from specdec.sampling.trees.tries import ScoredDrafts, merge_trees, trie
from tests.helpers.guards import no_host_sync
from tests.helpers.trie_case import assert_best, case, paths_of, shares, union_of


@pytest.mark.parametrize(("seed", "num_nodes", "keep"), [(0, 8, 0.8), (1, 30, 1.0), (2, 1, 0.5)])
def test_tries(seed: int, num_nodes: int, keep: float) -> None:
    """The best beginnings of what followed, equal ones together."""
    continuations, lengths, weights = case(seed)
    with no_host_sync():
        drafts = trie(continuations, lengths, weights, num_nodes, keep=keep)
    for i in range(4):
        tokens = [
            row[:length]
            for row, length in zip(continuations[i].tolist(), lengths[i].tolist(), strict=True)
        ]
        assert_best(drafts, i, shares(tokens, weights[i].tolist(), keep))
    assert (
        drafts.num_drafts[3] == 0
        and drafts.tree.parents[3].eq(0).all()
        and drafts.tree.depths[3].eq(1).all()
    )


def test_one_occurrence_is_a_chain() -> None:
    """In order, and what lies behind its end does not count."""
    continuations = torch.tensor([[[7, 7, 5, 9], [1, 2, 3, 4]]])
    drafts = trie(continuations, torch.tensor([[3, 0]]), torch.ones(1, 2), 5)
    assert list(paths_of(drafts, 0)) == [(7,), (7, 7), (7, 7, 5)]
    path, num_accepted = walk(
        drafts.token_ids, drafts.tree, torch.tensor([[7, 7, 4, 0, 0, 0]]), 4, drafts.num_drafts
    )
    assert path.tolist() == [[0, 1, 2, 3, 4]] and num_accepted.tolist() == [2]


def test_equal_paths_do_not_overtake_their_beginnings() -> None:
    """Where weights do not add up exactly, and all continuations are the same."""
    weights = torch.full((1, 7), 0.1)
    weights[0, 3] = 1e-7
    drafts = trie(torch.arange(8).expand(1, 7, 8), torch.full((1, 7), 8), weights, 8)
    assert list(paths_of(drafts, 0)) == [tuple(range(depth)) for depth in range(1, 9)]


def test_unions() -> None:
    """What a drafter and earlier text propose: the best paths of both, the common ones once; the
    host never waits.
    """
    scores = (
        (2 * torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(4)))
        .log_softmax(-1)
        .sort(descending=True)
        .values
    )
    best = best_first(scores, 12)
    one = ScoredDrafts(best.tree, best.tree.ranks, best.scores, torch.full((4,), 12))
    other = trie(*case(5), 10, keep=0.7)
    assert any(set(paths_of(one, i)) & set(paths_of(other, i)) for i in range(4))
    for num_nodes in (16, 7):
        with no_host_sync():
            drafts = merge_trees(one, other, num_nodes, 5)
        for i in range(4):
            assert_best(drafts, i, union_of([one, other], i))
