"""The scheduler: admission, chunked prefill, growth of block tables, preemption by recompute."""

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from specdec.engine.requests.prefix import PrefixCache
from specdec.engine.requests.request import Request, Status
from specdec.kv_cache import BlockPool, blocks_for

MAX_ROWS_TO_SCORE = 1024
"""Rows of a step: enough to keep a device busy, few enough that their logits over a large
vocabulary fit its memory.
"""


@dataclass(slots=True)
class Chunk:
    """Tokens `start .. end - 1` of a request's prefill."""

    request: Request
    start: int
    end: int
    admitted: bool  # the request got its slot in this step
    last: bool  # nothing of the prefill is left after it

    @property
    def rows_to_score(self) -> range:
        """Positions of rows that tell the log-probability of the prompt token behind them."""
        request = self.request
        if not request.num_to_score:
            return range(0)
        end = min(self.end, len(request.prompt_token_ids) - 1)
        return range(max(self.start, request.num_scored), end)


@dataclass(slots=True)
class Schedule:
    """Work of one step: a packed prefill, and the requests that decode."""

    prefill: list[Chunk]
    decode: list[Request]


def prefill_tokens(request: Request) -> list[int]:
    """Tokens whose KV the prefill writes: the prompt, or after a preemption everything but the
    known anchor.
    """
    return request.token_ids[:-1] if request.output_token_ids else request.prompt_token_ids


