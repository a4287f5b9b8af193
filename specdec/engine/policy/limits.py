"""Requests that want fewer drafts than their engine gives: none, or so many of a chain or a tree.

Blocks of a step are alike for all. So a step is as small as those who want most of it allow, and of
what is left the drafts that a request does not want are not accepted.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.sampling.params import SamplingParams


class DraftLimits(NamedTuple):
    """Most drafts of a step.

    Attributes:
        depth: positions that have one.
        nodes: of a tree; 0 where drafts form chains alone.
    """

    depth: int
    nodes: int

    @classmethod
    def of_shapes(cls, shapes: Iterable[BlockShape]) -> "DraftLimits":
        """The limits of an engine's steps.

        >>> DraftLimits.of_shapes([BlockShape(7), BlockShape(31, 15)])
        DraftLimits(depth=15, nodes=31)
        """
        every = list(shapes)
        return cls(
            max(shape.depth for shape in every),
            max((shape.drafts for shape in every if shape.is_tree), default=0),
        )

    def joined(self, params: Iterable[SamplingParams]) -> "DraftLimits":
        """The limits of a batch: those of the request that wants most."""
        depths, nodes = [], []
        for one in params:
            depths.append(self.depth if one.num_draft_tokens is None else one.num_draft_tokens)
            nodes.append(self.nodes if one.tree_nodes is None else one.tree_nodes)
        return DraftLimits(min(self.depth, max(depths)), min(self.nodes, max(nodes)))

    def check(self, sampling: SamplingParams) -> None:
        """Refuses what no step can give.

        Raises:
            InvalidInputError: a request wants more than there is.
        """
        for name, asked, most in (
            ("num_draft_tokens", sampling.num_draft_tokens, self.depth),
            ("tree_nodes", sampling.tree_nodes, self.nodes),
        ):
            if asked is not None and asked > most:
                raise InvalidInputError(
                    f"{name} is {asked} and this engine has {most} at most; ask for no more, or"
                    f" leave it out"
                )

    def fit(self, shape: BlockShape, shapes: Sequence[BlockShape]) -> BlockShape:
        """The smallest shape that has as many drafts as these limits allow of `shape`.

        Args:
            shape: that was chosen.
            shapes: that steps may have; a chain may be shorter.

        >>> arms = [BlockShape(15), BlockShape(3, 3), BlockShape(7, 7), BlockShape(31, 15)]
        >>> DraftLimits(15, 5).fit(arms[3], arms) == arms[2]
        True
        >>> DraftLimits(4, 0).fit(arms[3], arms) == BlockShape(4)
        True
        """
        if not shape.is_tree or not self.nodes or not self.depth:
            return BlockShape(min(shape.depth, self.depth))
        trees = (
            one for one in shapes if one.is_tree and not one.budget and one.drafts >= self.nodes
        )
        smallest = min(trees, key=lambda one: one.drafts, default=shape)
        return smallest if self.nodes < shape.drafts else shape


def limit(draft: DraftOutput, batch: DecodeBatch) -> None:
    """Takes from the drafts of a batch what its requests do not want; the host does not wait."""
    depth, nodes = batch.sampling.max_drafts[:, None], batch.sampling.max_nodes[:, None]
    rows = torch.arange(batch.k, device=depth.device)
    counts = torch.full_like(depth[:, 0], batch.k) if draft.num_drafts is None else draft.num_drafts
    if draft.tree is None:
        draft.num_drafts = torch.minimum(counts, depth[:, 0])
        return
    tree = draft.tree
    there = rows < counts[:, None]
    deepest = torch.where(there, tree.depths, 0).argmax(dim=1, keepdim=True)
    on_path = (tree.ancestors.gather(1, deepest) >> rows) & 1 == 1
    wanted = torch.where(nodes > 0, rows < nodes, on_path)
    draft.num_drafts, draft.offered = counts, there & wanted & (tree.depths <= depth)
