"""Per-request state on the device, one row per slot, and the batches gathered from it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.core import AcceptOutput, DecodeBatch, ForwardInput, PrefillBatch, Request
from specdec.engine.scheduler import Chunk, prefill_tokens
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.sampling import SamplingTensors
from specdec.sizes import power_of_two


class SamplingFacts(NamedTuple):
    """What the host knows about the sampling of a batch; it decides which operations a step consists of.

    Attributes:
        penalised: a request has a repetition penalty.
        all_greedy, any_top_p, any_min_p, logprobs: see `specdec.sampling.SamplingTensors`.
        max_top_k: a power of two, so that few values occur; a bound larger than needed changes nothing.
    """

    penalised: bool
    all_greedy: bool
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    logprobs: bool

    @classmethod
    def of(cls, requests: Sequence[Request]) -> "SamplingFacts":
        """The facts of these requests."""
        params = [request.sampling for request in requests]
        sampled = [p for p in params if p.temperature > 0]
        return cls(
            penalised=any(p.repetition_penalty != 1 for p in params),
            all_greedy=not sampled,
            max_top_k=power_of_two(max((p.top_k for p in sampled), default=0)),
            any_top_p=any(p.top_p < 1 for p in sampled),
            any_min_p=any(p.min_p > 0 for p in sampled),
            logprobs=any(p.logprobs for p in params),
        )


class SlotState:
    """Tensors with one row per slot. The host writes rows between steps; within a step only device operations touch them.

    The slot after the last is nobody's. Rows that pad a batch point at it: it decodes greedily on the null block, from position 0.

    Args:
        max_num_seqs: number of slots for requests.
        max_blocks: entries of a block table row.
        block_size: tokens per block.
        max_model_len: position ids stay below it.
        vocab_size: width of the table of tokens seen, which exists once a request has a repetition penalty.
        device: where the tensors live.
        num_lookahead_tokens: see `specdec.core.Drafter.num_lookahead_tokens`.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        max_model_len: int,
        vocab_size: int,
        device: torch.device,
        num_lookahead_tokens: int = 0,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        num_slots = max_num_seqs + 1
        self.device = device
        self.block_size, self.max_model_len, self.vocab_size = block_size, max_model_len, vocab_size
        self.padding_slot, self.num_lookahead_tokens = max_num_seqs, num_lookahead_tokens
        self.longest = max_blocks * block_size
        self._progress = zeros(2, num_slots, dtype=torch.int64)  # in one, since a step begins by gathering both
        self.seq_lens, self.anchors = self._progress[0], self._progress[1]
        self.block_table = zeros(num_slots, max_blocks, dtype=torch.int32)
        self.temperature = zeros(num_slots, dtype=torch.float32)
        self.top_k = zeros(num_slots, dtype=torch.int64)
        self.top_p = zeros(num_slots, dtype=torch.float32)
        self.min_p = zeros(num_slots, dtype=torch.float32)
        self.repetition_penalty = zeros(num_slots, dtype=torch.float32)
        self.seeds = zeros(num_slots, dtype=torch.int64)
        self.seen: Tensor | None = None  # bool [num_slots, vocab_size]
        self.block_table[self.padding_slot].fill_(NULL_BLOCK)
        self.top_p[self.padding_slot] = 1
        self.repetition_penalty[self.padding_slot] = 1
        self._num_blocks = [0] * max_num_seqs  # entries of each row that are the request's own
        self._batch_key: BatchKey = ()
        self._slots = zeros(0, dtype=torch.int64)
        self._sampling: SamplingTensors | None = None

    def begin(self, requests: Sequence[Request]) -> None:
        """Writes the rows of requests that have just got their slots."""
        if not requests:
            return
        params = [request.sampling for request in requests]
        slots, first_blocks, top_k, seeds = self.tensor(
            [
                [request.slot for request in requests],
                [request.block_ids[0] for request in requests],
                [p.top_k for p in params],
                [request.seed for request in requests],
            ]
        )
        temperature, top_p, min_p, repetition_penalty = self.tensor(
            [
                [p.temperature for p in params],
                [p.top_p for p in params],
                [p.min_p for p in params],
                [p.repetition_penalty for p in params],
            ],
            torch.float32,
        )
        # Entries past its own blocks repeat a request's first block, so that no request ever reads another's values.
        self.block_table.index_copy_(0, slots, first_blocks.int()[:, None].expand(-1, self.block_table.shape[1]))
        self.top_k.index_copy_(0, slots, top_k)
        self.seeds.index_copy_(0, slots, seeds)
        self.temperature.index_copy_(0, slots, temperature)
        self.top_p.index_copy_(0, slots, top_p)
        self.min_p.index_copy_(0, slots, min_p)
        self.repetition_penalty.index_copy_(0, slots, repetition_penalty)
        for request in requests:
            self._num_blocks[request.slot] = 0
            if request.sampling.repetition_penalty != 1:
                if self.seen is None:
                    self.seen = torch.zeros(self.seeds.shape[0], self.vocab_size, dtype=torch.bool, device=self.device)
                self.seen[request.slot] = False
                self.seen[request.slot].index_fill_(0, self.tensor(prefill_tokens(request)), True)

    def extend_block_tables(self, requests: Sequence[Request]) -> None:
        """Writes the entries of blocks that `requests` have got since the last call."""
        cells: list[int] = []
        blocks: list[int] = []
        for request in requests:
            known, count = self._num_blocks[request.slot], len(request.block_ids)
            if known < count:
                row = request.slot * self.block_table.shape[1]
                cells += range(row + known, row + count)
                blocks += request.block_ids[known:]
                self._num_blocks[request.slot] = count
        if cells:
            places, values = self.tensor([cells, blocks])
            self.block_table.view(-1).index_copy_(0, places, values.int())

    def end_prefill(self, chunks: Sequence[Chunk]) -> None:
        """Sets L, and the last known token as anchor, of the requests whose prefill ends with these chunks."""
        ended = [chunk for chunk in chunks if chunk.last]
        if ended:
            slots, seq_lens, anchors = self.tensor(
                [
                    [chunk.request.slot for chunk in ended],
                    [chunk.end for chunk in ended],
                    [chunk.request.token_ids[-1] for chunk in ended],
                ]
            )
            self.seq_lens.index_copy_(0, slots, seq_lens)
            self.anchors.index_copy_(0, slots, anchors)

    def prefill_batch(self, chunks: Sequence[Chunk]) -> PrefillBatch:
        """Packs chunks. Logits are asked for the last row of every prompt that ends here and has no known anchor."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts, logit_rows = [0], []
        for chunk in chunks:
            tokens += prefill_tokens(chunk.request)[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots += cache_slots(chunk, self.block_size)
            starts.append(len(tokens))
            if samples_first_token(chunk):
                logit_rows.append(len(tokens) - 1)
        lengths = [chunk.end for chunk in chunks]
        slot_rows = self.tensor([chunk.request.slot for chunk in chunks])
        metadata = AttentionMetadata(
            query_start_loc=self.tensor(starts).int(),
            seq_lens=self.tensor(lengths).int(),
            block_table=self.block_table.index_select(0, slot_rows),
            slot_mapping=self.tensor(slots),
            num_reqs=len(chunks),
            num_tokens=len(tokens),
            max_query_len=max(chunk.end - chunk.start for chunk in chunks),
            max_seq_len=max(lengths),
            query_lens=[chunk.end - chunk.start for chunk in chunks],
            seq_lens_host=lengths,
        )
        rows = ForwardInput(self.tensor(tokens), self.tensor(positions), metadata, logit_rows=self.tensor(logit_rows))
        return PrefillBatch(forward=rows, slots=slot_rows)

    def decode_batch(self, requests: Sequence[Request], k: int) -> DecodeBatch:
        """Gathers the rows of `requests` for a step of `k` drafts."""
        slots, sampling = self._select(requests)
        return self.gather(slots, sampling, k=k, max_seq_len=self.max_seq_len(requests, k))

    def max_seq_len(self, requests: Sequence[Request], k: int) -> int:
        """Bound on the positions that a step of `k` drafts writes for any of `requests`, whatever those in flight accept."""
        return max(request.kv_tokens_bound for request in requests) + max(k + 1, self.num_lookahead_tokens)

    def gather(self, slots: Tensor, sampling: SamplingTensors, *, k: int, max_seq_len: int) -> DecodeBatch:
        """The same for rows named by `slots` int64 [num_reqs]; only device operations."""
        seq_lens, anchors = self._progress.index_select(1, slots)
        return DecodeBatch(
            slots=slots,
            anchors=anchors,
            seq_lens=seq_lens,
            block_table=self.block_table.index_select(0, slots),
            k=k,
            max_seq_len=max_seq_len,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            sampling=sampling,
        )

    def sampling(self, slots: Tensor, facts: SamplingFacts) -> SamplingTensors:
        """Sampling state of the rows named by `slots`, as far as `facts` say that it is read; only device operations."""
        assert self.seen is not None or not facts.penalised

        def rows(values: Tensor, *, needed: bool) -> Tensor:
            return values.index_select(0, slots) if needed else values[:0]

        return SamplingTensors(
            temperature=rows(self.temperature, needed=not facts.all_greedy),
            top_k=rows(self.top_k, needed=facts.max_top_k > 0),
            top_p=rows(self.top_p, needed=facts.any_top_p),
            min_p=rows(self.min_p, needed=facts.any_min_p),
            repetition_penalty=rows(self.repetition_penalty, needed=facts.penalised),
            seeds=rows(self.seeds, needed=not facts.all_greedy),
            seen=self.seen.index_select(0, slots) if facts.penalised and self.seen is not None else None,
            all_greedy=facts.all_greedy,
            max_top_k=facts.max_top_k,
            any_top_p=facts.any_top_p,
            any_min_p=facts.any_min_p,
            logprobs=facts.logprobs,
        )

    def commit(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput) -> None:
        """Moves the requests of a step on: L grows by the accepted drafts and the old anchor, the next anchor takes its place.

        Args:
            batch: the step.
            token_ids: int64 [num_reqs, k+1], anchor and drafts.
            accept: what was accepted.
        """
        self.seq_lens.index_add_(0, batch.slots, accept.num_accepted + 1)
        self.anchors.index_copy_(0, batch.slots, accept.next_anchors)
        if batch.sampling.seen is not None and self.seen is not None:
            kept = torch.arange(token_ids.shape[1], device=self.device) <= accept.num_accepted[:, None]
            tokens = torch.where(kept, token_ids, token_ids[:, :1])
            cells = batch.slots[:, None] * self.seen.shape[1] + tokens
            # Not `seen[...] = True`: a number assigned through an index tensor is copied from the host, which waits.
            self.seen.view(-1).index_fill_(0, cells.view(-1), True)

    def rest_padding(self) -> None:
        """Takes the padding slot back to where it began, so that it never outgrows its block table."""
        self._progress[:, self.padding_slot].zero_()

    def slot_indices(self, requests: Sequence[Request], count: int | None = None) -> Tensor:
        """int64 [count]: the slots of `requests`, then the padding slot; `count` is their number when left out."""
        slots = [request.slot for request in requests]
        return self.tensor(slots + [self.padding_slot] * ((count or len(slots)) - len(slots)))

    def _select(self, requests: Sequence[Request]) -> tuple[Tensor, SamplingTensors]:
        """Slot indices and sampling state; both stay the same from step to step while the batch has the same requests."""
        key = batch_key(requests)
        if key != self._batch_key or self._sampling is None:
            self._batch_key = key
            self._slots = self.slot_indices(requests)
            self._sampling = self.sampling(self._slots, SamplingFacts.of(requests))
        elif self._sampling.seen is not None and self.seen is not None:
            self._sampling.seen = self.seen.index_select(0, self._slots)
        return self._slots, self._sampling

    def tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers, or rows of them, on the device."""
        return self.host_tensor(values, dtype).to(self.device, non_blocking=True)

    def host_tensor(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> Tensor:
        """Numbers, or rows of them, in pinned memory for an accelerator: the host would wait for any other copy."""
        return torch.tensor(values, dtype=dtype, pin_memory=self.device.type == "cuda")


BatchKey = tuple[int, ...]


def batch_key(requests: Sequence[Request]) -> BatchKey:
    """Differs between batches of different requests, or of the same in other slots."""
    return tuple([request.request_id for request in requests] + [request.slot for request in requests])


def cache_slots(chunk: Chunk, block_size: int) -> list[int]:
    """Where the keys and values of a chunk's tokens go, see `AttentionMetadata.slot_mapping`."""
    blocks = chunk.request.block_ids
    return [blocks[position // block_size] * block_size + position % block_size for position in range(chunk.start, chunk.end)]


def samples_first_token(chunk: Chunk) -> bool:
    """Whether this chunk ends a prompt whose first output token is yet to be chosen."""
    return chunk.last and not chunk.request.output_token_ids
