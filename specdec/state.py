"""Per-request state on the device, one row per slot, and the batches gathered from it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.core import AcceptOutput, DecodeBatch, ForwardInput, PrefillBatch, Request
from specdec.sampling import SamplingTensors
from specdec.scheduler import Chunk, prefill_tokens


class SlotState:
    """Tensors with one row per slot. The host writes rows between steps; within a step only device operations touch them.

    Args:
        max_num_seqs: number of slots.
        max_blocks: entries of a block table row.
        block_size: tokens per block.
        max_model_len: position ids stay below it.
        vocab_size: width of the table of tokens seen, which exists once a request has a repetition penalty.
        device: where the tensors live.
    """

    def __init__(
        self, *, max_num_seqs: int, max_blocks: int, block_size: int, max_model_len: int, vocab_size: int, device: torch.device
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.device = device
        self.block_size, self.max_model_len, self.vocab_size = block_size, max_model_len, vocab_size
        self.seq_lens = zeros(max_num_seqs, dtype=torch.int64)
        self.anchors = zeros(max_num_seqs, dtype=torch.int64)
        self.block_table = zeros(max_num_seqs, max_blocks, dtype=torch.int32)
        self.temperature = zeros(max_num_seqs, dtype=torch.float32)
        self.top_k = zeros(max_num_seqs, dtype=torch.int64)
        self.top_p = zeros(max_num_seqs, dtype=torch.float32)
        self.min_p = zeros(max_num_seqs, dtype=torch.float32)
        self.repetition_penalty = zeros(max_num_seqs, dtype=torch.float32)
        self.seeds = zeros(max_num_seqs, dtype=torch.int64)
        self.seen: Tensor | None = None  # bool [max_num_seqs, vocab_size]
        self._num_blocks = [0] * max_num_seqs  # entries of each row that are the request's own
        self._batch_key: tuple[tuple[int, int], ...] = ()
        self._slots = zeros(0, dtype=torch.int64)
        self._sampling: SamplingTensors | None = None

    def begin(self, request: Request) -> None:
        """Writes the row of a request that has just got its slot."""
        slot, params = request.slot, request.sampling
        # Entries past its own blocks repeat the request's first block, so that no request ever reads another's values.
        self.block_table[slot].fill_(request.block_ids[0])
        self._num_blocks[slot] = 0
        self.temperature[slot] = params.temperature
        self.top_k[slot] = params.top_k
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition_penalty[slot] = params.repetition_penalty
        self.seeds[slot] = request.seed
        if params.repetition_penalty != 1:
            if self.seen is None:
                self.seen = torch.zeros(self.seeds.shape[0], self.vocab_size, dtype=torch.bool, device=self.device)
            self.seen[slot] = False
            self.seen[slot, torch.tensor(prefill_tokens(request), device=self.device)] = True

    def extend_block_table(self, request: Request) -> None:
        """Writes the entries of blocks the request has got since the last call."""
        known = self._num_blocks[request.slot]
        new = request.block_ids[known:]
        if new:
            self.block_table[request.slot, known : known + len(new)] = torch.tensor(new, dtype=torch.int32, device=self.device)
            self._num_blocks[request.slot] = len(request.block_ids)

    def prefill_batch(self, chunks: Sequence[Chunk]) -> PrefillBatch:
        """Packs chunks. Logits are asked for the last row of every prompt that ends here and has no known anchor."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, logit_rows = [0], []
        for chunk in chunks:
            tokens += prefill_tokens(chunk.request)[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            blocks = chunk.request.block_ids
            slots += [blocks[p // self.block_size] * self.block_size + p % self.block_size for p in range(chunk.start, chunk.end)]
            starts.append(len(tokens))
            if samples_first_token(chunk):
                logit_rows.append(len(tokens) - 1)
        lengths = [chunk.end for chunk in chunks]
        slot_rows = self._tensor([chunk.request.slot for chunk in chunks])
        metadata = AttentionMetadata(
            query_start_loc=self._tensor(starts).int(),
            seq_lens=self._tensor(lengths).int(),
            block_table=self.block_table.index_select(0, slot_rows),
            slot_mapping=self._tensor(slots),
            num_reqs=len(chunks),
            num_tokens=len(tokens),
            max_query_len=max(chunk.end - chunk.start for chunk in chunks),
            max_seq_len=max(lengths),
            query_lens=[chunk.end - chunk.start for chunk in chunks],
            seq_lens_host=lengths,
        )
        rows = ForwardInput(self._tensor(tokens), self._tensor(positions), metadata, logit_rows=self._tensor(logit_rows))
        return PrefillBatch(forward=rows, slots=slot_rows)

    def decode_batch(self, requests: Sequence[Request], k: int) -> DecodeBatch:
        """Gathers the rows of `requests` for a step of `k` drafts."""
        slots, sampling = self._select(requests)
        return DecodeBatch(
            slots=slots,
            anchors=self.anchors.index_select(0, slots),
            seq_lens=self.seq_lens.index_select(0, slots),
            block_table=self.block_table.index_select(0, slots),
            k=k,
            max_seq_len=max(request.kv_tokens_bound for request in requests) + k + 1,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            sampling=sampling,
        )

    def sampling(self, requests: Sequence[Request], slots: Tensor) -> SamplingTensors:
        """Sampling state of the given requests."""
        params = [request.sampling for request in requests]
        penalised = any(p.repetition_penalty != 1 for p in params)
        sampled = [p for p in params if p.temperature > 0]
        return SamplingTensors(
            temperature=self.temperature.index_select(0, slots),
            top_k=self.top_k.index_select(0, slots),
            top_p=self.top_p.index_select(0, slots),
            min_p=self.min_p.index_select(0, slots),
            repetition_penalty=self.repetition_penalty.index_select(0, slots),
            seeds=self.seeds.index_select(0, slots),
            seen=self.seen.index_select(0, slots) if penalised and self.seen is not None else None,
            all_greedy=not sampled,
            max_top_k=max((p.top_k for p in sampled), default=0),
            any_top_p=any(p.top_p < 1 for p in sampled),
            any_min_p=any(p.min_p > 0 for p in sampled),
            logprobs=any(p.logprobs for p in params),
        )

    def commit(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput) -> None:
        """Moves the requests of a step on: L grows by the accepted drafts and the old anchor, the next anchor takes its place.

        Args:
            batch: the step.
            token_ids: int64 [num_reqs, k+1], anchor and drafts.
            accept: what was accepted.
        """
        self.seq_lens.index_copy_(0, batch.slots, batch.seq_lens + accept.num_accepted + 1)
        self.anchors.index_copy_(0, batch.slots, accept.next_anchors)
        if batch.sampling.seen is not None and self.seen is not None:
            kept = torch.arange(token_ids.shape[1], device=self.device) <= accept.num_accepted[:, None]
            self.seen[batch.slots[:, None], torch.where(kept, token_ids, token_ids[:, :1])] = True

    def _select(self, requests: Sequence[Request]) -> tuple[Tensor, SamplingTensors]:
        """Slot indices and sampling state; both stay the same from step to step while the batch has the same requests."""
        key = tuple((request.request_id, request.slot) for request in requests)
        if key != self._batch_key or self._sampling is None:
            self._batch_key = key
            self._slots = self._tensor([request.slot for request in requests])
            self._sampling = self.sampling(requests, self._slots)
        elif self._sampling.seen is not None and self.seen is not None:
            self._sampling.seen = self.seen.index_select(0, self._slots)
        return self._slots, self._sampling

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self.device, non_blocking=True)


def samples_first_token(chunk: Chunk) -> bool:
    """Whether this chunk ends a prompt whose first output token is yet to be chosen."""
    return chunk.last and not chunk.request.output_token_ids
