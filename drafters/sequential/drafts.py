"""Drafts from the hidden states of a network, and from those of a forward for each further one."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from drafters.choice import MOST_CANDIDATES, Choice, Guesses, choose, guess, side_by_side
from drafters.sequential.network import Rows, SequentialNetwork
from specdec.attention.backend import AttentionMetadata
from specdec.base.config import DraftSampling
from specdec.model.batch import DecodeBatch
from specdec.model.core import BoundDrafter, DraftOutput
from specdec.sampling.trees.trees import best_first

_UNKNOWN = -1e9  # score behind a token whose followers were not asked for: below all that is known, and finite


class TokenByToken(BoundDrafter):
    """A network over the paged cache of one engine. A subclass runs its first forward of a step, and keeps what that needs.

    Args:
        network: proposes tokens.
        caches: one per entry of its `kv_specs`.
        draft_sampling: how drafts are drawn.
    """

    def __init__(self, network: SequentialNetwork, caches: Sequence[Any], draft_sampling: DraftSampling) -> None:
        self.network, self.caches, self.draft_sampling = network, list(caches), draft_sampling

    def _drafts(
        self, batch: DecodeBatch, hidden: Tensor, count: int, single_rows: Sequence[tuple[Tensor, AttentionMetadata]]
    ) -> tuple[DraftOutput, Tensor]:
        """The drafts that hidden states [num_reqs * count, ...] predict, then one of a forward of each of `single_rows`.

        Returns:
            The block, and the tokens int64 [num_reqs, depth] that each draft was made behind: of a
            tree the likeliest ones.
        """
        network, choose = self.network, self._guess if batch.shape.is_tree else self._choose
        choices = [choose(batch, hidden, 0, count)]
        for draft, (position_ids, metadata) in enumerate(single_rows, start=1):
            newest = choices[-1].token_ids.view(batch.num_reqs, -1)[:, 0]  # the likeliest, where there are several
            rows = Rows(newest, network.next_features(hidden), position_ids, metadata)
            hidden = network.forward(rows, self.caches, None)
            choices.append(choose(batch, hidden, draft, 1))
        if batch.shape.is_tree:
            guesses = Guesses(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True)))
            return self._tree(batch, *guesses), guesses.token_ids[..., 0]
        token_ids, probs, own = (side_by_side(parts) for parts in zip(*choices, strict=True))
        assert token_ids is not None
        candidate_ids = None if probs is None or network.target_ids is None else network.target_ids.expand(probs.shape)
        forecast = None if own is None else own.cumprod(dim=1).sum(dim=1)
        return DraftOutput(token_ids, probs=probs, candidate_ids=candidate_ids, forecast=forecast), token_ids

    def _tree(self, batch: DecodeBatch, token_ids: Tensor, scores: Tensor) -> DraftOutput:
        """The likeliest paths through guesses [num_reqs, depth, C].

        Drafted one after another, they are those behind the likeliest tokens before them, so that
        others have nothing behind them.
        """
        if self.network.mask is None:
            edges = torch.full_like(scores, _UNKNOWN)[:, :, None].repeat(1, 1, scores.shape[-1], 1)
            edges[:, :, 0] = scores
            scores = edges
        best = best_first(scores, batch.k)
        output = DraftOutput(token_ids.flatten(1).gather(1, best.places), num_drafts=best.num_drafts, tree=best.tree)
        if self.forecasts:
            output.forecast, output.scores = best.scores.exp().sum(dim=1), best.scores
        return output

    def _choose(self, batch: DecodeBatch, hidden: Tensor, first: int, count: int) -> Choice:
        logits = self.network.logits(hidden).view(batch.num_reqs, count, -1)
        return choose(batch, logits, first, self.draft_sampling, self.network.target_ids, wants_own=self.forecasts)

    def _guess(self, batch: DecodeBatch, hidden: Tensor, first: int, count: int) -> Guesses:
        """So many candidates as a tree of the step's size may need, if each but the likeliest ends a path."""
        logits, depth = self.network.logits(hidden).view(batch.num_reqs, count, -1), batch.shape.depth
        most = max(min(MOST_CANDIDATES, batch.k), -(-batch.k // depth))
        return guess(batch, logits, first, most, self.draft_sampling, self.network.target_ids)
