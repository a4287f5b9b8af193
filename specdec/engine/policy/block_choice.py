"""How many drafts a step should have, in a chain or a tree: what decodes fastest, estimated while
decoding.

    speed(shape) = E[tokens](shape) / t(shape)
    E[tokens](shape) = 1 + sum over depths j of P(j drafts or more are accepted)

Plain decoding is the shape without drafts, and the first that is measured, so drafts that do not
pay are given up. What is measured, by the step's number of requests and whether any of them
samples, are the times, several steps in a row each, and the acceptance, which every step tells of
all shapes that its drafts contain. Some drafters tell what to expect before they draft, as those
that copy do (`BoundDrafter.expected_accepted`). Steps that expect more are then another kind of
steps: a sure copy gets a long block, and a text that repeats nothing gets none. A time that has not
been measured lies between those of steps that must be shorter and steps that must be longer, so a
batch of a new size begins with what others have shown. Once as many requests have come as a batch
has, what earlier texts have accepted counts little, and drafts that did not pay are tried. What is
slower is tried again now and then, within a share of the time. Whatever is tried, an account of
what it lost against plain decoding bounds what is lost over any few seconds. What is output does
not depend on the choice, except that probabilistic drafts draw other random tokens of the same
distribution.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import log2
from typing import NamedTuple

from specdec.base.blocks import BlockShape
from specdec.engine.capture.buckets import batch_bucket
from specdec.engine.policy.draft_acceptance import FIRST_GUESS, BlockAcceptance, Path
from specdec.engine.policy.shapes import may_have
from specdec.engine.policy.step_times import ENOUGH, StepSize, StepTimes

PROBING = 0.008
"""Share of the time that may go into measuring shapes that are not the best."""

WINDOW, WINDOW_STEPS = 5.0, 2500
"""Seconds, and plain steps where these take longer, over which drafts may lose at most twice `LOST`
against plain decoding.
"""
LOST = 0.008
"""Share of the time that drafts may lose on and on, and of the window at once."""

# drafts tried first, in a tree or without: many that are wrong cost much, and few tell little
_FIRST_TREE, _FEW = 7, 3
# of so many requests they are then looked at, over as many steps as that takes
_FIRST_REQUESTS = 16
_DEAR = 2  # times as long as a plain step, for which fewer are looked at
# steps that a shape is kept for longer when too few of its times are known yet, or it does better
# than expected
_PATIENCE = 12
_STEADY = 4  # steps before the choice is looked at again
# how many times as fast another k must seem to replace the one at work: less may be chance
_CLEARLY = 1.03
_PLAINLY = 1.01  # the same of plain decoding, to which little should be lost
_MIN_COST = 0.02  # of a step, for measuring one that seems to cost nothing


class Situation(NamedTuple):
    """What the best shape depends on, beside the texts.

    Attributes:
        sampled: a request has a temperature: its steps take longer and accept less.
        num_reqs: of the batch, as `batch_bucket` counts them.
        expected_accepted: the drafter's, by doublings of the tokens that it expects; 0 of one that
        has none.
    """

    sampled: bool
    num_reqs: int
    expected_accepted: int = 0

    @classmethod
    def of(cls, num_reqs: int, sampled: bool, expected_accepted: float) -> "Situation":
        """The situation of a batch that is expected to accept so many drafts of a request."""
        return cls(sampled, batch_bucket(num_reqs), int(log2(1 + expected_accepted)))

    @property
    def guess(self) -> float:
        """How likely a draft is accepted, by what the drafter expects: so likely that as many are
        accepted on average.
        """
        return 1 - 1 / (1.5 * 2**self.expected_accepted) if self.expected_accepted else FIRST_GUESS


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
class Run:
    """Steps of one shape in a row.

    Attributes:
        here: where it began; it ends when the situation is another one.
        shape: of their blocks.
        steps: how many are left until the choice is looked at again; less than 0 while more is to
            be learned.
        tokens: of a request, by step.
    """

    here: Situation
    shape: BlockShape
    steps: int
    tokens: list[float] = field(default_factory=list)


class BlockChoice:
    """Chooses the shape of every step's blocks.

    Args:
        arms: what to choose from, as `shapes` gives them.
        likeliest_first, forward_for_each: see `specdec.model.core.Drafter`.

    Attributes:
        arms: the same.
    """

    def __init__(
        self,
        arms: Sequence[BlockShape],
        *,
        likeliest_first: bool = False,
        forward_for_each: bool = False,
    ) -> None:
        self.arms = tuple(arms)
        self._likeliest_first, self._forward_for_each = likeliest_first, forward_for_each
        self._times: dict[Situation, StepTimes] = {}
        # until something new is measured
        self._estimates: dict[Situation, dict[BlockShape, float]] = {}
        self._spare = 0.0  # seconds that may go into probing
        self._tried = {BlockShape(0)}  # shapes whose time was measured for any batch
        self.forget_acceptance()

    def forget_acceptance(self) -> None:
        """Drafts are accepted otherwise from now on; steps take as long as before."""
        # by whether a request samples, and what is expected
        self._acceptance: dict[tuple[bool, int], BlockAcceptance] = {}
        # whether of requests that sample, too little is known of what they accept
        self._untaught = {False, True}
        self._at_work: dict[Situation, BlockShape] = {}  # what was found best
        self._runs: dict[Situation, Run] = {}  # by what is expected, of the batch at work
        self._debt = 0.0  # seconds that were lost lately
        self._news = 0.0  # batches of requests that have come since drafts were verified
        self._at_stake = 0.0  # what the step that was chosen last may lose
        self._losses: dict[tuple[Situation, BlockShape], float] = {}  # of a step, to plain ones

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
        here = Situation.of(num_reqs, sampled, expected_accepted)
        self._news += fresh / num_reqs
        run = self._runs.get(here)
        if run is None or not self._goes_on(run):
            run = self._next_run(here, ready() if ready else lambda shape: True)
            same = {there: one for there, one in self._runs.items() if there[:2] == here[:2]}
            self._runs = same | {here: run}
        loss = self._risk(here, run.shape)
        # What the step before has lost may be unread.
        afforded = loss <= 0 or self._affords(here, loss + self._at_stake)
        if not afforded and self._affords(here, loss):
            run.steps += 1  # it waits for one step alone
        self._at_stake = max(0.0, loss) * afforded
        return run.shape if afforded else BlockShape(0)

    def estimates(self) -> list[Estimate]:
        """What the choice goes by, the fastest shapes of a situation first."""
        found = []
        for here, times in self._times.items():
            acceptance, measured = self._acceptance_in(here), times.measured()
            for shape, seconds in self._seconds(here).items():
                tokens = acceptance.expected_tokens(shape)
                expected, speed = 2**here.expected_accepted - 1, here.num_reqs * tokens / seconds
                step = str(shape), 1000 * seconds, shape in measured, tokens, speed
                found.append(Estimate(here.num_reqs, here.sampled, expected, *step))
        return sorted(found, key=lambda one: (*one[:3], -one.tokens_per_second))

    def put_off(self) -> None:
        """The step that was chosen last has no drafts, and so loses nothing; it is due again."""
        self._at_stake = 0.0

    def _goes_on(self, run: Run) -> bool:
        """Counts one more step of a run, unless it has come to its end."""
        run.steps -= 1
        if run.steps > 0 or run.steps <= -_PATIENCE:
            return run.steps > 0
        return run.shape not in self._times_of(run.here).measured() or self._promises(run)

    def _affords(self, here: Situation, loss: float) -> bool:
        """Whether so many seconds may be lost now."""
        return self._debt + loss < self._most(here)

    def _most(self, here: Situation) -> float:
        """Seconds that may be lost at once."""
        plain = self._times_of(here).measured().get(BlockShape(0), 0.0)
        return LOST * max(WINDOW, WINDOW_STEPS * plain)

    def _risk(self, here: Situation, shape: BlockShape) -> float:
        """Seconds that a step may lose against plain decoding: as the last of its kind, or no
        faster than its rows one by one.
        """
        if not shape.drafts or (here, shape) in self._losses:
            return self._losses.get((here, shape), 0.0)
        seconds = self._seconds(here)
        known = shape if shape in self._tried and shape in seconds else None
        if known is None:
            smaller = (
                one for one in seconds if one in self._tried and one.mean_rows < shape.mean_rows
            )
            known = max(smaller, key=_rows, default=None)
        if known is None:
            return 0.0
        return self._loss(here, shape, seconds[known] * shape.mean_rows / known.mean_rows)

    def _loss(self, here: Situation, shape: BlockShape, took: float) -> float:
        """Seconds that a step which takes so long loses against plain decoding, with no draft
        accepted before any was verified.
        """
        plain = self._times_of(here).measured().get(BlockShape(0))
        if plain is None:
            plain = self._seconds(here).get(BlockShape(0), took)
        acceptance = self._acceptance_in(here)
        tokens = acceptance.expected_tokens(shape) if acceptance.has_evidence else 1.0
        return took - plain * tokens

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
        """
        here = Situation.of(num_reqs, sampled, expected_accepted)
        self._acceptance_in(here).observe(shape, num_accepted, paths)
        run = self._runs.get(here)
        if run is not None and run.shape == shape and num_accepted:
            run.tokens.append(1 + sum(num_accepted) / len(num_accepted))
        if seconds is not None:
            self._spare += PROBING * seconds
            times = self._times_of(here)
            known = times.num_measured
            times.observe(shape, seconds)
            if times.num_measured != known:
                self._estimates.clear()
            self._account(here, shape, seconds)

    def _account(self, here: Situation, shape: BlockShape, seconds: float) -> None:
        """Enters a step, whose time counts undisturbed where it is known."""
        times, loss = self._times_of(here).measured(), 0.0
        if shape in times:
            self._tried.add(shape)
        if shape.drafts:
            loss = self._losses[here, shape] = self._loss(here, shape, times.get(shape, seconds))
        self._debt = min(max(0.0, self._debt + loss - LOST * seconds), 2 * self._most(here))

    def _promises(self, run: Run) -> bool:
        """Whether steps of a shape that seemed slower were faster: few requests need more of them
        to show that it is no chance.
        """
        at_work = self._at_work.get(run.here, run.shape)
        seconds = self._seconds(run.here)
        if run.shape == at_work or not run.tokens or at_work not in seconds:
            return False
        speed = self._acceptance_in(run.here).expected_tokens(at_work) / seconds[at_work]
        return sum(run.tokens) / len(run.tokens) > _CLEARLY * speed * seconds[run.shape]

    def _next_run(self, here: Situation, ready: Callable[[BlockShape], bool]) -> Run:
        times, acceptance = self._times_of(here), self._acceptance_in(here)

        @cache
        def may(shape: BlockShape) -> bool:
            if not ready(shape):
                return False
            risk = self._risk(here, shape)
            return risk <= 0 or self._affords(here, risk)

        seconds = {shape: took for shape, took in self._seconds(here).items() if may(shape)}
        if not seconds:
            return Run(here, BlockShape(0), ENOUGH)  # what all others are compared with
        if not here.expected_accepted and here.sampled in self._untaught and times.measured():
            first, steps = self._first(here, _FIRST_TREE, may), _FIRST_REQUESTS // here.num_reqs
            if not acceptance.has_evidence and first.is_tree:
                return Run(here, first, ENOUGH)
            if first.drafts:
                self._untaught.discard(here.sampled)
            if not first.is_tree:
                return Run(here, first, max(ENOUGH, steps))
            if seconds.get(first, 0.0) > _DEAR * seconds[BlockShape(0)]:
                first = self._first(here, _FEW, may)
            return Run(here, first, max(1, steps - ENOUGH - 1))
        if news := self._news >= 1:
            self._news = 0.0
            acceptance.fade()
        tokens = {shape: acceptance.expected_tokens(shape) for shape in seconds}
        pace = {shape: took / tokens[shape] for shape, took in seconds.items()}
        fastest = min(pace, key=pace.__getitem__)
        at_work = self._at_work.get(here, fastest)
        clearly = _CLEARLY if fastest.drafts else _PLAINLY
        if at_work not in pace or pace[at_work] > clearly * pace[fastest]:
            at_work = fastest
        self._at_work[here] = at_work
        if news:
            drafted = [shape for shape in seconds if shape.drafts]
            if drafted and not at_work.drafts:
                return Run(here, min(drafted, key=pace.__getitem__), ENOUGH)
        if at_work in times.measured():
            # What measuring each of the others would cost.
            costs = {
                shape: (ENOUGH + times.is_cold(shape))
                * max(took * (1 - pace[at_work] / pace[shape]), _MIN_COST * seconds[at_work])
                for shape, took in seconds.items()
                if shape != at_work
            }
            probe = max(costs, key=lambda shape: times.age(shape) / costs[shape], default=at_work)
            if probe != at_work and self._spare >= costs[probe]:
                self._spare = 0.0
                return Run(here, probe, ENOUGH)
        return Run(here, at_work, _STEADY)

    def _first(self, here: Situation, most: int, may: Callable[[BlockShape], bool]) -> BlockShape:
        """What tells most about all others for little: a tree of up to so many drafts, or a chain;
        none where none may be had.
        """
        drafted = (shape for shape in self.arms if shape.drafts and may(shape))
        small = [shape for shape in drafted if shape.drafts <= (most if shape.is_tree else _FEW)]
        few = [shape for shape in small if not shape.budget and may_have(shape, here.num_reqs)]
        return max(few, key=lambda shape: (shape.is_tree, shape.drafts), default=BlockShape(0))

    def _seconds(self, here: Situation) -> Mapping[BlockShape, float]:
        """Time of a step by the shape of its blocks,
        as far as there is anything to tell it from.
        """
        times = self._times_of(here)
        estimated = self._estimates.get(here)
        if estimated is None:
            known = {
                StepSize(there.num_reqs, shape, self._forward_for_each): took
                for there, one in sorted(
                    self._times.items(),
                    key=lambda item: item[0].expected_accepted == here.expected_accepted,
                )
                if there.sampled == here.sampled
                for shape, took in one.measured().items()
            }
            estimated = self._estimates[here] = {}
            least = {True: 0.0, False: 0.0}  # of trees and chains: that of fewer drafts
            for shape in sorted(self._shapes(here, known)):
                size = StepSize(here.num_reqs, shape, self._forward_for_each)
                if (took := size.estimate(known)) is not None:
                    if not shape.budget:
                        took = least[shape.is_tree] = max(took, least[shape.is_tree])
                    estimated[shape] = took
        return {
            shape: max(took, 1e-9) for shape, took in sorted((estimated | times.measured()).items())
        }

    def _shapes(self, here: Situation, known: Mapping[StepSize, float]) -> list[BlockShape]:
        """Chains, and trees of at most four times the rows of those that have been tried: the time
        of a much larger one would be a guess. Before any they have at most as many rows as chains
        had.
        """
        rows = max(
            (step.shape.mean_rows * (4 if step.shape.is_tree else 1) for step in known), default=0
        )
        fit = (shape for shape in self.arms if may_have(shape, here.num_reqs))
        return [shape for shape in fit if shape.budget or not shape.is_tree or shape.rows <= rows]

    def _acceptance_in(self, here: Situation) -> BlockAcceptance:
        kind = here.sampled, here.expected_accepted
        if kind not in self._acceptance:
            self._acceptance[kind] = BlockAcceptance(
                self.arms,
                sampled=here.sampled,
                likeliest_first=self._likeliest_first,
                guess=here.guess,
            )
        return self._acceptance[kind]

    def _times_of(self, here: Situation) -> StepTimes:
        if here not in self._times:
            self._times[here] = StepTimes(self.arms)
        return self._times[here]


def _rows(shape: BlockShape) -> float:
    return shape.mean_rows
