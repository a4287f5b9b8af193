"""The decoding step: schedule, draft, verify, accept, commit.

Invariant: before a step, a request has L tokens whose KV is in the cache and one *anchor* token at position L whose KV is not.

    prefill  target scores the prompt in chunks   -> KV of L tokens, features for the drafter, the first anchor
    draft    drafter proposes                     -> k tokens for positions L+1 .. L+k
    verify   target scores anchor and drafts      -> logits of k+1 rows, features, KV at positions L .. L+k
    accept   longest acceptable prefix, a drafts  -> then one recovered or bonus token, the next anchor
    commit   L += a + 1                           -> rows of rejected drafts lie where the next step writes

Plain decoding is k = 0. From draft to commit every value stays on the device and every shape is known beforehand, so the host never
waits, and an accelerator can replay the step as one graph. One copy per step brings the results back; on an accelerator they are
read while the next step runs.
"""

import random
from collections.abc import Callable, Container, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.config import EngineConfig, SamplingParams
from specdec.core import (
    AcceptOutput,
    BoundDrafter,
    DecodeBatch,
    Drafter,
    DraftOutput,
    ForwardInput,
    PrefillBatch,
    Request,
    Status,
    Verifier,
)
from specdec.engine.acceptance import accept
from specdec.engine.buckets import BATCH_SIZES, batch_bucket
from specdec.engine.draft_length import DraftLength, checked_draft_tokens, ladder
from specdec.engine.graphs import CudaCapture, StepGraphs, captures_graphs
from specdec.engine.memory import plan_cache
from specdec.engine.outputs import append_tokens
from specdec.engine.prefill_graphs import PrefillGraphs, most_prefill_rows
from specdec.engine.results import FinishedStep, ResultQueue, result_table
from specdec.engine.scheduler import Chunk, Scheduler
from specdec.engine.slots import SamplingFacts, SlotState, samples_first_token
from specdec.engine.timing import StepClock, StepTimer
from specdec.errors import CapacityError, InvalidInputError
from specdec.kv_cache import BlockPool, PagedKVCache, blocks_for

OnTokens = Callable[[Request, list[int]], int | None]


