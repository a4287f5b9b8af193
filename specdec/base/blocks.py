"""The block that a step verifies of a request: its anchor, and a chain or a tree of drafts.

Rows of a block: row 0 is the anchor, at position L; rows 1 to N are the drafts. In a chain row `i`
continues row `i - 1`. In a tree it continues the row that `DraftTree.parents` names, which comes
before it; its position is L + its depth, while its keys and values are written where row `i` of a
chain would have them, at L + i.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    # the command line reads this file, too, and starts without torch
    from torch import Tensor, device

MAX_NODES = 64
"""Drafts of a tree at most: each has a bit in a word of 64."""


class BlockShape(NamedTuple):
    """How many drafts a step has for each request, and how they may lie: one set of operations.

    Attributes:
        drafts: N, rows beside the anchor; 0 decodes plainly.
        tree_depth: most drafts of a path, at most N; 0 is a chain.
        budget: drafts of a request verified on average, the step's likeliest; 0 verifies all.

    >>> BlockShape(15).depth, BlockShape(64, tree_depth=15).depth
    (15, 15)
    """

    drafts: int
    tree_depth: int = 0
    budget: float = 0.0

    @property
    def depth(self) -> int:
        """Drafts that can be accepted at most."""
        return self.tree_depth or self.drafts

    @property
    def rows(self) -> int:
        """Rows of a request, the anchor's included."""
        return self.drafts + 1

    @property
    def mean_rows(self) -> float:
        """Rows of a request that are verified on average."""
        return 1 + (self.budget or self.drafts)

    def verified(self, num_reqs: int) -> int:
        """Rows that a step of so many requests verifies, the anchors' included.

        >>> BlockShape(15).verified(8), BlockShape(15, budget=2.5).verified(8)
        (128, 28)
        """
        drafts = min(self.budget or self.drafts, self.drafts)
        return num_reqs + int(num_reqs * drafts)

    @property
    def is_tree(self) -> bool:
        """Whether drafts may have siblings."""
        return self.tree_depth > 0

    def __str__(self) -> str:
        """As reports name it.

        >>> str(BlockShape(7)), str(BlockShape(16, 15)), str(BlockShape(16, 15, 2.5))
        ('7', 'tree 16', '2.5 of tree 16')
        """
        drafts = f"tree {self.drafts}" if self.is_tree else str(self.drafts)
        return f"{self.budget:g} of {drafts}" if self.budget else drafts


@dataclass(slots=True)
class DraftTree:
    """How the drafts of each request hang together: parents first; siblings differ in their token.

    Drafts of higher score come first, so the first n of them are the tree of n drafts.

    Attributes:
        parents: int64 [num_reqs, N], the row that a draft continues; 0 is the anchor.
        depths: int64 [num_reqs, N], from 1.
        ancestors: int64 [num_reqs, N], of row `i` the bit `i - 1` and those of drafts above it.
        ranks: int64 [num_reqs, N], the draft's place among its position's candidates, from 0.
    """

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    ranks: Tensor

    def to(self, where: device) -> DraftTree:
        """This tree on another device."""
        return DraftTree(*(getattr(self, field.name).to(where) for field in fields(self)))