class Scheduler:
    """First come, first served, those aside whose grammar is not ready yet; the last to arrive is
    the first to be preempted, so the oldest request always advances.

    All state is on the host. Requests hold blocks for everything they have prefilled and for every
    position that launched steps may write, whatever those steps will turn out to have accepted.

    Args:
        pool: blocks of the cache.
        block_size: tokens per block.
        max_num_seqs: slots for requests in work.
        max_prefill_tokens: tokens of all prefill chunks of a step together.
        max_tokens_beside: the same in a step in which requests decode; None for no difference.
        prefix: finds and offers what requests have in common; None does neither.
        num_draft_tokens: drafts per step for which there must be room.
        num_lookahead_tokens: see `specdec.model.core.Drafter.num_lookahead_tokens`.
        snapshot_tokens: tokens to prefill for which a snapshot of recurrent states is worth a step
            of its own, at the end of a prompt or where it parts from another; None where no layer
            is recurrent.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_num_seqs: int,
        max_prefill_tokens: int,
        max_tokens_beside: int | None = None,
        prefix: PrefixCache | None = None,
        num_draft_tokens: int = 0,
        num_lookahead_tokens: int = 0,
        snapshot_tokens: int | None = None,
    ) -> None:
        self.pool = pool
        self.prefix = prefix or PrefixCache(pool, block_size, enabled=False)
        self._snapshot_tokens = snapshot_tokens if self.prefix.enabled else None
        self.num_draft_tokens, self.num_lookahead_tokens = num_draft_tokens, num_lookahead_tokens
        self.block_size = block_size
        self.max_prefill_tokens = max_prefill_tokens
        self.max_tokens_beside = min(max_tokens_beside or max_prefill_tokens, max_prefill_tokens)
        self.max_num_seqs = max_num_seqs
        self.waiting: list[Request] = []  # in order of arrival
        self.working: list[Request] = []  # prefilling or running, in order of arrival
        self.num_preemptions = 0
        self._free_slots: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forgets all requests."""
        self.waiting.clear()
        self.working.clear()
        self._free_slots = list(reversed(range(self.max_num_seqs)))
        self.prefix.reset()

    def add(self, request: Request) -> None:
        """Queues a request."""
        insort(self.waiting, request, key=_arrival)

    def finish(self, request: Request) -> list[int]:
        """Takes a request out, wherever it stands, and returns blocks that nobody holds."""
        freed: list[int] = []
        if request.status is Status.WAITING:
            self.waiting.remove(request)
        elif request.status is not Status.FINISHED:
            freed = self._withdraw(request)
        request.status = Status.FINISHED
        self.prefix.forget(request)
        return freed

    def send_back(self, request: Request) -> list[int]:
        """Lets a request in work wait again, and returns the blocks that nobody holds any more; its
        tokens so far will be prefilled again. Results that are unread then are not its own.
        """
        freed = self._withdraw(request)
        request.status, request.num_unread = Status.WAITING, 0
        insort(self.waiting, request, key=_arrival)
        return freed

    @property
    def decoding(self) -> list[Request]:
        """Requests to which one more step can add a token: unread ones add at least one each."""
        running = Status.RUNNING
        return [
            request
            for request in self.working
            if request.status is running
            and len(request.output_token_ids) + request.num_unread < request.max_output_tokens
        ]

    def schedule(self, decoding: list[Request], k: int) -> Schedule | None:
        """Decides the next step and reserves its blocks.

        Args:
            decoding: the scheduler's own, as it is now.
            k: drafts per request of that step.

        Returns:
            None when blocks are short while results of launched steps are unread: only a request
            whose tokens are all known can be preempted, and results may free blocks. Read them, and
            ask again.
        """
        preemptions = self.num_preemptions
        decode = self._grow(decoding, k)
        if decode is None:
            return None
        # else the victim would take back what was just freed
        admit = self.num_preemptions == preemptions
        budget = self.max_tokens_beside if decode else self.max_prefill_tokens
        return Schedule(prefill=self._prefill_chunks(budget, admit=admit), decode=decode)

    def has_room(self, decoding: Sequence[Request], k: int) -> bool:
        """Whether a step of `k` drafts finds its blocks without anyone being preempted."""
        num_rows = max(k + 1, self.num_lookahead_tokens)
        bounds = (
            blocks_for(request.kv_tokens_bound + num_rows, self.block_size) - len(request.block_ids)
            for request in decoding
        )
        return sum(max(missing, 0) for missing in bounds) <= self.pool.num_free

    def prefilled(self, chunk: Chunk) -> int | None:
        """Notes a launched chunk; blocks it has filled are offered for reuse from the next step on.

        Returns:
            The row that is to keep its recurrent states as they are now; None for no snapshot.
        """
        request = chunk.request
        row = self.prefix.prefilled(request, chunk.end, last=chunk.last)
        request.num_prefilled = chunk.end
        if chunk.last:
            request.status = Status.RUNNING
            request.num_kv_tokens = chunk.end
        return row

    def _grow(self, decoding: list[Request], k: int) -> list[Request] | None:
        """Requests that decode in this step, each with blocks for all rows of a step from the
        largest possible L on.
        """
        num_rows, block_size = max(k + 1, self.num_lookahead_tokens), self.block_size
        preemptions = self.num_preemptions
        for request in decoding:
            needed = request.num_kv_tokens + request.num_in_flight + num_rows
            if needed <= len(request.block_ids) * block_size:
                continue
            # The last to arrive goes first, which may be this one.
            while request.status is Status.RUNNING:
                wanted = blocks_for(request.kv_tokens_bound + num_rows, block_size)
                missing = wanted - len(request.block_ids)
                if missing <= self.pool.num_free:
                    if missing > 0:
                        request.block_ids += self.pool.allocate(missing)
                    break
                if any(r.num_unread for r in self.working):
                    return None
                self._preempt(self.working[-1])
        if self.num_preemptions == preemptions:
            return decoding
        return [request for request in decoding if request.status is Status.RUNNING]

    def _prefill_chunks(self, budget: int, *, admit: bool) -> list[Chunk]:
        """Prefills under way first, then newcomers, as far as tokens, slots and blocks go."""
        chunks: list[Chunk] = []
        for request in [r for r in self.working if r.status is Status.PREFILLING]:
            budget = self._take(chunks, request, budget, admitted=False)
        while admit and budget > 0 and self._free_slots:
            first = next((request for request in self.waiting if request.may_start), None)
            if first is None or not self._admit(first):
                break
            budget = self._take(chunks, first, budget, admitted=True)
        return chunks

    def _take(self, chunks: list[Chunk], request: Request, budget: int, *, admitted: bool) -> int:
        """Appends the next chunk of `request` and returns the budget left."""
        start, total = request.num_prefilled, len(prefill_tokens(request))
        end = min(total, start + budget)
        prompt_end = len(request.prompt_token_ids)
        if start < prompt_end < end:
            # what was generated before a preemption comes by itself: backends round prompts only
            end = prompt_end
        if request.num_to_score:
            room = MAX_ROWS_TO_SCORE - sum(len(chunk.rows_to_score) for chunk in chunks)
            end = min(end, start + max(room, 1))
        end = self._snapshot_end(request, start, end, total)
        if end > start:
            chunks.append(Chunk(request, start, end, admitted=admitted, last=end == total))
        return budget - (end - start)

    def _snapshot_end(self, request: Request, start: int, end: int, total: int) -> int:
        """Where a chunk ends that may go as far as `end`: at a block's end where states are kept,
        if that is not too near.

        The second request that begins as another did keeps them where it parts from that one, for
        all those that come after.
        """
        if self._snapshot_tokens is None:
            return end
        if start + self._snapshot_tokens <= request.parts_at < end:
            return request.parts_at
        least = self._snapshot_tokens if end == total else 1
        # the last token is computed after it
        boundary = (end - (end == total)) // self.block_size * self.block_size
        return boundary if boundary - start >= least else end

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and the blocks of its prefill and first step, if those in
        work can still grow.
        """
        tokens = prefill_tokens(request)
        cached = self.prefix.match(request, tokens)
        num_tokens = len(tokens) + max(self.num_draft_tokens + 1, self.num_lookahead_tokens)
        missing = blocks_for(num_tokens, self.block_size) - len(cached)
        if missing + len(self.working) > self.pool.num_free:
            self.pool.release(cached)
            return False
        request.block_ids = cached + self.pool.allocate(missing)
        request.num_prefilled = len(cached) * self.block_size
        read = takewhile(lambda block: block not in self.pool.unread, cached)
        request.num_read = sum(1 for _ in read) * self.block_size
        self.prefix.admit(request, cached, len(tokens))
        request.slot = self._free_slots.pop()
        request.status = Status.PREFILLING
        self.waiting.remove(request)
        insort(self.working, request, key=_arrival)
        return True

    def _preempt(self, request: Request) -> None:
        self.num_preemptions += 1
        self.send_back(request)

    def _withdraw(self, request: Request) -> list[int]:
        freed = self.pool.release(request.block_ids)
        self._free_slots.append(request.slot)
        self.prefix.withdraw(request)
        self.working.remove(request)
        request.block_ids, request.slot = [], -1
        request.num_prefilled = request.num_kv_tokens = 0
        request.num_in_flight = request.num_deferred = 0
        return freed


def _arrival(request: Request) -> int:
    return request.request_id
