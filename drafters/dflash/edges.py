"""Scores of every candidate of a slot behind every candidate of the slot before."""

import torch
from torch import Tensor
from torch.nn import functional as F

from drafters.choice import Guesses
from drafters.head import Head
from specdec.device.deviation import Deviation, deviation, worst
from specdec.kernels.kernel import Kernel
from specdec.sampling.argmax import argmax


def edges_of(
    head: Head,
    hidden: Tensor,
    anchors: Tensor,
    token_ids: Tensor,
    columns: Tensor,
    scores: Tensor,
    scale: Tensor | None,
    compared: Guesses | None = None,
    *,
    start: Tensor | None = None,
    as_logprobs: bool = False,
) -> Tensor:
    """The head's table for `best_chain`: the scores, and the head's corrections of them.

    A head with a state has one along each path. Here all paths to a slot have the state of the best
    chain before it, so the table is exact behind every token of that chain.

    Args:
        head: the head.
        hidden: [num_reqs, K, H], final hidden states of the slots.
        anchors: int64 [num_reqs].
        token_ids: int64 [num_reqs, K, C], candidates, tokens of the target.
        columns: int64 [num_reqs, K, C], the same in the drafter's vocabulary.
        scores: float32 [num_reqs, K, C], their log-probabilities without the head.
        scale: float32 [num_reqs, K], factor on the head's corrections; None are ones.
        compared: the tokens, as columns, that a head with `compares_candidates` compares, with
            their log-probabilities; None where they are the candidates.
        start: [num_reqs, S], see `drafters.head.Refiner.start`; None for another head.
        as_logprobs: gives `logprobs_of` the table.

    Returns:
        float32 [num_reqs, K, C, C], by the candidate before and the candidate; before the first
        slot all of them are the anchor.
    """
    parts = [anchors[:, None, None].expand(-1, 1, token_ids.shape[2]), token_ids[:, :-1]]
    before = torch.cat(parts, dim=1)
    if head.has_state:
        right = F.embedding(columns, head.right)
        table = _behind_the_best(head, hidden, before, right, scores, scale, start)
        return logprobs_of(table, scores) if as_logprobs else table
    left, _ = head.left(hidden[:, :, None], before, None)
    if compared is None and left.dtype == head.right.dtype and KERNEL.runs_on(left.device):
        from drafters.dflash import triton_edges  # it imports Triton

        sides = left.contiguous(), columns, head.right.detach().contiguous()
        return triton_edges.edges(
            *sides, scores, scale, first_slot=head.first_slot, as_logprobs=as_logprobs
        )
    # in float32, since a CPU takes ten times as long for small products in 16 bits
    bonus = torch.matmul(left.float(), F.embedding(columns, head.right).mT.float())
    if compared is not None:
        bonus = _within(compared, head, left, columns, bonus)
    return _table(bonus, scores, scale, head.first_slot, as_logprobs=as_logprobs)


def _table(
    bonus: Tensor, scores: Tensor, scale: Tensor | None, first_slot: int, *, as_logprobs: bool
) -> Tensor:
    """The table from corrections [num_reqs, K, C, C], whose first slots are overwritten."""
    if scale is not None:
        bonus = bonus * scale[..., None, None]
    if first_slot:
        bonus[:, :first_slot] = 0
    table = scores[:, :, None] + bonus
    return logprobs_of(table, scores) if as_logprobs else table


def logprobs_of(edges: Tensor, scores: Tensor) -> Tensor:
    """The table as log-probabilities, for `best_first`; both are those of `edges_of`.

    They are normalized over the candidates: the head shares out among them what they have without
    it, all together. Over the whole vocabulary it would also move some to or from the other tokens;
    that would cost a product with all of `right` for each candidate before.
    """
    return (edges.log_softmax(dim=-1) + together(scores)[..., None, None]).clamp(max=0)


