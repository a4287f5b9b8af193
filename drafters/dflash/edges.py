"""Scores of every candidate of a slot behind every candidate of the slot before: what a head says, for all paths at once."""

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.choice import Guesses
from drafters.head import Head
from specdec.layers.argmax import argmax


def edges_of(
    head: Head,
    hidden: Tensor,
    anchors: Tensor,
    token_ids: Tensor,
    columns: Tensor,
    scores: Tensor,
    scale: Tensor | None,
    compared: Guesses | None = None,
) -> Tensor:
    """The head's table for `specdec.sampling.trees.best_chain`: the scores, and the head's corrections of them.

    A head with a state has one along each path. Here all paths to a slot have the state of the best chain before it, so the table
    is exact behind every token of that chain.

    Args:
        head: the head.
        hidden: [num_reqs, K, H], final hidden states of the slots.
        anchors: int64 [num_reqs].
        token_ids: int64 [num_reqs, K, C], candidates, tokens of the target.
        columns: int64 [num_reqs, K, C], the same in the drafter's vocabulary.
        scores: float32 [num_reqs, K, C], their log-probabilities without the head.
        scale: float32 [num_reqs, K], factor on the head's corrections; None are ones.
        compared: the tokens, as columns, that a head with `compares_candidates` compares, with their log-probabilities; None where
            they are the candidates.

    Returns:
        float32 [num_reqs, K, C, C], by the candidate before and the candidate; before the first slot all of them are the anchor.
    """
    right = F.embedding(columns, head.right)
    before = torch.cat([anchors[:, None, None].expand(-1, 1, token_ids.shape[2]), token_ids[:, :-1]], dim=1)
    if head.has_state:
        return _behind_the_best(head, hidden, before, right, scores, scale)
    left, _ = head.left(hidden[:, :, None], before, None)
    bonus = torch.matmul(left, right.mT).float()
    if compared is not None:
        bonus = _within(compared, head, left, columns, bonus)
    if scale is not None:
        bonus = bonus * scale[..., None, None]
    if head.first_slot:
        bonus[:, : head.first_slot] = 0
    return scores[:, :, None] + bonus


def logprobs_of(edges: Tensor, scores: Tensor) -> Tensor:
    """The table as log-probabilities, for `specdec.sampling.trees.best_first`; both are those of `edges_of`.

    They are normalized over the candidates: the head shares out among them what they have without it, all together. Over the whole
    vocabulary it would also move some to or from the other tokens; that would cost a product with all of `right` for each candidate
    before.
    """
    return (edges.log_softmax(dim=-1) + together(scores)[..., None, None]).clamp(max=0)


def together(scores: Tensor) -> Tensor:
    """`scores.logsumexp(dim=-1)` where the first is not minus infinity unless all are; on a GPU torch takes nine kernels for it."""
    first = scores[..., 0]
    return first - scores.log_softmax(dim=-1)[..., 0]


def _within(compared: Guesses, head: Head, left: Tensor, columns: Tensor, bonus: Tensor) -> Tensor:
    """Corrections [num_reqs, K, C, C] that leave the tokens the head compares as likely, all together, as they were without it, and
    other tokens as they were, each.
    """
    corrected = compared.scores[:, :, None] + torch.matmul(left, F.embedding(compared.token_ids, head.right).mT).float()
    gained = corrected.logsumexp(dim=-1) - compared.scores.logsumexp(dim=-1)[:, :, None]
    known = (columns[..., None] == compared.token_ids[:, :, None]).any(dim=-1)
    return torch.where(known[:, :, None], bonus - gained[..., None], 0.0)


def _behind_the_best(head: Head, hidden: Tensor, before: Tensor, right: Tensor, scores: Tensor, scale: Tensor | None) -> Tensor:
    """The table of a head whose states follow the best chain, slot by slot."""
    tables, state, rank = [], None, torch.zeros_like(before[:, 0, :1])
    for slot in range(before.shape[1]):
        left, states = head.left(hidden[:, slot, None], before[:, slot], state)
        assert states is not None, "a head that has a state leaves one"
        state = states.gather(1, rank[..., None].expand(-1, -1, states.shape[-1]))
        bonus = torch.matmul(left, right[:, slot].mT).float()
        if scale is not None:
            bonus = bonus * scale[:, slot, None, None]
        table = scores[:, slot, None] + (bonus if slot >= head.first_slot else torch.zeros_like(bonus))
        tables.append(table)
        rank = argmax(table.gather(1, rank[..., None].expand(-1, -1, table.shape[-1])).squeeze(1))[0][:, None]
    return torch.stack(tables, dim=1)
