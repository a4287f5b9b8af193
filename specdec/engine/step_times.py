"""How long steps take, by requests and drafts: measured, and estimated where they are not."""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

ENOUGH = 3
"""Times that tell how long a step takes, even where two of them are disturbed."""

_SAMPLES = 15  # times kept per k
_FRESH = 64  # steps after which times may be of shorter contexts or of a busier machine, and give way to new ones
_CHANGE = 1.5  # how many times as long or short a step must take for all old times to be forgotten


class StepTimes:
    """Seconds of a step by k, at one batch size.

    Args:
        rungs: values of k, from 0.
    """

    def __init__(self, rungs: Sequence[int]) -> None:
        self._samples: dict[int, deque[float]] = {k: deque(maxlen=_SAMPLES) for k in rungs}
        self._measured_at = dict.fromkeys(rungs, 0)
        self._before: dict[int, float] = {}  # what was forgotten, until there is something new to compare it with
        self._cold = set(rungs)
        self._num_steps = 0

    def observe(self, k: int, seconds: float) -> None:
        """Takes over the time of a step. The first of its kind is left out: it pays for memory and for choosing kernels."""
        self._num_steps += 1
        if k in self._cold:
            self._cold.discard(k)
            return
        samples = self._samples[k]
        if self.age(k) > _FRESH and samples:
            self._before[k] = _lower_quartile(samples)
            samples.clear()
        samples.append(seconds)
        self._measured_at[k] = self._num_steps
        if len(samples) == ENOUGH and k in self._before:
            before = self._before.pop(k)
            if max(before, _lower_quartile(samples)) > _CHANGE * min(before, _lower_quartile(samples)):
                self._forget_old()

    def _forget_old(self) -> None:
        for k, samples in self._samples.items():
            if self.age(k) > _FRESH:
                samples.clear()

    def measured(self) -> dict[int, float]:
        """Seconds by k, where there are enough: their lower quartile, as disturbances only lengthen; not above a larger k's."""
        times: dict[int, float] = {}
        bound = float("inf")
        for k, samples in reversed(self._samples.items()):
            if len(samples) >= ENOUGH:
                bound = times[k] = min(bound, _lower_quartile(samples))
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

        Without one above it grows on, a quarter as fast as between fewer drafts. Plain decoding is hoped to take no longer than
        what is below, lest it be given up unmeasured when it would be the fastest.
        """
        below = max(((took, step.rows) for step, took in known.items() if self.exceeds(step)), default=None)
        above = min(((took, step.rows) for step, took in known.items() if step.exceeds(self)), default=None)
        if below is not None and above is None:
            return max(below[0], self._grown(known))
        if below is None or above is None or below[1] == above[1] or self.k == 0:
            return (below or above or (None,))[0]
        return below[0] + (above[0] - below[0]) * (self.rows - below[1]) / (above[1] - below[1])

    def _grown(self, known: Mapping["StepSize", float]) -> float:
        """Seconds if each draft more costs a quarter of those before, by the two largest numbers of them; 0 when nothing tells."""
        fewer = sorted(step for step in known if step.num_reqs == self.num_reqs and step.k < self.k)[-2:]
        if len(fewer) < 2:
            return 0.0
        less, more = fewer
        return known[more] + (known[more] - known[less]) / (more.k - less.k) * (self.k - more.k) / 4


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
