"""Which token a row of logits drafts."""

from typing import NamedTuple

from torch import Tensor

from specdec.config import DraftSampling
from specdec.core import DecodeBatch
from specdec.layers.argmax import argmax
from specdec.sampling.candidates import candidates
from specdec.sampling.filters import processed_probs
from specdec.sampling.noise import Purpose, of_step, uniform
from specdec.sampling.sampler import sample_from


class Choice(NamedTuple):
    """Drafts of some positions: the target's tokens int64 [num_reqs, n], and what they were drawn from.

    `probs` is float32 [num_reqs, n, V'], one number for each column of the logits; None where the drafts are point masses.
    """

    token_ids: Tensor
    probs: Tensor | None = None


def choose(batch: DecodeBatch, logits: Tensor, first: int, draft_sampling: DraftSampling, target_ids: Tensor | None) -> Choice:
    """Chooses one token for each of a few drafts.

    Args:
        batch: the step.
        logits: [num_reqs, n, V'].
        first: which draft the first of them is, from 0.
        draft_sampling: how drafts are drawn.
        target_ids: int64 [V'], the target's token of each column; None where they are the same.
    """
    count = logits.shape[1]
    if draft_sampling == "greedy" or batch.sampling.plan.all_greedy:
        return Choice(_to_target(argmax(logits)[0], target_ids))
    if draft_sampling == "coupled":
        positions = batch.positions(first + count + 1)[:, first + 1 :]
        return Choice(candidates(logits, batch.sampling, positions, 1, target_ids=target_ids)[0].squeeze(-1))
    probs = processed_probs(logits, batch.sampling)
    numbers = of_step(batch.seq_lens, first + count)[:, first:]
    token_ids = sample_from(probs, uniform(batch.sampling.seeds, numbers, Purpose.DRAFT))
    return Choice(_to_target(token_ids, target_ids), probs)


def _to_target(draft_ids: Tensor, target_ids: Tensor | None) -> Tensor:
    return draft_ids if target_ids is None else target_ids[draft_ids]
