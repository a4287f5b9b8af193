"""Reuse of what requests have in common: which of their blocks are offered, and which are found
when another one begins alike.

A block is offered once all its tokens are committed and target and drafter have written what they
keep of them; a drafter that can read them later may still have to. A prefill does so chunk by
chunk. Of generated tokens the host learns when it reads a step's result. By then the step has run,
or lies before everything that is still to be launched, and no later step writes to positions that
it committed. Such keys and values were computed among drafts, so in low precision they may round
otherwise than those of a prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from sys import maxsize
from typing import NamedTuple

from specdec.engine.requests.request import Request
from specdec.kv_cache import BlockPool, PrefixCounts, Snapshot, prefix_hashes, prefix_root
from specdec.model.batch import Context

SNAPSHOT_SPACING = 64
"""Generated tokens after which a snapshot of recurrent states is taken again, in the place of the
one before: it costs a copy of the states, and saves the next request as many tokens at most."""


class _Copied(NamedTuple):
    """States that were copied in case they turn out to be those of a block's end."""

    end: int
    snapshot: Snapshot


@dataclass(slots=True)
class _Sequence:
    """What is known of one request."""

    root: bytes
    # of full blocks, also before it is admitted and after a preemption
    digests: list[bytes] = field(default_factory=list)
    num_offered: int = 0  # blocks that came from the cache or were offered to it
    # For recurrent layers:
    # tokens that the states have taken in after the last step whose result was read
    num_in_state: int = 0
    last_end: int = 0  # where the last snapshot was taken, or the prefill ended
    last_chunk: int | None = None  # block that has the snapshot of the last chunk of the prefill
    kept: int | None = None  # block that has the last snapshot of generated tokens
    copied: _Copied | None = None


