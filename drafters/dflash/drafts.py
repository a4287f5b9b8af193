"""From a block's hidden states and base logits to its drafts: a chain or a tree, with a head or without one."""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from drafters.dflash.coupling import CouplingTable
from specdec.blocks import MOST_NODES
from specdec.config import DraftSampling
from specdec.core import DecodeBatch, DraftOutput
from specdec.layers.argmax import argmax
from specdec.sampling.candidates import candidates
from specdec.sampling.filters import processed_probs
from specdec.sampling.noise import Purpose, of_step, uniform
from specdec.sampling.sampler import sample_from
from specdec.sampling.tensors import SamplingPlan
from specdec.sampling.trees import best_first

MOST_CANDIDATES = 16
"""Tokens per position among which a tree chooses; of trees of up to 64 drafts more change nothing."""


class Slots(NamedTuple):
    """What the backbone says about the slots of a block.

    Attributes:
        hidden: [num_reqs, depth, H], final hidden states.
        logits: [num_reqs, depth, draft_vocab_size], without the head's correction.
    """

    hidden: Tensor
    logits: Tensor


class Drafts:
    """How the drafts of one run are drawn.

    Args:
        draft_sampling: of the run.
        coupling: weights for coupled drafts; None are ones.
        target_ids: int64 [draft_vocab_size], the target's token of each column of logits; None where they are the same.
    """

    def __init__(self, draft_sampling: DraftSampling, coupling: CouplingTable | None, target_ids: Tensor | None) -> None:
        self.draft_sampling, self._coupling, self._target_ids = draft_sampling, coupling, target_ids

    def of(self, batch: DecodeBatch, slots: Slots) -> DraftOutput:
        """The block of each request."""
        if batch.shape.is_tree:
            return self._tree(batch, slots)
        return self._chain(batch, slots)

    def _chain(self, batch: DecodeBatch, slots: Slots) -> DraftOutput:
        """Every slot's own choice."""
        if self.draft_sampling == "greedy" or batch.sampling.plan.all_greedy:
            return DraftOutput(token_ids=self._to_target(argmax(slots.logits)[0]))
        if self.draft_sampling == "coupled":
            token_ids, _ = self._candidates(batch, slots.logits, 1)
            return DraftOutput(token_ids=token_ids.squeeze(-1))
        probs = processed_probs(slots.logits, batch.sampling)
        draws = uniform(batch.sampling.seeds, of_step(batch.seq_lens, batch.k), Purpose.DRAFT)
        token_ids = self._to_target(sample_from(probs, draws))
        candidate_ids = None if self._target_ids is None else self._target_ids.expand(probs.shape)
        return DraftOutput(token_ids=token_ids, probs=probs, candidate_ids=candidate_ids)

    def _tree(self, batch: DecodeBatch, slots: Slots) -> DraftOutput:
        """The tree of the likeliest paths, if every position's token did not depend on those before it."""
        count = min(MOST_CANDIDATES if batch.shape.depth > 1 else MOST_NODES, batch.k)  # one position has no more paths than tokens
        token_ids, scores = self._candidates(batch, slots.logits, count)
        best = best_first(scores, batch.k)
        return DraftOutput(token_ids=token_ids.flatten(1).gather(1, best.places), tree=best.tree)

    def _candidates(self, batch: DecodeBatch, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The `count` likeliest tokens of every slot, given the noise that the target will choose by if drafts are coupled."""
        weights, sampling = None, batch.sampling
        if self.draft_sampling == "greedy":
            sampling = replace(sampling, plan=SamplingPlan.of([]))  # as of greedy requests
        elif self._coupling is not None and not sampling.plan.all_greedy:
            weights = self._coupling.at(sampling.temperature, batch.shape.depth)
        positions = batch.positions(batch.shape.depth + 1)[:, 1:]
        return candidates(logits, sampling, positions, count, weights=weights, target_ids=self._target_ids)

    def _to_target(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self._target_ids is None else self._target_ids[draft_ids]
