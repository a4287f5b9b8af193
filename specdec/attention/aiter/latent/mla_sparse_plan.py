"""What all layers of one forward share in sparse latent attention on AITER: every token is a batch
entry of its own.

    position              0   1   2   3   4  ...        with topk = 3
    keys attended to      1   2   3   3   3  ...        min(position + 1, topk)
    kv_indptr         0   1   3   6   9  12  ...        their running sum

AITER's decode kernel divides this work by a plan of its own, which a planner kernel writes into
work buffers. Buffers are made once per size and kept, so captured graphs may use their addresses.
What the host knows of the lengths decides when it is planned:

    nothing                         each time, in buffers of their own: a graph that replays such a
                                    plan overwrites them unseen
    every length (prefill)          when one of the plan's inputs has changed
    at least `topk` keys for each   once per number of tokens: every token has `topk` keys and keeps
                                    them

Nothing in here reads from the device.
"""

from array import array
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from specdec.attention.aiter.latent import latents
from specdec.attention.aiter.latent.latents import Entries, LatentKernels
from specdec.attention.backend import AttentionMetadata
from specdec.base.sizes import power_of_two

MAX_SCORES = 2**26
"""Most index scores (rows times keys, float32) that a prefill holds at once."""

PlanKey = tuple[int, int, torch.dtype, torch.dtype, int, bytes, bytes]


@dataclass(slots=True)
class IndexChunk:
    """Rows of a prefill whose keys are scored together: those of some requests, packed."""

    rows: slice
    requests: slice
    num_keys: int
    max_seq_len: int
    cu_seq_lens: Tensor  # int32 [requests + 1], where the keys of each request begin
    starts: Tensor  # int32 [rows], first key of the row's request
    ends: Tensor  # int32 [rows], end of the keys the row may see


@dataclass(slots=True)
class SparsePlan:
    """One forward."""

    metadata: AttentionMetadata
    buffers: "SparseBuffers"
    work_plan: "WorkPlan"
    serial: int  # of the buffers' content
    positions: Tensor  # int64 [num_tokens]
    chunks: list[IndexChunk] | None  # None when only the device knows the lengths
    # float32 [num_tokens, keys], shared by the layers of a decoding forward
    scores: Tensor | None = None
    selected: Tensor | None = None  # what the index list was last made of

    def entries(self) -> Entries:
        """The tokens, each an entry of its own."""
        return self.buffers.entries(self.metadata.num_tokens, self.work_plan)

    def list_slots(self, selected: Tensor, block_size: int) -> None:
        """Takes over what a layer selects, int32 [num_tokens, topk]; layers that share a selection
        share its list.
        """
        if self.selected is not selected:
            self.buffers.list_slots(selected, self.work_plan, self.metadata.block_table, block_size)
            self.selected = selected


@dataclass(slots=True, eq=False)
class WorkPlan:
    """AITER's plan for up to as many tokens as `kv_indptr` has room for, at addresses that never
    change.

    Attributes:
        kv_indptr: int32 [capacity + 1], where the keys of each token begin.
        work: the plan under the names that `mla_decode_fwd` gives its parts.
        key: of what is planned; None when its inputs are not known to the host.
        full: every token has `topk` keys.
    """

    kv_indptr: Tensor
    work: dict[str, Tensor]
    key: PlanKey | None = None
    full: bool = False

    def fill(self, lengths: Tensor) -> None:
        """Takes over the keys int64 [num_tokens] of each token; absent tokens have none."""
        count = len(lengths)
        self.kv_indptr[1 : count + 1].copy_(lengths.cumsum(0))
        last = self.kv_indptr[count].expand(len(self.kv_indptr) - count - 1)
        self.kv_indptr[count + 1 :].copy_(last)


