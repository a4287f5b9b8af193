"""Trees from several occurrences, and what plain dictionaries make of the same."""

import math
from collections import defaultdict
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from specdec.sampling.trees.tries import ScoredDrafts

Paths = dict[tuple[int, ...], float]


def paths_of(drafts: ScoredDrafts, request: int) -> Paths:
    """Every path that counts with its probability, in order; checks that parents come first and
    siblings differ.
    """
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
        assert (
            int(tree.depths[request, i]) == len(rows[-1])
            and int(tree.ancestors[request, i]) % 2**64 == words[-1]
        )
        assert rows[-1] not in found and int(tree.ranks[request, i]) == children[parent]
        children[parent] += 1
        found[rows[-1]] = math.exp(drafts.scores[request, i])
    assert list(found.values()) == sorted(found.values(), reverse=True)
    return found


def assert_best(drafts: ScoredDrafts, request: int, expected: Paths) -> None:
    """The drafts are the most probable of `expected`, as many as there is room for, each as
    probable.
    """
    found, num_nodes = paths_of(drafts, request), drafts.token_ids.shape[1]
    assert len(found) == min(num_nodes, len(expected))
    assert found == pytest.approx({path: expected[path] for path in found}, rel=1e-5)
    assert sum(found.values()) == pytest.approx(
        sum(sorted(expected.values(), reverse=True)[:num_nodes]), rel=1e-5
    )


def union_of(sides: Sequence[ScoredDrafts], request: int) -> Paths:
    """All paths, each with the highest of its probabilities."""
    paths = [paths_of(side, request) for side in sides]
    return {path: max(side.get(path, 0.0) for side in paths) for path in set().union(*paths)}


def shares(continuations: list[list[int]], weights: list[float], keep: float) -> Paths:
    """Probability of every beginning of a continuation."""
    found: Paths = defaultdict(float)
    total = sum(weight for tokens, weight in zip(continuations, weights, strict=True) if tokens)
    for tokens, weight in zip(continuations, weights, strict=True):
        for depth in range(1, len(tokens) + 1):
            found[tuple(tokens[:depth])] += weight / total * keep**depth
    return dict(found)


def case(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Continuations of few different tokens, some of them short or missing; one request has none at
    all.
    """
    generator = torch.Generator().manual_seed(seed)
    continuations = torch.randint(3, (4, 6, 5), generator=generator)
    lengths = torch.randint(6, (4, 6), generator=generator)
    lengths[3] = 0
    return continuations, lengths, torch.rand(4, 6, generator=generator) + 0.1
