"""How many drafts a step should have: the number that decodes fastest, estimated while decoding.

    speed(k) = E[tokens](k) / t(k)        E[tokens](k) = 1 + sum over j <= k of P(the first j drafts are accepted)

Plain decoding is k = 0, so drafts that do not pay are given up. The acceptance of every position and the time of a step are
measured, never assumed, and both estimates grow old, so that a k that was bad is tried again now and then. What is output does
not depend on the choice, except that probabilistic drafts draw other random tokens of the same distribution.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from specdec.buckets import batch_bucket
from specdec.core import Drafter
from specdec.errors import InvalidInputError

MEMORY = 64
"""Steps after which what they taught about acceptance weighs 1/e, and their times are forgotten once there is a new one."""
PROBING = 0.004
"""Share of the time that may go into measuring one k again that is not the best."""

_RUNGS = (0, 1, 3, 7, 11, 15, 23, 31, 47, 63)
_FIRST_GUESS = 0.9  # acceptance of the first position before anything is known; high, so that drafting is tried
_GUESS_WEIGHT = 0.5  # in observations; what retrying drafts that never pay costs grows with it
_SAMPLES = 8  # times kept per k and batch size
_SHORTEST_AGE = 16  # steps before a time is measured again, however little that costs


def checked_draft_tokens(asked: int | None, drafter: Drafter | None) -> int:
    """Most drafts per step: what is asked for, or the drafter's own number.

    Raises:
        InvalidInputError: the drafter cannot give that many.
    """
    most = drafter.max_draft_tokens if drafter else 0
    if asked is None:
        return most
    if asked > most:
        way_out = f"choose 1 to {most}, or 0 for plain decoding" if drafter else "name a drafter, or leave it out"
        raise InvalidInputError(f"num_draft_tokens is {asked} and the drafter gives at most {most}; {way_out}")
    return asked


def ladder(most: int) -> tuple[int, ...]:
    """Values of k worth telling apart. With the anchor, most of them fill whole tiles of 4 rows, which kernels work in.

    >>> ladder(15), ladder(8), ladder(1), ladder(0)
    ((0, 1, 3, 7, 11, 15), (0, 1, 3, 7, 8), (0, 1), (0,))
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

    def seconds(self, k: int) -> float | None:
        """The lower quartile of the last times, since whatever disturbs a step makes it longer; not above that of any larger k.

        The first k that is not measured is taken to cost no more than the one before it, so that it is tried if that could pay;
        None beyond it.
        """
        known = [_lower_quartile(samples) for rung, samples in self._samples.items() if samples and rung >= k]
        if known:
            return min(known)
        below = [samples for rung, samples in self._samples.items() if rung < k]
        return _lower_quartile(below[-1]) if below and below[-1] else None

    def is_due(self, k: int, cost: float) -> bool:
        """Whether to measure `k` again, given what that would cost, in steps of the best k."""
        age = self._num_steps - self._measured_at[k]
        return bool(self._samples[k]) and age > max(_SHORTEST_AGE, cost / PROBING)


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

    def choose(self, num_reqs: int) -> int:
        """k of the next step of `num_reqs` requests."""
        times = self._times_of(num_reqs)
        seconds = {k: max(took, 1e-9) for k in self.rungs if (took := times.seconds(k)) is not None}
        if not seconds:
            return 0  # what all others are compared with
        tokens = {k: self.acceptance.expected_tokens(k) for k in seconds}
        best = max(seconds, key=lambda k: tokens[k] / seconds[k])
        # A step of k, less the steps of the best that its tokens would have taken.
        costs = {k: seconds[k] / seconds[best] - tokens[k] / tokens[best] for k in seconds}
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
            self._times_of(num_reqs).observe(k, seconds)

    def _times_of(self, num_reqs: int) -> StepTimes:
        return self._times.setdefault(batch_bucket(num_reqs), StepTimes(self.rungs))


def _lower_quartile(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 4]
