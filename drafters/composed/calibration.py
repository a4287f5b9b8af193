"""What forecasts are worth: what was accepted lately puts them right."""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.device.deviation import Deviation, deviation, mismatches, worst
from specdec.kernels.kernel import Kernel

MEMORY = 256
"""Observations after which one weighs 1/e."""
PRIOR = 4
"""Observations that a forecast itself counts as."""
LEAST = 0.05
"""Forecasts, and their ratios, count as no less: little is known of what is never accepted."""
_PER_DOUBLING = 3  # buckets, of one more than the forecast
_BUCKETS = 6 * _PER_DOUBLING + 1  # up to 63 drafts
_KEEP = 1 - 1 / MEMORY


class Forecasts(NamedTuple):
    """What the drafters of a composition expect in a step; 0 of those that did not draft.

    Attributes:
        raw: float32 [P, num_reqs], drafts that will be accepted.
        corrected: float32 [P, num_reqs], the same, put right.
        shifts: float32 [P, num_reqs], logarithms of how many times as many it is then. At most 0:
            more than once as many would make a path likelier than its beginning.
    """

    raw: Tensor
    corrected: Tensor
    shifts: Tensor


class Calibration:
    """The mean error of late forecasts that were alike, by drafter; of chains and of trees."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._on_triton = KERNEL.runs_on(device)
        # of chains and of trees, errors and observations
        self._sums = torch.zeros(2, 2, count * _BUCKETS, dtype=torch.float32, device=device)

    def correct(self, raw: Tensor, *, of_trees: bool) -> Forecasts:
        """Puts forecasts float32 [P, num_reqs] right."""
        correct = _correct_on_triton if self._on_triton else _correct
        return Forecasts(raw, *correct(raw, self._sums[int(of_trees)]))

    def observe(
        self,
        forecasts: Forecasts,
        agreed: Tensor,
        num_accepted: Tensor,
        counts: Tensor,
        *,
        of_trees: bool,
        best: Tensor | None = None,
    ) -> None:
        """Takes over what came out of a step.

        Args:
            forecasts: for the step.
            agreed: int64 [P, num_reqs], tokens of the output that each drafter had right.
            num_accepted: int64 [num_reqs]; the output has one token more.
            counts: float32 [num_reqs], or [P, num_reqs] where not all drafted, 1 for each request
                that is to count, and 0.
            of_trees: the drafts formed trees.
            best: int64 [num_reqs], takes the first drafter that had most right; or None.
        """
        take = _observe_on_triton if self._on_triton and counts.ndim == 1 else _observe
        take(self._sums[int(of_trees)], forecasts, agreed, num_accepted, counts, best)


def _correct(raw: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The rest of `Forecasts`, by sums float32 [2, P * buckets]."""
    errors, observations = sums[:, _buckets(raw)]
    corrected = raw + errors / (observations + PRIOR)
    return corrected, (corrected / raw.clamp(min=LEAST)).clamp(LEAST, 1.0).log()


def _correct_on_triton(raw: Tensor, sums: Tensor) -> tuple[Tensor, Tensor]:
    from drafters.composed import triton_forecasts  # it imports Triton

    return triton_forecasts.correct(
        raw, sums, buckets=_BUCKETS, per_doubling=_PER_DOUBLING, prior=float(PRIOR), least=LEAST
    )


def _observe(
    sums: Tensor,
    forecasts: Forecasts,
    agreed: Tensor,
    num_accepted: Tensor,
    counts: Tensor,
    best: Tensor | None,
) -> None:
    """Updates sums [2, P * buckets], and `best`; see `Calibration.observe`."""
    if best is not None:
        best.copy_(agreed.max(dim=0).indices)
    # What fits everything that came out might have gone on: for as long as it was expected to.
    right = agreed.to(forecasts.raw.dtype)
    observed = torch.where(agreed <= num_accepted, right, torch.maximum(right, forecasts.corrected))
    errors = observed - forecasts.raw
    # one that is no number says nothing, and would never be forgotten
    seen = torch.where(errors.abs() < torch.inf, counts, 0.0)
    errors = torch.where(seen > 0, errors, 0.0)
    sums_of_step = torch.stack([errors, seen]).flatten(1)
    late = torch.zeros_like(sums).index_add_(1, _buckets(forecasts.raw).flatten(), sums_of_step)
    sums.mul_(_KEEP ** late[1]).add_(late)


def _observe_on_triton(
    sums: Tensor,
    forecasts: Forecasts,
    agreed: Tensor,
    num_accepted: Tensor,
    counts: Tensor,
    best: Tensor | None,
) -> None:
    from drafters.composed import triton_forecasts  # it imports Triton

    before = forecasts.raw, forecasts.corrected
    triton_forecasts.observe(
        sums,
        *before,
        agreed,
        num_accepted,
        counts,
        best,
        buckets=_BUCKETS,
        per_doubling=_PER_DOUBLING,
        keep=_KEEP,
    )


def _buckets(raw: Tensor) -> Tensor:
    """int64 [P, num_reqs], places of forecasts in the sums."""
    first = _BUCKETS * torch.arange(len(raw), device=raw.device)[:, None]
    return first + (_PER_DOUBLING * (raw + 1).log2()).long().clamp(0, _BUCKETS - 1)


def check_forecasts(device: torch.device) -> Deviation:
    """Two steps of three drafters and many requests, some of which do not count."""
    generator = torch.Generator().manual_seed(0)
    sides = [torch.zeros(2, 3 * _BUCKETS, dtype=dtype) for dtype in (torch.float32, torch.float64)]
    ours, found = torch.zeros_like(sides[0], device=device), []
    for _ in range(2):
        raw = 9 * torch.rand(3, 70, generator=generator)
        agreed = torch.randint(6, (3, 70), generator=generator)
        num_accepted = torch.randint(5, (70,), generator=generator)
        counts = (torch.rand(70, generator=generator) < 0.8).float()
        expected = [
            Forecasts(x, *_correct(x, sums))
            for x, sums in zip((raw, raw.double()), sides, strict=True)
        ]
        got = Forecasts(raw.to(device), *_correct_on_triton(raw.to(device), ours))
        corrected, shifts = list(zip(got, *expected, strict=True))[1:]
        # Times as many, for logarithms near 0 have few digits to compare.
        found += [deviation(*corrected), deviation(*(numbers.exp() for numbers in shifts))]
        best = torch.zeros_like(num_accepted), torch.zeros_like(num_accepted, device=device)
        for sums, forecasts in zip(sides, expected, strict=True):
            _observe(sums, forecasts, agreed, num_accepted, counts.to(sums.dtype), best[0])
        _observe_on_triton(
            ours, got, agreed.to(device), num_accepted.to(device), counts.to(device), best[1]
        )
        found += [deviation(ours, *sides), mismatches(best[1], best[0])]
    return worst(found)


KERNEL = Kernel("forecasts", check_forecasts)
