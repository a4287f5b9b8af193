"""How many drafts of a block the target would have accepted, told by its later tokens."""

from collections.abc import Mapping

import torch
from torch import Tensor

from drafters.composed.calibration import KERNEL
from specdec.model.core import AcceptOutput, DraftOutput


def agreements(drafts: Mapping[int, DraftOutput], count: int, accept: AcceptOutput) -> Tensor:
    """int64 [P, num_reqs], `agreement` of each of P drafters; 0 of those that did not draft."""
    output, num_accepted = accept.token_ids, accept.num_accepted
    if KERNEL.runs_on(output.device):
        from drafters.composed.triton_forecasts import agree  # it imports Triton

        make = output.new_zeros if len(drafts) < count else output.new_empty
        agreed = make(count, len(output))
        for n, draft in drafts.items():
            agree(agreed[n], draft.token_ids, draft.num_drafts, draft.tree, output, num_accepted)
        return agreed
    counts = num_accepted + 1
    right = {n: agreement(draft, output, counts) for n, draft in drafts.items()}
    return torch.stack([right.get(n, torch.zeros_like(counts)) for n in range(count)])


def agreement(draft: DraftOutput, token_ids: Tensor, counts: Tensor) -> Tensor:
    """int64 [num_reqs]: tokens of the output that drafts begin with, on a tree's best path.

    Args:
        draft: point masses.
        token_ids: int64 [num_reqs, n], what the target put out.
        counts: int64 [num_reqs], tokens of these that count, the first ones.
    """
    drafts = draft.token_ids
    rows = torch.arange(drafts.shape[1], device=drafts.device)
    offered = drafts.shape[1] if draft.num_drafts is None else draft.num_drafts[:, None]
    if draft.tree is None:
        places = rows[: token_ids.shape[1]]
        fits = drafts[:, : len(places)] == token_ids[:, : len(places)]
        fits = fits & (places < offered) & (places < counts[:, None])
        return fits.long().cumprod(dim=1).sum(dim=1)
    depths = draft.tree.depths
    fits = drafts == token_ids.gather(1, (depths - 1).clamp(max=token_ids.shape[1] - 1))
    fits = fits & (rows < offered) & (depths <= counts[:, None])
    fitting = (fits.long() << rows).sum(dim=1, keepdim=True)
    return torch.where((draft.tree.ancestors & ~fitting) == 0, depths, 0).amax(dim=1)
