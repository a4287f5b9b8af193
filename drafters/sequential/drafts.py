"""Drafts from the hidden states of a network, and from those of a forward for each further one."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from drafters.choice import (
    MAX_CANDIDATES,
    Choice,
    Guesses,
    chain_of,
    choose,
    forecast_chain,
    guess,
    tree_of,
)
from drafters.sequential.growth import UNKNOWN, Growth, Level, joined
from drafters.sequential.network import Rows, SequentialNetwork
from specdec.attention.backend import AttentionMetadata
from specdec.base.config import DraftSampling
from specdec.model.batch import DecodeBatch
from specdec.model.core import BoundDrafter, DraftOutput
from specdec.sampling.trees.trees import best_first


class TokenByToken(BoundDrafter):
    """A network over the paged cache of one engine. A subclass runs a step's first forward."""

    def __init__(
        self, network: SequentialNetwork, caches: Sequence[Any], draft_sampling: DraftSampling
    ) -> None:
        self.network, self.caches, self.draft_sampling = network, list(caches), draft_sampling

    def _drafts(
        self,
        batch: DecodeBatch,
        hidden: Tensor,
        count: int,
        single_rows: Sequence[tuple[Tensor, AttentionMetadata]],
    ) -> DraftOutput:
        """Drafts of hidden states [num_reqs * count, ...], then one forward for each more."""
        network, choose = self.network, self._guess if batch.shape.is_tree else self._choose
        choices: list[Any] = [choose(batch, hidden, 0, count)]
        for draft, (position_ids, metadata) in enumerate(single_rows, start=1):
            # the likeliest, where there are several
            newest = choices[-1].token_ids.view(batch.num_reqs, -1)[:, 0]
            rows = Rows(newest, network.next_features(hidden), position_ids, metadata)
            hidden = network.forward(rows, self.caches, None)
            choices.append(choose(batch, hidden, draft, 1))
        if batch.shape.is_tree:
            guesses = Guesses(*(torch.cat(parts, dim=1) for parts in zip(*choices, strict=True)))
            return self._tree(batch, *guesses)
        chain, own = chain_of(choices, network.target_ids)
        return chain if own is None else forecast_chain(chain, own)

    def _tree(self, batch: DecodeBatch, token_ids: Tensor, scores: Tensor) -> DraftOutput:
        """The likeliest paths through guesses [num_reqs, depth, C].

        Drafted one after another, they are those behind the likeliest tokens before them, so that
        others have nothing behind them.
        """
        if self.network.mask is None:
            edges = torch.full_like(scores, UNKNOWN)[:, :, None].repeat(1, 1, scores.shape[-1], 1)
            edges[:, :, 0] = scores
            scores = edges
        return tree_of(token_ids, best_first(scores, batch.k), forecasts=self.forecasts)

    def _grown(
        self, batch: DecodeBatch, last: Tensor, beams: int, features: Tensor | None, hidden: Tensor
    ) -> DraftOutput:
        """A tree that grows by a level with every forward, from the hidden state [num_reqs, ...]
        that the first one gave; the other arguments are those of `Growth`.
        """
        network, levels = self.network, [Level.first(self._guess(batch, hidden, 0, 1))]
        # a drafter of few tokens has no more paths
        growth = Growth(batch, last, min(beams, levels[0].token_ids.shape[1]), features)
        for depth in range(1, batch.shape.depth):
            rows, wanted = growth.rows(levels[-1], network.next_features(hidden))
            hidden = network.forward(rows, self.caches, wanted)
            guesses = self._guess(batch, hidden, depth, growth.beams, alike=True)
            levels.append(levels[-1].behind(guesses))
        token_ids, edges, ranks = joined(levels)
        best = best_first(edges, batch.k)
        tree = replace(best.tree, ranks=ranks.flatten(1).gather(1, best.places))
        return tree_of(token_ids, best._replace(tree=tree), forecasts=self.forecasts)

    def _choose(self, batch: DecodeBatch, hidden: Tensor, first: int, count: int) -> Choice:
        logits = self.network.logits(hidden).view(batch.num_reqs, count, -1)
        given = batch, logits, first, self.draft_sampling, self.network.target_ids
        return choose(*given, wants_own=self.forecasts)

    def _guess(
        self, batch: DecodeBatch, hidden: Tensor, first: int, count: int, *, alike: bool = False
    ) -> Guesses:
        """As many candidates as a tree may need if each but the likeliest ends a path."""
        logits = self.network.logits(hidden).view(batch.num_reqs, count, -1)
        most = max(min(MAX_CANDIDATES, batch.k), -(-batch.k // batch.shape.depth))
        given = batch, logits, first, most, self.draft_sampling, self.network.target_ids
        return guess(*given, alike=alike)
