"""Which tokens rows of logits draft, each row for itself."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.base.config import DraftSampling
from specdec.model.batch import DecodeBatch
from specdec.model.core import DraftOutput
from specdec.sampling.argmax import argmax
from specdec.sampling.filters import processed_probs
from specdec.sampling.noise import Purpose, of_step, uniform
from specdec.sampling.sampler import sample_from
from specdec.sampling.tensors import SamplingPlan
from specdec.sampling.trees.candidates import candidates
from specdec.sampling.trees.trees import BestPaths

MAX_CANDIDATES = 16
"""Tokens per position among which a tree chooses; up to 64 drafts gain nothing by more."""


class Guesses(NamedTuple):
    """The likeliest tokens of some positions."""

    token_ids: Tensor  # int64 [num_reqs, n, C], of the target
    scores: Tensor  # float32 [num_reqs, n, C], their log-probabilities in falling order


class Choice(NamedTuple):
    """Drafts of some positions.

    Attributes:
        token_ids: int64 [num_reqs, n], of the target.
        probs: float32 [num_reqs, n, V'], what they were drawn from, a number for each column of the
            logits; None where they are point masses.
        own: float32 [num_reqs, n], how likely the network thinks each, given the noise where it is
            known; None unless asked for.
    """

    token_ids: Tensor
    probs: Tensor | None = None
    own: Tensor | None = None


def choose(
    batch: DecodeBatch,
    logits: Tensor,
    first: int,
    draft_sampling: DraftSampling,
    target_ids: Tensor | None,
    *,
    weights: Tensor | None = None,
    wants_own: bool = False,
) -> Choice:
    """Chooses one token for each of a few drafts.

    Args:
        batch: the step.
        logits: [num_reqs, n, V'].
        first: which draft the first of them is, from 0.
        draft_sampling: how drafts are drawn.
        target_ids: int64 [V'], the target's token of each column; None where they are the same.
        weights: float32 [2, num_reqs, depth], of coupled drafts, see
            `specdec.sampling.trees.candidates`;
            None are ones.
        wants_own: asks for `Choice.own`.
    """
    count, sampling = logits.shape[1], batch.sampling
    if draft_sampling == "probabilistic" and not sampling.plan.all_greedy:
        probs = processed_probs(logits, sampling)
        numbers = of_step(batch.seq_lens, first + count)[:, first:]
        columns = sample_from(probs, uniform(sampling.seeds, numbers, Purpose.DRAFT))
        own = probs.gather(-1, columns[..., None]).squeeze(-1) if wants_own else None
        return Choice(_to_target(columns, target_ids), probs, own)
    if (draft_sampling == "greedy" or sampling.plan.all_greedy) and not wants_own:
        return Choice(_to_target(argmax(logits)[0], target_ids))
    token_ids, scores = guess(batch, logits, first, 1, draft_sampling, target_ids, weights=weights)
    return Choice(token_ids.squeeze(-1), own=scores.squeeze(-1).exp() if wants_own else None)


def guess(
    batch: DecodeBatch,
    logits: Tensor,
    first: int,
    count: int,
    draft_sampling: DraftSampling,
    target_ids: Tensor | None,
    *,
    weights: Tensor | None = None,
    alike: bool = False,
) -> Guesses:
    """The `count` likeliest tokens of each of a few drafts, or as many as there are, given the
    noise that the target will choose by if drafts are coupled.

    Arguments as of `choose`. Rows that are `alike` are all for the draft `first`.
    """
    sampling, count = batch.sampling, min(count, logits.shape[-1])
    end = first + (1 if alike else logits.shape[1])
    if draft_sampling == "greedy":
        # as of greedy requests
        sampling, weights = replace(sampling, plan=SamplingPlan.of([])), None
    if weights is not None:
        weights = weights[..., first:end].contiguous()
    positions = batch.positions(batch.shape.depth + 1)[:, first + 1 : end + 1]
    positions = positions.expand(logits.shape[:2])
    return Guesses(
        *candidates(logits, sampling, positions, count, weights=weights, target_ids=target_ids)
    )


def chain_of(
    choices: Sequence[Choice], target_ids: Tensor | None
) -> tuple[DraftOutput, Tensor | None]:
    """The chain of all choices, in order, and what `Choice.own` says of its drafts."""
    token_ids, probs, own = (_side_by_side(fields) for fields in zip(*choices, strict=True))
    assert token_ids is not None
    columns = None if probs is None or target_ids is None else target_ids.expand(probs.shape)
    return DraftOutput(token_ids, probs=probs, candidate_ids=columns), own


def forecast_chain(chain: DraftOutput, probs: Tensor) -> DraftOutput:
    """The chain with its scores, by probabilities float32 [num_reqs, depth] of its drafts."""
    paths = probs.cumprod(dim=1)
    chain.forecast, chain.scores = paths.sum(dim=1), paths.log()
    return chain


def tree_of(token_ids: Tensor, best: BestPaths, *, forecasts: bool) -> DraftOutput:
    """The best paths through candidates int64 [num_reqs, depth, C]; with scores if asked for."""
    chosen = token_ids.flatten(1).gather(1, best.places)
    output = DraftOutput(chosen, num_drafts=best.num_drafts, tree=best.tree)
    if forecasts:
        output.forecast, output.scores = best.scores.exp().sum(dim=1), best.scores
    return output


def _side_by_side(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Parts [num_reqs, n, ...] joined, or None where there are none."""
    there = [part for part in parts if part is not None]
    return None if not there else there[0] if len(there) == 1 else torch.cat(there, dim=1)


def _to_target(draft_ids: Tensor, target_ids: Tensor | None) -> Tensor:
    return draft_ids if target_ids is None else target_ids[draft_ids]
