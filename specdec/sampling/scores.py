"""From the target's logits to the scores that tokens are chosen by: edits, then penalties."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.base.blocks import DraftTree
from specdec.sampling.tensors import SamplingTensors


def scored(
    logits: Tensor,
    sampling: SamplingTensors,
    tokens: Tensor,
    positions: Tensor,
    tree: DraftTree | None = None,
) -> Tensor:
    """Logits as the requests want them, before temperature and filters.

    Args:
        logits: [num_reqs, n, V] of rows that were fed `tokens`.
        tokens: int64 [num_reqs, n], the anchor, then the drafts.
        positions: int64 [num_reqs, n], of these tokens; a row chooses the token behind its own.
        tree: how the drafts hang together; None is a chain.

    Returns:
        float32 [num_reqs, n, V], or `logits` themselves where no request changes any.
    """
    if sampling.edits is not None:
        logits = sampling.edits.apply(logits, positions + 1)
    if sampling.seen is None and sampling.counts is None:
        return logits
    return penalized(logits, sampling, tokens, positions, tree)


def penalized(
    logits: Tensor,
    sampling: SamplingTensors,
    tokens: Tensor,
    positions: Tensor,
    tree: DraftTree | None = None,
) -> Tensor:
    """Applies the penalties, for tokens up to the row's own on its path; arguments of `scored`.

    The repetition penalty (Keskar et al., arXiv 1909.05858) counts prompt and output; those for
    presence and frequency, as in OpenAI's API, count the output alone.

    Returns:
        float32 [num_reqs, n, V].
    """
    counted, scores = _counted(tokens, tree), logits.float()
    if sampling.seen is not None:
        # Row j names the tokens that it counts, for others the anchor, which every row has.
        fed = torch.where(counted, tokens[:, None, :], tokens[:, :1, None])
        lower = lowered_in_cache if scores.device.type == "cpu" else lowered
        scores = lower(scores, sampling.seen, sampling.repetition_penalty, fed)
    if sampling.counts is not None:
        ours = counted & (positions >= sampling.firsts[:, None])[:, None, :]
        fed = tokens[:, None, :].expand_as(ours)
        counts = sampling.counts[:, None, :].repeat(1, tokens.shape[1], 1)
        counts.scatter_add_(-1, fed, ours.int())
        frequency, presence = (
            x[:, None, None] for x in (sampling.frequency_penalty, sampling.presence_penalty)
        )
        scores = scores - frequency * counts - presence * (counts > 0)
    return scores


def lowered(scores: Tensor, seen: Tensor, penalties: Tensor, fed: Tensor) -> Tensor:
    """Scores [num_reqs, n, V] under repetition penalties.

    Args:
        scores: float32.
        seen: bool [num_reqs, V], tokens that all rows of a request count.
        penalties: float32 [num_reqs].
        fed: int64 [num_reqs, n, n], further tokens that each row counts.
    """
    seen = seen[:, None, :].repeat(1, scores.shape[1], 1).scatter_(-1, fed, True)
    penalty = penalties[:, None, None]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def lowered_in_cache(scores: Tensor, seen: Tensor, penalties: Tensor, fed: Tensor) -> Tensor:
    """Lowered scores, the same bit for bit, row by row without conditions: faster on a CPU.

    Of a score times and by its penalty the smaller one is meant, and the larger one where the
    penalty is below 1: the smaller one with both signs turned.
    """
    sign = torch.where(penalties < 1, -1.0, 1.0).to(penalties.dtype)
    factors = torch.where(seen, penalties[:, None], 1.0).mul_(sign[:, None])
    own = (penalties * sign)[:, None].expand(fed.shape[:2])
    found = torch.empty_like(scores)
    for request, factor in enumerate(factors):
        for row, ids, out in zip(scores[request], fed[request], found[request], strict=True):
            factor_here = factor.scatter(-1, ids, own[request])
            torch.minimum(row * factor_here, row / factor_here, out=out)
    return found.mul_(sign[:, None, None])


def _counted(tokens: Tensor, tree: DraftTree | None) -> Tensor:
    """bool [num_reqs or 1, n, n]: tokens of the block that each row has before it, or is fed."""
    width = tokens.shape[1]
    if tree is None:
        seen = torch.ones(1, width, width, dtype=torch.bool, device=tokens.device).tril()
        return seen.expand(len(tokens), -1, -1)
    drafts = torch.arange(width - 1, device=tokens.device)
    above = F.pad((tree.ancestors[..., None] >> drafts) & 1, (0, 0, 1, 0))  # of the anchor no draft
    return F.pad(above, (1, 0), value=1).bool()
