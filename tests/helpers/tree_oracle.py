"""DDTree in plain Python, as its paper puts it: a heap of paths, and a walk by dictionaries. Shares
nothing with what it judges.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

Table = Sequence[Sequence[float]]
"""Scores of the candidates at each position, whatever came before."""


@dataclass
class Node:
    """A draft: its row and its parent's (0 is the anchor), the candidates on its path, and the
    path's sum in float32.
    """

    row: int
    parent: int
    path: tuple[int, ...]
    score: float


def heap_tree(table: Table | Sequence[Table], num_nodes: int) -> list[Node]:
    """The best paths, best first: of equal ones the shorter, then the one behind the earlier
    parent, then the lower candidate.

    Each position of `table` is a list of scores, or one such list for each candidate before.
    """

    def scores(path: tuple[int, ...]) -> Sequence[float]:
        entry = table[len(path)]
        own = entry if np.ndim(entry) == 1 else entry[path[-1] if path else 0]
        return own  # type: ignore[return-value]

    def push_children(parent: int, path: tuple[int, ...], score: np.float32) -> None:
        if len(path) < len(table):
            for candidate, value in enumerate(scores(path)):
                total = np.float32(score + np.float32(value))
                heapq.heappush(heap, (-float(total), len(path) + 1, parent, candidate, path, total))

    heap: list[tuple[float, int, int, int, tuple[int, ...], np.float32]] = []
    push_children(0, (), np.float32(0))
    nodes: list[Node] = []
    while len(nodes) < num_nodes:
        _, _, parent, candidate, above, total = heapq.heappop(heap)
        nodes.append(Node(len(nodes) + 1, parent, (*above, candidate), float(total)))
        push_children(len(nodes), nodes[-1].path, total)
    return nodes


def walk_tree(
    nodes: Sequence[Node], token_ids: Sequence[int], target_ids: Sequence[int]
) -> list[int]:
    """Rows of the drafts that the target's tokens lead to, given those of every row."""
    children: dict[int, dict[int, int]] = {}
    for node, token in zip(nodes, token_ids, strict=True):
        children.setdefault(node.parent, {}).setdefault(token, node.row)
    rows = [0]
    while (token := target_ids[rows[-1]]) in children.get(rows[-1], {}):
        rows.append(children[rows[-1]][token])
    return rows[1:]
