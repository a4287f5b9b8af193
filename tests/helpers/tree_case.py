"""Tables of scores, and trees and walks that are compared with `tests.helpers.tree_oracle`,
wherever they were computed.
"""

import torch
from torch import Tensor

from specdec.sampling.trees.trees import BestPaths
from tests.helpers.tree_oracle import Node, heap_tree, walk_tree

Shape = tuple[int, int, int, int, bool, int | None]

SHAPES: list[Shape] = [  # requests, K, C, N, conditional, distinct scores
    (2, 15, 16, 64, False, None),
    (2, 15, 8, 24, False, 3),
    (2, 6, 5, 48, True, None),
    (2, 4, 4, 40, True, 2),
    (2, 1, 32, 32, False, 4),
    (2, 12, 1, 12, False, None),
    (2, 3, 2, 14, False, 1),
]


def scores_of(shape: Shape) -> tuple[Tensor, int]:
    """Log-probabilities, in falling order unless they are conditional; with few distinct values
    many sums are equal.
    """
    num_reqs, depth, count, num_nodes, conditional, distinct = shape
    generator = torch.Generator().manual_seed(sum(shape[:4]))
    size = (num_reqs, depth, count, count) if conditional else (num_reqs, depth, count)
    if distinct is None:
        scores = (2 * torch.randn(*size, generator=generator)).log_softmax(-1)
    else:
        scores = -torch.randint(distinct, size, generator=generator).float()
        scores[..., -1:] = -torch.inf if count > 2 else 0.0  # what a filter drops
    return scores if conditional else scores.sort(dim=-1, descending=True).values, num_nodes


def assert_as_heap(best: BestPaths, scores: Tensor, num_nodes: int) -> list[list[Node]]:
    """Every field of the tree is that of the oracle, whose nodes are returned."""
    requests = [heap_tree(table, num_nodes) for table in scores.tolist()]
    count = scores.shape[-1]
    for i, nodes in enumerate(requests):
        expected = [
            (
                node.parent,
                len(node.path),
                node.path[-1],
                (len(node.path) - 1) * count + node.path[-1],
                node.score,
            )
            for node in nodes
        ]
        tree = best.tree
        fields = (tree.parents, tree.depths, tree.ranks, best.places, best.scores)
        assert list(zip(*(field[i].tolist() for field in fields), strict=True)) == expected
        rows = {0: 0}
        for node in nodes:
            rows[node.row] = rows[node.parent] | 1 << (node.row - 1)
        assert [word % 2**64 for word in tree.ancestors[i].tolist()] == [
            rows[node.row] for node in nodes
        ]
    return requests


def chain_by_hand(scores: Tensor) -> list[list[int]]:
    """The first best candidate behind the one before, of each request, in plain Python."""
    chains = []
    for table in scores.tolist():
        chain = [0]
        for position in table:
            row = position[chain[-1]] if isinstance(position[0], list) else position
            chain.append(row.index(max(row)))
        chains.append(chain[1:])
    return chains


def choices(best: BestPaths, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens of the drafts, different ones for siblings, and of the target: mostly those of a
    child.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks, parents = best.tree.ranks, best.tree.parents
    target_ids = torch.randint(
        int(ranks.max()) + 1, (ranks.shape[0], ranks.shape[1] + 1), generator=generator
    )
    likely = torch.rand(ranks.shape, generator=generator) < 0.8
    for i in range(ranks.shape[1] - 1, -1, -1):  # the best child last
        row = parents[:, i : i + 1]
        target_ids.scatter_(
            1,
            row,
            torch.where(likely[:, i : i + 1], ranks[:, i : i + 1], target_ids.gather(1, row)),
        )
    return ranks * 7 + 3, target_ids * 7 + 3


def assert_walked(
    path: Tensor,
    num_accepted: Tensor,
    nodes: list[list[Node]],
    token_ids: Tensor,
    target_ids: Tensor,
) -> int:
    """The walk by dictionaries takes the same rows; returns how many it takes in all."""
    total = 0
    for i, request in enumerate(nodes):
        rows = walk_tree(request, token_ids[i].tolist(), target_ids[i].tolist())
        assert num_accepted[i] == len(rows)
        assert path[i].tolist() == [0, *rows, *range(len(rows) + 1, path.shape[1])]
        tokens = target_ids[i, path[i]].tolist()[: len(rows) + 1]
        assert tokens == [
            *(int(token_ids[i, row - 1]) for row in rows),
            int(target_ids[i, rows[-1] if rows else 0]),
        ]
        total += len(rows)
    return total


def on(device: torch.device, best: BestPaths) -> BestPaths:
    """The same tree on another device."""
    return BestPaths(best.tree.to(device), best.places.to(device), best.scores.to(device))
