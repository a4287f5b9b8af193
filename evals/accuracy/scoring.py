"""Log-probabilities of given tokens under the target, in packed forwards with a cache of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionMetadata
from specdec.core import ForwardInput
from specdec.decoder import SpecDecoder
from specdec.kv_cache import PagedKVCache, blocks_for

MAX_ROWS = 1024
"""Rows per forward: enough to keep a device busy, few enough that their logits over a large vocabulary fit its memory."""


class Scored(NamedTuple):
    """Sum of the log-probabilities of the scored tokens, and whether each was the most likely one."""

    log_probability: float
    is_greedy: bool


class _Piece(NamedTuple):
    """Rows `start .. end - 1` of sequence number `sequence`."""

    sequence: int
    start: int
    end: int


@torch.inference_mode()
def score(decoder: SpecDecoder, sequences: Sequence[tuple[Sequence[int], int]]) -> Iterator[Scored]:
    """Scores the last `count` tokens of every `(token_ids, count)`, in order.

    Args:
        decoder: gives the target; neither its engine nor its drafter is used.
        sequences: at least one token stands before the scored ones.
    """
    batch: list[tuple[Sequence[int], int]] = []
    for sequence in sequences:
        assert 0 < sequence[1] < len(sequence[0]), "a token is scored by the row before it"
        if batch and sum(len(token_ids) for token_ids, _ in [*batch, sequence]) > MAX_ROWS:
            yield from _score_batch(decoder, batch)
            batch = []
        batch.append(sequence)
    if batch:
        yield from _score_batch(decoder, batch)


def _score_batch(decoder: SpecDecoder, batch: list[tuple[Sequence[int], int]]) -> list[Scored]:
    """One forward when the batch has at most `MAX_ROWS` rows; a longer sequence stands alone and takes several."""
    block_size = decoder.verifier.attention.spec.block_size
    verifier = decoder.verifier
    # The last token has nothing to predict.
    lengths = [len(token_ids) - 1 for token_ids, _ in batch]
    blocks = [blocks_for(length, block_size) for length in lengths]
    first_blocks = [0, *accumulate(blocks)]
    cache = PagedKVCache(
        verifier.kv_specs, num_blocks=first_blocks[-1], block_size=block_size, dtype=verifier.dtype, device=verifier.device
    )
    sums, greedy = [0.0] * len(batch), [True] * len(batch)
    for pieces in _forwards(lengths):
        rows = _rows(decoder, batch, pieces, first_blocks, blocks)
        wanted = [range(max(p.start, lengths[p.sequence] - batch[p.sequence][1]), p.end) for p in pieces]
        if not any(wanted):
            verifier.forward(rows, cache.layers)
            continue
        offsets = [0, *accumulate(p.end - p.start for p in pieces)]
        picked = [
            offset + position - p.start for p, offset, some in zip(pieces, offsets, wanted, strict=False) for position in some
        ]
        targets = [batch[p.sequence][0][position + 1] for p, some in zip(pieces, wanted, strict=True) for position in some]
        rows.logit_rows = torch.tensor(picked, device=verifier.device)
        chosen, best = _compare(verifier.forward(rows, cache.layers).logits, torch.tensor(targets, device=verifier.device))
        values = iter(zip(chosen, best, strict=True))
        for p, some in zip(pieces, wanted, strict=True):
            for _ in some:
                value, is_best = next(values)
                sums[p.sequence] += value
                greedy[p.sequence] &= is_best
    return [Scored(*pair) for pair in zip(sums, greedy, strict=True)]


def _forwards(lengths: list[int]) -> list[list[_Piece]]:
    """What each forward holds.

    >>> [[tuple(piece) for piece in pieces] for pieces in _forwards([3, 2])]
    [[(0, 0, 3), (1, 0, 2)]]
    >>> [[tuple(piece) for piece in pieces] for pieces in _forwards([MAX_ROWS + 1])]
    [[(0, 0, 1024)], [(0, 1024, 1025)]]
    """
    if len(lengths) > 1:
        return [[_Piece(index, 0, length) for index, length in enumerate(lengths)]]
    return [[_Piece(0, start, min(start + MAX_ROWS, lengths[0]))] for start in range(0, lengths[0], MAX_ROWS)]


def _rows(
    decoder: SpecDecoder,
    batch: list[tuple[Sequence[int], int]],
    pieces: list[_Piece],
    first_blocks: list[int],
    blocks: list[int],
) -> ForwardInput:
    device, block_size = decoder.verifier.device, decoder.verifier.attention.spec.block_size
    query_lens = [p.end - p.start for p in pieces]
    positions = list(chain.from_iterable(range(p.start, p.end) for p in pieces))
    starts = [first_blocks[p.sequence] * block_size for p in pieces]
    slots = [start + position for p, start in zip(pieces, starts, strict=True) for position in range(p.start, p.end)]
    widest = max(blocks)
    # Entries past a sequence's own blocks only have to be valid.
    table = [[min(first_blocks[p.sequence] + i, first_blocks[-1] - 1) for i in range(widest)] for p in pieces]
    metadata = AttentionMetadata(
        query_start_loc=torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([p.end for p in pieces], dtype=torch.int32, device=device),
        block_table=torch.tensor(table, dtype=torch.int32, device=device),
        slot_mapping=torch.tensor(slots, device=device),
        num_reqs=len(pieces),
        num_tokens=len(positions),
        max_query_len=max(query_lens),
        max_seq_len=max(p.end for p in pieces),
        query_lens=query_lens,
        seq_lens_host=[p.end for p in pieces],
    )
    token_ids = list(chain.from_iterable(batch[p.sequence][0][p.start : p.end] for p in pieces))
    return ForwardInput(torch.tensor(token_ids, device=device), torch.tensor(positions, device=device), metadata)


def _compare(logits: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """Log-probability of each row's target, and whether it is the row's most likely token."""
    log_probs = logits.float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, targets[:, None])[:, 0]
    return chosen.tolist(), (log_probs.argmax(dim=-1) == targets).tolist()
