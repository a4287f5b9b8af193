"""Acceptance: which drafts stay, and the token of the target's own that follows them. `accept` is
where a step enters.

Both rules leave the target's distribution exactly as it is:

- A draft that is a point mass, as all are of greedy requests and, by default, of sampled ones, is
  compared with the token the target chooses at its position (`_of_chain`). The output is then the
  target's own choices, token for token those of plain decoding. In a tree `walk` goes on in the
  child that has this token; whatever the tree was chosen by, the target has not seen it (DDTree,
  arXiv 2604.12989).
- Drafts drawn from known distributions q, `draft_sampling="probabilistic"`, are judged as a block
  (`_block_verification`; Sun et al. 2024, arXiv 2403.10444): as many are kept as have been likely
  enough together, and what follows them is drawn from what they leave of p. That keeps no fewer
  than a test of each by min(1, p/q) (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023,
  arXiv 2302.01318).
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.base.blocks import DraftTree
from specdec.device.deviation import Deviation, mismatches, worst
from specdec.kernels.kernel import Kernel
from specdec.model.core import AcceptOutput, DraftOutput
from specdec.model.packing import Packing
from specdec.sampling.argmax import argmax
from specdec.sampling.filters import processed_probs
from specdec.sampling.logprobs import Logprobs, logprobs_of
from specdec.sampling.masks import TokenMasks, mask_logits
from specdec.sampling.noise import Purpose, of_step, uniform
from specdec.sampling.sampler import sample, sample_from
from specdec.sampling.scores import scored
from specdec.sampling.tensors import SamplingTensors
from specdec.sampling.trees.trees import walk


def accept(
    tokens: Tensor,
    logits: Tensor,
    draft: DraftOutput | None,
    sampling: SamplingTensors,
    positions: Tensor,
    depth: int | None = None,
    masks: TokenMasks | None = None,
    forced: Tensor | None = None,
    packing: Packing | None = None,
) -> AcceptOutput:
    """Decides one step for every request; shapes are static and the host never waits.

    Row `j` of a request was fed `tokens[:, j]` at `positions[:, j]`. It judges the drafts that
    continue it, or yields the request's last token of the step, with the random numbers of position
    `positions[:, j] + 1`.

    Args:
        tokens: int64 [num_reqs, k + 1], the anchor, then the drafts; k may be 0.
        logits: [num_reqs, k + 1, V], the target's, in its own dtype.
        draft: where the drafts come from; None means a chain of point masses, and all k count.
        sampling: sampling state of the requests.
        positions: int64 [num_reqs, k + 1].
        depth: most drafts of a path of a tree, see `specdec.base.blocks.BlockShape`.
        masks: what the grammars of requests allow; applied to `logits` in place, or to a copy where
            log-probabilities are wanted.
        forced: int64 [num_reqs], how many drafts are accepted whatever the target chooses, see
            `StepRunner.force`; None accepts what it agrees with.
        packing: the rows of which there are logits, [T, V] then; None for all. No other draft may
            count.

    Returns:
        The outcome. A request whose logits are not finite says so in `finite`; its tokens are valid
        ids without meaning, and no other request is affected.
    """
    drafts = tokens[:, 1:]
    k = drafts.shape[1]
    plan = sampling.plan
    if packing is not None and (masks is not None or plan.reads_blocks):
        logits, packing = packing.unpack(logits), None
    assert tokens.shape == positions.shape
    assert packing is not None or logits.shape[:2] == tokens.shape
    num_drafts = None if draft is None else draft.num_drafts
    tree = None if draft is None else draft.tree

    raw = logits
    if masks is not None:
        logits = logits.clone() if sampling.plan.logprobs else logits.contiguous()
        mask_logits(logits, masks)
    scores = logits if packing else scored(logits, sampling, tokens, positions, tree)
    if plan.all_greedy or draft is None or draft.probs is None or k == 0:
        if packing is not None:
            token_ids, finite = _of_packed(logits, sampling, positions, packing)
        else:
            token_ids, finite = (
                argmax(scores) if plan.all_greedy else sample(scores, sampling, positions + 1)
            )
        if forced is not None and k:
            tokens, token_ids = _forced(tokens, token_ids, forced[:, None], num_drafts, tree)
        if draft is not None and tree is not None:
            proposed = draft.token_ids if forced is None else tokens[:, 1:].contiguous()
            if draft.offered is not None:
                proposed = torch.where(draft.offered, proposed, -1)
            path, num_accepted = walk(proposed, tree, token_ids, depth or k, num_drafts)
            logprobs = _logprobs(raw, token_ids, sampling)
            return _along(path, num_accepted, token_ids, finite, logprobs)
        num_accepted, next_anchors, whole = _of_chain(tokens, token_ids, num_drafts, finite)
    else:
        assert forced is None, "only point masses are accepted whatever the target chooses"
        assert tree is None, (
            "what is rejected on another branch would have to leave the residual, too"
        )
        _, finite = argmax(scores)
        probs = processed_probs(scores, sampling)
        token_ids, num_accepted, looked_at = _block_verification(
            drafts, num_drafts, probs, draft, sampling.seeds, positions
        )
        next_anchors, whole = _last(token_ids, num_accepted), (finite | ~looked_at).all(dim=1)

    return AcceptOutput(
        token_ids=token_ids,
        num_accepted=num_accepted,
        next_anchors=next_anchors,
        finite=whole,
        logprobs=_logprobs(raw, token_ids, sampling),
    )


def _of_packed(
    logits: Tensor, sampling: SamplingTensors, positions: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """What the target chooses behind the rows [T, V] that are verified, and whether they are
    finite, as blocks [num_reqs, k + 1].
    """
    if sampling.plan.all_greedy:
        chosen = argmax(logits)
    else:
        behind = packing.pack(positions)[:, None] + 1
        chosen = sample(logits[:, None], sampling.of_rows(packing.requests), behind)
    token_ids, finite = (packing.unpack(one.flatten()) for one in chosen)
    return token_ids, finite


def drawn(survival: Tensor, seeds: Tensor, seq_lens: Tensor) -> Tensor:
    """How many drafts a step accepts by given rates.

    Args:
        survival: float64 [R, K], see `StepRunner.force`.
        seeds: int64 [num_reqs].
        seq_lens: int64 [num_reqs], positions of the anchors.

    Returns:
        int64 [num_reqs], in [0, K].
    """
    uniforms = uniform(seeds, seq_lens[:, None], Purpose.ACCEPT)
    return (uniforms < survival.index_select(0, seeds % len(survival))).sum(dim=1)


def _forced(
    tokens: Tensor,
    token_ids: Tensor,
    count: Tensor,
    num_drafts: Tensor | None,
    tree: DraftTree | None,
) -> tuple[Tensor, Tensor]:
    """Makes the drafts and the target's tokens agree on the first drafts of the deepest path alone.

    Args:
        tokens, num_drafts, tree: as of `accept`.
        token_ids: int64 [num_reqs, k + 1], what the target chose behind every row.
        count: int64 [num_reqs, 1], drafts to keep.

    Returns:
        `tokens` with -1 for each rejected draft, and `token_ids` with the kept drafts behind their
        parents.
    """
    drafts = tokens[:, 1:]
    k = drafts.shape[1]
    places = torch.arange(k, device=tokens.device).expand_as(drafts)
    counts = places < (k if num_drafts is None else num_drafts[:, None])
    parents = places if tree is None else tree.parents
    kept = counts & ((places if tree is None else tree.depths - 1) < count)
    if tree is not None:
        deepest = torch.where(counts, tree.depths, 0).argmax(dim=1, keepdim=True)
        kept &= (tree.ancestors.gather(1, deepest) >> places) & 1 == 1
    behind = F.pad(token_ids, (0, 1)).scatter(1, torch.where(kept, parents, k + 1), drafts)
    tokens = torch.cat([tokens[:, :1], torch.where(kept, drafts, -1)], dim=1)
    return tokens, behind[:, :-1].contiguous()


def _along(
    path: Tensor, num_accepted: Tensor, token_ids: Tensor, finite: Tensor, logprobs: Logprobs | None
) -> AcceptOutput:
    """What the target chose along a path through a tree, from its choices `token_ids` [num_reqs, k
    + 1] behind all rows.
    """
    chosen, next_anchors, whole = _of_path(path, num_accepted, token_ids, finite)
    return AcceptOutput(
        token_ids=chosen,
        num_accepted=num_accepted,
        next_anchors=next_anchors,
        finite=whole,
        logprobs=None if logprobs is None else logprobs.along(path),
        path=path,
    )


def _of_chain(
    tokens: Tensor, token_ids: Tensor, num_drafts: Tensor | None, finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec.engine.triton_acceptance.chain_outcome`."""
    if KERNEL.runs_on(tokens.device):
        from specdec.engine.triton_acceptance import chain_outcome  # it imports Triton

        return chain_outcome(tokens, token_ids, num_drafts, finite)
    return _plain_chain(tokens, token_ids, num_drafts, finite)


