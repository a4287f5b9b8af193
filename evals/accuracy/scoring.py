"""Log-probabilities of given tokens under the target, in packed forwards with their own cache."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.model.core import Verifier
from specdec.model.scratch import ScratchCache
from specdec.parallel.executor import collective_rpc
from specdec.parallel.plain import on_ranks
from specdec.session.decoder import SpecDecoder

MAX_ROWS = 1024
"""Rows per forward: they keep a device busy, and their logits fit its memory."""


class Scored(NamedTuple):
    """Sum of the log-probabilities of the scored tokens, and whether each was the likeliest."""

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
            yield from collective_rpc(decoder.verifier, _score_batch, decoder.verifier, batch)
            batch = []
        batch.append(sequence)
    if batch:
        yield from collective_rpc(decoder.verifier, _score_batch, decoder.verifier, batch)


@on_ranks
@torch.inference_mode()
def _score_batch(verifier: Verifier, batch: list[tuple[Sequence[int], int]]) -> list[Scored]:
    """One forward for at most `MAX_ROWS` rows; a longer sequence stands alone and takes several."""
    # The last token has nothing to predict.
    lengths = [len(token_ids) - 1 for token_ids, _ in batch]
    cache = ScratchCache(verifier, lengths)
    sums, greedy = [0.0] * len(batch), [True] * len(batch)
    for pieces in _forwards(lengths):
        parts = [(p.sequence, p.start, batch[p.sequence][0][p.start : p.end]) for p in pieces]
        rows = cache.rows(parts)
        wanted = [
            range(max(p.start, lengths[p.sequence] - batch[p.sequence][1]), p.end) for p in pieces
        ]
        if not any(wanted):
            verifier.forward(rows, cache.layers)
            continue
        offsets = [0, *accumulate(p.end - p.start for p in pieces)]
        picked = [
            offset + position - p.start
            for p, offset, some in zip(pieces, offsets, wanted, strict=False)
            for position in some
        ]
        targets = [
            batch[p.sequence][0][position + 1]
            for p, some in zip(pieces, wanted, strict=True)
            for position in some
        ]
        rows.logit_rows = torch.tensor(picked, device=verifier.device)
        logits = verifier.forward(rows, cache.layers).logits
        chosen, best = _compare(logits, torch.tensor(targets, device=verifier.device))
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
    starts = range(0, lengths[0], MAX_ROWS)
    return [[_Piece(0, start, min(start + MAX_ROWS, lengths[0]))] for start in starts]


def _compare(logits: Tensor, targets: Tensor) -> tuple[list[float], list[bool]]:
    """Log-probability of each row's target, and whether it is the row's most likely token."""
    log_probs = logits.float().log_softmax(dim=-1)
    chosen = log_probs.gather(1, targets[:, None])[:, 0]
    return chosen.tolist(), (log_probs.argmax(dim=-1) == targets).tolist()
