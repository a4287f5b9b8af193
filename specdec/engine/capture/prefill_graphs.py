"""Prefill of short chunks as graphs: launched operation by operation, it takes the host longer than
the device.

Chunks are padded to one length, a power of two, or three quarters of one where they are short and
few. Rows past a chunk's end come later than all of its own, which see none of them, and write to
the null block.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.base.sizes import power_of_two
from specdec.engine.capture.buckets import batch_bucket, batches, length_bucket, lengths
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
"""Fewest rows of a request; fewer take as long."""
FINE_ROWS, FINE_REQS = 4, 8
"""Times `MIN_ROWS`, and requests, up to which three quarters of a size are a size, too: of three
prompts of 180 tokens 576 rows are computed instead of 1,024.
"""
MAX_ROWS = 8192
"""Padding included, of which many chunks of unlike lengths have much."""
MAX_CHUNK_ROWS = 2048
"""The same of one chunk."""
MAX_ROW_BYTES = 2**43
"""Rows times bytes of the weights that each reads beyond which the device takes longer than the
host, some 10 ms on an H200.
"""


class PrefillShape(NamedTuple):
    """What a captured prefill depends on beside the tensors it reads."""

    num_reqs: int  # padding included, as in what follows
    num_rows: int  # of each request
    max_seq_len: int


class PrefillGraph(NamedTuple):
    """A captured prefill.

    Attributes:
        shape: what it serves, and less.
        replay: launches it.
        inputs: int64 [3 * num_reqs * num_rows + 5 * num_reqs]: token, position and cache slot of
            each row; then of each request the slot, the row whose logits are wanted, the position
            after its last row, how many of its rows do not pad, and the token after those.
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
        self._dtype, self._max_rows = dtype, max_rows

    def run(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Prefills chunks, whose requests' block tables are complete.

        Returns:
            Logits [n, V] after the chunks that `samples_first_token`; None when nothing was done,
            because the chunks are too long or too many, or rows inside them are asked for, or there
            is no graph for them.

        Raises:
            BackendError: graphs are required and the device refuses to capture the prefill.
        """
        shape = None if max_pending(chunks) else self._shape(chunks)
        graph = self.obtain(shape, self._captured) if shape else None
        if shape is None or graph is None:
            return None
        graph.inputs.copy_(self._inputs(chunks, graph.shape), non_blocking=True)
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
    ) -> Iterator[list[tuple[int, int]]]:
        """For every shape the shortest chunks that have it, each from start to end.

        Args:
            max_reqs: chunks of a step.
            max_total_tokens: tokens of all chunks of a step together.
            bounds: some of those on lengths; None takes all.
        """
        sizes = [MIN_ROWS]
        while 2 * sizes[-1] <= self._max_rows:
            sizes.append(2 * sizes[-1])
        rows = (part for size in (*sizes, 2 * sizes[-1]) for part in (3 * size // 4, size))
        widths = [width for width in sorted(set(map(_width, rows))) if width <= self._max_rows]
        counts = sorted({*batches(max_reqs), *(n for n in (3, 6) if n < max_reqs)})
        for shorter, width in pairwise([0, *widths]):
            fewest = shorter + 1
            for num_reqs in counts:
                if (
                    _count(num_reqs) * width > self._max_rows
                    or fewest + num_reqs - 1 > max_total_tokens
                ):
                    break
                for bound in bounds or lengths(self._state.longest):
                    start = min(bound - width, self._state.max_model_len - 1 - fewest)
                    if start >= 0 and length_bucket(start + width, self._state.longest) == bound:
                        yield [(start, start + fewest), *[(start, start + 1)] * (num_reqs - 1)]

    def _cost(self, one: PrefillShape, shape: PrefillShape) -> tuple[int, ...] | None:
        """See `ShapeGraphs`. Rows of a request are as many: padding is computed, too."""
        fits = one.num_reqs >= shape.num_reqs and one.max_seq_len >= shape.max_seq_len
        fits &= one.num_rows == shape.num_rows
        return (one.num_reqs, one.max_seq_len) if fits else None

    def _shape(self, chunks: Sequence[Chunk]) -> PrefillShape | None:
        longest = self._state.longest
        num_reqs = _count(len(chunks))
        num_rows = _width(max(chunk.end - chunk.start for chunk in chunks))
        end = max(chunk.start for chunk in chunks) + num_rows
        if (
            num_reqs * num_rows > self._max_rows
            or end > longest
            or any(chunk.rows_to_score for chunk in chunks)
        ):
            return None
        return PrefillShape(num_reqs, num_rows, length_bucket(end, longest))

    def _inputs(self, chunks: Sequence[Chunk], shape: PrefillShape) -> Tensor:
        """`PrefillGraph.inputs` on the host, pinned for an accelerator."""
        state, (num_reqs, width, _) = self._state, shape
        pinned = state.device.type == "cuda"
        values = torch.zeros((3 * width + 5) * num_reqs, dtype=torch.int64, pin_memory=pinned)
        numbers, count = values.numpy(), num_reqs * width
        tokens, positions, cached = numbers[: 3 * count].reshape(3, num_reqs, width)
        slots, ends, seq_lens, row_counts, next_tokens = numbers[3 * count :].reshape(5, num_reqs)
        # of those that pad
        cached[:] = NULL_BLOCK * state.block_size
        slots[:], ends[:], seq_lens[:] = state.padding_slot, len(chunks) * width, width
        for index, chunk in enumerate(chunks):
            rows = chunk.end - chunk.start
            tokens[index, :rows] = prefill_tokens(chunk.request)[chunk.start : chunk.end]
            positions[index] = np.arange(chunk.start, chunk.start + width)
            cached[index, :rows] = cache_slots(chunk, state.block_size)
            slots[index], ends[index] = chunk.request.slot, index * width + rows - 1
            seq_lens[index], row_counts[index] = chunk.start + width, rows
            next_tokens[index] = next_token(chunk)
        np.minimum(positions, state.max_model_len - 1, out=positions)
        return values

    def _captured(self, shape: PrefillShape) -> PrefillGraph:
        """Captures a prefill of padding alone."""
        state, (num_reqs, width, max_seq_len) = self._state, shape
        count = num_reqs * width
        inputs = self._inputs([], shape).to(state.device)
        logits = torch.empty(num_reqs, state.vocab_size, dtype=self._dtype, device=state.device)

        def launch() -> None:
            token_ids, position_ids, slot_mapping = inputs[: 3 * count].view(3, count)
            rest = inputs[3 * count :].view(5, num_reqs)
            slots, logit_rows, seq_lens, row_counts, next_token_ids = rest
            block_table = state.block_table.index_select(0, slots)
            metadata = AttentionMetadata.uniform(
                width, seq_lens.int(), block_table, slot_mapping, max_seq_len=max_seq_len
            )
            rope_lens = state.rope_lens_of(slots)
            rope_lens = None if rope_lens is None else rope_lens.repeat_interleave(width)
            rows = ForwardInput(
                token_ids, position_ids, metadata, logit_rows, rope_lens, slots, row_counts
            )
            logits.copy_(self._forward(PrefillBatch(rows, slots, next_token_ids)))

        replay = self._capture.capture(launch, PrefillShape)
        return PrefillGraph(shape, replay, inputs, logits)


def _width(num_rows: int) -> int:
    """Rows to which chunks of up to so many are padded.

    >>> [_width(rows) for rows in (1, 129, 193, 300, 385, 513)]
    [128, 192, 256, 384, 512, 1024]
    """
    return _finer(num_rows, max(MIN_ROWS, power_of_two(num_rows)), MIN_ROWS, FINE_ROWS * MIN_ROWS)


def _count(num_reqs: int) -> int:
    """Requests to which so many are padded.

    >>> [_count(number) for number in (1, 2, 3, 4, 5, 7, 9)]
    [1, 2, 3, 4, 6, 8, 16]
    """
    return _finer(num_reqs, batch_bucket(num_reqs), 2, FINE_REQS)


def _finer(number: int, size: int, least: int, most: int) -> int:
    return 3 * size // 4 if least < size <= most and 4 * number <= 3 * size else size


def max_prefill_rows(verifier: Verifier, max_num_seqs: int) -> int:
    """Rows up to which a prefill of at most so many chunks is captured."""
    row_bytes, experts = verifier.weight_bytes, verifier.routed_experts
    if experts is not None:
        row_bytes += experts.bytes_read(1) - experts.weight_bytes
    return min(MAX_ROWS, MAX_ROW_BYTES // row_bytes, max_num_seqs * MAX_CHUNK_ROWS)
