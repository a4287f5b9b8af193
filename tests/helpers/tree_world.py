"""Decoding without a model or a clock where drafts may form trees: made-up times, and how often
each candidate is right.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from specdec.base.blocks import MAX_NODES, BlockShape
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.draft_acceptance import Path
from specdec.engine.policy.shapes import shapes
from tests.helpers.block_choice_world import in_mood
from tests.helpers.tree_oracle import Node, heap_tree

MOST = 15
"""Positions that are drafted."""


class TreeLength:
    """A `BlockChoice` of chains and trees, told of a tree the rows that were accepted."""

    def __init__(
        self,
        ranks_of: "Callable[[BlockShape, Sequence[int]], list[int]] | None" = None,
        *,
        most: int = MOST,
        forward_for_each: bool = False,
    ) -> None:
        self.arms = shapes(most, trees=MAX_NODES, forward_for_each=forward_for_each)
        likeliest_first = ranks_of is not None
        self.choice = BlockChoice(
            self.arms, likeliest_first=likeliest_first, forward_for_each=forward_for_each
        )
        self.ranks_of = ranks_of or (lambda shape, rows: [0] * len(rows))

    def choose(self, num_reqs: int) -> BlockShape:
        return self.choice.choose(num_reqs)

    def observe(
        self,
        num_reqs: int,
        shape: BlockShape,
        accepted: Sequence[Sequence[int]],
        seconds: float | None,
    ) -> None:
        paths = (
            [Path(rows, self.ranks_of(shape, rows)) for rows in accepted if rows]
            if shape.is_tree
            else []
        )
        self.choice.observe(num_reqs, shape, [len(rows) for rows in accepted], seconds, paths=paths)


@dataclass(frozen=True)
class TreeWorld:
    """What decoding would be like; see `tests.helpers.block_choice_world.World`.

    Attributes:
        time: undisturbed time of a step, by requests and the shape of their blocks.
        ranks: P(a candidate is right | those before it on the path are), of every position the
            likeliest first.
        num_reqs, spread, moods: as there.
    """

    time: Callable[[int, BlockShape], float]
    ranks: tuple[float, ...]
    num_reqs: Callable[[int], int] = lambda step: 1
    spread: float = 0.05
    moods: float = 0.1

    def nodes(self, shape: BlockShape) -> list[Node]:
        """The best tree of that shape."""
        return _best_tree(self.ranks, shape)

    def ranks_of(self, shape: BlockShape, rows: Sequence[int]) -> list[int]:
        """Of accepted drafts of a tree among the candidates of their positions."""
        return [self.nodes(shape)[row - 1].path[-1] for row in rows]

    def tokens(self, shape: BlockShape, step: int) -> float:
        """Expected tokens of each request."""
        if shape.is_tree:
            return 1 + sum(math.exp(node.score) for node in self.nodes(shape))
        return sum(self.ranks[0] ** depth for depth in range(shape.drafts + 1))

    def pace(self, shape: BlockShape, step: int) -> float:
        """Time per token of each request with blocks of that shape, undisturbed."""
        return self.time(self.num_reqs(step), shape) / self.tokens(shape, step)

    def accepted(self, shape: BlockShape, step: int, mood: float, rng: random.Random) -> list[int]:
        """Rows that a request accepts."""
        rows: list[int] = []
        while (rank := self._right(mood, rng)) is not None:
            parent = rows[-1] if rows else 0
            if shape.is_tree:
                row = next(
                    (n.row for n in self.nodes(shape) if n.parent == parent and n.path[-1] == rank),
                    0,
                )
            else:
                row = parent + 1 if rank == 0 and parent < shape.drafts else 0
            if not row:
                break
            rows.append(row)
        return rows

    def _right(self, mood: float, rng: random.Random) -> int | None:
        """The candidate that is right, if any is."""
        left = rng.random()
        for rank, rate in enumerate(self.ranks):
            left -= in_mood(rate, mood) if rank == 0 else rate
            if left < 0:
                return rank
        return None


@cache
def _best_tree(ranks: tuple[float, ...], shape: BlockShape) -> list[Node]:
    return heap_tree([[math.log(rate) for rate in ranks]] * shape.depth, shape.drafts)
