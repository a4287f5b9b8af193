"""How many drafts the target would have accepted of a block, from the tokens that it has put out since."""

import torch
from torch import Tensor

from specdec.core import DraftOutput


def agreement(draft: DraftOutput, token_ids: Tensor, counts: Tensor) -> Tensor:
    """int64 [num_reqs]: tokens of the output that the drafts begin with, along the best path in a tree.

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