class SpecEngine:
    """Continuous batching of requests through one target and at most one drafter.

    Args:
        verifier: the target.
        drafter: proposes drafts; None decodes plainly.
        config: limits and choices.

    Raises:
        InvalidInputError: more drafts per step than the drafter can give, drafts without a drafter, or blocks of another size
            than the target was loaded for.
        CheckpointError: the drafter does not fit the target.
        CapacityError: the cache budget does not pay for two blocks, or the device does not have it.

    Attributes:
        num_draft_tokens: most drafts per step.
        draft_length: chooses k for every step; None when k is fixed.
        graphs: the captured steps; None where steps are launched operation by operation.
        prefill_graphs: the captured prefills of short chunks; None where all are launched operation by operation.
    """

    def __init__(self, verifier: Verifier, drafter: Drafter | None = None, config: EngineConfig | None = None) -> None:
        config = config or EngineConfig()
        self.config = config
        self.verifier = verifier
        self.num_draft_tokens = checked_draft_tokens(config.num_draft_tokens, drafter)
        self.drafter = drafter if self.num_draft_tokens > 0 else None
        self._num_lookahead_tokens = self.drafter.num_lookahead_tokens if self.drafter else 0
        self.pipeline_depth = config.pipeline_depth if config.pipeline_depth is not None else int(verifier.device.type == "cuda")
        self.max_model_len = min(config.max_model_len or verifier.max_model_len, verifier.max_model_len)
        self.draft_length = DraftLength(self.num_draft_tokens) if config.num_draft_tokens == "auto" and self.drafter else None
        self.timer = StepTimer(verifier.device, enabled=config.timing)
        self.clock = StepClock(verifier.device)
        self.results = ResultQueue(self.clock)
        self._previous_end: Any = None
        self._touched: dict[int, Request] = {}
        self._next_id = 0
        self._seeds = random.Random(config.seed)

        captures = captures_graphs(verifier.device, config.graphs)
        block_size = verifier.attention.spec.block_size
        specs = [*verifier.kv_specs, *(self.drafter.kv_specs if self.drafter else [])]
        max_blocks = blocks_for(self.max_model_len + self._overshoot, block_size)
        graph_rows = min(batch_bucket(config.max_num_seqs), BATCH_SIZES[-1]) * (self.num_draft_tokens + 1)
        prefill_rows = most_prefill_rows(verifier, config.max_num_seqs) if captures and verifier.attention.captures_prefill else 0
        num_blocks = plan_cache(
            verifier,
            specs,
            config.cache,
            most_tokens=config.max_num_seqs * max_blocks * block_size,
            graph_rows=graph_rows if captures else 0,
            prefill_rows=prefill_rows,
        )
        self.kv_cache = PagedKVCache(
            specs,
            num_blocks=num_blocks,
            block_size=block_size,
            dtype=verifier.attention.spec.kv_dtype,
            device=verifier.device,
        )
        self.pool = BlockPool(num_blocks)
        self.scheduler = Scheduler(
            self.pool,
            block_size=block_size,
            max_num_seqs=config.max_num_seqs,
            max_prefill_tokens=config.max_prefill_tokens or (512 if verifier.device.type == "cpu" else 2048),
            prefix_caching=config.cache.prefix_caching,
            num_lookahead_tokens=self._num_lookahead_tokens,
        )
        self.state = SlotState(
            max_num_seqs=config.max_num_seqs,
            max_blocks=max_blocks,
            block_size=block_size,
            max_model_len=self.max_model_len,
            vocab_size=verifier.vocab_size,
            device=verifier.device,
            num_lookahead_tokens=self._num_lookahead_tokens,
        )
        self._target_caches = self.kv_cache.layers[: len(verifier.kv_specs)]
        self._aux_layer_ids: tuple[int, ...] = ()
        self.bound_drafter: BoundDrafter | None = None
        if self.drafter:
            self._aux_layer_ids = self.drafter.aux_layer_ids
            self.bound_drafter = self.drafter.bind(
                verifier,
                self.kv_cache.layers[len(verifier.kv_specs) :],
                max_num_seqs=config.max_num_seqs + 1,  # the padding slot of the state
                max_len=max_blocks * block_size,
                draft_sampling=config.draft_sampling,
            )
        self.graphs: StepGraphs | None = None
        self.prefill_graphs: PrefillGraphs | None = None
        if captures:
            capture = CudaCapture(verifier.device)
            required = bool(config.graphs)
            self.graphs = StepGraphs(capture, self.state, self._result_table, required=required)
            if prefill_rows:
                self.prefill_graphs = PrefillGraphs(
                    capture, self.state, self._prefill_logits, dtype=verifier.dtype, most_rows=prefill_rows, required=required
                )

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.scheduler.waiting or self.scheduler.working or len(self.results))

    @property
    def _overshoot(self) -> int:
        """Most positions that launched steps can write past the last token a request may have."""
        return self.pipeline_depth * (self.num_draft_tokens + 1) + max(self.num_draft_tokens + 1, self._num_lookahead_tokens)

    def add_request(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams | None = None, *, on_tokens: OnTokens | None = None
    ) -> Request:
        """Queues a request; `step` works on it.

        Args:
            prompt_token_ids: at least one token.
            sampling: how to decode it.
            on_tokens: see `Request.on_tokens`.

        Raises:
            InvalidInputError: the prompt is empty or holds ids outside the vocabulary.
            CapacityError: it cannot fit the model or the cache, even alone.
        """
        sampling = sampling or SamplingParams()
        prompt = list(prompt_token_ids)
        if not prompt:
            raise InvalidInputError("the prompt is empty; give at least one token")
        if min(prompt) < 0 or max(prompt) >= self.verifier.vocab_size:
            raise InvalidInputError(
                f"the prompt holds token id {min(prompt) if min(prompt) < 0 else max(prompt)}; ids of this model lie in"
                f" [0, {self.verifier.vocab_size}), so tokenize it with the target's own tokenizer"
            )
        if len(prompt) >= self.max_model_len:
            raise CapacityError(
                f"the prompt has {len(prompt)} tokens and the limit is {self.max_model_len} for prompt and output together;"
                " shorten it or raise max_model_len, if the model allows more"
            )
        total = min(len(prompt) + sampling.max_tokens, self.max_model_len)
        needed = blocks_for(total + self._overshoot, self.kv_cache.block_size)
        if needed > self.pool.num_blocks - 1:
            raise CapacityError(
                f"prompt and output of {total} tokens need {needed} cache blocks and the cache has {self.pool.num_blocks - 1};"
                " lower max_tokens, shorten the prompt or give the cache more memory"
            )
        seed = sampling.seed if sampling.seed is not None else self._seeds.getrandbits(63)
        request = Request(self._next_id, prompt, sampling, seed=seed, max_total_len=total, on_tokens=on_tokens)
        self._next_id += 1
        self.scheduler.add(request)
        return request

    def abort(self, request: Request) -> None:
        """Ends a request with what it has; does nothing when it is finished."""
        if request.status is not Status.FINISHED:
            self._finish(request, "cancelled")

    def abort_all(self, request_ids: Container[int]) -> None:
        """Ends every unfinished request whose id is among `request_ids`."""
        for request in [*self.scheduler.waiting, *self.scheduler.working]:
            if request.request_id in request_ids:
                self.abort(request)

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Launches the next step and reads the results that are due.

        Returns:
            Requests that have new tokens or have finished since the last call.
        """
        with self.timer.phase("schedule"):
            schedule = self.scheduler.schedule(self._most_drafts(), settle=self._read_results)
        if schedule.prefill:
            self._prefill(schedule.prefill)
        if schedule.prefill or not schedule.decode:
            self._previous_end = None
        if schedule.decode:
            self._decode(schedule.decode, schedule.k)
        with self.timer.phase("collect"):
            self._read_results(leave=self.pipeline_depth if schedule.prefill or schedule.decode else 0)
        touched, self._touched = self._touched, {}
        return list(touched.values())

    def _prefill(self, chunks: list[Chunk]) -> None:
        """Writes the KV of prompt chunks and chooses the first token of every prompt that ends among them."""
        with self.timer.phase("schedule"):
            newcomers = [chunk.request for chunk in chunks if chunk.admitted]
            self.state.begin(newcomers)
            if self.bound_drafter:
                for request in newcomers:
                    self.bound_drafter.begin(request.slot, request.token_ids)
            self.state.extend_block_tables([chunk.request for chunk in chunks])
        logits = None
        if self.prefill_graphs and not self.timer.enabled:
            logits = self.prefill_graphs.run(chunks)
        if logits is None:
            with self.timer.phase("schedule"):
                batch = self.state.prefill_batch(chunks)
            logits = self._prefill_logits(batch)
        with self.timer.phase("accept"):
            for chunk in chunks:
                self.scheduler.prefilled(chunk)
            self.state.end_prefill(chunks)
            self._sample_first_tokens([chunk.request for chunk in chunks if samples_first_token(chunk)], logits)

    def _prefill_logits(self, batch: PrefillBatch) -> Tensor:
        """Writes what the target and the drafter keep of a batch; logits of the rows that it asks them for."""
        with self.timer.phase("prefill"):
            verify = self.verifier.forward(batch.forward, self._target_caches, self._aux_layer_ids)
        if self.bound_drafter:
            with self.timer.phase("context"):
                self.bound_drafter.prefill(batch, verify)
        return verify.logits

    def _sample_first_tokens(self, requests: list[Request], logits: Tensor) -> None:
        """The step's acceptance with the last prompt token as anchor and no drafts."""
        if not requests:
            return
        slots = self.state.slot_indices(requests)
        sampling = self.state.sampling(slots, SamplingFacts.of(requests))
        last_tokens = self.state.anchors.index_select(0, slots)[:, None]
        last_positions = self.state.seq_lens.index_select(0, slots)[:, None] - 1
        result = accept(last_tokens, logits[:, None], None, sampling, last_positions)
        self.state.anchors.index_copy_(0, slots, result.next_anchors)
        for request in requests:
            request.first_token_unread = True
        self.results.send(requests, None, result_table(0, result))

    def _most_drafts(self) -> int:
        """k of the next step, before the scheduler sees that nobody has that many tokens left."""
        if self.draft_length is None:
            return self.num_draft_tokens
        return self.draft_length.choose(sum(request.status is Status.RUNNING for request in self.scheduler.working))

    def _decode(self, requests: list[Request], k: int) -> None:
        """Drafts, verifies, accepts and commits for all running requests; nothing in here waits for the device."""
        graph = None
        with self.timer.phase("schedule"):
            if self.draft_length or self.graphs:
                k = min(rung for rung in ladder(self.num_draft_tokens) if rung >= k)
            self.state.extend_block_tables(requests)
            if self.graphs and not self.timer.enabled:  # phases cannot be told apart within a graph
                num_graphs = len(self.graphs.graphs)
                graph = self.graphs.prepare(requests, k)
                if len(self.graphs.graphs) > num_graphs:  # a capture is no part of a step's time
                    self._previous_end = None
        # From the end of the step before, if nothing else came between: the host's time counts where it is the longer one.
        start = self.clock.stamp() if self._previous_end is None else self._previous_end
        if graph:
            graph.replay()
            table = graph.table
        else:
            table = self._result_table(self.state.decode_batch(requests, k))
        for request in requests:
            request.in_flight.append(k)
        with self.timer.phase("collect"):
            self._previous_end = self.results.send(requests, k, table, start)
        self.timer.count_step(k)

    def _result_table(self, batch: DecodeBatch, out: Tensor | None = None) -> Tensor:
        """The step on the device, and what the host wants to know about it; see `specdec.engine.results.result_table`."""
        draft, result = self._launch(batch)
        return result_table(batch.k, result, draft, out)

    def _launch(self, batch: DecodeBatch) -> tuple[DraftOutput | None, AcceptOutput]:
        """The step on the device, from draft to commit."""
        width = batch.k + 1
        draft, token_ids = None, batch.anchors[:, None]
        if self.bound_drafter and batch.k:
            with self.timer.phase("draft"):
                draft = self.bound_drafter.propose(batch)
                token_ids = torch.cat([token_ids, draft.token_ids], dim=1)  # [num_reqs, k+1]
        with self.timer.phase("verify"):
            rows = ForwardInput(token_ids.reshape(-1), batch.position_ids(width), batch.metadata(width, causal=True))
            verify = self.verifier.forward(rows, self._target_caches, self._aux_layer_ids)
        with self.timer.phase("accept"):
            logits = verify.logits.view(batch.num_reqs, width, -1)
            result = accept(token_ids, logits, draft, batch.sampling, batch.positions(width))
            self.state.commit(batch, token_ids, result)
        if self.bound_drafter:
            with self.timer.phase("context"):
                self.bound_drafter.commit(batch, token_ids, result, verify)
        return draft, result

    def _read_results(self, leave: int = 0) -> None:
        """Takes over results, oldest first, until only `leave` launched steps are unread."""
        for step in self.results.receive(leave):
            num_accepted = self._take_over(step)
            if self.draft_length and step.k is not None:
                self.draft_length.observe(len(step.requests), step.k, num_accepted, step.seconds)

    def _take_over(self, step: FinishedStep) -> list[int]:
        """Adds a step's tokens to its requests; returns the drafts accepted by each that had not ended before."""
        num_accepted = []
        touched, eos_token_ids = self._touched, self.verifier.eos_token_ids
        for request, result in step.results():
            if request.status is Status.FINISHED:
                continue  # it ended while this step was in flight; what the step added is surplus
            num_accepted.append(result.num_accepted)
            if result.k is None:
                request.first_token_unread = False
            else:
                request.in_flight.pop(0)
                request.num_kv_tokens += len(result.token_ids)
            touched[request.request_id] = request
            if result.finite:
                reason = append_tokens(request, result, eos_token_ids)
            else:
                reason = "error"
                request.error = (
                    f"the target's logits are NaN or infinite after {len(request.output_token_ids)} output tokens;"
                    " use --dtype float32 or check the checkpoint"
                )
            if reason:
                self._finish(request, reason)
        return num_accepted

    def _finish(self, request: Request, reason: str) -> None:
        request.finish_reason = reason
        self._touched[request.request_id] = request
        blocks = list(request.block_ids)
        freed = self.scheduler.finish(request)
        if reason == "error":
            # Its keys and values may be NaN, and a masked NaN is still NaN to the next owner of the block.
            self.pool.discard(blocks)
            self.kv_cache.scrub(freed)
