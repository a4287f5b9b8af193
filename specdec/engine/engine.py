"""The decoding step: schedule, draft, verify, accept, commit.

Invariant: before a step, a request has L tokens whose KV is in the cache and one *anchor* token at
position L whose KV is not.

    prefill  target scores the prompt in chunks   -> KV of L tokens, features for the drafter, the first anchor
    draft    drafter proposes                     -> a block: a chain or a tree of k drafts (`base.blocks`)
    verify   target scores anchor and drafts      -> logits of k+1 rows, features, KV at L .. L+k
    accept   longest acceptable path, a drafts    -> then one recovered or bonus token, the next anchor
    commit   the path's KV lie at L .. L+a        -> L += a + 1; rows of other drafts lie where the next step writes

Plain decoding is a block without drafts. From draft to commit every value stays on the device and
every shape is known beforehand, so the host never waits, and an accelerator can replay the step as
one graph. One copy per step brings the results back; on an accelerator they are read while the next
step runs.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.engine.build import build_engine
from specdec.engine.policy.block_choice import BlockChoice, ladder
from specdec.engine.policy.timing import StepClock
from specdec.engine.requests.admission import Admission, OnTokens
from specdec.engine.requests.outcome import take_over
from specdec.engine.requests.request import Request, Status
from specdec.engine.requests.scheduler import Chunk, Schedule
from specdec.engine.requests.second_try import SecondTries
from specdec.engine.results import ResultQueue
from specdec.engine.selection import Selection
from specdec.engine.slots import samples_first_token
from specdec.grammar.compiler import GrammarCompiler, wait_for
from specdec.kv_cache import PrefixCounts
from specdec.model.core import Drafter, Verifier
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
        shapes: of the blocks that steps may have.
        block_choice: chooses the shape of every step; None when it is fixed.
        guided_choice: the same for batches in which an output follows a grammar, whose steps take
            longer and accept otherwise.
        admission: makes and checks requests.
        runner: launches the work of a step; holds what is captured.
        second_tries: of requests whose logits were not finite.
        spare_work: what makes later steps faster, to be done one by one while there are no
            requests.
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
        self.shapes = parts.shapes
        self.drafter = drafter if self.num_draft_tokens else None
        self.max_model_len, self.pipeline_depth = parts.max_model_len, parts.pipeline_depth
        self.timer, self.kv_cache, self.pool = parts.timer, parts.kv_cache, parts.pool
        self.scheduler, self.slots, self.runner = parts.scheduler, parts.slots, parts.runner
        self.spare_work: deque[Callable[[], None]] = deque()
        self.second_tries = SecondTries(self.scheduler, self.pool, self.kv_cache)
        self.block_choice = self._new_choice()
        self.guided_choice = self._new_choice()
        self.clock = StepClock(verifier.device)
        self.results = ResultQueue(self.clock)
        self._outlook = 0.0  # of the step that is launched next
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
            seed=config.seed,
        )

    def _new_choice(self) -> BlockChoice | None:
        """What chooses the shape of blocks; None when it is fixed."""
        if len(self.shapes) == 1 or not self.drafter:
            return None
        drafter = self.drafter
        return BlockChoice(
            self.shapes,
            likeliest_first=drafter.likeliest_first,
            forward_for_each=drafter.forward_for_each,
        )

    @property
    def num_draft_tokens(self) -> int:
        """Most positions for which a step has drafts."""
        return max(shape.depth for shape in self.shapes)

    @property
    def k(self) -> int | str:
        """Drafts per step: a number of a chain, "tree N", or "auto" where their shape is chosen
        step by step.
        """
        if self.block_choice:
            return "auto"
        return str(self.shapes[0]) if self.shapes[0].is_tree else self.num_draft_tokens

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
            shape, work = self._schedule()
        if work.prefill:
            self._prefill(work.prefill)
        if work.prefill or not work.decode:
            self._previous_end = None
        if not work.decode:
            return self.pipeline_depth if work.prefill else 0
        batch = self.slots.select(work.decode)
        self._decode(batch, shape)
        return 0 if batch.plan.guided else self.pipeline_depth

    def _schedule(self) -> tuple[BlockShape, Schedule]:
        """The shape of blocks and the work of the next step."""
        while True:
            batch = self._ready_batch()
            shape = self._shape(batch)
            work = self.scheduler.schedule(batch.requests, shape.drafts)
            if work is not None:
                return shape, work
            self._read_results()

    def _ready_batch(self) -> Selection:
        """The requests that can decode now."""
        batch = self.slots.select(self.scheduler.decoding)
        if not batch.plan.guided or not self.results:
            return batch
        self._read_results()  # what may follow depends on what they bring
        return self.slots.select(self.scheduler.decoding)

    def _shape(self, batch: Selection) -> BlockShape:
        """Shape of blocks for a step of a batch: fixed or what pays most; a chain is shorter when
        none has room for it.
        """
        requests, shape, choice = batch.requests, self.shapes[-1], self._choice(batch)
        if self.second_tries.concern(requests):
            return BlockShape(0)
        if choice and requests:
            self._outlook = self.runner.outlook(batch, self.num_draft_tokens)
            shape = choice.choose(
                len(requests),
                sampled=batch.sampled,
                outlook=self._outlook,
                ready=partial(self.runner.ready, batch),
            )
        if shape.is_tree and (
            not self.block_choice or self.scheduler.has_room(requests, shape.drafts)
        ):
            return shape  # what reaches too far is cut off
        k = shape.depth
        # the first one has, nearly always
        if not any(request.num_left >= k for request in requests):
            k = max((request.num_left for request in requests), default=0)
        # few values, so that each is measured and captured
        if self.block_choice or self.runner.graphs:
            k = next(rung for rung in ladder(self.num_draft_tokens) if rung >= k)
        return BlockShape(k)

    def _choice(self, batch: Selection) -> BlockChoice | None:
        """What chooses the shape of a batch's steps."""
        return self.guided_choice if batch.plan.guided else self.block_choice

    def _look_at_grammars(self) -> None:
        """Lets requests begin whose grammars are compiled; waits a moment for one when there is
        nothing else to do.
        """
        if not self.scheduler.working and all(
            not request.may_start for request in self.scheduler.waiting
        ):
            wait_for(
                [request.grammar.compiled for request in self._compiling if request.grammar],
                IDLE_SECONDS,
            )
        waiting = [request for request in self._compiling if request.grammar]  # others have ended
        self._compiling = [request for request in waiting if not request.may_start]
        for request in waiting:
            if request.may_start and request.grammar and (error := request.grammar.error):
                request.fail(error)
                self._finish(request, "error")

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Launches the prefill of prompt chunks, and the first token of every prompt that ends
        among them.
        """
        for request in self.runner.begin([chunk.request for chunk in chunks if chunk.admitted]):
            self._finish(request, "error")
        chunks = [chunk for chunk in chunks if chunk.request.status is not Status.FINISHED]
        if not chunks:
            return
        self.second_tries.admitted(chunks)
        table, scored = self.runner.prefill(chunks)
        newly_started = [chunk.request for chunk in chunks if samples_first_token(chunk)]
        rows = [(chunk.request.slot, self.scheduler.prefilled(chunk)) for chunk in chunks]
        self.runner.copy_states([(slot, row) for slot, row in rows if row is not None])
        for request in newly_started:
            request.num_unread += 1
        if table is not None or scored is not None:
            self.results.send(Selection(newly_started), None, table, scored=scored)

    def _decode(self, batch: Selection, shape: BlockShape) -> None:
        """Launches a decode step."""
        shape, context = self.runner.due(batch, shape)
        self.runner.copy_states(self.scheduler.prefix.copies(batch.requests))
        table, start = self.runner.decode(batch, shape, self.clock, self._previous_end, context)
        most = shape.depth + 1
        for request in batch.requests:
            request.num_unread += 1
            request.num_in_flight += most
        with self.timer.phase("collect"):
            self._previous_end = self.results.send(
                batch, shape, table, start, context=context, outlook=self._outlook
            )
        self.timer.count_step(shape)
        self.second_tries.launched(batch.requests)

    def _read_results(self, leave: int = 0) -> None:
        """Takes over results, oldest first, until only `leave` launched steps are unread."""
        again = False
        for step in self.results.receive(leave):
            if step.scored:
                step.scored.take_over()
                for request, _ in step.scored.requests:
                    # others are in a batch, see `take_over`
                    if request.error and request.status is Status.PREFILLING:
                        self._finish(request, "error")
            outcome = take_over(step)
            self._touched.update(dict.fromkeys(outcome.requests))
            for request, start in zip(outcome.filled, outcome.starts, strict=True):
                self.scheduler.prefix.committed(
                    request, start, step.context, plain=step.shape == BlockShape(0)
                )
            for request, reason in outcome.ended:
                self._finish(request, reason)
            for request in outcome.spoiled:
                if self.second_tries.send_back(request):
                    again = True
                else:
                    self._finish(request, "error", spoiled=True)
            batch, choice = step.selection, self._choice(step.selection)
            if choice and step.shape is not None:
                choice.observe(
                    len(batch.requests),
                    step.shape,
                    outcome.num_accepted,
                    step.seconds,
                    sampled=batch.sampled,
                    outlook=step.outlook,
                    paths=outcome.paths,
                )
        if again:  # what is unread of who was sent back has to be read before it begins again
            self._read_results()

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
