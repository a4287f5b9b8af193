"""How many drafts a step should have: the number that decodes fastest, estimated while decoding.

    speed(k) = E[tokens](k) / t(k)        E[tokens](k) = 1 + sum over j <= k of P(the first j drafts are accepted)

Plain decoding is k = 0, and the first that is measured, so drafts that do not pay are given up. What is measured, by the step's
number of requests and whether any of them samples, are the times, several steps in a row each, and the acceptance of every
position. A time that has not been measured lies between those of steps that must be shorter and steps that must be longer, so a
batch of a new size begins with what others have shown. What is slower is tried again now and then, within a share of the time. What
is output does not depend on the choice, except that probabilistic drafts draw other random tokens of the same distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from specdec.core import Drafter
from specdec.engine.buckets import batch_bucket
from specdec.engine.draft_acceptance import AcceptanceEstimate
from specdec.engine.step_times import ENOUGH, StepSize, StepTimes
from specdec.errors import InvalidInputError

PROBING = 0.006
"""Share of the time that may go into measuring k again that are not the best."""

_RUNGS = (0, 1, 3, 7, 15, 31, 63)
_FIRST = 3  # drafts tried first: many that are wrong cost much, and few tell little
_FIRST_REQUESTS = 16  # of which so many are then looked at, over as many steps as that takes
_PATIENCE = 8  # steps that a k is kept for longer when too few of its times are known yet
_STEADY = 4  # steps before the choice is looked at again
_CLEARLY = 1.03  # how many times as fast another k must seem to replace the one at work: less may be chance
_NEW = 15  # steps that a kind of step costs once, until a capture has shown what it takes
_WRITE_OFF = 200  # steps among which that is divided when kinds are compared: a batch may not last longer
_LEAST_COST = 0.02  # of a step, for measuring one that seems to cost nothing


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


class Situation(NamedTuple):
    """What the best k depends on, beside the texts.

    Attributes:
        sampled: a request has a temperature: its steps take longer and accept less.
        num_reqs: of the batch, as `batch_bucket` counts them.
    """

    sampled: bool
    num_reqs: int


@dataclass(slots=True)
class Run:
    """Steps of one k in a row.

    Attributes:
        here: where it began; it ends when the situation is another one.
        k: their drafts.
        steps: how many are left until the choice is looked at again; less than 0 while times of this `k` are waited for.
    """

    here: Situation
    k: int
    steps: int


class DraftLength:
    """Chooses k for every step.

    Args:
        most: largest k.

    Attributes:
        rungs: the values it chooses from.
    """

    def __init__(self, most: int) -> None:
        self.rungs = ladder(most)
        self._acceptance = {sampled: AcceptanceEstimate(most) for sampled in (False, True)}
        self._times: dict[Situation, StepTimes] = {}
        self._at_work: dict[Situation, int] = {}  # k that was found best
        self._estimates: dict[Situation, dict[int, float]] = {}  # by k, until something new is measured
        self._run: Run | None = None
        self._spare = 0.0  # seconds that may go into probing
        self._capture: float | None = None  # seconds that one takes

    def choose(self, num_reqs: int, *, sampled: bool = False, is_new: Callable[[int], bool] | None = None) -> int:
        """k of the next step.

        Args:
            num_reqs: requests in its batch.
            sampled: any of them samples.
            is_new: whether a step of so many drafts would have to be captured first; left out, the first of its kind is new.
        """
        here = Situation(sampled, batch_bucket(num_reqs))
        times, run = self._times_of(here), self._run
        if run is not None and run.here == here:
            run.steps -= 1
            if run.steps > 0 or (run.k not in times.measured() and run.steps > -_PATIENCE):
                return run.k
        self._run = self._next_run(here, is_new or times.is_cold)
        return self._run.k

    def observe(
        self, num_reqs: int, k: int, num_accepted: Sequence[int], seconds: float | None, *, sampled: bool = False
    ) -> None:
        """Takes over the outcome of a step.

        Args:
            num_reqs: requests in its batch.
            k: its drafts per request, one of `rungs`.
            num_accepted: drafts accepted, one entry per request whose text goes on.
            seconds: how long it took; None when it did work that other steps do not.
            sampled: a request in the batch samples.
        """
        self._acceptance[sampled].observe(k, num_accepted)
        if seconds is not None:
            self._spare += PROBING * seconds
            times = self._times_of(Situation(sampled, batch_bucket(num_reqs)))
            known = len(times.measured())
            times.observe(k, seconds)
            if len(times.measured()) != known:
                self._estimates.clear()

    def observe_capture(self, seconds: float) -> None:
        """Takes over how long a capture held up a step."""
        self._capture = seconds if self._capture is None else (self._capture + seconds) / 2

    def _next_run(self, here: Situation, is_new: Callable[[int], bool]) -> "Run":
        times, acceptance = self._times_of(here), self._acceptance[here.sampled]
        seconds = self._seconds(here)
        if not seconds:
            return Run(here, 0, ENOUGH)  # what all others are compared with
        if not acceptance.has_evidence and len(self.rungs) > 1 and times.measured():
            return Run(here, min(_FIRST, self.rungs[-1]), max(ENOUGH, _FIRST_REQUESTS // here.num_reqs))
        tokens = {k: acceptance.expected_tokens(k) for k in seconds}
        at_work = self._at_work[here] = self._best(seconds, tokens, is_new, self._at_work.get(here))
        costs = self._costs(times, seconds, tokens, is_new, at_work)
        probe = max(costs, key=lambda k: times.age(k) / costs[k], default=at_work)
        if probe == at_work or self._spare < costs[probe] or at_work not in times.measured():
            return Run(here, at_work, _STEADY)
        self._spare = 0.0
        return Run(here, probe, ENOUGH)

    def _best(
        self, seconds: dict[int, float], tokens: dict[int, float], is_new: Callable[[int], bool], at_work: int | None
    ) -> int:
        """The fastest k, or the one at work where that is about as fast."""
        new = self._new(seconds) / _WRITE_OFF
        speeds = {k: tokens[k] / (took + new * is_new(k)) for k, took in seconds.items()}
        best = max(speeds, key=speeds.__getitem__)
        return best if at_work not in speeds or speeds[best] > _CLEARLY * speeds[at_work] else at_work

    def _costs(
        self,
        times: StepTimes,
        seconds: dict[int, float],
        tokens: dict[int, float],
        is_new: Callable[[int], bool],
        at_work: int,
    ) -> dict[int, float]:
        """Seconds that measuring every other k would cost: its steps, less those at work that its tokens would have taken."""
        pace = seconds[at_work] / tokens[at_work]
        least = _LEAST_COST * seconds[at_work]
        costs = {}
        for k in seconds.keys() - {at_work}:
            steps = ENOUGH + times.is_cold(k)
            costs[k] = steps * max(seconds[k] - tokens[k] * pace, least) + self._new(seconds) * is_new(k)
        return costs

    def _new(self, seconds: dict[int, float]) -> float:
        """Seconds that a step takes longer when it has to be captured."""
        return _NEW * min(seconds.values()) if self._capture is None else self._capture

    def _seconds(self, here: Situation) -> dict[int, float]:
        """Time of a step by k, as far as there is anything to tell it from."""
        times = self._times_of(here)
        estimated = self._estimates.get(here)
        if estimated is None:
            known = {
                StepSize(there.num_reqs, k): took
                for there, one in self._times.items()
                if there.sampled == here.sampled
                for k, took in one.measured().items()
            }
            steps = {k: StepSize(here.num_reqs, k).estimate(known) for k in self.rungs}
            estimated = self._estimates[here] = {k: took for k, took in steps.items() if took is not None}
        return {k: max(took, 1e-9) for k, took in sorted((estimated | times.measured()).items())}

    def _times_of(self, here: Situation) -> StepTimes:
        return self._times.setdefault(here, StepTimes(self.rungs))
