"""How many drafts a step should have: the number that decodes fastest, estimated while decoding.

    speed(k) = E[tokens](k) / t(k)        E[tokens](k) = 1 + sum over j <= k of P(the first j drafts are accepted)

Plain decoding is k = 0, and the first that is measured, so drafts that do not pay are given up. What is measured, by the step's
number of requests and whether any of them samples, are the times, several steps in a row each, and the acceptance of every
position. A time that has not been measured lies between those of steps that must be shorter and steps that must be longer, so a
batch of a new size begins with what others have shown. What is slower is tried again now and then, within a share of the time. What
is output does not depend on the choice, except that probabilistic drafts draw other random tokens of the same distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Literal, NamedTuple

from specdec.core import Drafter
from specdec.engine.buckets import batch_bucket
from specdec.engine.draft_acceptance import AcceptanceEstimate
from specdec.engine.step_times import ENOUGH, StepSize, StepTimes
from specdec.errors import InvalidInputError

PROBING = {False: 0.006, True: 0.002}
"""Shares of the time that may go into measuring k that are not the best, by whether a step has to be captured for that: the few
that are dear must not keep the others waiting."""

_RUNGS = (0, 1, 3, 7, 15, 31, 63)
_FIRST = 3  # drafts tried first: many that are wrong cost much, and few tell little
_FIRST_REQUESTS = 16  # of which so many are then looked at, over as many steps as that takes
_PATIENCE = 12  # steps that a k is kept for longer when too few of its times are known yet, or it does better than expected
_STEADY = 4  # steps before the choice is looked at again
_CLEARLY = 1.03  # how many times as fast another k must seem to replace the one at work: less may be chance
_NEW = 15  # steps that a kind of step costs once, until a capture has shown what it takes
_WRITE_OFF = 100  # steps among which that is divided when kinds are compared
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


@dataclass(frozen=True, slots=True)
class Prospects:
    """What steps are expected to take and to give, by k.

    Attributes:
        seconds: of a step.
        tokens: of each request.
        is_new: whether a step of so many drafts would have to be captured first.
        new_seconds: what that takes, if it is known.
    """

    seconds: dict[int, float]
    tokens: dict[int, float]
    is_new: Callable[[int], bool]
    new_seconds: float | None

    def capture(self, k: int) -> float:
        """Seconds that a step of `k` drafts takes longer now."""
        if not self.is_new(k):
            return 0.0
        return _NEW * min(self.seconds.values()) if self.new_seconds is None else self.new_seconds

    def pace(self, k: int, *, among: float = float("inf")) -> float:
        """Seconds per token; a capture is divided among so many steps."""
        return (self.seconds[k] + self.capture(k) / among) / self.tokens[k]

    def lost(self, k: int, other: int) -> float:
        """Seconds that a step of `k` takes longer than its tokens would take with `other`."""
        return self.seconds[k] - self.tokens[k] * self.pace(other)


@dataclass(slots=True)
class Run:
    """Steps of one k in a row.

    Attributes:
        here: where it began; it ends when the situation is another one.
        k: their drafts.
        steps: how many are left until the choice is looked at again; less than 0 while more is to be learned.
        tokens: of a request, by step.
    """

    here: Situation
    k: int
    steps: int
    tokens: list[float] = field(default_factory=list)


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
        self._missed: dict[Situation, float] = {}  # seconds, for want of a capture
        self._estimates: dict[Situation, dict[int, float]] = {}  # by k, until something new is measured
        self._run: Run | None = None
        self._spare = dict.fromkeys(PROBING, 0.0)  # seconds that may go into probing

    def choose(
        self,
        num_reqs: int,
        *,
        sampled: bool = False,
        news: Callable[[], Callable[[int], bool]] | None = None,
        new_seconds: float | None = None,
    ) -> int:
        """k of the next step.

        Args:
            num_reqs: requests in its batch.
            sampled: any of them samples.
            news: gives, when the choice is looked at again, what tells whether a step of so many drafts would have to be captured
                first; left out, the first of its kind is new.
            new_seconds: what that takes, once it is known.
        """
        here = Situation(sampled, batch_bucket(num_reqs))
        times, run = self._times_of(here), self._run
        if run is not None and run.here == here:
            run.steps -= 1
            if run.steps > 0 or (run.steps > -_PATIENCE and (run.k not in times.measured() or self._promises(run))):
                return run.k
        self._run = self._next_run(here, cache(news() if news else times.is_cold), new_seconds)
        return self._run.k

    def observe(self, num_reqs: int, k: int, num_accepted: Sequence[int], seconds: float | None, *, sampled: bool = False) -> None:
        """Takes over the outcome of a step.

        Args:
            num_reqs: requests in its batch.
            k: its drafts per request, one of `rungs`.
            num_accepted: drafts accepted, one entry per request whose text goes on.
            seconds: how long it took; None when it did work that other steps do not.
            sampled: a request in the batch samples.
        """
        self._acceptance[sampled].observe(k, num_accepted)
        if self._run is not None and self._run.k == k and num_accepted:
            self._run.tokens.append(1 + sum(num_accepted) / len(num_accepted))
        if seconds is not None:
            for is_new, share in PROBING.items():
                self._spare[is_new] += share * seconds
            times = self._times_of(Situation(sampled, batch_bucket(num_reqs)))
            known = len(times.measured())
            times.observe(k, seconds)
            if len(times.measured()) != known:
                self._estimates.clear()

    def _promises(self, run: Run) -> bool:
        """Whether steps of a k that seemed slower have been faster: few requests need more of them to show that it is no chance."""
        at_work = self._at_work.get(run.here, run.k)
        seconds = self._seconds(run.here)
        if run.k == at_work or not run.tokens or at_work not in seconds:
            return False
        speed = self._acceptance[run.here.sampled].expected_tokens(at_work) / seconds[at_work]
        return sum(run.tokens) / len(run.tokens) > _CLEARLY * speed * seconds[run.k]

    def _next_run(self, here: Situation, is_new: Callable[[int], bool], new_seconds: float | None) -> Run:
        times, acceptance = self._times_of(here), self._acceptance[here.sampled]
        seconds = self._seconds(here)
        if not seconds:
            return Run(here, 0, ENOUGH)  # what all others are compared with
        if not acceptance.has_evidence and len(self.rungs) > 1 and times.measured():
            return Run(here, min(_FIRST, self.rungs[-1]), max(ENOUGH, _FIRST_REQUESTS // here.num_reqs))
        tokens = {k: acceptance.expected_tokens(k) for k in seconds}
        prospects = Prospects(seconds, tokens, is_new, new_seconds)
        at_work = self._at_work[here] = self._best(here, prospects)
        if at_work in times.measured():
            for new, spare in self._spare.items():
                # What measuring each of the others would cost.
                costs = {
                    k: (ENOUGH + times.is_cold(k)) * max(prospects.lost(k, at_work), _LEAST_COST * seconds[at_work])
                    + prospects.capture(k)
                    for k in seconds
                    if k != at_work and is_new(k) == new
                }
                probe = max(costs, key=lambda k: times.age(k) / costs[k], default=at_work)
                if probe != at_work and spare >= costs[probe]:
                    self._spare[new] = 0.0
                    return Run(here, probe, ENOUGH)
        return Run(here, at_work, _STEADY)

    def _best(self, here: Situation, prospects: Prospects) -> int:
        """The k to work with: the fastest, or the one at work where it is about as fast or a capture does not pay yet."""
        soon = min(prospects.seconds, key=lambda k: prospects.pace(k, among=_WRITE_OFF))
        at_work = self._at_work.get(here, soon)
        if at_work not in prospects.seconds or prospects.pace(at_work) > _CLEARLY * prospects.pace(soon, among=_WRITE_OFF):
            at_work = soon
        late = min(prospects.seconds, key=prospects.pace)
        if prospects.pace(at_work) <= _CLEARLY * prospects.pace(late) or not prospects.is_new(late):
            self._missed[here] = 0.0
            return at_work
        # A batch may end any time; so what would pay in the long run is captured once as much has been missed as it costs.
        self._missed[here] = self._missed.get(here, 0.0) + _STEADY * prospects.lost(at_work, late)
        return at_work if self._missed[here] < prospects.capture(late) else late

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
