"""What forecasts are worth: drafters count their expectations in different ways, and what was accepted lately puts them right."""

import torch
from torch import Tensor

MEMORY = 256
"""Observations after which one weighs 1/e."""
PRIOR = 4
"""Observations that a forecast itself counts as."""
_PER_DOUBLING = 3  # buckets, of one more than the forecast
_BUCKETS = 6 * _PER_DOUBLING + 1  # up to 63 drafts


class Calibration:
    """The mean error of late forecasts that were alike, for each drafter; of chains and of trees.

    Args:
        count: P, drafters.
        device: where.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._first = _BUCKETS * torch.arange(count, device=device)[:, None]  # bucket of each drafter
        self._sums = torch.zeros(2, 2, count * _BUCKETS, device=device)  # of chains and of trees, errors and observations

    def corrected(self, forecasts: Tensor, *, of_trees: bool) -> Tensor:
        """float32 [P, num_reqs], how many drafts will be accepted, for `forecasts` float32 [P, num_reqs]."""
        errors, observations = self._sums[int(of_trees)][:, self._buckets(forecasts)]
        return forecasts + errors / (observations + PRIOR)

    def observe(self, forecasts: Tensor, accepted: Tensor, counts: Tensor, *, of_trees: bool) -> None:
        """Takes over a step: what was accepted float32 [P, num_reqs] of drafts with these forecasts.

        Args:
            forecasts: float32 [P, num_reqs], not corrected.
            accepted: of each drafter's drafts, whether it was its turn or not.
            counts: float32 [num_reqs], or [P, num_reqs] where not all drafted, 1 for each request that is to count, and 0.
            of_trees: the drafts formed trees.
        """
        sums, seen = self._sums[int(of_trees)], counts.expand_as(forecasts)
        errors = torch.where(seen > 0, accepted - forecasts, 0.0)  # what does not count may be no number
        news = torch.stack([errors, seen]).flatten(1)
        late = torch.zeros_like(sums).index_add_(1, self._buckets(forecasts).flatten(), news)
        sums.mul_((1 - 1 / MEMORY) ** late[1]).add_(late)

    def _buckets(self, forecasts: Tensor) -> Tensor:
        """int64 [P, num_reqs], places in the tables."""
        return self._first + (_PER_DOUBLING * (forecasts + 1).log2()).long().clamp(0, _BUCKETS - 1)
