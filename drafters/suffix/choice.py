"""Which of several continuations to draft: the one that is expected to be accepted for longest.

Suffix decoding (arXiv 2411.04975, snowflakedb/ArcticInference) takes what followed the last m
tokens, for every m: a token is as probable there as it is frequent among the occurrences of these m
tokens, and a match of m tokens is trusted for no more than m tokens to come. The expected drafts
that are accepted are the sum of these probabilities; the m with the highest sum is taken. A product
of such frequencies is the share of the occurrences that begin with the whole path. So the sum for
one occurrence's continuation is the mean, over all occurrences, of how far they agree with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from specdec.sampling.trees.tries import common_prefixes

BY_LENGTH = 4.0
"""Times as much does a match weigh in a tree as one that is a token shorter."""
BY_AGE = 0.9
"""The same, of one that is next in order."""
SHORTEST = -16
"""Tokens by which a match may be shorter and still weigh less; bounds the weights."""


class Chain(NamedTuple):
    """The best continuation of each row.

    Attributes:
        token_ids: int64 [num_reqs, K], 0 past its end.
        num_drafts: int64 [num_reqs], its tokens; 0 where there is no match.
        scores: float32 [num_reqs], expected drafts accepted; 0 where there is no match.
    """

    token_ids: Tensor
    num_drafts: Tensor
    scores: Tensor


class Weighed(NamedTuple):
    """What a tree is made by, see `specdec.sampling.trees.tries.trie`; each [num_reqs, C].

    Attributes:
        tokens: int64, of the continuations; 0 where there is no match.
        weights: float32.
        keep: float32.
    """

    tokens: Tensor
    weights: Tensor
    keep: Tensor


def best_chain(continuations: Tensor, lengths: Tensor, longest: int) -> Chain:
    """The continuation of the highest score; of equal ones the longer match's, then the first.

    Args:
        continuations: int64 [num_reqs, C, K], less than 0 past the end of each.
        lengths: int64 [num_reqs, C], of the matches; 0 where there is none.
        longest: a longer match counts as one of so many tokens.
    """
    count = continuations.shape[1]
    if count == 1:
        tokens = continuations[:, 0]
        scores = torch.minimum(lengths[:, 0].clamp(max=longest), (tokens >= 0).sum(dim=1)).float()
    else:
        # m, the longest first
        levels = torch.arange(longest, 0, -1, device=lengths.device)[:, None]
        counts = lengths[:, None] >= levels  # [num_reqs, M, C]
        trusted = torch.minimum(common_prefixes(continuations)[:, None], levels[..., None])
        agreed = trusted * counts[:, :, None]
        means = agreed.sum(dim=3) / counts.sum(dim=2, keepdim=True).clamp(min=1)
        scores, cells = torch.where(counts, means, 0.0).flatten(1).max(dim=1)
        best = (cells % count)[:, None, None].expand_as(continuations[:, :1])
        tokens = continuations.gather(1, best).squeeze(1)
    return Chain(tokens.clamp(min=0), (tokens >= 0).sum(dim=1) * (scores > 0), scores)


def weigh(continuations: Tensor, lengths: Tensor) -> Weighed:
    """How much continuations count in a tree: more, the longer and later the match."""
    tokens = (continuations >= 0).sum(dim=2) * (lengths > 0)
    shorter = (lengths - lengths.amax(dim=1, keepdim=True)).clamp(min=SHORTEST)
    ages = torch.arange(lengths.shape[1], dtype=lengths.dtype, device=lengths.device)
    weights = BY_LENGTH**shorter * BY_AGE**ages
    # so a match is expected to go on for as many tokens as it has
    return Weighed(tokens, weights, lengths / (lengths + 1))
