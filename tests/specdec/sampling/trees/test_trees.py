"""Draft trees in plain torch against DDTree's heap and dictionaries."""

import pytest
import torch

from specdec.sampling.trees.trees import best_chain, best_first, walk
from tests.helpers.guards import no_host_sync
from tests.helpers.tree_case import (
    SHAPES,
    Shape,
    assert_as_heap,
    assert_walked,
    chain_by_hand,
    choices,
    scores_of,
)
from tests.helpers.tree_oracle import heap_tree, walk_tree


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_ddtree(shape: Shape) -> None:
    """The same nodes in the same order, also where sums are equal, and the same tokens accepted,
    step for step.
    """
    scores, num_nodes = scores_of(shape)
    with no_host_sync():
        best = best_first(scores, num_nodes)
    nodes = assert_as_heap(best, scores, num_nodes)
    accepted = 0
    for seed in range(8):
        token_ids, target_ids = choices(best, seed)
        with no_host_sync():
            walked = walk(token_ids, best.tree, target_ids, min(shape[1], num_nodes))
        accepted += assert_walked(*walked, nodes, token_ids, target_ids)
    assert accepted >= shape[0] * 8  # at least a token a step


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[4]], ids=str)
def test_best_chain(shape: Shape) -> None:
    """Behind each candidate its own best one, of equal ones the first."""
    scores, _ = scores_of(shape)
    with no_host_sync():
        ranks = best_chain(scores)
    assert ranks.tolist() == chain_by_hand(scores)


def test_a_smaller_tree_is_the_beginning_of_a_larger_one() -> None:
    """So drafts that do not count are the last."""
    scores, _ = scores_of((4, *SHAPES[0][1:]))
    large, small = best_first(scores, 64), best_first(scores, 24)
    for name in ("parents", "depths", "ancestors", "ranks"):
        assert torch.equal(getattr(large.tree, name)[:, :24], getattr(small.tree, name))
    token_ids, target_ids = choices(large, 0)
    num_drafts = torch.tensor([24, 0, 64, 1])
    path, num_accepted = walk(token_ids, large.tree, target_ids, 15, num_drafts)
    nodes = [
        heap_tree(table, 64)[:count]
        for table, count in zip(scores.tolist(), num_drafts.tolist(), strict=True)
    ]
    for i, request in enumerate(nodes):
        rows = walk_tree(request, token_ids[i, : len(request)].tolist(), target_ids[i].tolist())
        assert path[i].tolist() == [0, *rows, *range(len(rows) + 1, 16)] and num_accepted[i] == len(
            rows
        )


@pytest.mark.parametrize("shape", [(1, 40), (2, 3), (1, 1), (3, 2, 2)], ids=str)
def test_a_tree_of_more_drafts_than_there_are_paths(shape: tuple[int, ...]) -> None:
    """Has them all; the others do not count, and can be verified all the same."""
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(2, *shape, generator=generator).log().sort(dim=-1, descending=True).values
    depth, count = shape[0], shape[-1]
    paths = sum(count**d for d in range(1, depth + 1))
    best = best_first(scores, 64)
    assert best.num_drafts is not None and best.num_drafts.tolist() == [paths] * 2
    whole = best_first(scores, paths)
    for name in ("parents", "depths", "ancestors", "ranks"):
        assert torch.equal(getattr(best.tree, name)[:, :paths], getattr(whole.tree, name))
    assert (
        torch.equal(best.scores[:, :paths], whole.scores)
        and best.scores[:, paths:].isneginf().all()
    )
    assert ((best.places >= 0) & (best.places < depth * count)).all() and (
        best.tree.parents[:, paths:] == 0
    ).all()
    right = torch.full((2, 65), best.places[0, 0].item())
    assert walk(best.places, best.tree, right, depth, best.num_drafts)[1].max() <= depth


def test_the_sum_of_probabilities_is_the_best_there_is() -> None:
    """No other tree of as many drafts promises more: by enumeration."""
    scores = (
        (2 * torch.randn(1, 3, 3, generator=torch.Generator().manual_seed(1)))
        .log_softmax(-1)
        .sort(descending=True)
        .values
    )
    first, second, third = scores[0].exp()
    products = [first, first[:, None] * second, first[:, None, None] * second[:, None] * third]
    every = torch.cat([product.flatten() for product in products]).sort(descending=True).values
    torch.testing.assert_close(best_first(scores, 20).scores[0].exp(), every[:20])