class PrefixCache:
    """Finds and offers blocks of requests in a pool, by content.

    Args:
        pool: of the blocks.
        block_size: tokens per block.
        enabled: False neither finds nor offers anything.
        tokens_ahead: see `specdec.model.core.Drafter.tokens_ahead`.
        late_context, reads_late: see `specdec.model.core.Drafter`.
        recurrent: layers keep states, which are to be kept along with blocks.

    Attributes:
        counts: of all requests so far.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        enabled: bool,
        tokens_ahead: int = 0,
        late_context: bool = False,
        reads_late: bool = False,
        recurrent: bool = False,
    ) -> None:
        self.pool, self.block_size, self.enabled = pool, block_size, enabled
        self._ahead, self._late, self._recurrent = tokens_ahead, late_context, recurrent
        self._reads_late = reads_late
        self.counts = PrefixCounts()
        self._sequences: dict[int, _Sequence] = {}  # by request id, from the first try to admit it

    def reset(self) -> None:
        """Forgets all requests."""
        self._sequences.clear()

    def match(self, request: Request, tokens: Sequence[int]) -> list[int]:
        """Takes a reference on the blocks with which a request can begin, whose prefill has these
        tokens.
        """
        if not self.enabled:
            return []
        params = request.sampling
        if request.request_id not in self._sequences:
            root = prefix_root(rope_len=request.rope_len, salt=params.cache_salt)
            self._sequences[request.request_id] = _Sequence(root)
        digests = self._digests(request, tokens)
        # The last token is always computed: its logits choose the first output token. So are all
        # whose logits are asked for.
        most = request.num_scored if request.num_to_score else len(tokens) - 1
        # what it found may be what was wrong
        reads = params.read_prefix_cache and not request.num_tries
        return self.pool.match(digests[: most // self.block_size]) if reads else []

    def admit(self, request: Request, cached: Sequence[int], num_tokens: int) -> None:
        """Notes that a request with so many tokens to prefill begins with these blocks."""
        if not self.enabled:
            request.offers_from = maxsize
            return
        sequence, found = self._sequences[request.request_id], len(cached) * self.block_size
        sequence.num_offered, sequence.last_end, sequence.kept, sequence.last_chunk = (
            len(cached),
            num_tokens,
            None,
            None,
        )
        if self._recurrent:
            request.snapshot = self.pool.snapshot_at(cached[-1]) if cached else None
            most = (num_tokens - 1) // self.block_size
            known = self.pool.num_known(sequence.digests[:most], len(cached))
            request.parts_at = known * self.block_size
        if request.num_cached_tokens is None:  # not again after a preemption
            request.num_cached_tokens = found
            if request.sampling.read_prefix_cache and not request.num_to_score:
                self.counts.queried += num_tokens
                self.counts.found += found

    def prefilled(self, request: Request, end: int, *, last: bool) -> int | None:
        """Offers what a launched chunk of a prefill that ends at `end` has filled.

        Returns:
            The row that is to keep the request's recurrent states as they are now; None for no
            snapshot.
        """
        if not self.enabled:
            return None
        # What drafting caches for the last position depends on a token that is yet to be chosen.
        self._offer(request, end - self._ahead if last else end)
        sequence = self._sequences[request.request_id]
        sequence.num_in_state = end
        number = end // self.block_size - 1
        if not self._recurrent or end % self.block_size or number >= len(sequence.digests):
            return None
        block = self.pool.published(sequence.digests[number])  # whoever has computed it first
        if block is None or not self.pool.takes_snapshot(block):
            return None
        # Of one prompt the states at its end serve most, and those where it parts from another; the
        # others go first.
        if sequence.last_chunk is not None:
            self.pool.demote_snapshot(sequence.last_chunk)
        sequence.last_chunk = block if end != request.parts_at else None
        row = self.pool.take_row()
        if row is not None:
            self.pool.keep_snapshot(block, Snapshot(row))
        return row

    def committed(self, request: Request, start: int, context: Context, *, plain: bool) -> None:
        """Offers what a step has filled whose result was read; needless while L is below
        `request.offers_from`.

        Args:
            request: has the step's tokens, and was finite.
            start: L before the step; `request.num_kv_tokens` is L after it.
            context: of the step.
            plain: it had no drafts.
        """
        if not self.enabled:
            return
        if context != "later" and not request.unread:
            end = start if self._late else request.num_kv_tokens
            if self._reads_late:
                self.read(request, end)
            self._offer(request, end)
        elif self._reads_late:
            self._offer(request, request.num_kv_tokens)
        if self._recurrent:
            num_in_state = request.num_kv_tokens if plain else start
            self._sequences[request.request_id].num_in_state = num_in_state
            self._settle(request)

    def read(self, request: Request, end: int) -> None:
        """Notes that the drafter has cached the context of a request's tokens up to `end`."""
        if end > request.num_read:
            blocks = slice(request.num_read // self.block_size, end // self.block_size)
            self.pool.unread.difference_update(request.block_ids[blocks])
            request.num_read = end

    def copies(self, requests: Sequence[Request]) -> list[tuple[int, int]]:
        """Slots and rows to which their recurrent states are to be copied before the next step of
        these requests is launched.
        """
        if not (self.enabled and self._recurrent):
            return []
        pairs = []
        for request in requests:
            sequence = self._sequences[request.request_id]
            in_state = sequence.num_in_state
            # The step in flight has taken in what the one before it committed, and its own where it
            # has no drafts.
            if request.num_in_flight:
                in_state = request.num_kv_tokens + (request.num_in_flight == 1)
            end = -(-in_state // self.block_size) * self.block_size
            known = request.num_unread - request.first_token_unread <= 1
            may_hold = known and end <= request.kv_tokens_bound
            if sequence.copied is None and may_hold and end >= sequence.last_end + SNAPSHOT_SPACING:
                if sequence.kept is not None and not self.pool.has_free_row:
                    self.pool.drop_snapshot(sequence.kept)  # rather than another request's
                    sequence.kept = None
                row = self.pool.take_row()
                if row is not None:
                    sequence.copied = _Copied(end, Snapshot(row, end - in_state))
                    pairs.append((request.slot, row))
        return pairs

    def withdraw(self, request: Request) -> None:
        """Notes that a request has lost its blocks."""
        if self.enabled:
            self._drop_copy(self._sequences[request.request_id])

    def forget(self, request: Request) -> None:
        """Forgets a request."""
        self._sequences.pop(request.request_id, None)

    def _digests(self, request: Request, tokens: Sequence[int]) -> list[bytes]:
        sequence = self._sequences[request.request_id]
        sequence.digests = prefix_hashes(
            tokens, self.block_size, root=sequence.root, ahead=self._ahead, known=sequence.digests
        )
        return sequence.digests

    def _offer(self, request: Request, end: int) -> None:
        """Offers full blocks up to position `end`, as far as their tokens are known: an output may
        be cut shorter than its step.
        """
        sequence, known = self._sequences[request.request_id], request.num_tokens - self._ahead
        full = min(end, known) // self.block_size
        if full > sequence.num_offered:
            digests = self._digests(request, request.token_ids)
            for index in range(sequence.num_offered, full):
                block = request.block_ids[index]
                if self._reads_late and (index + 1) * self.block_size > request.num_read:
                    self.pool.unread.add(block)
                self.pool.publish(block, digests[index])
            sequence.num_offered = full
        request.offers_from = 0 if self._recurrent else (sequence.num_offered + 1) * self.block_size

    def _settle(self, request: Request) -> None:
        """Keeps states that were copied before the step whose result was read, once their block is
        offered; or gives them up.
        """
        sequence, block_size = self._sequences[request.request_id], self.block_size
        if sequence.copied is None:
            return
        end, snapshot = sequence.copied
        if end > request.num_kv_tokens:
            self._drop_copy(sequence)  # no step ended there
        elif end <= sequence.num_offered * block_size:
            block = request.block_ids[end // block_size - 1]
            if not self.pool.takes_snapshot(block):
                self._drop_copy(sequence)
                return
            if sequence.kept is not None:
                self.pool.drop_snapshot(sequence.kept)
            self.pool.keep_snapshot(block, snapshot)
            sequence.copied, sequence.kept, sequence.last_end = None, block, end

    def _drop_copy(self, sequence: _Sequence) -> None:
        if sequence.copied is not None:
            self.pool.return_row(sequence.copied.snapshot.row)
            sequence.copied = None
