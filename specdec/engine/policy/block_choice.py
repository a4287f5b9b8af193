"""How many drafts a step should have, in a chain or a tree: what decodes fastest, estimated while
decoding.

    speed(shape) = E[tokens](shape) / t(shape)
    E[tokens](shape) = 1 + sum over depths j of P(j drafts or more are accepted)

Plain decoding is the shape without drafts, and the first that is measured, so drafts that do not
pay are given up. What is measured, by the step's number of requests and whether any of them
samples, are the times, several steps in a row each, and the acceptance, which every step tells of
all shapes that its drafts contain. Some drafters tell what to expect before they draft, as those
that copy do (`BoundDrafter.expected_accepted`). Their acceptance is told apart by that: a sure copy
gets a long block, and a text that repeats nothing gets none. A time that has not been measured lies
between those of steps that must be shorter and steps that must be longer, or is taken to be no
longer than the shorter ones. So what may be fast is tried, at most twice the rows at a time, and a
batch of a new size begins with what others have shown. Once as many requests have come as a batch
has, what earlier texts have accepted counts little, and drafts that did not pay are tried. What is
slower is tried again now and then, within a share of the time. Whatever is tried, an account of
what it lost against plain decoding, and of what a drafter had to read before, bounds what is lost
over any few seconds. What is output does not depend on the choice, except that probabilistic drafts
draw other random tokens of the same distribution.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log2
from typing import NamedTuple

from specdec.base.blocks import BlockShape
from specdec.engine.capture.buckets import batch_bucket
from specdec.engine.policy.draft_acceptance import FIRST_GUESS, BlockAcceptance, Path
from specdec.engine.policy.shapes import may_have
from specdec.engine.policy.step_times import ENOUGH, Batch, StepTimes

SHARE = 0.008
"""Share of the time that may go into measuring shapes that are not the best, and that drafts may
lose against plain decoding on and on, and of the window at once.
"""

WINDOW, WINDOW_STEPS = 5.0, 2500
"""Seconds, and plain steps where these take longer, over which drafts may lose at most twice
`SHARE` against plain decoding.
"""

FEW = 4
"""Requests that tell of a batch whether drafts pay, where the drafter would have to read them."""

PLAIN = BlockShape(0)


class Estimate(NamedTuple):
    """How fast steps of a shape are, as far as a choice knows.

    Attributes:
        requests: of the batch.
        sampled: any of them samples.
        expected: drafts that a drafter expects to be accepted, where it tells.
        shape: of the blocks.
        milliseconds: of a step.
        measured: they are; else they are estimated from other steps.
        tokens: that a step gives a request.
        tokens_per_second: of the batch.
    """

    requests: int
    sampled: bool
    expected: int
    shape: str
    milliseconds: float
    measured: bool
    tokens: float
    tokens_per_second: float


@dataclass(slots=True)
class Situation:
    """What the best shape depends on beside the texts, and the steps at work there.

    Attributes:
        batch: what times depend on.
        acceptance: of drafts that are expected to do as well.
        shape: of the next steps.
        steps: how many are left until the choice is looked at again.
        plain: seconds of a plain step; 0 before anything is known.
        preparing: seconds by which a step took longer that brought the context up to date.
        tries: drafts of this shape are not known to pay.
        pays: the best shape has drafts; None before that is measured.
    """

    batch: Batch
    acceptance: BlockAcceptance
    shape: BlockShape = PLAIN
    steps: int = 0
    plain: float = 0.0
    preparing: float = 0.0
    tries: bool = False
    pays: bool | None = None


class BlockChoice:
    """Chooses the shape of every step's blocks.

    Args:
        arms: what to choose from, as `shapes` gives them.
        likeliest_first, forward_for_each: see `specdec.model.core.Drafter`.

    Attributes:
        arms: the same.
        tries: drafts of the shape that was chosen last are not known to pay.
    """

    def __init__(
        self,
        arms: Sequence[BlockShape],
        *,
        likeliest_first: bool = False,
        forward_for_each: bool = False,
    ) -> None:
        self.arms = tuple(arms)
        self._likeliest_first = likeliest_first
        self._times = StepTimes(self.arms, forward_for_each=forward_for_each)
        self._spare = 0.0  # seconds that may go into measuring
        self.tries = False
        self.forget_acceptance()

    def forget_acceptance(self) -> None:
        """Drafts are accepted otherwise from now on; steps take as long as before."""
        self._acceptance: dict[tuple[bool, int], BlockAcceptance] = {}
        self._situations: dict[tuple[Batch, int], Situation] = {}
        self._debt = 0.0  # seconds that were lost lately
        self._news = 0.0  # batches of requests that have come since drafts were verified

    def choose(
        self,
        num_reqs: int,
        *,
        sampled: bool = False,
        expected_accepted: float = 0.0,
        fresh: int = 0,
        ready: Callable[[], Callable[[BlockShape], bool]] | None = None,
    ) -> BlockShape:
        """The shape of the next step's blocks.

        Args:
            num_reqs: requests in its batch.
            sampled: any of them samples.
            expected_accepted: drafts that are expected to be accepted of a request, see
                `BoundDrafter.expected_accepted`.
            fresh: how many of the requests were not in the batch before. Once a whole batch has
                come anew, drafts that did not pay are tried again: its texts are others.
            ready: gives, when the choice is looked at again, what tells whether a step may have a
                shape; None allows all.
        """
        here = self._situation(num_reqs, sampled, expected_accepted)
        self._news += fresh / num_reqs
        if here.steps <= 0:
            self._look(here, ready() if ready else lambda shape: True)
        here.steps -= 1
        self.tries = here.tries
        return here.shape

    def pays(self, num_reqs: int, *, sampled: bool) -> bool:
        """Whether batches of so many requests should have drafts, as far as anything tells; else
        those of `FEW` should.
        """
        here = self._situations.get((Batch(sampled, batch_bucket(num_reqs)), 0))
        return num_reqs <= FEW if here is None or here.pays is None else here.pays

    def estimates(self) -> list[Estimate]:
        """What the choice goes by, the fastest shapes of a situation first."""
        found = []
        for (batch, expected), here in self._situations.items():
            samples = self._times.of(batch)
            for shape, seconds in self._seconds(here).items():
                tokens = here.acceptance.expected_tokens(shape)
                step = str(shape), 1000 * seconds, samples[shape].seconds is not None, tokens
                speed = batch.num_reqs * tokens / seconds
                found.append(Estimate(batch.num_reqs, batch.sampled, 2**expected - 1, *step, speed))
        return sorted(found, key=lambda one: (*one[:3], -one.tokens_per_second))

    def observe(
        self,
        num_reqs: int,
        shape: BlockShape,
        num_accepted: Sequence[int],
        seconds: float | None,
        *,
        sampled: bool = False,
        expected_accepted: float = 0.0,
        paths: Sequence[Path] = (),
        prepares: bool = False,
    ) -> None:
        """Takes over the outcome of a step.

        Args:
            num_reqs: requests in its batch.
            shape: of its blocks, one of `arms`.
            num_accepted: drafts accepted, one entry per request whose text goes on.
            seconds: how long it took; None when it did work that other steps do not.
            sampled: a request in the batch samples.
            expected_accepted: what `choose` was told.
            paths: of a tree, what was accepted, by each of these requests that accepted any.
            prepares: it had no drafts, and brought the context up to date for those of the next.
        """
        here = self._situation(num_reqs, sampled, expected_accepted)
        here.acceptance.observe(shape, num_accepted, paths)
        if seconds is not None:
            if prepares:
                loss = here.preparing = max(0.0, seconds - here.plain) if here.plain else 0.0
            else:
                self._times.observe(here.batch, shape, seconds)
                loss = self._loss(here, shape)
            self._spare += SHARE * seconds
            debt = max(0.0, self._debt + loss - SHARE * seconds)
            self._debt = min(debt, 4 * self._most(here))
            if shape == here.shape and loss > 0 and self._debt + loss >= self._most(here):
                here.steps = 0

    def _situation(self, num_reqs: int, sampled: bool, expected_accepted: float) -> Situation:
        batch = Batch(sampled, batch_bucket(num_reqs))
        expected = int(log2(1 + expected_accepted))  # by doublings of the tokens
        here = self._situations.get((batch, expected))
        if here is None:
            if (sampled, expected) not in self._acceptance:
                # so likely that as many are accepted on average
                guess = 1 - 1 / (1.5 * 2**expected) if expected else FIRST_GUESS
                self._acceptance[sampled, expected] = BlockAcceptance(
                    self.arms, likeliest_first=self._likeliest_first, guess=guess
                )
            here = Situation(batch, self._acceptance[sampled, expected])
            self._situations[batch, expected] = here
        return here

    def _seconds(self, here: Situation) -> dict[BlockShape, float]:
        times = self._times.seconds(here.batch).items()
        return {shape: took for shape, took in times if may_have(shape, here.batch.num_reqs)}

    def _affords(self, here: Situation, shape: BlockShape, preparing: float) -> bool:
        """Whether what a run of steps may lose may be lost now."""
        loss = self._num_steps(here, shape) * self._loss(here, shape)
        return loss <= 0 or self._debt + preparing + loss < self._most(here)

    def _most(self, here: Situation) -> float:
        """Seconds that may be lost at once."""
        return SHARE * max(WINDOW, WINDOW_STEPS * here.plain)

    def _loss(self, here: Situation, shape: BlockShape) -> float:
        """Seconds that a step may lose against plain decoding, with no draft accepted before any
        was verified.
        """
        if not here.plain or not shape.drafts:
            return 0.0
        known = here.acceptance.has_evidence
        tokens = here.acceptance.expected_tokens(shape) if known else 1.0
        return self._times.most(here.batch, shape) - here.plain * tokens

    def _look(self, here: Situation, ready: Callable[[BlockShape], bool]) -> None:
        """Decides the shape of the next steps."""
        # What took long once may have been disturbed, so it leaves room for a trial.
        preparing = 0.0 if here.shape.drafts else min(here.preparing, self._most(here) / 2)
        here.shape, here.steps, here.tries = PLAIN, 1, False
        acceptance, samples = here.acceptance, self._times.of(here.batch)
        seconds = self._seconds(here)
        if PLAIN not in seconds:
            return  # what all others are compared with
        here.plain = seconds[PLAIN]
        if news := self._news >= 1:
            self._news = 0.0
            acceptance.fade()
        allowed = (s for s in seconds if ready(s) and self._affords(here, s, preparing))
        pace = {shape: seconds[shape] / acceptance.expected_tokens(shape) for shape in allowed}
        if not pace:
            return
        best = here.shape = min(pace, key=pace.__getitem__)
        known = samples[best].seconds is not None and acceptance.has_evidence
        here.pays = best.drafts > 0 if known else None
        if news and not best.drafts and len(pace) > 1:
            here.shape = min((s for s in pace if s.drafts), key=pace.__getitem__)
        elif samples[best].seconds:
            # what measuring each of the others would cost
            costs = {
                s: self._num_steps(here, s)
                * max(seconds[s] * (1 - pace[best] / pace[s]), SHARE * seconds[best])
                + preparing * (s.drafts > 0)
                for s in pace
                if s != best
            }
            now = self._times.num_steps[here.batch]
            probe = max(costs, key=lambda s: (now - samples[s].step) / costs[s], default=best)
            if probe != best and self._spare >= costs[probe]:
                self._spare = 0.0
                here.shape = probe
        here.steps = self._num_steps(here, here.shape)
        here.tries = here.shape != best or not known

    def _num_steps(self, here: Situation, shape: BlockShape) -> int:
        """Steps in a row that measure a shape."""
        return ENOUGH + (not self._times.of(here.batch)[shape].last)