def _plain_chain(
    tokens: Tensor, token_ids: Tensor, num_drafts: Tensor | None, finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    num_accepted = _prefix_length(token_ids[:, :-1] == tokens[:, 1:], num_drafts)
    return num_accepted, _last(token_ids, num_accepted), _prefix_length(finite) > num_accepted


def _of_path(
    path: Tensor, num_accepted: Tensor, token_ids: Tensor, finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """See `specdec.engine.triton_acceptance.path_outcome`."""
    if KERNEL.runs_on(path.device):
        from specdec.engine.triton_acceptance import path_outcome  # it imports Triton

        return path_outcome(path, num_accepted, token_ids, finite)
    return _plain_path(path, num_accepted, token_ids, finite)


def _plain_path(
    path: Tensor, num_accepted: Tensor, token_ids: Tensor, finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    chosen = token_ids.gather(1, path)
    anchors = _last(chosen, num_accepted)
    return chosen, anchors, _prefix_length(finite.gather(1, path)) > num_accepted


def follow(
    path: Tensor, token_ids: Tensor, features: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The rows of paths through trees.

    Args:
        path: int64 [num_reqs, depth + 1], rows of each request.
        token_ids: int64 [num_reqs, N + 1].
        features: [num_reqs * (N + 1), F], or None.

    Returns:
        Their tokens int64 [num_reqs, depth + 1], and features [num_reqs * (depth + 1), F] or None.
    """
    if KERNEL.runs_on(path.device):
        from specdec.engine import triton_acceptance  # it imports Triton

        return triton_acceptance.follow(path, token_ids, features)
    return _plainly_follow(path, token_ids, features)


def _plainly_follow(
    path: Tensor, token_ids: Tensor, features: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    first = torch.arange(0, token_ids.numel(), token_ids.shape[1], device=path.device)
    kept = None if features is None else features.index_select(0, (first[:, None] + path).flatten())
    return token_ids.gather(1, path), kept


def _last(token_ids: Tensor, num_accepted: Tensor) -> Tensor:
    """int64 [num_reqs], the tokens behind the accepted ones."""
    return token_ids.gather(1, num_accepted[:, None]).squeeze(1)


def check_acceptance(device: torch.device) -> Deviation:
    """Chains and paths of two tokens, some of whose drafts do not count, and some rows are not
    finite; features along paths.
    """
    from specdec.engine import triton_acceptance

    generator = torch.Generator().manual_seed(0)
    found: list[Deviation] = []
    for rows in (1, 6, 17):
        tokens, target_ids = torch.randint(2, (2, 9, rows), generator=generator)
        finite = torch.rand(9, rows, generator=generator) < 0.8
        num_drafts = torch.randint(rows, (9,), generator=generator)
        chain, path = (
            (tokens, target_ids, num_drafts, finite),
            torch.randint(rows, (9, 4), generator=generator),
        )
        paths = path, torch.randint(4, (9,), generator=generator), target_ids, finite
        for ours, plain, given in (
            (triton_acceptance.chain_outcome, _plain_chain, chain),
            (triton_acceptance.path_outcome, _plain_path, paths),
        ):
            sides = ours(*(tensor.to(device) for tensor in given)), plain(*given)
            found += [mismatches(*pair) for pair in zip(*sides, strict=True)]
        of_paths = path, tokens, torch.rand(9 * rows, 1100, generator=generator)
        followed = triton_acceptance.follow(*(tensor.to(device) for tensor in of_paths))
        for one, other in zip(followed, _plainly_follow(*of_paths), strict=True):
            assert one is not None and other is not None
            found.append(mismatches(one, other))
    return worst(found)


KERNEL = Kernel("acceptance", check_acceptance)


def _prefix_length(kept: Tensor, most: Tensor | None = None) -> Tensor:
    """int64 [num_reqs]: leading True entries of `kept` [num_reqs, n], but not more than `most`
    int64 [num_reqs].
    """
    n = kept.shape[1]
    if n == 0:
        return kept.new_zeros(kept.shape[0], dtype=torch.int64)
    least = kept.min(dim=1)  # the first False; without one the minimum is True, at 0
    length = torch.add(least.indices, least.values, alpha=n)
    return length if most is None else torch.minimum(length, most)


def _block_verification(
    drafts: Tensor,
    num_drafts: Tensor | None,
    probs: Tensor,
    draft: DraftOutput,
    seeds: Tensor,
    positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output tokens int64 [num_reqs, k + 1], the number of accepted drafts int64 [num_reqs], and
    bool [num_reqs, k + 1]: the rows that had a part in both.

    `probs` float32 [num_reqs, k + 1, V] are the target's; `positions` int64 [num_reqs, k + 1] those
    of the rows.
    """
    k = drafts.shape[1]
    q = _draft_distributions(draft, probs)
    wanted = probs[:, :k].gather(-1, drafts[..., None]).squeeze(-1)
    ratio = wanted / q.gather(-1, drafts[..., None]).squeeze(-1)
    # behind a row that is not finite nothing is looked at
    ratio = torch.where(ratio >= 0, ratio, 0.0)
    # The paper's p_i: how far the first i drafts are as likely for the target as for their drafter,
    # from 1 for none of them.
    trust = [torch.ones_like(ratio[:, 0])]
    for place in range(k):
        trust.append((trust[-1] * ratio[:, place]).clamp(max=1))
    trusted = torch.stack(trust, dim=1)  # [num_reqs, k + 1]
    last = torch.full_like(drafts[:, :1], k) if num_drafts is None else num_drafts[:, None]
    places = torch.arange(k + 1, device=drafts.device)
    # What is left of p behind each number of drafts; with no draft to reject there, p itself.
    rejectable = F.pad(q, (0, 0, 0, 1)) * (places < last)[..., None]
    left = (trusted[..., None] * probs - rejectable).clamp(min=0)
    surplus = left.sum(dim=-1)
    most = surplus + 1 - trusted
    kept = torch.where(places == last, trusted, torch.where(most <= 0, 1.0, surplus / most))
    u = uniform(seeds, of_step(positions[:, 0], k), Purpose.ACCEPT)
    accepted = (u < kept[:, 1:]) & (places[1:] <= last)
    num_accepted = torch.where(accepted, places[1:], 0).amax(dim=1)

    end = num_accepted[:, None]
    weights = left.gather(1, end[..., None].expand(-1, 1, probs.shape[-1]))
    # Where p and q agree to the last bit, rounding can leave nothing.
    p_end = probs.gather(1, end[..., None].expand(-1, 1, probs.shape[-1]))
    weights = torch.where(weights.sum(dim=-1, keepdim=True) > 0, weights, p_end)
    final = sample_from(weights, uniform(seeds, positions.gather(1, end) + 1, Purpose.SAMPLE))
    token_ids = torch.cat([drafts, final], dim=1).scatter(1, end, final)
    return token_ids, num_accepted, (trusted > 0) & (places <= last)


def _draft_distributions(draft: DraftOutput, like: Tensor) -> Tensor:
    """The drafter's distributions [num_reqs, k, V], in the type of `like` [num_reqs, k + 1, V]."""
    assert draft.probs is not None
    probs = draft.probs.to(like.dtype)
    if draft.candidate_ids is None:
        return probs
    return torch.zeros_like(like[:, 1:]).scatter(-1, draft.candidate_ids, probs)


def _logprobs(logits: Tensor, token_ids: Tensor, sampling: SamplingTensors) -> Logprobs | None:
    """Log-probabilities of `token_ids` int64 [num_reqs, k + 1], under the unprocessed logits; None
    when nobody asked.
    """
    if sampling.plan.logprobs:
        return logprobs_of(logits, token_ids, sampling.plan.top_logprobs)
    return None
