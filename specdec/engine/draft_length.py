"""How many drafts a step should have: the number that decodes fastest, estimated while decoding.

    speed(k) = E[tokens](k) / t(k)        E[tokens](k) = 1 + sum over j <= k of P(the first j drafts are accepted)

Plain decoding is k = 0, so drafts that do not pay are given up. The acceptance of every position and the time of a step are
measured, and both estimates grow old, so that a k that was bad is tried again now and then. A time that has not been measured
lies between those of steps that must be shorter and steps that must be longer, so a batch of a new size begins with what others
have shown. What is output does not depend on the choice, except that probabilistic drafts draw other random tokens of the same
distribution.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from specdec.core import Drafter
from specdec.engine.buckets import batch_bucket
from specdec.errors import InvalidInputError

MEMORY = 64
"""Steps after which what they taught about acceptance weighs 1/e, and their times are forgotten once there is a new one."""
PROBING = 0.004
"""Share of the time that may go into measuring one k again that is not the best."""

_RUNGS = (0, 1, 3, 7, 15, 31, 63)
_FIRST_GUESS = 0.9  # acceptance of the first position before anything is known; high, so that drafting is tried
_GUESS_WEIGHT = 0.5  # in observations; what retrying drafts that never pay costs grows with it
_SAMPLES = 8  # times kept per k and batch size
_SHORTEST_AGE = 16  # steps before a time is measured again, however little that costs
_NEW = 15  # steps that a kind of step costs once: a graph to capture, kernels to choose


def checked_draft_tokens(asked: int | Literal["auto"] | None, drafter: Drafter | None) -> int:
    """Most drafts per step: what is asked for, or the drafter's own number.

    Raises:
        InvalidInputError: the drafter cannot give that many.
    """
    most = drafter.max_draft_tokens if drafter else 0
    if asked is None or asked == "auto":
        return most
    if asked > most:
        way_out = f"choose 1 to {most}, or 0 for plain decoding" if drafter else "name a drafter, or leave it out"
        raise InvalidInputError(f"num_draft_tokens is {asked} and the drafter gives at most {most}; {way_out}")
    return asked


def ladder(most: int) -> tuple[int, ...]:
    """Values of k worth telling apart. With the anchor, most of them fill the tiles that kernels work in.

    >>> ladder(15), ladder(8), ladder(1), ladder(0)
    ((0, 1, 3, 7, 15), (0, 1, 3, 7, 8), (0, 1), (0,))
    """
    return (*(k for k in _RUNGS if k < most), most)


class AcceptanceEstimate:
    """P(a draft is accepted | those before it are), by position, over all requests of late steps.

    A position without evidence of its own is taken to be like the one before it.

    Args:
        most: positions.
    """

    def __init__(self, most: int) -> None:
        self._reached = [0.0] * most
        self._accepted = [0.0] * most

    def observe(self, k: int, num_accepted: Sequence[int]) -> None:
        """Takes over one step of `k` drafts, with what each request accepted of them."""
        keep = 1 - 1 / MEMORY
        # Also positions that this step did not try: what is not tried for long becomes a guess again, and is tried.
        self._reached = [keep * count for count in self._reached]
        self._accepted = [keep * count for count in self._accepted]
        for accepted, times in Counter(num_accepted).items():
            for position in range(min(accepted + 1, k)):
                self._reached[position] += times
                self._accepted[position] += times * (position < accepted)

    def expected_tokens(self, k: int) -> float:
        """Tokens that a request gets from a step of `k` drafts, on average."""
        rate, alive, tokens = _FIRST_GUESS, 1.0, 1.0
        for reached, accepted in zip(self._reached[:k], self._accepted, strict=False):
            rate = (accepted + _GUESS_WEIGHT * rate) / (reached + _GUESS_WEIGHT)
            alive *= rate
            tokens += alive
        return tokens


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
        else:
            if self._num_steps - self._measured_at[k] > MEMORY:
                self._samples[k].clear()  # they may be of longer contexts or of a busier machine
            self._samples[k].append(seconds)
            self._measured_at[k] = self._num_steps

    def measured(self) -> dict[int, float]:
        """Seconds by k: the lower quartile of the last times, since disturbances only lengthen a step; not above a larger k's."""
        least: dict[int, float] = {}
        bound = float("inf")
        for k, samples in reversed(self._samples.items()):
            if samples:
                bound = least[k] = min(bound, _lower_quartile(samples))
        return least

    def is_due(self, k: int, cost: float) -> bool:
        """Whether to measure `k` again, or at last, given what that would cost, in steps of the best k."""
        age = self._num_steps - self._measured_at[k]
        if not self._samples[k]:
            cost += _NEW
        return age > max(_SHORTEST_AGE, cost / PROBING)


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

        Plain decoding is hoped to take no longer than what is below, lest it be given up unmeasured when it would be the fastest.
        """
        below = max(((took, step.rows) for step, took in known.items() if self.exceeds(step)), default=None)
        above = min(((took, step.rows) for step, took in known.items() if step.exceeds(self)), default=None)
        if below is None or above is None or below[1] == above[1] or self.k == 0:
            return (below or above or (None,))[0]
        return below[0] + (above[0] - below[0]) * (self.rows - below[1]) / (above[1] - below[1])


class DraftLength:
    """Chooses k for every step.

    Args:
        most: largest k.

    Attributes:
        rungs: the values it chooses from.
    """

    def __init__(self, most: int) -> None:
        self.rungs = ladder(most)
        self.acceptance = AcceptanceEstimate(most)
        self._times: dict[int, StepTimes] = {}
        self._estimates: dict[int, dict[int, float]] = {}  # by batch size and k, until something new is measured

    def choose(self, num_reqs: int) -> int:
        """k of the next step of `num_reqs` requests."""
        seconds = self._seconds(batch_bucket(num_reqs))
        if not seconds:
            return 0  # what all others are compared with
        tokens = {k: self.acceptance.expected_tokens(k) for k in seconds}
        best = max(seconds, key=lambda k: tokens[k] / seconds[k])
        # A step of k, less the steps of the best that its tokens would have taken.
        costs = {k: seconds[k] / seconds[best] - tokens[k] / tokens[best] for k in seconds}
        times = self._times_of(num_reqs)
        return next((k for k in seconds if times.is_due(k, costs[k])), best)

    def observe(self, num_reqs: int, k: int, num_accepted: Sequence[int], seconds: float | None) -> None:
        """Takes over the outcome of a step.

        Args:
            num_reqs: requests in its batch.
            k: its drafts per request, one of `rungs`.
            num_accepted: drafts accepted, one entry per request whose text goes on.
            seconds: how long it took; None when it did work that other steps do not.
        """
        self.acceptance.observe(k, num_accepted)
        if seconds is not None:
            times = self._times_of(num_reqs)
            known = len(times.measured())
            times.observe(k, seconds)
            if len(times.measured()) != known:
                self._estimates.clear()

    def _seconds(self, num_reqs: int) -> dict[int, float]:
        """Time of a step by k, as far as there is anything to tell it from."""
        times = self._times_of(num_reqs)
        estimated = self._estimates.get(num_reqs)
        if estimated is None:
            known = {StepSize(size, k): took for size, one in self._times.items() for k, took in one.measured().items()}
            steps = {k: StepSize(num_reqs, k).estimate(known) for k in self.rungs}
            estimated = self._estimates[num_reqs] = {k: took for k, took in steps.items() if took is not None}
        return {k: max(took, 1e-9) for k, took in sorted((estimated | times.measured()).items())}

    def _times_of(self, num_reqs: int) -> StepTimes:
        return self._times.setdefault(batch_bucket(num_reqs), StepTimes(self.rungs))


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
