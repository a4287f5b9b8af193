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
        attention = verifier.attention.spec
        rule = verifier.length_rule
        self._rope_lens = (
            None if rule is None else [rule.rope_len(length, length + 1) for length in lengths]
        )
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
        starts = [self._first_blocks[sequence] * self._block_size for sequence, _, _ in pieces]
        ends = [first + len(tokens) for _, first, tokens in pieces]
        positions = [range(first, end) for (_, first, _), end in zip(pieces, ends, strict=True)]
        slots = [
            [start + position for position in some]
            for start, some in zip(starts, positions, strict=True)
        ]
        # Entries past a sequence's own blocks only have to be valid.
        last = self._first_blocks[-1] - 1
        table = [
            [min(self._first_blocks[sequence] + i, last) for i in range(self._widest)]
            for sequence, _, _ in pieces
        ]
        metadata = AttentionMetadata.packed(
            [len(tokens) for _, _, tokens in pieces],
            ends,
            torch.tensor(table, dtype=torch.int32, device=self._device),
            self._tensor(chain.from_iterable(slots)),
        )
        tokens = chain.from_iterable(tokens for _, _, tokens in pieces)
        owners = self._tensor(sequence for sequence, _, _ in pieces)
        lens = self._rope_lens
        rope_lens = (
            None
            if lens is None
            else self._tensor(lens[number] for number, _, some in pieces for _ in some)
        )
        position_ids = self._tensor(chain.from_iterable(positions))
        return ForwardInput(
            self._tensor(tokens), position_ids, metadata, rope_lens=rope_lens, slots=owners
        )

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
