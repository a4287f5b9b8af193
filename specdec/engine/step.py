"""The work of a step on the device: what `specdec.engine.engine` describes, launched whole or replayed as a graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.batch import Context, DecodeBatch, PrefillBatch
from specdec.blocks import BlockShape
from specdec.core import AcceptOutput, BoundDrafter, DraftOutput, Verifier, VerifyOutput
from specdec.engine.acceptance import accept
from specdec.engine.graphs import StepGraphs
from specdec.engine.prefill_graphs import PrefillGraphs
from specdec.engine.request import Request
from specdec.engine.results import result_table
from specdec.engine.scheduler import Chunk
from specdec.engine.slots import SlotState, samples_first_token
from specdec.engine.timing import StepClock, StepTimer
from specdec.kv_cache import copy_states
from specdec.layers.cache_rows import CacheRows
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
        most_rows: of a request in a step.
        trees: blocks may be trees.

    Attributes:
        host_may_look: the device is the host, see `BoundDrafter.host_may_look`; not where steps are captured, which go one way.
        graphs: the captured steps; None where steps are launched operation by operation.
        prefill_graphs: the captured prefills of short chunks; None where all are launched operation by operation.
    """

    def __init__(
        self,
        verifier: Verifier,
        drafter: BoundDrafter | None,
        caches: Sequence[Any],
        aux_layer_ids: tuple[int, ...],
        slots: SlotState,
        timer: StepTimer,
        most_rows: int = 1,
        *,
        trees: bool = False,
    ) -> None:
        self.verifier, self.drafter = verifier, drafter
        self._rows = CacheRows(caches) if trees else None
        self.host_may_look = slots.device.type == "cpu"
        self._max_pending = most_rows if drafter else 0
        self.graphs: StepGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        self._caches, self._aux_layer_ids = caches, aux_layer_ids
        self._slots, self._timer = slots, timer

    def step(self, batch: DecodeBatch) -> tuple[DraftOutput | None, AcceptOutput]:
        """Draft, verify, accept, commit. Nothing in here waits for the device."""
        draft, token_ids = None, batch.anchors[:, None]
        if self.drafter and batch.k:
            with self._timer.phase("draft"):
                draft = self.drafter.propose(batch)
                token_ids = torch.cat([token_ids, draft.token_ids], dim=1)  # [num_reqs, k+1]
        tree = draft.tree if draft else None
        with self._timer.phase("verify"):
            positions = batch.row_positions(tree)
            rows = batch.verification(token_ids, positions, tree, max_pending=self._max_pending)
            verify = self.verifier.forward(rows, self._caches, self._aux_layer_ids)
        with self._timer.phase("accept"):
            logits = verify.logits.view(*token_ids.shape, -1)
            accepted = accept(token_ids, logits, draft, batch.sampling, positions, batch.shape.depth)
            if accepted.path is not None:
                token_ids, verify = self._follow(batch, accepted.path, token_ids, verify)
            self._slots.commit(batch, token_ids, accepted)
        if self.drafter:
            with self._timer.phase("context"):
                self.drafter.commit(batch, token_ids, accepted, verify)
        return draft, accepted

    def _follow(self, batch: DecodeBatch, path: Tensor, token_ids: Tensor, verify: VerifyOutput) -> tuple[Tensor, VerifyOutput]:
        """Makes a chain of the path through a tree: cached rows move to where those of a chain lie, and others are left behind.

        Returns:
            Tokens [num_reqs, depth + 1] of the path, and what the target put out for them.
        """
        assert self._rows is not None, "blocks are trees where the engine was built for trees"
        self._rows.move(batch.slot_mapping(token_ids.shape[1]).view(token_ids.shape), path)
        hidden = verify.aux_hidden
        if hidden is not None:
            first = torch.arange(0, token_ids.numel(), token_ids.shape[1], device=path.device)
            hidden = hidden.index_select(0, (first[:, None] + path).flatten())
        return token_ids.gather(1, path), VerifyOutput(verify.logits, hidden)

    def prefill_step(self, batch: PrefillBatch) -> Tensor:
        """Writes what the target and the drafter keep of prompt chunks; logits of the rows that the batch asks for."""
        with self._timer.phase("prefill"):
            verify = self.verifier.forward(batch.forward, self._caches, self._aux_layer_ids)
        if self.drafter:
            with self._timer.phase("context"):
                self.drafter.prefill(batch, verify)
        return verify.logits

    def step_table(self, batch: DecodeBatch, out: Tensor | None = None) -> Tensor:
        """A step, and what the host wants to know about it; see `specdec.engine.results.result_table`."""
        draft, accepted = self.step(batch)
        return result_table(batch.shape, accepted, draft, out)

    def news(self, requests: Sequence[Request]) -> Callable[[BlockShape], bool]:
        """Tells of any shape whether a step of it would have to be captured first."""
        if self.graphs is None or self._timer.enabled:
            return lambda shape: False
        is_new = self.graphs.news(self._slots.select(requests))
        plain: Context = "later" if self.most_deferred else "now"
        return lambda shape: is_new(shape, "now" if shape.drafts else plain)

    @property
    def most_deferred(self) -> int:
        """See `BoundDrafter.most_deferred`."""
        return self.drafter.most_deferred if self.drafter else 0

    def due(self, requests: Sequence[Request], shape: BlockShape) -> tuple[BlockShape, Context]:
        """The shape of the step that should have `shape`, and which context its drafter takes over.

        Before drafts can be made again, one step without any brings the context up to date.
        """
        most = self.most_deferred
        deferred = max((request.num_deferred for request in requests), default=0) if most else 0
        if not most or (shape.drafts and not deferred):
            return shape, "now"
        return BlockShape(0), "all" if shape.drafts or deferred + 1 >= most else "later"

    def decode(
        self, requests: Sequence[Request], shape: BlockShape, clock: StepClock, since: Any = None, context: Context = "now"
    ) -> tuple[Tensor, Any]:
        """Launches a step.

        Args:
            requests: the batch.
            shape: of the block of each request.
            clock: stamps the step's beginning.
            since: stamp of the end of the step before, if nothing came in between: the host's time then counts where it is longer.
            context: see `due`.

        Returns:
            The step's table, and the stamp from which its time counts.
        """
        graph = None
        if self.drafter:
            self.drafter.host_may_look = self.host_may_look and self.graphs is None
        with self._timer.phase("schedule"):
            self._slots.extend_block_tables(requests)
            selection = self._slots.select(requests)
            if self.graphs and not self._timer.enabled:  # phases cannot be told apart within a graph
                num_captured = self.graphs.num_captured
                graph = self.graphs.prepare(selection, shape, context)
                if self.graphs.num_captured > num_captured:
                    since = None  # a capture is no part of a step's time
        for request in requests if self.most_deferred else ():
            request.num_deferred = request.num_deferred + 1 if context == "later" else 0
        start = clock.stamp() if since is None else since
        if graph:
            graph.replay()
            return graph.table, start
        return self.step_table(self._slots.decode_batch(selection, shape, context)), start

    def prefill(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Writes the KV of prompt chunks and chooses the first token of every prompt that ends among them.

        Returns:
            The table of those prompts, whose requests are those of the chunks that `samples_first_token`; None without any.
        """
        with self._timer.phase("schedule"):
            newcomers = [chunk.request for chunk in chunks if chunk.admitted]
            self._slots.begin(newcomers)
            self.copy_states([(request.snapshot.row, request.slot) for request in newcomers if request.snapshot is not None])
            if self.drafter:
                for request in newcomers:
                    self.drafter.begin(request.slot, request.token_ids)
            self._slots.extend_block_tables([chunk.request for chunk in chunks])
        logits = None
        if self.prefill_graphs and not self._timer.enabled:
            logits = self.prefill_graphs.run(chunks)
        if logits is None:
            with self._timer.phase("schedule"):
                batch = self._slots.prefill_batch(chunks)
            logits = self.prefill_step(batch)
        with self._timer.phase("accept"):
            self._slots.end_prefill(chunks)
            return self._first_tokens([chunk.request for chunk in chunks if samples_first_token(chunk)], logits)

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
        sampling = state.sampling.select(slots, SamplingPlan.of([request.sampling for request in requests]))
        last_tokens = state.anchors.index_select(0, slots)[:, None]
        last_positions = state.seq_lens.index_select(0, slots)[:, None] - 1
        accepted = accept(last_tokens, logits[:, None], None, sampling, last_positions)
        state.anchors.index_copy_(0, slots, accepted.next_anchors)
        return result_table(BlockShape(0), accepted)
