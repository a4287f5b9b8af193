"""How long steps take, by requests and drafts: measured, and estimated where they are not."""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

ENOUGH = 3
"""Times that tell how long a step takes: their median is not disturbed by one of them."""

_SAMPLES = 15  # times kept per k
_FRESH = 64  # steps after which times may be of shorter contexts or of a busier machine


class StepTimes:
    """Seconds of a step by k, at one batch size.

    Args:
        rungs: values of k, from 0.
    """

    def __init__(self, rungs: Sequence[int]) -> None:
        self._samples: dict[int, deque[float]] = {k: deque(maxlen=_SAMPLES) for k in rungs}
        self._measured_at = dict.fromkeys(rungs, 0)
        self._cold = set(rungs)
        self._num_steps = 0

    def observe(self, k: int, seconds: float) -> None:
        """Takes over the time of a step. The first of its kind is left out: it pays for memory and for choosing kernels."""
        self._num_steps += 1
        if k in self._cold:
            self._cold.discard(k)
            return
        samples = self._samples[k]
        if self.age(k) > _FRESH:
            while len(samples) >= ENOUGH:
                samples.popleft()  # so few are left that as many new ones as are taken at once outweigh them
        samples.append(seconds)
        self._measured_at[k] = self._num_steps

    def measured(self) -> dict[int, float]:
        """Seconds by k: the median of the last times, where there are enough; not above a larger k's."""
        times: dict[int, float] = {}
        bound = float("inf")
        for k, samples in reversed(self._samples.items()):
            if len(samples) >= ENOUGH:
                bound = times[k] = min(bound, median(samples))
        return times

    def is_cold(self, k: int) -> bool:
        """Whether there has been no step of `k` drafts."""
        return k in self._cold

    def age(self, k: int) -> int:
        """Steps since one of `k` drafts was measured."""
        return self._num_steps - self._measured_at[k]


class StepSize(NamedTuple):
    """What the time of a step depends on."""

    num_reqs: int
    k: int

    @property
    def rows(self) -> int:
        """Rows to verify."""
        return self.num_reqs * (self.k + 1)

    def exceeds(self, other: "StepSize") -> bool:
        """Whether it takes no less time: it has no fewer requests, rows or forwards."""
        return self.num_reqs >= other.num_reqs and self.rows >= other.rows and (self.k > 0 or other.k == 0)

    def estimate(self, known: Mapping["StepSize", float]) -> float | None:
        """Seconds by rows between the longest known step below and the shortest above; without one of them what the other took.

        Without one above it grows on, half as fast as between fewer drafts. Plain decoding is hoped to take no longer than what is
        below, lest it be given up unmeasured when it would be the fastest.
        """
        below = max(((took, step.rows) for step, took in known.items() if self.exceeds(step)), default=None)
        above = min(((took, step.rows) for step, took in known.items() if step.exceeds(self)), default=None)
        if below is not None and above is None:
            return max(below[0], self._grown(known))
        if below is None or above is None or below[1] == above[1] or self.k == 0:
            return (below or above or (None,))[0]
        return below[0] + (above[0] - below[0]) * (self.rows - below[1]) / (above[1] - below[1])

    def _grown(self, known: Mapping["StepSize", float]) -> float:
        """Seconds by those of the two largest numbers of drafts of as many requests, if the next ones cost half as much each."""
        fewer = sorted(step for step in known if step.num_reqs == self.num_reqs and step.k < self.k)[-2:]
        if len(fewer) < 2:
            return 0.0
        less, more = fewer
        return known[more] + (known[more] - known[less]) / (more.k - less.k) * (self.k - more.k) / 2
