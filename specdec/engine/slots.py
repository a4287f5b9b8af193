"""Per-request state on the device, one row per slot, and the batches gathered from it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.base.blocks import BlockShape
from specdec.device.host import to_device
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk, prefill_tokens
from specdec.engine.selection import Selection
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.model.batch import Context, DecodeBatch, ForwardInput, PrefillBatch
from specdec.model.core import AcceptOutput
from specdec.sampling.edits import Edits, num_edits
from specdec.sampling.tensors import SamplingTensors


class SlotState:
    """Tensors with one row per slot. The host writes rows between steps; within a step only device
    operations touch them.

    The slot after the last is nobody's. Rows that pad a batch point at it: it decodes greedily on
    the null block, from position 0.

    Args:
        max_num_seqs: number of slots for requests.
        max_blocks: entries of a block table row.
        block_size: tokens per block.
        max_model_len: position ids stay below it.
        vocab_size: width of the table of tokens seen, which exists once a request has a repetition
            penalty.
        device: where the tensors live.
        num_lookahead_tokens: see `specdec.model.core.Drafter.num_lookahead_tokens`.
        rotates_by_length: the target asks, see `specdec.model.batch.ForwardInput.rope_lens`.
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
        rotates_by_length: bool = False,
    ) -> None:
        self.device = device
        self.block_size, self.max_model_len, self.vocab_size = block_size, max_model_len, vocab_size
        self.num_slots = max_num_seqs + 1
        self.padding_slot, self.num_lookahead_tokens = max_num_seqs, num_lookahead_tokens
        self.longest = max_blocks * block_size
        # In one, since a step begins by gathering both.
        self._progress = torch.zeros(2, self.num_slots, dtype=torch.int64, device=device)
        self.seq_lens, self.anchors = self._progress[0], self._progress[1]
        shape = (self.num_slots, max_blocks)
        self.block_table = torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=device)
        self.sampling = SamplingTensors.neutral(self.num_slots, device)
        self.rope_lens = None
        if rotates_by_length:
            self.rope_lens = torch.zeros(self.num_slots, dtype=torch.int64, device=device)
        self._num_blocks = [0] * max_num_seqs  # entries of each row that are the request's own
        self._selection = Selection([])

    def begin(self, requests: Sequence[Request]) -> None:
        """Writes the rows of requests that have just got their slots."""
        if not requests:
            return
        own = [request.slot for request in requests]
        slots, first_blocks = self.tensor([own, [request.block_ids[0] for request in requests]])
        # Entries past its own blocks repeat a request's first block, so that no request ever reads
        # another's values.
        block_rows = first_blocks.int()[:, None].expand(-1, self.block_table.shape[1])
        self.block_table.index_copy_(0, slots, block_rows)
        rows = SamplingTensors.of(
            [request.sampling for request in requests],
            [request.seed for request in requests],
            firsts=[len(request.prompt_token_ids) for request in requests],
            device=self.device,
        )
        self.sampling.put(slots, rows)
        self._begin_edits(requests, slots)
        if self.rope_lens is not None:
            lens = self.tensor([request.rope_len for request in requests])
            self.rope_lens.index_copy_(0, slots, lens)
        for request in requests:
            self._num_blocks[request.slot] = 0
            if request.sampling.penalized:
                if self.sampling.seen is None:
                    self.sampling.seen = torch.zeros(
                        self.num_slots, self.vocab_size, dtype=torch.bool, device=self.device
                    )
                self.sampling.seen[request.slot] = False
                tokens = self.tensor(prefill_tokens(request))
                self.sampling.seen[request.slot].index_fill_(0, tokens, True)
            if request.sampling.presence_penalty != 0 or request.sampling.frequency_penalty != 0:
                if self.sampling.counts is None:
                    self.sampling.counts = torch.zeros(
                        self.num_slots, self.vocab_size, dtype=torch.int32, device=self.device
                    )
                self.sampling.counts[request.slot] = 0
                # after a preemption; the last one is the anchor
                known = self.tensor(request.output_token_ids[:-1])
                ones = torch.ones_like(known, dtype=torch.int32)
                self.sampling.counts[request.slot].index_add_(0, known, ones)

    def _begin_edits(self, requests: Sequence[Request], slots: Tensor) -> None:
        """Writes what these requests change of single logits; from the first one that does on, also
        that others change none.
        """
        params = [request.sampling for request in requests]
        if self.sampling.edits is None and any(map(num_edits, params)):
            self.sampling.edits = Edits.none(self.num_slots, self.device)
        if self.sampling.edits is not None:
            firsts = [len(request.prompt_token_ids) for request in requests]
            self.sampling.edits.put(slots, params, firsts)

    def extend_block_tables(self, requests: Sequence[Request]) -> None:
        """Writes the entries of blocks that `requests` have got since the last call."""
        cells: list[int] = []
        blocks: list[int] = []
        num_blocks = self._num_blocks
        for request in [
            request for request in requests if num_blocks[request.slot] < len(request.block_ids)
        ]:
            known, count = num_blocks[request.slot], len(request.block_ids)
            row = request.slot * self.block_table.shape[1]
            cells += range(row + known, row + count)
            blocks += request.block_ids[known:]
            num_blocks[request.slot] = count
        if cells:
            places, values = self.tensor([cells, blocks])
            self.block_table.view(-1).index_copy_(0, places, values.int())

    def end_prefill(self, chunks: Sequence[Chunk]) -> None:
        """Sets L, and the last known token as anchor, of the requests whose prefill ends with these
        chunks.
        """
        ended = [chunk for chunk in chunks if chunk.last]
        if ended:
            columns = [
                [chunk.request.slot for chunk in ended],
                [chunk.end for chunk in ended],
                [chunk.request.token_ids[-1] for chunk in ended],
            ]
            slots, seq_lens, anchors = self.tensor(columns)
            self.seq_lens.index_copy_(0, slots, seq_lens)
            self.anchors.index_copy_(0, slots, anchors)

    def prefill_batch(self, chunks: Sequence[Chunk]) -> PrefillBatch:
        """Packs chunks. Logits are asked for the last row of every prompt that ends here and has no
        known anchor, and behind these for those of `Chunk.rows_to_score`.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[NDArray[np.int64]] = []
        logit_rows: list[int] = []
        scored_rows: list[int] = []
        rope_lens: list[int] = []
        for chunk in chunks:
            rope_lens += [chunk.request.rope_len] * (chunk.end - chunk.start)
            scored_rows += [
                len(tokens) + position - chunk.start for position in chunk.rows_to_score
            ]
            tokens += prefill_tokens(chunk.request)[chunk.start : chunk.end]
            positions += range(chunk.start, chunk.end)
            slots.append(cache_slots(chunk, self.block_size))
            if samples_first_token(chunk):
                logit_rows.append(len(tokens) - 1)
        slot_rows = self.tensor([chunk.request.slot for chunk in chunks])
        metadata = AttentionMetadata.packed(
            [chunk.end - chunk.start for chunk in chunks],
            [chunk.end for chunk in chunks],
            self.block_table.index_select(0, slot_rows),
            self.tensor(np.concatenate(slots)),
        )
        wanted = self.tensor(logit_rows + scored_rows)
        rows = ForwardInput(
            self.tensor(tokens),
            self.tensor(positions),
            metadata,
            logit_rows=wanted,
            rope_lens=None if self.rope_lens is None else self.tensor(rope_lens),
            slots=slot_rows,
            max_pending=max_pending(chunks),
        )
        next_token_ids = self.tensor([next_token(chunk) for chunk in chunks])
        return PrefillBatch(forward=rows, slots=slot_rows, next_token_ids=next_token_ids)

    def select(self, requests: Sequence[Request]) -> Selection:
        """The batch of these requests, with what is known of it from the step before."""
        if not self._selection.holds(requests):
            self._selection = Selection(requests)
        return self._selection

    def decode_batch(
        self, selection: Selection, shape: BlockShape, context: Context = "now"
    ) -> DecodeBatch:
        """Gathers the rows of a batch for a step of blocks of one shape."""
        if selection.tensors is None:
            slots = self.tensor(selection.slots)
            selection.tensors = slots, self.sampling.select(slots, selection.plan)
        slots, sampling = selection.tensors
        sampling.select_past(slots, self.sampling)
        longest = self.max_seq_len(selection, shape.drafts)
        bounds = {"max_seq_len": longest, "min_seq_len": selection.shortest}
        return self.gather(slots, sampling, shape=shape, context=context, **bounds)

    def max_seq_len(self, selection: Selection, k: int) -> int:
        """Bound on the positions that a step of `k` drafts writes for any request, whatever those
        in flight accept.
        """
        return selection.longest + self.step_rows(k)

    def step_rows(self, k: int) -> int:
        """Positions that a step of `k` drafts writes at most."""
        return max(k + 1, self.num_lookahead_tokens)

    def gather(
        self,
        slots: Tensor,
        sampling: SamplingTensors,
        *,
        shape: BlockShape,
        max_seq_len: int,
        min_seq_len: int = 0,
        context: Context = "now",
    ) -> DecodeBatch:
        """Gathers rows named by `slots` int64 [num_reqs]; only device operations."""
        seq_lens, anchors = self._progress.index_select(1, slots)
        return DecodeBatch(
            slots=slots,
            anchors=anchors,
            seq_lens=seq_lens,
            block_table=self.block_table.index_select(0, slots),
            shape=shape,
            max_seq_len=max_seq_len,
            min_seq_len=min_seq_len,
            block_size=self.block_size,
            max_model_len=self.max_model_len,
            sampling=sampling,
            rope_lens=self.rope_lens_of(slots),
            context=context,
        )

    def rope_lens_of(self, slots: Tensor) -> Tensor | None:
        """int64 [num_reqs]: those of the requests in `slots`; None where the target asks none."""
        return None if self.rope_lens is None else self.rope_lens.index_select(0, slots)

    def commit(self, batch: DecodeBatch, token_ids: Tensor, accept: AcceptOutput) -> None:
        """Moves the requests of a step on: L grows by the accepted drafts and the old anchor, the
        next anchor takes its place.

        Args:
            batch: the step.
            token_ids: int64 [num_reqs, depth + 1], the anchor and the drafts of the path.
            accept: what was accepted.
        """
        self.seq_lens.index_add_(0, batch.slots, accept.num_accepted + 1)
        self.anchors.index_copy_(0, batch.slots, accept.next_anchors)
        plan, seen, counts = batch.sampling.plan, self.sampling.seen, self.sampling.counts
        if plan.penalized or plan.counted:
            columns = torch.arange(token_ids.shape[1], device=self.device)
            kept = columns <= accept.num_accepted[:, None]
            tokens = torch.where(kept, token_ids, token_ids[:, :1])
            cells = (batch.slots[:, None] * self.vocab_size + tokens).view(-1)
            if plan.penalized and seen is not None:
                # Not `seen[...] = True`: a number assigned through an index tensor is copied from
                # the host, which waits.
                seen.view(-1).index_fill_(0, cells, True)
            if plan.counted and counts is not None:
                counts.view(-1).scatter_add_(0, cells, kept.int().view(-1))

    def rest_padding(self) -> None:
        """Takes the padding slot back to where it began, lest it outgrow its block table."""
        self._progress[:, self.padding_slot].zero_()

    def slot_indices(self, requests: Sequence[Request], count: int | None = None) -> Tensor:
        """int64 [count]: the slots of `requests`, then the padding slot; `count` is their number
        when left out.
        """
        slots = [request.slot for request in requests]
        return self.tensor(slots + [self.padding_slot] * ((count or len(slots)) - len(slots)))

    def tensor(self, values: Sequence[Any] | NDArray[np.int64]) -> Tensor:
        """Integers, or rows of them, as int64 on the device."""
        return to_device(values, torch.int64, self.device)


def cache_slots(chunk: Chunk, block_size: int) -> NDArray[np.int64]:
    """Where the keys and values of a chunk's tokens go, see `AttentionMetadata.slot_mapping`."""
    first, skipped = divmod(chunk.start, block_size)
    blocks = np.array(chunk.request.block_ids[first : -(-chunk.end // block_size)], np.int64)
    places = blocks[:, None] * block_size + np.arange(block_size)
    return places.reshape(-1)[skipped : skipped + chunk.end - chunk.start]


def next_token(chunk: Chunk) -> int:
    """The token after a chunk; 0 where it is yet to be chosen."""
    tokens = chunk.request.token_ids
    return tokens[chunk.end] if chunk.end < len(tokens) else 0


def max_pending(chunks: Sequence[Chunk]) -> int:
    """See `ForwardInput.max_pending`: those of the snapshots that prefills go on from."""
    pending = (
        chunk.request.snapshot.pending
        for chunk in chunks
        if chunk.admitted and chunk.request.snapshot
    )
    return max(pending, default=0)


def samples_first_token(chunk: Chunk) -> bool:
    """Whether this chunk ends a prompt whose first output token is yet to be chosen."""
    return chunk.last and not chunk.request.output_token_ids
