"""Forwards of a target outside any engine: packed rows over a cache of their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.kv_cache import LayerSpec, PagedKVCache, blocks_for
from specdec.model.batch import ForwardInput
from specdec.model.core import Verifier
from specdec.parallel.plain import on_ranks


class ScratchCache:
    """A cache just large enough for some sequences, in the type that the target's attention stores.

    Args:
        verifier: the target.
        lengths: tokens of each sequence.
        specs: layers to hold; None takes all of the target's.

    Attributes:
        layers: one cache per layer, as `Verifier.forward` takes them.
    """

    def __init__(
        self, verifier: Verifier, lengths: Sequence[int], specs: Sequence[LayerSpec] | None = None
    ) -> None:
        attention, rule = verifier.attention.spec, verifier.length_rule
        self._rope_lens: list[int] | None = None
        if rule is not None:
            self._rope_lens = [rule.rope_len(length, length + 1) for length in lengths]
        self._device, self._block_size = verifier.device, attention.block_size
        blocks = [blocks_for(length, self._block_size) for length in lengths]
        self._first_blocks = [0, *accumulate(blocks)]  # of every sequence, and the end
        self._widest = max(blocks)
        self.layers = PagedKVCache(
            verifier.kv_specs if specs is None else specs,
            num_blocks=self._first_blocks[-1],
            block_size=self._block_size,
            dtype=attention.kv_dtype,
            device=verifier.device,
            num_slots=len(lengths),
        ).layers

    def rows(self, pieces: Sequence[tuple[int, int, Sequence[int]]]) -> ForwardInput:
        """Rows of one forward, whose logits are all wanted.

        Args:
            pieces: number of the sequence, position of the first row, token ids. What stands before
                a piece has been forwarded.
        """
        numbers = [number for number, _, _ in pieces]
        first_blocks = [self._first_blocks[number] for number in numbers]
        positions = [range(first, first + len(tokens)) for _, first, tokens in pieces]
        slots = (
            start * self._block_size + position
            for start, some in zip(first_blocks, positions, strict=True)
            for position in some
        )
        # Entries past a sequence's own blocks only have to be valid.
        last = self._first_blocks[-1] - 1
        table = [[min(start + i, last) for i in range(self._widest)] for start in first_blocks]
        metadata = AttentionMetadata.packed(
            list(map(len, positions)),
            [some.stop for some in positions],
            torch.tensor(table, dtype=torch.int32, device=self._device),
            self._tensor(slots),
        )
        token_ids = self._tensor(chain.from_iterable(tokens for _, _, tokens in pieces))
        position_ids = self._tensor(chain.from_iterable(positions))
        rows = ForwardInput(token_ids, position_ids, metadata, slots=self._tensor(numbers))
        if (lens := self._rope_lens) is not None:
            rows.rope_lens = self._tensor(lens[number] for number, _, some in pieces for _ in some)
        return rows

    def _tensor(self, values: Iterable[int]) -> Tensor:
        return torch.tensor(list(values), device=self._device)


@on_ranks
@torch.inference_mode()
def next_token_logits(verifier: Verifier, token_ids: Sequence[int]) -> Tensor:
    """The target's unprocessed logits after `token_ids`, float32 [V]."""
    cache = ScratchCache(verifier, [len(token_ids)])
    rows = cache.rows([(0, 0, token_ids)])
    rows.logit_rows = torch.tensor([len(token_ids) - 1], device=verifier.device)
    return verifier.forward(rows, cache.layers).logits[0].float()
