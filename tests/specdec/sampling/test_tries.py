"""Trees from several occurrences, and unions of trees, against dictionaries in plain Python."""

import math
from collections import defaultdict

import pytest
import torch
from torch import Tensor

from specdec.sampling.trees import best_first, walk
from specdec.sampling.tries import ScoredDrafts, merge_trees, trie
from tests.helpers.guards import no_host_sync

Paths = dict[tuple[int, ...], float]


def paths_of(drafts: ScoredDrafts, request: int) -> Paths:
    """Every path that counts with its probability, in order; checks that parents come first and siblings differ."""
    tree, tokens = drafts.tree, drafts.token_ids[request].tolist()
    rows: list[tuple[int, ...]] = [()]
    words = [0]
    children: defaultdict[int, int] = defaultdict(int)
    found: Paths = {}
    for i in range(int(drafts.num_drafts[request])):
        parent = int(tree.parents[request, i])
        assert parent <= i
        rows.append((*rows[parent], tokens[i]))
        words.append(words[parent] | 1 << i)
        assert int(tree.depths[request, i]) == len(rows[-1]) and int(tree.ancestors[request, i]) % 2**64 == words[-1]
        assert rows[-1] not in found and int(tree.ranks[request, i]) == children[parent]
        children[parent] += 1
        found[rows[-1]] = math.exp(drafts.scores[request, i])
    assert list(found.values()) == sorted(found.values(), reverse=True)
    return found


def shares(continuations: list[list[int]], weights: list[float], keep: float) -> Paths:
    """Probability of every beginning of a continuation."""
    found: Paths = defaultdict(float)
    total = sum(weight for tokens, weight in zip(continuations, weights, strict=True) if tokens)
    for tokens, weight in zip(continuations, weights, strict=True):
        for depth in range(1, len(tokens) + 1):
            found[tuple(tokens[:depth])] += weight / total * keep**depth
    return dict(found)


def case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Continuations of few different tokens, some of them short or missing; one request has none at all."""
    generator = torch.Generator().manual_seed(seed)
    continuations = torch.randint(3, (4, 6, 5), generator=generator)
    lengths = torch.randint(6, (4, 6), generator=generator)
    lengths[3] = 0
    return continuations, lengths, torch.rand(4, 6, generator=generator) + 0.1


@pytest.mark.parametrize(("seed", "num_nodes", "keep"), [(0, 8, 0.8), (1, 30, 1.0), (2, 1, 0.5)])
def test_tries(seed: int, num_nodes: int, keep: float) -> None:
    """The best beginnings of what followed, equal ones together."""
    continuations, lengths, weights = case(seed)
    with no_host_sync():
        drafts = trie(continuations, lengths, weights, num_nodes, keep=keep)
    for i in range(4):
        tokens = [row[:length] for row, length in zip(continuations[i].tolist(), lengths[i].tolist(), strict=True)]
        expected = shares(tokens, weights[i].tolist(), keep)
        found = paths_of(drafts, i)
        assert len(found) == min(num_nodes, len(expected))
        assert found == pytest.approx({path: expected[path] for path in found}, rel=1e-5)
        assert sum(found.values()) == pytest.approx(sum(sorted(expected.values(), reverse=True)[:num_nodes]), rel=1e-5)
    assert drafts.num_drafts[3] == 0 and drafts.tree.parents[3].eq(0).all() and drafts.tree.depths[3].eq(1).all()


def test_one_occurrence_is_a_chain() -> None:
    """In order, and what lies behind its end does not count."""
    continuations = torch.tensor([[[7, 7, 5, 9], [1, 2, 3, 4]]])
    drafts = trie(continuations, torch.tensor([[3, 0]]), torch.ones(1, 2), 5)
    assert list(paths_of(drafts, 0)) == [(7,), (7, 7), (7, 7, 5)]
    path, num_accepted = walk(drafts.token_ids, drafts.tree, torch.tensor([[7, 7, 4, 0, 0, 0]]), 4, drafts.num_drafts)
    assert path.tolist() == [[0, 1, 2, 3, 4]] and num_accepted.tolist() == [2]


def test_equal_paths_do_not_overtake_their_beginnings() -> None:
    """Where weights do not add up exactly, and all continuations are the same."""
    weights = torch.full((1, 7), 0.1)
    weights[0, 3] = 1e-7
    drafts = trie(torch.arange(8).expand(1, 7, 8), torch.full((1, 7), 8), weights, 8)
    assert list(paths_of(drafts, 0)) == [tuple(range(depth)) for depth in range(1, 9)]


def test_unions() -> None:
    """What a drafter and earlier text propose: the best paths of both, the common ones once; the host never waits."""
    scores = (2 * torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(4))).log_softmax(-1).sort(descending=True).values
    best = best_first(scores, 12)
    one = ScoredDrafts(best.tree, best.tree.ranks, best.scores, torch.full((4,), 12))
    other = trie(*case(5), 10, keep=0.7)
    assert any(set(paths_of(one, i)) & set(paths_of(other, i)) for i in range(4))
    for num_nodes in (16, 7):
        with no_host_sync():
            drafts = merge_trees(one, other, num_nodes, 5)
        for i in range(4):
            first, second = paths_of(one, i), paths_of(other, i)
            expected = {path: max(first.get(path, 0.0), second.get(path, 0.0)) for path in first | second}
            found = paths_of(drafts, i)
            assert len(found) == min(num_nodes, len(expected))
            assert found == pytest.approx({path: expected[path] for path in found}, rel=1e-5)
            assert sum(found.values()) == pytest.approx(sum(sorted(expected.values(), reverse=True)[:num_nodes]), rel=1e-5)
