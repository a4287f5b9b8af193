"""Which blocks a step has: a fixed shape, or the one that pays most."""

from collections.abc import Sequence
from functools import partial

from specdec.base.blocks import BlockShape
from specdec.engine.launch import Launch
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.limits import DraftLimits
from specdec.engine.policy.shapes import ladder
from specdec.engine.requests.outcome import Outcome
from specdec.engine.requests.scheduler import Scheduler
from specdec.engine.requests.second_try import SecondTries
from specdec.engine.selection import Selection
from specdec.engine.step import StepRunner
from specdec.model.core import Drafter


class Planner:
    """Decides the shape of blocks, and learns from what came of it.

    Args:
        shapes: of the blocks that steps may have; the last where nothing is chosen.
        drafter: None decodes plainly.
        runner, scheduler, second_tries: of the engine.

    Attributes:
        shapes: the same.
        limits: most drafts of a step.
        num_draft_tokens: most positions for which a step has drafts.
        choice: chooses the shape of every step; None when it is fixed.
        guided_choice, predicted_choice: the same for batches in which an output follows a grammar,
            or has a prediction: their steps take longer and accept otherwise.
    """

    def __init__(
        self,
        shapes: Sequence[BlockShape],
        drafter: Drafter | None,
        runner: StepRunner,
        scheduler: Scheduler,
        second_tries: SecondTries,
    ) -> None:
        self.shapes = tuple(shapes)
        self.limits = DraftLimits.of_shapes(shapes)
        self.num_draft_tokens = self.limits.depth
        self._reads_late = drafter is not None and drafter.reads_late
        self._runner, self._scheduler, self._second_tries = runner, scheduler, second_tries
        self._last: Selection | None = None  # for which a shape was chosen
        self.choice: BlockChoice | None = None
        self.guided_choice: BlockChoice | None = None
        self.predicted_choice: BlockChoice | None = None
        if len(self.shapes) > 1 and drafter:
            new = partial(
                BlockChoice,
                likeliest_first=drafter.likeliest_first,
                forward_for_each=drafter.forward_for_each,
            )
            self.choice = new(self.shapes)
            whole = [shape for shape in self.shapes if not shape.budget]
            self.guided_choice, self.predicted_choice = new(whole), new(whole)

    def plan(self, batch: Selection) -> Launch:
        """A step of `batch`. A chain is shorter when no request has room for it."""
        requests, choice = batch.requests, self._choice(batch)
        launch = Launch(batch, self.shapes[-1], reads=self._reads(batch, choice))
        if self._second_tries.concern(requests):
            launch.block = BlockShape(0)
            return launch
        if choice and requests:
            launch.expected_accepted = self._runner.expected_accepted(batch, self.num_draft_tokens)
            launch.block = choice.choose(
                len(requests),
                sampled=batch.sampled,
                expected_accepted=launch.expected_accepted,
                fresh=self._fresh(batch),
                ready=partial(self._runner.ready, batch),
            )
            launch.tries = choice.tries
        if batch.plan.limited and requests:
            limits = self.limits.joined(request.sampling for request in requests)
            budget = 0.0 if choice else launch.shape.budget
            launch.block = limits.fit(launch.shape, self.shapes)._replace(budget=budget)
        shape = launch.shape
        # what of a tree reaches too far is cut off
        if not shape.is_tree or (
            self.choice and not self._scheduler.has_room(requests, shape.drafts)
        ):
            k = self._length(shape.depth, batch)
            launch.block = BlockShape(k, budget=shape.budget if shape.budget < k else 0.0)
        return launch

    def _reads(self, batch: Selection, choice: BlockChoice | None) -> bool:
        """Whether the drafter should read prompts that are prefilled now."""
        waiting, scheduler = self._scheduler.waiting, self._scheduler
        if choice is None or not self._reads_late:
            return True
        num_reqs = min(len(scheduler.working) + len(waiting), scheduler.max_num_seqs)
        sampled = any(not request.plan.all_greedy for request in waiting[:1])
        return choice.pays(num_reqs, sampled=batch.sampled or sampled)

    def _fresh(self, batch: Selection) -> int:
        """How many requests were not in the batch before."""
        last, self._last = self._last, batch
        if last is batch:
            return 0
        known = {id(request) for request in last.requests} if last else set()
        return sum(id(request) not in known for request in batch.requests)

    def _length(self, k: int, batch: Selection) -> int:
        """Drafts of a chain, of which some request has room for all."""
        # the first one has, nearly always
        if not any(request.num_left >= k for request in batch.requests):
            k = max((request.num_left for request in batch.requests), default=0)
        # few values, so that each is measured and captured
        if self.choice or self._runner.graphs:
            k = next(rung for rung in ladder(self.num_draft_tokens) if rung >= k)
        return k

    def forget_acceptance(self) -> None:
        """The drafter has become another one; steps take as long as before."""
        for choice in (self.choice, self.guided_choice, self.predicted_choice):
            if choice:
                choice.forget_acceptance()

    def learn(self, launch: Launch, outcome: Outcome) -> None:
        """Takes over what a step took and accepted."""
        if launch.block is not None and (choice := self._choice(launch.selection)):
            choice.observe(
                len(launch.requests),
                launch.block,
                outcome.num_accepted,
                launch.seconds,
                sampled=launch.selection.sampled,
                expected_accepted=launch.expected_accepted,
                paths=outcome.paths,
                prepares=launch.prepares,
            )

    def _choice(self, batch: Selection) -> BlockChoice | None:
        if batch.plan.guided:
            return self.guided_choice
        return self.predicted_choice if batch.plan.predicted else self.choice