class SparseBuffers:
    """Index lists for up to `capacity` tokens, at addresses that never change; zeros, since a
    captured graph may read up to the largest extent it was made for.

    Args:
        capacity: tokens.
        topk: keys per token.
        device: where they live.
    """

    def __init__(self, capacity: int, topk: int, device: torch.device) -> None:
        self.capacity, self.topk = capacity, topk
        numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.request_ids = torch.zeros(capacity, dtype=torch.int64, device=device)
        self.qo_indptr = torch.arange(capacity + 1, **numbers)
        # the last place takes what is not selected
        self.kv_indices = torch.zeros(capacity * topk + 1, **numbers)
        self.last_page_lens = torch.ones(capacity, **numbers)
        self.serial = 0
        self.used = 0  # tokens whose entries may be other than zero
        self.captured = False

    def entries(self, count: int, plan: WorkPlan) -> Entries:
        """The first `count` tokens, each an entry of its own."""
        return Entries(
            max_seqlen_q=1,
            qo_indptr=self.qo_indptr[: count + 1],
            kv_indptr=plan.kv_indptr[: count + 1],
            kv_indices=self.kv_indices[: count * self.topk],
            kv_last_page_lens=self.last_page_lens[:count],
            work=plan.work,
        )

    def fill(self, request_ids: Tensor, *, capturing: bool) -> None:
        """Takes over the requests int64 [num_tokens] of a forward's rows, and clears what longer
        forwards left behind them.
        """
        count = len(request_ids)
        # a graph replays after forwards that nobody knows yet
        used = self.capacity if capturing else self.used
        self.captured |= capturing
        if count < used:
            self.request_ids[count:used].zero_()
            self.kv_indices[count * self.topk : used * self.topk].zero_()
        self.used = self.capacity if self.captured else count
        self.request_ids[:count].copy_(request_ids)
        self.serial += 1

    def list_slots(
        self, selected: Tensor, plan: WorkPlan, block_table: Tensor, block_size: int
    ) -> None:
        """Makes of positions int32 [num_tokens, topk], or -1, the packed list of cache slots."""
        count = len(selected)
        valid = selected >= 0
        positions = selected.clamp(min=0)
        blocks = block_table[self.request_ids[:count, None], positions // block_size]
        slots = blocks * block_size + positions % block_size
        # Only padding has fewer positions than its list is long, and any cache has the slot 0.
        if plan.full:
            self.kv_indices[: slots.numel()].copy_(torch.where(valid, slots, 0).view(-1))
            return
        places = plan.kv_indptr[:count, None] + valid.cumsum(1) - 1
        places = torch.where(valid, places, self.capacity * self.topk)
        self.kv_indices.scatter_(0, places.view(-1), slots.view(-1))


class SparsePlanner:
    """Makes plans and keeps their buffers.

    Args:
        kernels: of the latents.
        topk: keys per token.
    """

    def __init__(self, kernels: LatentKernels, topk: int) -> None:
        self.kernels, self.topk, self.device = kernels, topk, kernels.spec.device
        self._buffers: dict[int, SparseBuffers] = {}
        self._work_plans: dict[tuple[int, bool], WorkPlan] = {}
        self._steady_plans: dict[int, WorkPlan] = {}

    def plan(self, metadata: AttentionMetadata) -> SparsePlan:
        """Index lists and work plan of a forward."""
        capturing = metadata.seq_lens.is_cuda and torch.cuda.is_current_stream_capturing()
        buffers = self.buffers(metadata.num_tokens)
        ends = metadata.query_start_loc[1:]
        rows = torch.arange(metadata.num_tokens, dtype=torch.int32, device=self.device)
        request_ids = torch.searchsorted(ends, rows, right=True)
        positions = rows + (metadata.seq_lens - ends)[request_ids].long()
        buffers.fill(request_ids, capturing=capturing)
        steady = self._steady_plan(metadata, buffers, capturing)
        work_plan = steady or self._work_plan(metadata, positions, buffers, capturing)
        chunks = None if metadata.query_lens is None else _index_chunks(metadata, self.device)
        return SparsePlan(metadata, buffers, work_plan, buffers.serial, positions, chunks)

    def buffers(self, num_tokens: int) -> SparseBuffers:
        """Buffers for at least `num_tokens`."""
        capacity = power_of_two(num_tokens)
        if capacity not in self._buffers:
            self._buffers[capacity] = SparseBuffers(capacity, self.topk, self.device)
        return self._buffers[capacity]

    def _steady_plan(
        self, metadata: AttentionMetadata, buffers: SparseBuffers, capturing: bool
    ) -> WorkPlan | None:
        """The plan of as many tokens with `topk` keys each; None where some may have fewer, or
        where it is yet to be made.

        A graph must not make it: its replays alone would, and other forwards would take it for
        made.
        """
        count = metadata.num_tokens
        if (
            metadata.query_lens is not None
            or metadata.min_seq_len - metadata.max_query_len + 1 < self.topk
        ):
            return None
        if count not in self._steady_plans and not capturing:
            work = self.kernels.work(count, 1, is_sparse=True)
            plan = WorkPlan(self._zeros(count + 1), work, full=True)
            torch.arange(0, (count + 1) * self.topk, self.topk, out=plan.kv_indptr)
            self.kernels.divide(buffers.entries(count, plan))
            self._steady_plans[count] = plan
        return self._steady_plans.get(count)

    def _work_plan(
        self,
        metadata: AttentionMetadata,
        positions: Tensor,
        buffers: SparseBuffers,
        capturing: bool,
    ) -> WorkPlan:
        """A plan of tokens at `positions`, made anew unless the host knows it is the last."""
        key = None if capturing else self._key(metadata)
        # plans of lengths that the host knows share no memory with others
        index = buffers.capacity, key is not None
        if index not in self._work_plans:
            work = self.kernels.work(buffers.capacity, 1, is_sparse=True)
            self._work_plans[index] = WorkPlan(self._zeros(buffers.capacity + 1), work)
        plan = self._work_plans[index]
        if key is None or key != plan.key:
            plan.key = None  # should the planner fail, what it leaves belongs to no key
            plan.fill((positions + 1).clamp_(max=self.topk))
            self.kernels.divide(buffers.entries(metadata.num_tokens, plan))
            plan.key = key
        return plan

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32, device=self.device)

    def _key(self, metadata: AttentionMetadata) -> PlanKey | None:
        """Everything AITER's plan depends on; None when the host does not know it."""
        if metadata.query_lens is None or metadata.seq_lens_host is None:
            return None
        contexts = (n - q for n, q in zip(metadata.seq_lens_host, metadata.query_lens, strict=True))
        return (
            metadata.num_tokens,
            self.kernels.num_heads,
            self.kernels.spec.dtype,
            self.kernels.spec.kv_dtype,
            latents.MAX_SPLIT_PER_BATCH,
            array("q", (min(context, self.topk) for context in contexts)).tobytes(),
            array("q", metadata.query_lens).tobytes(),
        )


