"""Draft trees on kernels against DDTree's heap and dictionaries; where they run, see
`tests.helpers.triton_interpreter`.
"""

import pytest
import torch

from specdec.sampling.trees.trees import KERNEL, best_chain, best_first, check_trees, walk
from tests.helpers.tree_case import (
    SHAPES,
    Shape,
    assert_as_heap,
    assert_walked,
    chain_by_hand,
    choices,
    on,
    scores_of,
)
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()
HOST = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_as_ddtree(shape: Shape) -> None:
    """The same nodes in the same order, also where sums are equal, and the same tokens accepted,
    step for step.
    """
    assert KERNEL.runs_on(DEVICE)
    scores, num_nodes = scores_of(shape)
    found = best_first(scores.to(DEVICE), num_nodes)
    best = on(HOST, found)
    nodes = assert_as_heap(best, scores, num_nodes)
    for seed in range(3):
        token_ids, target_ids = choices(best, seed)
        walked = walk(
            token_ids.to(DEVICE), found.tree, target_ids.to(DEVICE), min(shape[1], num_nodes)
        )
        assert_walked(walked[0].cpu(), walked[1].cpu(), nodes, token_ids, target_ids)


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[4]], ids=str)
def test_best_chain(shape: Shape) -> None:
    """Behind each candidate its own best one, of equal ones the first; also where requests do not
    lie next to each other.
    """
    scores, _ = scores_of(shape)
    assert best_chain(scores.to(DEVICE)).tolist() == chain_by_hand(scores)
    assert best_chain(scores.to(DEVICE)[:, ::2]).tolist() == chain_by_hand(scores[:, ::2])


def test_what_is_no_number_harms_nobody() -> None:
    """A row of NaN leads to a tree without meaning, whose every number can be used, and the other
    requests have theirs.
    """
    scores, num_nodes = scores_of(SHAPES[6])
    expected = on(HOST, best_first(scores[1:].to(DEVICE), num_nodes))
    scores[0] = torch.nan
    best = on(HOST, best_first(scores.to(DEVICE), num_nodes))
    rows = torch.arange(1, num_nodes + 1)
    assert (best.tree.parents < rows).all() and (best.tree.parents >= 0).all()
    assert ((best.places >= 0) & (best.places < 3 * 2)).all()
    assert torch.equal(best.places[1:], expected.places) and torch.equal(
        best.tree.ancestors[1:], expected.tree.ancestors
    )


def test_the_check_passes() -> None:
    """Also drafts that do not count."""
    assert check_trees(DEVICE).error == 0
