"""Prefill of short chunks as graphs: launched operation by operation, it takes the host longer than
the device.

The rows of all chunks together are padded to one of a few numbers. Padding belongs to requests that
only pad, one row each at least, and where it is more than they can have, to chunks: rows past a
chunk's end come later than all of its own, which see none of them. All of it writes to the null
block.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.attention.ragged import owners_of
from specdec.engine.capture.buckets import length_bucket, lengths
from specdec.engine.capture.capture import Capture
from specdec.engine.capture.graphs import ShapeGraphs
from specdec.engine.requests.scheduler import Chunk, prefill_tokens
from specdec.engine.slots import (
    SlotState,
    cache_slots,
    max_pending,
    next_token,
    samples_first_token,
)
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.model.batch import ForwardInput, PrefillBatch
from specdec.model.core import Verifier
from specdec.parallel.group import Group

MIN_ROWS = 128
"""Least rows of all requests together; fewer take as long."""
ROWS = (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 24, 32, 48, 64)
"""Times `MIN_ROWS`: rows of all requests, padding included."""
CHUNK_ROWS = (2, 16)
"""Times `MIN_ROWS`: bounds on the rows of a request beside others. Attention has a program for each
tile up to it, which ends at once where the request has fewer rows.
"""
REQUESTS = (1, 8, 64)
"""Sizes of batches. A request that only pads costs a row."""
MAX_ROW_BYTES = 2**43
"""Rows times bytes of the weights that each reads beyond which the device takes longer than the
host, some 10 ms on an H200.
"""

Spans = Sequence[tuple[int, int]]
"""Chunks, each from start to end."""


class PrefillShape(NamedTuple):
    """What a captured prefill depends on beside the tensors it reads."""

    num_reqs: int  # padding included, as in what follows
    num_rows: int  # of all requests together
    max_rows: int  # bound on those of one request
    max_seq_len: int
    reads: bool = True  # the drafter takes over the context


class PrefillGraph(NamedTuple):
    """A captured prefill.

    Attributes:
        shape: what it serves, and less.
        replay: launches it.
        inputs: int64 [3 * num_rows + 6 * num_reqs + 1]: token, position and cache slot of each row;
            of each request the slot, the row whose logits are wanted, the position after its last
            row, how many of its rows do not pad, and the token after those; then the first row of
            each request, and the end.
        logits: [num_reqs, V], its result, the same tensor every time.
    """

    shape: PrefillShape
    replay: Callable[[], None]
    inputs: Tensor
    logits: Tensor


class PrefillGraphs(ShapeGraphs[PrefillShape, PrefillGraph]):
    """The captured prefills of one engine.

    Args:
        state: of the requests.
        forward: gives logits [num_reqs, V] of a batch, after all that a prefill writes.
        dtype: of the logits.
        max_rows: of a captured prefill, padding included.
        capture, required, group: see `ShapeGraphs`.
    """

    def __init__(
        self,
        capture: Capture,
        state: SlotState,
        forward: Callable[[PrefillBatch], Tensor],
        *,
        dtype: torch.dtype,
        max_rows: int,
        required: bool = True,
        group: Group | None = None,
    ) -> None:
        super().__init__(capture, required=required, group=group)
        self._state, self._forward = state, forward
        self._dtype = dtype
        self._sizes = [size for size in _rows(ROWS) if size <= max_rows]
        self._bounds = _rows(CHUNK_ROWS)
        # those of a replay are read before the next one
        self._logits: dict[int, Tensor] = {}

    def run(self, chunks: Sequence[Chunk], *, reads: bool = True) -> Tensor | None:
        """Prefills chunks, whose requests' block tables are complete; the drafter `reads` them.

        Returns:
            Logits [n, V] after the chunks that `samples_first_token`; None when nothing was done,
            because the chunks are too long or too many, or rows inside them are asked for, or there
            is no graph for them.

        Raises:
            BackendError: graphs are required and the device refuses to capture the prefill.
        """
        if max_pending(chunks) or any(chunk.rows_to_score for chunk in chunks):
            return None
        spans = [(chunk.start, chunk.end) for chunk in chunks]
        shape = self._shape(spans)
        graph = self.obtain(shape._replace(reads=reads), self._captured) if shape else None
        widths = self._widths(spans, graph.shape) if graph else None
        if graph is None or widths is None:
            return None
        graph.inputs.copy_(self._inputs(chunks, graph.shape, widths), non_blocking=True)
        graph.replay()
        ended = [index for index, chunk in enumerate(chunks) if samples_first_token(chunk)]
        return (
            graph.logits[: len(ended)]
            if len(ended) == len(chunks)
            else graph.logits[self._state.tensor(ended)]
        )

    def spans(
        self,
        max_reqs: int,
        max_total_tokens: int,
        bounds: Sequence[int] | None = None,
    ) -> Iterator[Spans]:
        """For every shape the shortest chunks that have it.

        Args:
            max_reqs: chunks of a step.
            max_total_tokens: tokens of all chunks of a step together.
            bounds: some of those on lengths; None takes all.
        """
        for shape, lens in self._shortest(max_reqs):
            widths = self._widths([(0, length) for length in lens], shape)
            if widths is None or sum(lens) > max_total_tokens:
                continue
            for bound in bounds or lengths(self._state.longest):
                start = min(bound - int(widths[0]), self._state.max_model_len - 1 - lens[0])
                spans = [(start, start + lens[0]), *((0, length) for length in lens[1:])]
                if start >= 0 and self._shape(spans) == shape._replace(max_seq_len=bound):
                    yield spans

    def _shortest(self, max_reqs: int) -> Iterator[tuple[PrefillShape, list[int]]]:
        """Every shape of sequences of any length, with the fewest rows of the fewest chunks."""
        longest = self._state.longest
        for fewer_reqs, num_reqs in pairwise([0, *REQUESTS]):
            for fewer_rows, num_rows in pairwise([0, *self._sizes]):
                widths = pairwise([0, *self._bounds]) if num_reqs > 1 else [(0, num_rows)]
                for shorter, bound in widths:
                    max_rows = min(bound, num_rows)
                    for others in range(fewer_reqs, min(num_reqs, max_reqs)):
                        num_padding = num_reqs - others - 1
                        total = max(fewer_rows - num_padding, shorter + others, others) + 1
                        if total > (others + 1) * max_rows:
                            continue
                        first = min(max_rows, total - others)
                        rest = [(total - first + n) // others for n in range(others)]
                        yield PrefillShape(num_reqs, num_rows, max_rows, longest), [first, *rest]
                        break

    def _cost(self, one: PrefillShape, shape: PrefillShape) -> tuple[int, ...] | None:
        """See `ShapeGraphs`. What pads is computed, too, so it is no more than what does not."""
        more_reqs, more_rows = one.num_reqs - shape.num_reqs, one.num_rows - shape.num_rows
        fits = shape.num_rows >= more_rows >= more_reqs >= 0 and one.max_rows >= shape.max_rows
        fits &= one.max_seq_len >= shape.max_seq_len and one.reads == shape.reads
        return (*one[1:], one.num_reqs) if fits else None

    def _shape(self, spans: Spans) -> PrefillShape | None:
        """The smallest shape of chunks; None where there is none."""
        total, longest = sum(end - start for start, end in spans), self._state.longest
        num_reqs = _at_least(len(spans), REQUESTS)
        num_rows = _at_least(total + (num_reqs or 0) - len(spans), self._sizes)
        bound = _at_least(max(end - start for start, end in spans), self._bounds)
        if num_reqs is None or num_rows is None or (bound is None and num_reqs > 1):
            return None
        max_rows = num_rows if bound is None or num_reqs == 1 else min(bound, num_rows)
        shape = PrefillShape(num_reqs, num_rows, max_rows, longest)
        widths = self._widths(spans, shape)
        if widths is None:
            return None
        end = max(start + int(width) for (start, _), width in zip(spans, widths, strict=False))
        return shape._replace(max_seq_len=length_bucket(end, longest))

    def _widths(self, spans: Spans, shape: PrefillShape) -> NDArray[np.int64] | None:
        """Rows of each request of a shape that serves these chunks, those that pad at the end; None
        where there is no room for the padding.
        """
        lens, most = [end - start for start, end in spans], min(shape.max_rows, self._state.longest)
        num_padding, left = shape.num_reqs - len(spans), shape.num_rows - sum(lens)
        for index in range(num_padding):
            lens.append(min(most, left // (num_padding - index)))
            left -= lens[-1]
        for index, (_, end) in enumerate(spans):
            more = min(left, shape.max_rows - lens[index], shape.max_seq_len - end)
            lens[index] += more
            left -= more
        return None if left else np.array(lens)

    def _inputs(
        self, chunks: Sequence[Chunk], shape: PrefillShape, widths: NDArray[np.int64]
    ) -> Tensor:
        """`PrefillGraph.inputs` on the host, pinned for an accelerator; `widths` are the rows of
        each request.
        """
        state, num_rows, num_reqs = self._state, shape.num_rows, shape.num_reqs
        pinned = state.device.type == "cuda"
        size = 3 * num_rows + 6 * num_reqs + 1
        values = torch.zeros(size, dtype=torch.int64, pin_memory=pinned)
        rows, reqs, first_rows = np.split(values.numpy(), [3 * num_rows, size - num_reqs - 1])
        tokens, positions, cached = rows.reshape(3, num_rows)
        slots, ends, seq_lens, row_counts, next_tokens = reqs.reshape(5, num_reqs)
        first_rows[1:] = widths.cumsum()
        # of those that pad
        cached[:] = NULL_BLOCK * state.block_size
        slots[:], ends[:], seq_lens[:] = state.padding_slot, first_rows[:-1], widths
        for index, chunk in enumerate(chunks):
            first, count = int(first_rows[index]), chunk.end - chunk.start
            tokens[first : first + count] = prefill_tokens(chunk.request)[chunk.start : chunk.end]
            cached[first : first + count] = cache_slots(chunk, state.block_size)
            slots[index], ends[index] = chunk.request.slot, first + count - 1
            seq_lens[index] += chunk.start
            row_counts[index], next_tokens[index] = count, next_token(chunk)
        positions[:] = np.arange(num_rows) + np.repeat(seq_lens - first_rows[1:], widths)
        np.minimum(positions, state.max_model_len - 1, out=positions)
        return values

    def _captured(self, shape: PrefillShape) -> PrefillGraph:
        """Captures a prefill of padding alone."""
        state, (num_reqs, num_rows, max_rows, max_seq_len, reads) = self._state, shape
        widths = np.diff(np.arange(num_reqs + 1) * num_rows // num_reqs)
        inputs = self._inputs([], shape, widths).to(state.device)
        if num_reqs not in self._logits:
            size = num_reqs, state.vocab_size
            self._logits[num_reqs] = torch.empty(size, dtype=self._dtype, device=state.device)
        logits = self._logits[num_reqs]

        def launch() -> None:
            token_ids, position_ids, slot_mapping = inputs[: 3 * num_rows].view(3, num_rows)
            rest = inputs[3 * num_rows : -num_reqs - 1].view(5, num_reqs)
            slots, logit_rows, seq_lens, row_counts, next_token_ids = rest
            metadata = AttentionMetadata(
                query_start_loc=inputs[-num_reqs - 1 :].int(),
                seq_lens=seq_lens.int(),
                block_table=state.block_table.index_select(0, slots),
                slot_mapping=slot_mapping,
                num_reqs=num_reqs,
                num_tokens=num_rows,
                max_query_len=max_rows,
                max_seq_len=max_seq_len,
                ragged=True,
            )
            rope_lens = state.rope_lens_of(slots)
            if rope_lens is not None:
                rope_lens = rope_lens.index_select(0, owners_of(metadata).requests)
            rows = ForwardInput(
                token_ids, position_ids, metadata, logit_rows, rope_lens, slots, row_counts
            )
            logits.copy_(self._forward(PrefillBatch(rows, slots, next_token_ids, reads)))

        replay = self._capture.capture(launch, (PrefillShape, reads))
        return PrefillGraph(shape, replay, inputs, logits)


def _rows(sizes: Sequence[float]) -> list[int]:
    return [int(MIN_ROWS * size) for size in sizes]


def _at_least(number: int, sizes: Sequence[int]) -> int | None:
    """The first of rising `sizes` that is not below; None beyond the last."""
    return next(iter(sizes[bisect_left(sizes, number) :]), None)


def max_prefill_rows(verifier: Verifier, max_num_seqs: int) -> int:
    """Rows up to which a prefill of at most so many chunks is captured."""
    row_bytes, experts = verifier.weight_bytes, verifier.routed_experts
    if experts is not None:
        row_bytes += experts.bytes_read(1) - experts.weight_bytes
    most = min(MIN_ROWS * ROWS[-1], max_num_seqs * MIN_ROWS * CHUNK_ROWS[-1])
    return min(int(most), MAX_ROW_BYTES // row_bytes)
