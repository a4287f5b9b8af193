"""Which drafts of a step are verified when there are fewer rows than drafts: those that are most
likely to be accepted, of all requests of the batch.

    survival of a draft = what the drafter gives its path, times what came of such drafts lately

What came of them is the ratio of accepted to expected drafts, by depth and by request, kept on the
device. A ratio of which nothing is heard goes back to 1, so a request whose drafts were wrong is
tried again. Drafts come best first, so those of a request that are verified are the first ones.
The choice may read anything, the drafts themselves too: they are point masses, accepted where the
target chooses the same token.
"""

import math

import torch
from torch import Tensor

from specdec.model.batch import DecodeBatch
from specdec.model.core import AcceptOutput, DraftOutput
from specdec.model.packing import Packing

GUESS = 0.8
"""P(a draft is accepted | those before it are) where a drafter does not tell."""
_BY_DEPTH, _BY_REQUEST = 64, 16  # steps after which what they gave weighs 1/e
_PRIOR = 2.0  # drafts that weigh as much as the guess that they come as expected


class VerifyBudget:
    """Shares out the rows of a step; nothing here waits for the device.

    Args:
        num_slots: of requests, the last of which pads batches.
        depth: most drafts of a path.
        device: where the tensors live.
    """

    def __init__(self, num_slots: int, depth: int, device: torch.device) -> None:
        self._padding_slot = num_slots - 1
        # expected and accepted drafts
        self._by_depth = torch.zeros(2, depth + 1, dtype=torch.float32, device=device)
        self._by_slot = torch.zeros(2, num_slots, dtype=torch.float32, device=device)
        self._expected: Tensor | None = None

    def begin(self, slots: Tensor) -> None:
        """Forgets what requests before had accepted in `slots` int64 [n]."""
        self._by_slot.index_fill_(1, slots, 0)

    def allot(self, batch: DecodeBatch, draft: DraftOutput, total: int) -> Tensor:
        """int64 [num_reqs]: drafts of each request that are verified, `total` together."""
        best = self.survival(batch, draft).flatten().topk(total, sorted=False).indices
        drafts = torch.zeros_like(batch.slots)
        return drafts.scatter_add_(0, best // batch.k, torch.ones_like(best))

    def survival(self, batch: DecodeBatch, draft: DraftOutput) -> Tensor:
        """float32 [num_reqs, k]: how likely each draft is accepted. It never rises, and is below 0
        where a draft does not count.
        """
        depths = _depths(batch, draft)
        scores = depths * math.log(GUESS) if draft.scores is None else draft.scores
        self._expected = scores.float().exp()
        of_request = _ratios(self._by_slot.index_select(1, batch.slots))[:, None]
        found = self._expected * _ratios(self._by_depth)[depths] * of_request
        found = found.clamp(max=1).cummin(dim=1).values
        counts = (batch.slots != self._padding_slot)[:, None]
        if draft.num_drafts is not None:
            counts = counts & _first(draft.num_drafts, batch.k)
        return torch.where(counts, found, -1.0)

    def learn(
        self, batch: DecodeBatch, draft: DraftOutput, packing: Packing, accepted: AcceptOutput
    ) -> None:
        """Takes over what was accepted of the drafts that were verified."""
        expected, self._expected = self._expected, None  # nothing outlives a step
        if expected is None:  # another rule has shared them out
            return
        depths, most = _depths(batch, draft), self._by_depth.shape[1]
        counted = _first(packing.drafts, batch.k) & (batch.slots != self._padding_slot)[:, None]
        expected = torch.where(counted, expected, 0.0)
        of_depth = torch.zeros(most, dtype=expected.dtype, device=expected.device).scatter_add_(
            0, depths.expand_as(expected).flatten(), expected.flatten()
        )
        kept = accepted.num_accepted[:, None] >= torch.arange(most, device=expected.device)
        kept = kept & counted[:, :1]
        self._by_depth.mul_(1 - 1 / _BY_DEPTH).add_(torch.stack([of_depth, kept.sum(dim=0)]))
        sums = torch.stack(
            [
                (expected * _ratios(self._by_depth)[depths]).sum(dim=1),
                accepted.num_accepted * counted[:, 0],
            ]
        )
        late = self._by_slot.index_select(1, batch.slots) * (1 - 1 / _BY_REQUEST)
        self._by_slot.index_copy_(1, batch.slots, late + sums)


def _ratios(sums: Tensor) -> Tensor:
    """Accepted to expected drafts, from `sums` float32 [2, n] of the expected and the accepted."""
    return (sums[1] + _PRIOR) / (sums[0] + _PRIOR)


def _first(counts: Tensor, k: int) -> Tensor:
    """bool [num_reqs, k]: the first int64 [num_reqs] of each."""
    return torch.arange(k, device=counts.device) < counts[:, None]


def _depths(batch: DecodeBatch, draft: DraftOutput) -> Tensor:
    """int64 [num_reqs or 1, k], from 1."""
    if draft.tree is not None:
        return draft.tree.depths
    return torch.arange(1, batch.k + 1, device=batch.slots.device)[None]
