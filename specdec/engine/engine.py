"""The decoding step: schedule, draft, verify, accept, commit.

Invariant: before a step, a request has L tokens whose KV is in the cache and one *anchor* token at
position L whose KV is not.

    prefill  target scores the prompt in chunks  -> KV of L tokens, features for the drafter, and
                                                    the first anchor
    draft    drafter proposes                    -> a block: a chain or a tree of k drafts
                                                    (`base.blocks`)
    verify   target scores anchor and drafts     -> logits of k+1 rows, features, KV at L .. L+k
    accept   longest acceptable path, a drafts   -> then one recovered or bonus token, the next
                                                    anchor
    commit   the path's KV lie at L .. L+a       -> L += a + 1; rows of other drafts lie where the
                                                    next step writes

Plain decoding is a block without drafts. From draft to commit every value stays on the device and
every shape is known beforehand, so the host never waits, and an accelerator can replay the step as
one graph. One copy per step brings the results back; on an accelerator they are read while the next
step runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.engine.build import build_engine
from specdec.engine.launch import Launch, ResultQueue, ScoredPrompts
from specdec.engine.policy.planner import Planner
from specdec.engine.policy.timing import StepClock
from specdec.engine.requests.admission import Admission, OnTokens
from specdec.engine.requests.outcome import take_over
from specdec.engine.requests.reading import Reading
from specdec.engine.requests.request import Request, Status
from specdec.engine.requests.scheduler import Chunk
from specdec.engine.requests.second_try import SecondTries
from specdec.engine.selection import Selection
from specdec.engine.slots import samples_first_token
from specdec.grammar.compiler import GrammarCompiler, wait_for
from specdec.kv_cache import PrefixCounts
from specdec.model.core import Drafter, Verifier
from specdec.model.weights import Exchange
from specdec.sampling.params import SamplingParams

IDLE_SECONDS = 0.02
"""How long a step without work waits for a grammar to be compiled, before it looks for new
requests.
"""


class SpecEngine:
    """Continuous batching of requests through one target and at most one drafter. One thread at a
    time; see `Session`.

    Args:
        verifier: the target.
        drafter: proposes drafts; None decodes plainly.
        config: limits and choices.
        grammars: compiles those of requests, for the target's tokenizer; None refuses requests with
            a grammar.

    Raises:
        SpecDecError: see `specdec.engine.build.build_engine`.

    Attributes:
        planner: decides the shape of every step's blocks.
        admission: makes and checks requests.
        runner: launches the work of a step; holds what is captured.
        reading: says what the drafter takes over.
        second_tries: of requests whose logits were not finite.
        idle_work: what makes later steps faster, to be done one by one while there are no
            requests.
        staged: other weights of the drafter, for `exchange`.
        last_step: the last decode step whose results were read.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: Drafter | None = None,
        config: EngineConfig | None = None,
        grammars: GrammarCompiler | None = None,
    ) -> None:
        self.config = config = config or EngineConfig()
        parts = build_engine(verifier, drafter, config, SpecEngine)
        self.verifier = verifier
        self.drafter = drafter if any(shape.drafts for shape in parts.shapes) else None
        self.max_model_len, self.pipeline_depth = parts.max_model_len, parts.pipeline_depth
        self.timer, self.kv_cache, self.pool = parts.timer, parts.kv_cache, parts.pool
        self.scheduler, self.slots, self.runner = parts.scheduler, parts.slots, parts.runner
        self.idle_work: deque[Callable[[], None]] = deque()
        self.staged: Exchange | None = None
        self.last_step: Launch | None = None
        self.second_tries = SecondTries(self.scheduler, self.pool, self.kv_cache)
        self.reading = Reading(
            self.runner,
            self.scheduler,
            late=self.drafter is not None and self.drafter.reads_late,
            max_rows=max(shape.rows for shape in parts.shapes),
        )
        self.planner = Planner(
            parts.shapes, self.drafter, self.runner, self.scheduler, self.second_tries
        )
        self.clock = StepClock(verifier.device)
        self.results = ResultQueue(self.clock)
        self._previous_end: Any = None  # stamp of the last step's end, if nothing has come since
        self._touched: dict[Request, None] = {}  # in the order in which they had news
        self._compiling: list[Request] = []  # requests whose grammars may not be ready yet
        self.admission = Admission(
            verifier,
            max_model_len=self.max_model_len,
            block_size=self.kv_cache.block_size,
            num_blocks=self.pool.num_blocks - 1,
            overshoot=parts.overshoot,
            grammars=grammars,
            check_drafts=self.planner.limits.check,
            predicts=bool(self.drafter) and config.draft_sampling != "probabilistic",
            seed=config.seed,
        )

    @property
    def num_draft_tokens(self) -> int:
        """Most positions for which a step has drafts."""
        return self.planner.num_draft_tokens

    @property
    def k(self) -> int | str:
        """Drafts per step: a number of a chain, "tree N", "B of" either, or "auto" where their
        shape is chosen step by step, "auto with budgets" where some have one.
        """
        if self.planner.choice:
            return "auto with budgets" if self.runner.budget else "auto"
        shape = self.planner.shapes[0]
        return str(shape) if shape.is_tree or shape.budget else shape.depth

    @property
    def prefix_counts(self) -> PrefixCounts:
        """Tokens of all requests so far that were looked for in the cache, and found there."""
        return self.scheduler.prefix.counts

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.waiting or self.scheduler.working or len(self.results))

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Request:
        """Queues a request; `step` works on it. See `new_request`."""
        request = self.new_request(prompt_token_ids, sampling, on_tokens=on_tokens)
        self.enqueue(request)
        return request

    def enqueue(self, request: Request) -> None:
        """Queues what `new_request` has made."""
        self.scheduler.add(request)
        if request.grammar is not None:
            self._compiling.append(request)

    def new_request(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        on_tokens: OnTokens | None = None,
    ) -> Request:
        """A request that is not queued yet; see `Admission.new_request`."""
        return self.admission.new_request(prompt_token_ids, sampling or SamplingParams(), on_tokens)

    def abort(self, request: Request) -> None:
        """Ends a request with what it has; does nothing when it is finished."""
        if request.status is not Status.FINISHED:
            self._finish(request, "cancelled")

    def reset(self) -> None:
        """Forgets all requests, results, cached prefixes and past outputs, as after an error in the
        midst of a step.
        """
        for request in [*self.scheduler.waiting, *self.scheduler.working]:
            request.status, request.finish_reason = Status.FINISHED, "error"
            if request.grammar is not None:
                request.grammar.leave()
        self.pool.reset()
        self.scheduler.reset()
        self.results.reset()
        self.second_tries.reset()
        self._touched.clear()
        self._compiling.clear()
        self._previous_end = None
        if self.runner.drafter:
            self.runner.drafter.forget()  # last, for a device that is lost refuses it

    @torch.inference_mode()
    def exchange(self, weights: Exchange) -> None:
        """Goes on with other weights of the drafter; runs between steps. Requests in work are
        prefilled again, and what was cached with the old weights is not used again.
        """
        self._read_results()
        for request in list(self.scheduler.working):
            self.scheduler.send_back(request)
        self.pool.reset()
        weights.apply()
        self.staged = None
        self.planner.forget_acceptance()
        self._previous_end = None

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Launches the next step and reads the results that are due.

        Returns:
            Requests that have new tokens or have finished since the last call.
        """
        leave = self._launch()
        with self.timer.phase("collect"):
            self._read_results(leave)
        touched, self._touched = self._touched, {}
        return list(touched)

    def _launch(self) -> int:
        """Launches the next step; gives how many launched steps may stay unread."""
        if self._compiling:
            self._look_at_grammars()
        with self.timer.phase("schedule"):
            chunks, launch = self._schedule()
        if chunks:
            self._prefill(chunks, reads=launch.reads)
        if launch.requests:
            self._decode(launch)
            return 0 if launch.selection.plan.guided else self.pipeline_depth
        self._previous_end = None
        return self.pipeline_depth if chunks else 0

    def _schedule(self) -> tuple[list[Chunk], Launch]:
        """The prefill and the decode step that are launched next."""
        while True:
            launch = self._plan(self._ready_batch())
            work = self.scheduler.schedule(launch.requests, launch.shape.drafts)
            if work is not None:
                launch.selection = self.slots.select(work.decode)
                launch.start = None if work.prefill else self._previous_end
                return work.prefill, launch
            self._make_room()

    def _make_room(self) -> None:
        """Reads the results without which no work can be scheduled."""
        self._read_results()

    def _ready_batch(self) -> Selection:
        """The requests that can decode now."""
        batch = self.slots.select(self.scheduler.decoding)
        if not batch.plan.guided or not self.results:
            return batch
        self._read_results()  # what may follow depends on what they bring
        return self.slots.select(self.scheduler.decoding)

    def _plan(self, batch: Selection) -> Launch:
        """See `Planner.plan`."""
        return self.planner.plan(batch)

    def _look_at_grammars(self) -> None:
        """Lets requests begin whose grammars are compiled; waits a moment for one when there is
        nothing else to do.
        """
        if not self.scheduler.working and all(
            not request.may_start for request in self.scheduler.waiting
        ):
            futures = [request.grammar.compiled for request in self._compiling if request.grammar]
            wait_for(futures, IDLE_SECONDS)
        waiting = [request for request in self._compiling if request.grammar]  # others have ended
        self._compiling = [request for request in waiting if not request.may_start]
        for request in waiting:
            if request.may_start and request.grammar and (error := request.grammar.error):
                request.fail(error)
                self._finish(request, "error")

    def _prefill(self, chunks: list[Chunk], *, reads: bool) -> None:
        """Launches the prefill of prompt chunks, and the first token of every prompt that ends
        among them.
        """
        for request in self.runner.begin([chunk.request for chunk in chunks if chunk.admitted]):
            self._finish(request, "error")
        chunks = [chunk for chunk in chunks if chunk.request.status is not Status.FINISHED]
        if not chunks:
            return
        self.second_tries.admitted(chunks)
        reads = self.reading.prefill(chunks, wanted=reads)
        table, scored = self.runner.prefill(chunks, reads=reads)
        newly_started = [chunk.request for chunk in chunks if samples_first_token(chunk)]
        rows = [(chunk.request.slot, self.scheduler.prefilled(chunk)) for chunk in chunks]
        self.runner.copy_states([(slot, row) for slot, row in rows if row is not None])
        for request in newly_started:
            request.num_unread += 1
        if table is not None or scored is not None:
            self.results.send(Launch(Selection(newly_started), None, table=table, scored=scored))

    def _decode(self, launch: Launch) -> None:
        """Launches a decode step."""
        self.reading.plan(launch)
        self.runner.copy_states(self.scheduler.prefix.copies(launch.requests))
        self.runner.decode(launch, self.clock)
        most = launch.shape.depth + 1
        for request in launch.requests:
            request.num_unread += 1
            request.num_in_flight += most
        with self.timer.phase("collect"):
            self.results.send(launch)
        self._previous_end = launch.end
        self.timer.count_step(launch.shape)
        self.second_tries.launched(launch.requests)

    def _read_results(self, leave: int = 0) -> None:
        """Takes over results, oldest first, until only `leave` launched steps are unread."""
        again = False
        for launch in self.results.receive(leave):
            if launch.scored:
                self._take_scores(launch.scored)
            outcome = take_over(launch)
            self.last_step = launch if launch.block is not None else self.last_step
            self._touched.update(dict.fromkeys(outcome.requests))
            for request, start in zip(outcome.filled, outcome.starts, strict=True):
                plain = launch.block == BlockShape(0)
                self.scheduler.prefix.committed(request, start, launch.context, plain=plain)
            for request, reason in outcome.ended:
                self._finish(request, reason)
            for request in outcome.spoiled:
                if self.second_tries.send_back(request):
                    again = True
                else:
                    self._finish(request, "error", spoiled=True)
            self.planner.learn(launch, outcome)
        if again:  # what is unread of who was sent back has to be read before it begins again
            self._read_results()

    def _take_scores(self, scored: ScoredPrompts) -> None:
        """Adds log-probabilities of prompt tokens."""
        scored.take_over()
        for request, _ in scored.requests:
            # others are in a batch, see `take_over`
            if request.error and request.status is Status.PREFILLING:
                self._finish(request, "error")

    def _finish(self, request: Request, reason: str, *, spoiled: bool = False) -> None:
        """Takes a request out; what it has written to the cache is of no use where it is
        `spoiled`.
        """
        if request.grammar is not None:
            request.grammar.leave()
        request.finish_reason, request.grammar = reason, None
        self._touched[request] = None
        self.second_tries.forget(request)
        blocks = list(request.block_ids)
        freed = self.scheduler.finish(request)
        if spoiled:
            self.second_tries.take_back(blocks, freed)