def together(scores: Tensor) -> Tensor:
    """`scores.logsumexp(dim=-1)` of scores in falling order, in fewer kernels."""
    first = scores[..., 0]
    return first - scores.log_softmax(dim=-1)[..., 0]


def _within(compared: Guesses, head: Head, left: Tensor, columns: Tensor, bonus: Tensor) -> Tensor:
    """Corrections [num_reqs, K, C, C] that leave the tokens the head compares as likely, all
    together, as they were without it, and other tokens as they were, each.
    """
    scores = compared.scores[:, :, None]
    corrected = scores + torch.matmul(left, F.embedding(compared.token_ids, head.right).mT).float()
    gained = corrected.logsumexp(dim=-1) - compared.scores.logsumexp(dim=-1)[:, :, None]
    known = (columns[..., None] == compared.token_ids[:, :, None]).any(dim=-1)
    return torch.where(known[:, :, None], bonus - gained[..., None], 0.0)


def _behind_the_best(
    head: Head,
    hidden: Tensor,
    before: Tensor,
    right: Tensor,
    scores: Tensor,
    scale: Tensor | None,
    start: Tensor | None,
) -> Tensor:
    """The table of a head whose states follow the best chain, slot by slot."""
    tables, rank = [], torch.zeros_like(before[:, 0, :1])
    state = None if start is None else start[:, None]
    for slot in range(before.shape[1]):
        left, states = head.left(hidden[:, slot, None], before[:, slot], state)
        assert states is not None, "a head that has a state leaves one"
        state = states.gather(1, rank[..., None].expand(-1, -1, states.shape[-1]))
        bonus = torch.matmul(left, right[:, slot].mT).float()
        if scale is not None:
            bonus = bonus * scale[:, slot, None, None]
        table = scores[:, slot, None] + (
            bonus if slot >= head.first_slot else torch.zeros_like(bonus)
        )
        tables.append(table)
        rank = argmax(table.gather(1, rank[..., None].expand(-1, -1, table.shape[-1])).squeeze(1))[
            0
        ][:, None]
    return torch.stack(tables, dim=1)


def check_edges(device: torch.device) -> Deviation:
    """Tables of several sizes, with uncorrected slots, of scores and of log-probabilities."""
    from drafters.dflash import triton_edges

    generator, found = torch.Generator().manual_seed(0), []
    # of which Triton's interpreter has no products
    half = torch.float16 if device.type == "cpu" else torch.bfloat16
    for count, rank, first_slot in ((16, 128, 0), (5, 40, 1), (20, 16, 2)):
        left = torch.randn(2, 6, count, rank, generator=generator)
        right = torch.randn(90, rank, generator=generator) / (4 * rank**0.5)
        columns = torch.randint(90, (2, 6, count), generator=generator)
        scale = 0.5 + torch.rand(2, 6, generator=generator)
        scores = torch.randn(2, 6, count, generator=generator).log_softmax(dim=-1)
        kinds = ((half, scale, True), (torch.float16, None, False), (torch.float32, None, True))
        for dtype, factor, as_logprobs in kinds:
            sides = left.to(dtype), right.to(dtype)
            bonus = torch.matmul(sides[0], sides[1][columns].mT)
            plain, exact = (
                _table(product, numbers, factor, first_slot, as_logprobs=as_logprobs)
                for product, numbers in (
                    (bonus.float(), scores),
                    (_exactly(*sides, columns), scores.double()),
                )
            )
            states = sides[0].to(device)
            arguments = (states, columns.to(device), sides[1].to(device), scores.to(device))
            here = None if factor is None else factor.to(device)
            ours = triton_edges.edges(
                *arguments, here, first_slot=first_slot, as_logprobs=as_logprobs
            )
            found.append(deviation(ours, plain, exact))
    return worst(found)


KERNEL = Kernel("edges", check_edges)


def _exactly(left: Tensor, right: Tensor, columns: Tensor) -> Tensor:
    return torch.matmul(left.double(), right.double()[columns].mT)