def _index_chunks(metadata: AttentionMetadata, device: torch.device) -> list[IndexChunk]:
    """Packs requests until their scores fill the workspace; a request too large by itself is cut
    between rows.
    """
    assert metadata.query_lens is not None and metadata.seq_lens_host is not None
    firsts = [0, *accumulate(metadata.query_lens)]
    chunks, begin = [], 0
    while begin < metadata.num_reqs:
        end, rows, keys = begin, 0, 0
        while end < metadata.num_reqs:
            more_rows = rows + metadata.query_lens[end]
            more_keys = keys + metadata.seq_lens_host[end]
            if end > begin and more_rows * more_keys > MAX_SCORES:
                break
            end, rows, keys = end + 1, more_rows, more_keys
        step = max(1, MAX_SCORES // max(1, keys))
        for row in range(firsts[begin], firsts[end], step):
            span = slice(row, min(row + step, firsts[end]))
            chunks.append(_index_chunk(metadata, slice(begin, end), span, firsts, device))
        begin = end
    return chunks


def _index_chunk(
    metadata: AttentionMetadata,
    requests: slice,
    rows: slice,
    firsts: list[int],
    device: torch.device,
) -> IndexChunk:
    """The given rows on all keys of the given requests."""
    assert metadata.query_lens is not None and metadata.seq_lens_host is not None
    lengths, counts = metadata.seq_lens_host[requests], metadata.query_lens[requests]
    offsets = [0, *accumulate(lengths)]
    part = slice(rows.start - firsts[requests.start], rows.stop - firsts[requests.start])
    starts = torch.repeat_interleave(torch.tensor(offsets[:-1]), torch.tensor(counts))[part]
    each = zip(offsets, lengths, counts, strict=False)
    ends = torch.cat([torch.arange(o + n - q, o + n) + 1 for o, n, q in each])[part]
    bounds = (torch.tensor(offsets), starts, ends)
    cu_seq_lens, starts, ends = (tensor.int().to(device, non_blocking=True) for tensor in bounds)
    return IndexChunk(rows, requests, offsets[-1], max(lengths), cu_seq_lens, starts, ends)
