"""The table of a step: all that the host wants to know about it, in one tensor, and how the host
reads it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.base.blocks import BlockShape
from specdec.model.core import AcceptOutput, DraftOutput
from specdec.sampling.logprobs import Unpacked, num_packed
from specdec.sampling.tensors import SamplingPlan

# columns before the tokens: accepted drafts, offered drafts, and whether the logits were finite
# with twice the part
_COUNTS = 3


@dataclass(slots=True)
class StepColumns:
    """What one step gave its requests, request by request in flat lists.

    Not an object for each of them: thousands of small objects alive at once would set off Python's
    garbage collector in every few steps, and that takes longer than all else that the host does.

    Attributes:
        num_accepted: drafts kept.
        num_drafts: positions for which drafts were offered, at most the block's depth.
        flags: 1 where the logits behind the tokens were finite, else 0, and twice the part of a
            composition of drafters whose drafts they were, 0 for any other.
        token_ids: depth + 1 of each request, of which the first `num_accepted + 1` are its output.
        verified: drafts that were verified, where blocks have a budget; else empty.
        rows: of trees, the rows that were kept, from the anchor's child on: the first
            `num_accepted` of depth.
        ranks: of trees, the places of these drafts among the candidates of their positions,
            likewise.
        logprobs: of all `token_ids`; None when nobody in the batch asked.
    """

    num_accepted: list[int]
    num_drafts: list[int]
    flags: list[int]
    token_ids: list[int]
    verified: list[int]
    rows: list[int]
    ranks: list[int]
    logprobs: Unpacked | None

    @classmethod
    def of(cls, table: Tensor, shape: BlockShape) -> StepColumns:
        """Columns of a step's table, on the host, of blocks of one shape."""
        width, depth = shape.depth + 1, shape.tree_depth
        few = int(shape.budget > 0)
        widths = [_COUNTS, width, few, depth, depth, table.shape[1] - num_columns(shape)]
        counts, *parts, logprobs = table.split(widths, dim=1)
        num_accepted, num_drafts, flags = counts.T.tolist()
        # tokens, verified, rows, ranks; most steps have no more than the first
        flat = [part.flatten().tolist() if part.shape[1] else [] for part in parts]
        of_tokens = Unpacked(logprobs, logprobs.shape[1] // width) if logprobs.shape[1] else None
        return cls(num_accepted, num_drafts, flags, flat[0], flat[1], flat[2], flat[3], of_tokens)


def result_table(
    shape: BlockShape,
    accept: AcceptOutput,
    draft: DraftOutput | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """One tensor with all that the host wants to know about a step of blocks of one shape.

    Returns:
        int64 [num_reqs, num_columns(shape, ...)]; `out` when it is given.
    """
    flags = accept.finite.long()
    if draft is not None and draft.part is not None:
        flags = torch.add(flags, draft.part, alpha=2)
    counts = (accept.num_accepted, _positions_offered(shape, accept, draft), flags)
    columns = [*(count[:, None] for count in counts), accept.token_ids]
    if shape.budget:
        assert draft is not None and draft.num_drafts is not None
        columns.append(draft.num_drafts[:, None])
    if accept.path is not None:
        assert draft is not None and draft.tree is not None
        rows = accept.path[:, 1:]
        columns += [rows, draft.tree.ranks.gather(1, rows - 1)]
    if accept.logprobs is not None:
        columns.append(accept.logprobs.packed())
    return torch.cat(columns, dim=1, out=out)


def _positions_offered(
    shape: BlockShape, accept: AcceptOutput, draft: DraftOutput | None
) -> Tensor:
    """int64 [num_reqs]: positions for which drafts count, of a tree those of its longest path."""
    if draft is None or draft.num_drafts is None:
        return torch.full_like(accept.num_accepted, shape.depth)
    if draft.tree is None:
        return draft.num_drafts
    drafts = torch.arange(shape.drafts, device=draft.num_drafts.device)
    counts = drafts < draft.num_drafts[:, None]
    if draft.offered is not None:
        counts = counts & draft.offered
    return torch.where(counts, draft.tree.depths, 0).amax(dim=1)


def num_columns(shape: BlockShape, plan: SamplingPlan | None = None) -> int:
    """Width of the table of a step of blocks of one shape; without a plan, that of requests that
    want no log-probabilities.
    """
    of_token = num_packed(plan.top_logprobs) if plan and plan.logprobs else 0
    of_block = _COUNTS + int(shape.budget > 0) + 2 * shape.tree_depth
    return of_block + (shape.depth + 1) * (1 + of_token)
