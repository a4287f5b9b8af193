"""Acceptance: which drafts stay, and the token of the target's own that follows them.

Both rules leave the target's distribution exactly as it is:

- A draft that is a point mass is compared with the token the target chooses at its position. The output is then the target's
  own choices, token for token those of plain decoding. In a tree the walk goes on in the child that has this token; whatever the
  tree was chosen by, the target has not seen it (DDTree, arXiv 2604.12989).
- A draft drawn from a known distribution q is kept with probability min(1, p/q), and a rejected one is replaced from the
  residual max(p - q, 0) (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv 2302.01318).
"""

import torch
from torch import Tensor

from specdec.core import AcceptOutput, DraftOutput
from specdec.layers.argmax import argmax
from specdec.sampling.filters import processed_probs
from specdec.sampling.noise import Purpose, uniform
from specdec.sampling.sampler import penalized, sample, sample_from
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees import walk


def accept(
    tokens: Tensor,
    logits: Tensor,
    draft: DraftOutput | None,
    sampling: SamplingTensors,
    positions: Tensor,
    depth: int | None = None,
) -> AcceptOutput:
    """Decides one step for every request; shapes are static and the host never waits.

    Row `j` of a request was fed `tokens[:, j]` at `positions[:, j]`. It judges the drafts that continue it, or yields the request's
    last token of the step, with the random numbers of position `positions[:, j] + 1`.

    Args:
        tokens: int64 [num_reqs, k + 1], the anchor, then the drafts; k may be 0.
        logits: [num_reqs, k + 1, V], the target's, in its own dtype.
        draft: where the drafts come from; None means a chain of point masses, and all k count.
        sampling: sampling state of the requests.
        positions: int64 [num_reqs, k + 1].
        depth: most drafts of a path of a tree, see `specdec.blocks.BlockShape`.

    Returns:
        The outcome. A request whose logits are not finite says so in `finite`; its tokens are valid ids without meaning, and
        no other request is affected.
    """
    drafts = tokens[:, 1:]
    k = drafts.shape[1]
    assert logits.shape[:2] == tokens.shape == positions.shape
    num_drafts = None if draft is None else draft.num_drafts
    tree = None if draft is None else draft.tree

    scores = logits if sampling.seen is None else penalized(logits, sampling, tokens, tree)
    if sampling.plan.all_greedy or draft is None or draft.probs is None or k == 0:
        token_ids, finite = argmax(scores) if sampling.plan.all_greedy else sample(scores, sampling, positions + 1)
        if draft is not None and tree is not None:
            path, num_accepted = walk(draft.token_ids, tree, token_ids, depth or k, num_drafts)
            return _along(path, num_accepted, token_ids, finite, logits if sampling.plan.logprobs else None)
        num_accepted = _prefix_length(token_ids[:, :k] == drafts, num_drafts)
    else:
        assert tree is None, "what is rejected on another branch would have to leave the residual, too"
        _, finite = argmax(scores)
        probs = processed_probs(scores, sampling)
        token_ids, num_accepted = _rejection_sampling(drafts, num_drafts, probs, draft, sampling.seeds, positions + 1)

    return AcceptOutput(
        token_ids=token_ids,
        num_accepted=num_accepted,
        next_anchors=token_ids.gather(1, num_accepted[:, None]).squeeze(1),
        finite=_prefix_length(finite) > num_accepted,
        logprobs=_logprobs(logits, token_ids) if sampling.plan.logprobs else None,
    )


def _along(path: Tensor, num_accepted: Tensor, token_ids: Tensor, finite: Tensor, logits: Tensor | None) -> AcceptOutput:
    """What the target chose along a path through a tree, from its choices `token_ids` [num_reqs, k + 1] behind all rows."""
    chosen = token_ids.gather(1, path)
    return AcceptOutput(
        token_ids=chosen,
        num_accepted=num_accepted,
        next_anchors=chosen.gather(1, num_accepted[:, None]).squeeze(1),
        finite=_prefix_length(finite.gather(1, path)) > num_accepted,
        logprobs=None if logits is None else _logprobs(logits, token_ids).gather(1, path),
        path=path,
    )


def _prefix_length(kept: Tensor, most: Tensor | None = None) -> Tensor:
    """int64 [num_reqs]: leading True entries of `kept` [num_reqs, n], but not more than `most` int64 [num_reqs]."""
    n = kept.shape[1]
    if n == 0:
        return kept.new_zeros(kept.shape[0], dtype=torch.int64)
    least = kept.min(dim=1)  # the first False; without one the minimum is True, at 0
    length = torch.add(least.indices, least.values, alpha=n)
    return length if most is None else torch.minimum(length, most)


def _rejection_sampling(
    drafts: Tensor, num_drafts: Tensor | None, probs: Tensor, draft: DraftOutput, seeds: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    """Output tokens int64 [num_reqs, k + 1] and the number of accepted drafts int64 [num_reqs].

    `probs` float32 [num_reqs, k + 1, V] are the target's; `positions` int64 [num_reqs, k + 1] those of the output tokens.
    """
    k = drafts.shape[1]
    p = probs[:, :k].gather(-1, drafts[..., None]).squeeze(-1)
    q = _draft_probs(draft, drafts)
    u = uniform(seeds, positions[:, :k], Purpose.ACCEPT)
    num_accepted = _prefix_length(u * q < p, num_drafts)

    # One more token, from the row after the accepted drafts. With no draft to reject there, q is 0 and the residual is p.
    end = num_accepted[:, None]
    p_end = probs.gather(1, end[..., None].expand(-1, 1, probs.shape[-1])).squeeze(1)
    rejected = end < (k if num_drafts is None else num_drafts[:, None])
    q_end = torch.where(rejected, _draft_distribution(draft, end.clamp(max=k - 1), p_end), 0.0)
    residual = (p_end - q_end).clamp(min=0)
    # Where p and q agree to the last bit, rounding can leave no residual.
    weights = torch.where(residual.sum(dim=-1, keepdim=True) > 0, residual, p_end)
    final = sample_from(weights[:, None], uniform(seeds, positions.gather(1, end), Purpose.SAMPLE))

    return torch.cat([drafts, final], dim=1).scatter(1, end, final), num_accepted


def _draft_probs(draft: DraftOutput, drafts: Tensor) -> Tensor:
    """[num_reqs, k]: the drafter's probability of each of its drafts."""
    assert draft.probs is not None
    if draft.candidate_ids is None:
        return draft.probs.gather(-1, drafts[..., None]).squeeze(-1)
    return torch.where(draft.candidate_ids == drafts[..., None], draft.probs, 0.0).sum(dim=-1)


def _draft_distribution(draft: DraftOutput, row: Tensor, like: Tensor) -> Tensor:
    """The drafter's distribution at `row` int64 [num_reqs, 1], shaped and typed as `like` [num_reqs, V]."""
    assert draft.probs is not None
    index = row[..., None].expand(-1, 1, draft.probs.shape[-1])
    probs = draft.probs.gather(1, index).squeeze(1).to(like.dtype)
    if draft.candidate_ids is None:
        return probs
    return torch.zeros_like(like).scatter(-1, draft.candidate_ids.gather(1, index).squeeze(1), probs)


def _logprobs(logits: Tensor, token_ids: Tensor) -> Tensor:
    """float32 [num_reqs, k + 1]: log-probabilities of `token_ids` under the unprocessed logits."""
    scores = logits.float()
    return scores.gather(-1, token_ids[..., None]).squeeze(-1) - scores.logsumexp(dim=-1)
