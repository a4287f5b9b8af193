"""One tree of several drafters' trees: the most probable paths, by what was accepted lately."""

from collections.abc import Iterable, Sequence
from functools import partial, reduce

import torch
from torch import Tensor

from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.model.core import DraftOutput
from specdec.sampling.trees.tries import ScoredDrafts, merge_trees


def union(
    drafts: Sequence[DraftOutput], shifts: Iterable[Tensor], shape: BlockShape
) -> DraftOutput:
    """The best `shape.drafts` paths of all trees, each with the highest of its probabilities.

    Args:
        drafts: trees with scores.
        shifts: float32 [num_reqs] for each, see `drafters.composed.calibration.Forecasts`.
        shape: of the block.

    Raises:
        InvalidInputError: a tree without scores.
    """
    trees = []
    for draft, shift in zip(drafts, shifts, strict=True):
        if draft.tree is None or draft.scores is None:
            what = "a drafter of this composition draws trees without DraftOutput.scores"
            raise InvalidInputError(f"{what}; use tree_nodes=0, which makes chains")
        counts = draft.num_drafts
        if counts is None:
            counts = torch.full_like(draft.tree.parents[:, 0], shape.drafts)
        trees.append(ScoredDrafts(draft.tree, draft.token_ids, draft.scores, counts, shift))
    merged = reduce(partial(merge_trees, num_nodes=shape.drafts, depth=shape.depth), trees)
    part = torch.zeros_like(merged.num_drafts)  # known once some are accepted
    return DraftOutput(
        merged.token_ids,
        num_drafts=merged.num_drafts,
        tree=merged.tree,
        scores=merged.scores,
        part=part,
    )
