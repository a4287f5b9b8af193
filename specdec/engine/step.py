"""The work of a step on the device: what `specdec.engine.engine` describes, launched whole or
replayed as a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specdec.base.blocks import BlockShape
from specdec.base.errors import InvalidInputError
from specdec.base.sizes import power_of_two
from specdec.engine.acceptance import accept, drawn, follow
from specdec.engine.agreement import agreed, same
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.capture.prefill_graphs import PrefillGraphs
from specdec.engine.guided import GuidedGraph, GuidedGraphs, GuidedStep, fill, put, run_guided
from specdec.engine.launch import Launch, ScoredPrompts
from specdec.engine.policy.block import Block
from specdec.engine.policy.budget import VerifyBudget
from specdec.engine.policy.limits import limit
from specdec.engine.policy.timing import StepClock, StepTimer
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk
from specdec.engine.selection import Selection
from specdec.engine.slots import SlotState, samples_first_token
from specdec.engine.step_table import result_table
from specdec.kv_cache import copy_states
from specdec.model.batch import Context, DecodeBatch, PrefillBatch
from specdec.model.cache_rows import CacheRows
from specdec.model.core import (
    AcceptOutput,
    BoundDrafter,
    DraftOutput,
    PredictedDrafter,
    Verifier,
    VerifyOutput,
)
from specdec.model.packing import Packing
from specdec.parallel.group import group_of
from specdec.sampling.logprobs import logprobs_of
from specdec.sampling.masks import TokenMasks
from specdec.sampling.tensors import SamplingPlan


class StepRunner:
    """Runs the target, the drafter and acceptance on batches of requests.

    Args:
        verifier: the target.
        drafter: of this run; None decodes plainly.
        caches: of the target's layers.
        aux_layer_ids: decoder layers of the target that the drafter taps.
        slots: state of the requests.
        timer: told when a phase begins and ends.
        max_rows: of a request in a step.
        trees: blocks may be trees.
        budget: shares out the rows of steps that do not verify all drafts; None where all do.
        predicted: makes the drafter of batches in which a request has a prediction.

    Attributes:
        host_may_look: the device is the host, see `BoundDrafter.host_may_look`; not where steps are
            captured, which go one way.
        graphs: the captured steps; None where steps are launched operation by operation.
        guided_graphs: the same of batches in which outputs follow a grammar.
        prefill_graphs: the captured prefills of short chunks; None where all are launched operation
            by operation.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: BoundDrafter | None,
        caches: Sequence[Any],
        aux_layer_ids: tuple[int, ...],
        slots: SlotState,
        timer: StepTimer,
        max_rows: int = 1,
        *,
        trees: bool = False,
        budget: VerifyBudget | None = None,
        predicted: Callable[[], PredictedDrafter] | None = None,
    ) -> None:
        self.verifier, self.drafter = verifier, drafter
        self._make_predicted = predicted
        self._predicted: PredictedDrafter | None = None
        self._rows = CacheRows(caches) if trees else None
        self.budget = budget
        self.host_may_look = slots.device.type == "cpu"
        self._max_pending = max_rows if drafter else 0
        self._group = group_of(verifier)
        self.graphs: StepGraphs | None = None
        self.guided_graphs: GuidedGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self._survival: Tensor | None = None
        self._caches, self._aux_layer_ids = caches, aux_layer_ids
        self._slots, self._timer = slots, timer

    def force(self, survival: Sequence[Sequence[float]]) -> None:
        """Accepts drafts at given rates, whatever the target says: output without meaning.

        Args:
            survival: [R, K], falling rates at which the first 1, 2, ... K drafts of a step are
                accepted together; a request with seed s has row s % R. In a tree they are those of
                the deepest path. Set before a step is captured.

        Raises:
            InvalidInputError: the target has weights that mean something.
        """
        if not self.verifier.random_weights:
            raise InvalidInputError(
                f"drafts cannot be accepted at given rates: {self.verifier.name!r} has weights of a"
                " checkpoint, and its output would be spoilt; give a target with random weights"
            )
        device = self._slots.device
        self._survival = torch.tensor(survival, dtype=torch.float64, device=device)

    def step(self, batch: DecodeBatch) -> tuple[DraftOutput | None, AcceptOutput]:
        """Draft, verify, accept, commit. Nothing in here waits for the device."""
        block = self.draft(batch)
        verify = self.verify(batch, block)
        return block.draft, self.accept(batch, block, verify)

    def draft(self, batch: DecodeBatch) -> Block:
        """The block of each request."""
        draft, packing, token_ids = None, None, batch.anchors[:, None]
        drafter = self._drafter_of(batch.sampling.plan)
        if drafter and batch.k:
            with self._timer.phase("draft"):
                draft = drafter.propose(batch)
                if not isinstance(draft, DraftOutput):
                    what = f"the drafter gave a {type(draft).__name__}"
                    raise InvalidInputError(f"{what}; propose must give a DraftOutput")
                draft.check(batch, self.verifier.vocab_size)
                if batch.sampling.plan.limited:
                    limit(draft, batch)
                token_ids = torch.cat([token_ids, draft.token_ids], dim=1)  # [num_reqs, k+1]
                if batch.shape.budget:
                    packing = self._shared_out(batch, draft)
        positions = batch.row_positions(draft.tree if draft else None)
        return Block(token_ids, positions, draft, packing)

    def _shared_out(self, batch: DecodeBatch, draft: DraftOutput) -> Packing:
        """The rows that are verified; no other draft counts."""
        assert self.budget is not None, "blocks have budgets where the engine was built for them"
        total = batch.shape.verified(batch.num_reqs)
        drafts = same(self.budget.allot(batch, draft, total - batch.num_reqs), self._group)
        draft.num_drafts = (
            drafts if draft.num_drafts is None else torch.minimum(drafts, draft.num_drafts)
        )
        return Packing.of(drafts, batch.shape.rows, total)

    def verify(self, batch: DecodeBatch, block: Block) -> VerifyOutput:
        """The target's forward over the block."""
        with self._timer.phase("verify"):
            tree = block.draft.tree if block.draft else None
            rows = batch.verification(
                block.token_ids, tree, max_pending=self._max_pending, packing=block.packing
            )
            return self.verifier.forward(rows, self._caches, self._aux_layer_ids)

    def accept(
        self,
        batch: DecodeBatch,
        block: Block,
        verify: VerifyOutput,
        masks: TokenMasks | None = None,
    ) -> AcceptOutput:
        """Acceptance, and the commit. `masks` say which tokens are allowed; the logits are
        overwritten then.
        """
        token_ids, packing = block.token_ids, block.packing
        with self._timer.phase("accept"):
            logits = verify.logits if packing else verify.logits.view(*token_ids.shape, -1)
            forced = None
            if self._survival is not None:
                seeds = self._slots.sampling.seeds.index_select(0, batch.slots)
                forced = drawn(self._survival, seeds, batch.seq_lens)
            accepted = accept(
                token_ids,
                logits,
                block.draft,
                batch.sampling,
                block.positions,
                batch.shape.depth,
                masks,
                forced,
                packing,
            )
            accepted = agreed(accepted, self._group)
            if packing and block.draft and self.budget:
                self.budget.learn(batch, block.draft, packing, accepted)
            if accepted.path is not None:
                token_ids, verify = self._follow(batch, accepted.path, token_ids, verify, packing)
            elif packing and verify.aux_hidden is not None:
                hidden = packing.unpack(verify.aux_hidden).flatten(0, 1)
                verify = VerifyOutput(verify.logits, hidden)
            self._slots.commit(batch, token_ids, accepted)
        drafter = self._drafter_of(batch.sampling.plan)
        if drafter:
            with self._timer.phase("context"):
                drafter.commit(batch, token_ids, accepted, verify)
        return accepted

    def _drafter_of(self, plan: SamplingPlan) -> BoundDrafter | None:
        return self._predicted if plan.predicted else self.drafter

    def _follow(
        self,
        batch: DecodeBatch,
        path: Tensor,
        token_ids: Tensor,
        verify: VerifyOutput,
        packing: Packing | None = None,
    ) -> tuple[Tensor, VerifyOutput]:
        """Makes a chain of the path through a tree: cached rows move to where those of a chain lie,
        and others are left behind.

        Returns:
            Tokens [num_reqs, depth + 1] of the path, and what the target put out for them.
        """
        assert self._rows is not None, "blocks are trees where the engine was built for trees"
        self._rows.move(batch.slot_mapping(token_ids.shape[1]).view(token_ids.shape), path)
        hidden = verify.aux_hidden
        if packing and hidden is not None:
            hidden = hidden.index_select(0, packing.places.gather(1, path).flatten())
            token_ids = token_ids.gather(1, path)
        else:
            token_ids, hidden = follow(path, token_ids, hidden)
        return token_ids, VerifyOutput(verify.logits, hidden)

    def prefill_step(self, batch: PrefillBatch) -> Tensor:
        """Writes what the target and the drafter keep of prompt chunks; logits of the rows that the
        batch asks for.
        """
        with self._timer.phase("prefill"):
            verify = self.verifier.forward(batch.forward, self._caches, self._aux_layer_ids)
        if self.drafter and batch.reads:
            with self._timer.phase("context"):
                self.drafter.prefill(batch, verify)
        return verify.logits

    def read(self, chunks: Sequence[Chunk]) -> None:
        """Has a drafter that `reads_late` take over tokens whose KV the target has cached."""
        assert self.drafter is not None
        with self._timer.phase("context"):
            self._slots.extend_block_tables([chunk.request for chunk in chunks])
            batch = self._slots.prefill_batch(chunks)
            nothing = VerifyOutput(torch.empty(0, device=self._slots.device))
            self.drafter.prefill(batch, nothing)

    def step_table(self, batch: DecodeBatch, out: Tensor | None = None) -> Tensor:
        """A step, and what the host wants to know; see `specdec.engine.step_table.result_table`."""
        draft, accepted = self.step(batch)
        return result_table(batch.shape, accepted, draft, out)

    def ready(self, selection: Selection) -> Callable[[BlockShape], bool]:
        """Tells of any shape whether a step may have it, see `CapturedSteps.ready`."""
        graphs = self.guided_graphs if selection.plan.guided else self.graphs
        if graphs is None or self._timer.enabled:
            return lambda shape: True
        return graphs.ready(selection, "later" if self.max_deferred else "now")

    @property
    def max_deferred(self) -> int:
        """See `BoundDrafter.max_deferred`."""
        return self.drafter.max_deferred if self.drafter else 0

    def expected_accepted(self, selection: Selection, k: int) -> float:
        """Drafts that a request is expected to accept of a chain of `k`, on average, where the
        drafter can tell; else 0.
        """
        drafter = self._drafter_of(selection.plan)
        if not drafter or not drafter.has_expected_accepted or not self._looks:
            return 0.0
        with self._timer.phase("draft"):
            batch = self._slots.decode_batch(selection, BlockShape(k))
            expected_accepted = drafter.expected_accepted(batch)
        return 0.0 if expected_accepted is None else float(expected_accepted.mean())

    @property
    def _looks(self) -> bool:
        # Ranks would take what they measure for different.
        return self.host_may_look and self.graphs is None and self._group is None

    def decode(self, launch: Launch, clock: StepClock) -> None:
        """Launches a step: its table is on its way then. Its time counts from its `start`, the end
        of the step before, if nothing came in between: the host's time then counts where it is
        longer; else from now on, as `clock` stamps it.
        """
        selection, shape, context = launch.selection, launch.shape, launch.context
        graph, drafter = None, self._drafter_of(selection.plan)
        if drafter:
            drafter.host_may_look = self._looks
        with self._timer.phase("schedule"):
            self._slots.extend_block_tables(selection.requests)
            graphs = self.guided_graphs if selection.plan.guided else self.graphs
            if graphs and not self._timer.enabled:  # phases cannot be told apart within a graph
                num_captured = graphs.num_captured
                graph = graphs.prepare(selection, shape, context)
                if graphs.num_captured > num_captured:
                    launch.start = None  # a capture is no part of a step's time
        if launch.start is None:
            launch.start = clock.stamp()
        if selection.plan.guided:
            parts = (
                graph
                if isinstance(graph, GuidedGraph)
                else self._guided_step(selection, shape, context)
            )
            launch.table = run_guided(parts, selection.requests, shape, self._timer)
        elif graph:
            assert not isinstance(graph, GuidedGraph)
            graph.replay()
            launch.table = graph.table
        else:
            launch.table = self.step_table(self._slots.decode_batch(selection, shape, context))

    def _guided_step(self, selection: Selection, shape: BlockShape, context: Context) -> GuidedStep:
        """A step in parts, launched operation by operation."""
        memory = torch.empty(0, dtype=torch.int32, device=self._slots.device)
        num_reqs = len(selection.requests)
        masks = TokenMasks.empty(num_reqs, shape.rows, self._slots.vocab_size, memory)
        return GuidedStep(self, partial(self._slots.decode_batch, selection, shape, context), masks)

    def begin(self, newcomers: Sequence[Request]) -> list[Request]:
        """Writes the rows of requests that have just got their slots; gives those for which that
        raises, which have failed.
        """
        with self._timer.phase("schedule"):
            try:
                self._begin(newcomers)
            except Exception as error:
                if len(newcomers) == 1:
                    newcomers[0].fail(error)
                    return list(newcomers)
                return [request for newcomer in newcomers for request in self.begin([newcomer])]
        return []

    def _begin(self, newcomers: Sequence[Request]) -> None:
        self._slots.begin(newcomers)
        if self.budget:
            self.budget.begin(self._slots.slot_indices(newcomers))
        copies = [
            (request.snapshot.row, request.slot)
            for request in newcomers
            if request.snapshot is not None
        ]
        self.copy_states(copies)
        if self.drafter:
            for request in newcomers:
                self.drafter.begin(request.slot, request.token_ids)
                if request.sampling.cache_salt is not None:
                    self.drafter.keep_private(request.slot)
            self._predict(newcomers)

    def _predict(self, newcomers: Sequence[Request]) -> None:
        """Takes over what newcomers predict, from the first one that does on."""
        if self._predicted is None:
            if self._make_predicted is None or not any(one.plan.predicted for one in newcomers):
                return
            self._predicted = self._make_predicted()
        for one in newcomers:
            prediction = one.sampling.prediction or ()
            assert not isinstance(prediction, str)
            self._predicted.predict(
                one.slot, one.prompt_token_ids, one.output_token_ids, prediction
            )

    def prefill(
        self, chunks: Sequence[Chunk], *, reads: bool = True
    ) -> tuple[Tensor | None, ScoredPrompts | None]:
        """Writes the KV of prompt chunks and chooses the first token of every prompt that ends
        among them.

        Args:
            chunks: of prompts.
            reads: the drafter takes over their context.

        Returns:
            The table of those prompts, whose requests are those of the chunks that
            `samples_first_token`; None without any. And what is told of prompt tokens; None where
            nobody asks.
        """
        with self._timer.phase("schedule"):
            self._slots.extend_block_tables([chunk.request for chunk in chunks])
        logits = None
        if self.prefill_graphs and not self._timer.enabled:
            logits = self.prefill_graphs.run(chunks, reads=reads)
        if logits is None:
            with self._timer.phase("schedule"):
                batch = self._slots.prefill_batch(chunks)
            batch.reads = reads
            logits = self.prefill_step(batch)
        with self._timer.phase("accept"):
            self._slots.end_prefill(chunks)
            ended = [chunk.request for chunk in chunks if samples_first_token(chunk)]
            first = self._first_tokens(ended, logits[: len(ended)])
            return first, self._scores(chunks, logits[len(ended) :])

    def _scores(self, chunks: Sequence[Chunk], logits: Tensor) -> ScoredPrompts | None:
        """Log-probabilities of prompt tokens from the logits [n, V] of the rows before them."""
        rows = [(chunk.request, chunk.rows_to_score) for chunk in chunks]
        scored = [(request, len(some)) for request, some in rows if some]
        if not scored:
            return None
        tokens = [
            token
            for request, some in rows
            for token in request.prompt_token_ids[some.start + 1 : some.stop + 1]
        ]
        for request, count in scored:
            request.num_scored += count
        top = power_of_two(max(request.sampling.prompt_logprobs or 0 for request, _ in scored))
        table = logprobs_of(logits, self._slots.tensor(tokens), top).packed().view(len(tokens), -1)
        return ScoredPrompts(scored, table)

    def copy_states(self, rows: Sequence[tuple[int, int]]) -> None:
        """Copies recurrent states, of all layers, from the first row of each pair to the second."""
        if rows:
            copy_states(self._caches, *self._slots.tensor(list(zip(*rows, strict=True))))

    def _first_tokens(self, requests: Sequence[Request], logits: Tensor) -> Tensor | None:
        """The step's acceptance with the last prompt token as anchor and no drafts."""
        if not requests:
            return None
        state = self._slots
        slots = state.slot_indices(requests)
        plan = SamplingPlan.of([request.sampling for request in requests])
        sampling = state.sampling.select(slots, plan)
        last_tokens = state.anchors.index_select(0, slots)[:, None]
        last_positions = state.seq_lens.index_select(0, slots)[:, None] - 1
        masks = None
        if sampling.plan.guided:
            with self._timer.phase("grammar"):
                memory = torch.empty(0, dtype=torch.int32, device=state.device)
                masks = TokenMasks.empty(len(requests), 1, state.vocab_size, memory)
                put(masks, fill(requests, 1, [[] for _ in requests], masks))
        own = accept(last_tokens, logits[:, None], None, sampling, last_positions, masks=masks)
        accepted = agreed(own, self._group)
        state.anchors.index_copy_(0, slots, accepted.next_anchors)
        return result_table(BlockShape(0), accepted)
