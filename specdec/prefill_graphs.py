"""Prefill of short chunks as graphs: launched operation by operation, a small model's prompt takes the host longer than the device.

A chunk is padded to a power of two of rows. Rows past its end come later than all others, which see none of them, and write to the
null block. Each chunk is a replay of its own.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.buckets import length_bucket, power_of_two
from specdec.core import ForwardInput, PrefillBatch
from specdec.graphs import Capture
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.scheduler import Chunk, prefill_tokens
from specdec.state import SlotState, samples_first_token

MOST_PREFILL_ROWS = 512
"""Rows of a chunk beyond which the device takes longer than the host."""
MOST_CHUNKS = 4
"""Chunks of a step beyond which packing them is faster than replaying each."""


class PrefillShape(NamedTuple):
    """What a captured prefill depends on beside the tensors it reads."""

    num_rows: int  # padding included
    max_seq_len: int


class PrefillGraph(NamedTuple):
    """A captured prefill of one chunk.

    Attributes:
        replay: launches it.
        inputs: int64 [3 * num_rows + 3]: token, position and cache slot of each row, then the request's slot, the row whose logits
            are wanted, and the position after the last row.
        logits: [1, V], its result, the same tensor every time.
    """

    replay: Callable[[], None]
    inputs: Tensor
    logits: Tensor


class PrefillGraphs:
    """The captured prefills of one engine. A shape is captured when it occurs for the second time.

    Args:
        capture: captures device work.
        state: of the requests.
        forward: gives logits [1, V] of a batch, after all that a prefill writes.
        dtype: of the logits.
    """

    def __init__(
        self, capture: Capture, state: SlotState, forward: Callable[[PrefillBatch], Tensor], *, dtype: torch.dtype
    ) -> None:
        self.graphs: dict[PrefillShape, PrefillGraph] = {}
        self._capture, self._state, self._forward, self._dtype = capture, state, forward, dtype
        self._uses: Counter[PrefillShape] = Counter()

    def run(self, chunks: Sequence[Chunk]) -> Tensor | None:
        """Prefills chunks, whose requests' block tables are complete.

        Returns:
            Logits [n, V] after the chunks that `samples_first_token`; None when nothing was done, because the chunks are long or
            many, or of a new shape.
        """
        if len(chunks) > MOST_CHUNKS:
            return None
        shapes = [shape for chunk in chunks if (shape := self._shape(chunk)) is not None]
        self._uses.update(set(shapes))
        if len(shapes) < len(chunks) or any(self._uses[shape] < 2 for shape in shapes):
            return None
        logits = []
        for chunk, shape in zip(chunks, shapes, strict=True):
            if shape not in self.graphs:
                self.graphs[shape] = self._captured(shape)
            graph = self.graphs[shape]
            graph.inputs.copy_(self._inputs(chunk, shape), non_blocking=True)
            graph.replay()
            logits.append(graph.logits.clone() if samples_first_token(chunk) else graph.logits[:0])
        return torch.cat(logits)

    def _shape(self, chunk: Chunk) -> PrefillShape | None:
        num_rows = max(16, power_of_two(chunk.end - chunk.start))
        longest = self._state.longest
        if num_rows > MOST_PREFILL_ROWS or chunk.start + num_rows > longest:
            return None
        return PrefillShape(num_rows, length_bucket(chunk.start + num_rows, longest))

    def _inputs(self, chunk: Chunk, shape: PrefillShape) -> Tensor:
        """`PrefillGraph.inputs` on the host, pinned for an accelerator."""
        state, size = self._state, self._state.block_size
        blocks = chunk.request.block_ids
        count, end = chunk.end - chunk.start, chunk.start + shape.num_rows
        padding = shape.num_rows - count
        tokens = prefill_tokens(chunk.request)[chunk.start : chunk.end] + [0] * padding
        positions = [min(position, state.max_model_len - 1) for position in range(chunk.start, end)]
        slots = [blocks[p // size] * size + p % size for p in range(chunk.start, chunk.end)] + [NULL_BLOCK * size] * padding
        values = [*tokens, *positions, *slots, chunk.request.slot, count - 1, end]
        return torch.tensor(values, dtype=torch.int64, pin_memory=state.device.type == "cuda")

    def _captured(self, shape: PrefillShape) -> PrefillGraph:
        """Captures a prefill of padding alone."""
        state, count = self._state, shape.num_rows
        inputs = torch.zeros(3 * count + 3, dtype=torch.int64, device=state.device)
        inputs[2 * count : 3 * count].fill_(NULL_BLOCK * state.block_size)
        inputs[-3].fill_(state.padding_slot)
        inputs[-1].fill_(count)
        starts = torch.arange(2, dtype=torch.int32, device=state.device) * count
        logits = torch.empty(1, state.vocab_size, dtype=self._dtype, device=state.device)

        def launch() -> None:
            token_ids, position_ids, slot_mapping = inputs[: 3 * count].view(3, count)
            slots, logit_rows, seq_lens = inputs[-3:].split(1)
            metadata = AttentionMetadata(
                query_start_loc=starts,
                seq_lens=seq_lens.int(),
                block_table=state.block_table.index_select(0, slots),
                slot_mapping=slot_mapping,
                num_reqs=1,
                num_tokens=count,
                max_query_len=count,
                max_seq_len=shape.max_seq_len,
            )
            logits.copy_(self._forward(PrefillBatch(ForwardInput(token_ids, position_ids, metadata, logit_rows), slots)))

        replay = self._capture.capture(launch)
        return PrefillGraph(replay, inputs, logits)
