"""Which tokens may be drawn: temperature, top-k, top-p and min-p, in Transformers' order.

A filter keeps the scores from a least one on, so of equal scores all stay or all go.
"""

import torch
from torch import Tensor

from specdec.sampling.argmax import argmax
from specdec.sampling.tensors import SamplingTensors

SORTED_VOCABULARY = 4096
"""Largest vocabulary that top-p sorts."""

COLDEST = 1e-20
"""Temperatures below act like it, which is one-hot already; dividing by less could overflow."""

_UNIT = 2**52  # probability 1 in the integer sums of top-p


def filtered_scores(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Logits divided by the temperature, -inf where a filter drops a token.

    Rows are computed from their own values, bit for bit the same whatever others' filters.

    Args:
        logits: [num_reqs, n, V], see `specdec.sampling.scores.scored`.
        sampling: of the requests; rows of greedy ones have no meaning.

    Returns:
        float32 [num_reqs, n, V]. One whose maximum is NaN or infinite disturbs no other.
    """
    scores = logits.float() / sampling.temperature[:, None, None].clamp(min=COLDEST)
    if sampling.plan.max_top_k:
        scores = _filter_top_k(scores, sampling)
    if sampling.plan.any_top_p:
        scores = _filter_top_p(scores, sampling)
    if sampling.plan.any_min_p:
        probs = scores.softmax(dim=-1)
        floor = sampling.min_p[:, None, None] * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < floor, -torch.inf)
    return scores


def processed_probs(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """The distributions of `filtered_scores`, float32 [num_reqs, n, V]; greedy ones are one-hot."""
    probs = filtered_scores(logits, sampling).softmax(dim=-1)
    greedy = torch.zeros_like(probs).scatter_(-1, argmax(logits)[0][..., None], 1.0)
    return torch.where(sampling.temperature[:, None, None] == 0, greedy, probs)


def _filter_top_k(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """Keeps the `top_k` largest of each row, and whatever equals the last of them."""
    most = min(sampling.plan.max_top_k, scores.shape[-1])
    largest = scores.topk(most, dim=-1).values
    last = (sampling.top_k - 1).clamp(0, most - 1)[:, None, None].expand(-1, scores.shape[1], 1)
    least = largest.gather(-1, last).where(sampling.top_k[:, None, None] > 0, -torch.inf)
    return scores.masked_fill(scores < least, -torch.inf)


def _filter_top_p(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """Keeps each row's fewest tokens whose probability reaches `top_p`, and equals of the last.

    Probabilities are added up as integers, in any order the same: so is the edge everywhere.
    """
    mass = (scores.softmax(dim=-1).double() * _UNIT).long()
    # the least likely tokens up to this much go
    spare = ((1 - sampling.top_p).double() * _UNIT).long()[:, None, None]
    spare = torch.minimum(spare, mass.sum(dim=-1, keepdim=True) - 1)  # never all of them
    search = _below_by_sorting if scores.shape[-1] <= SORTED_VOCABULARY else _below_by_digits
    return scores.masked_fill(search(scores, mass, spare), -torch.inf)


def _below_by_sorting(scores: Tensor, mass: Tensor, spare: Tensor) -> Tensor:
    """bool [..., V]: scores below that at which mass int64 [..., V] exceeds `spare`."""
    ordered, token_ids = scores.sort(dim=-1)
    within = mass.gather(-1, token_ids).cumsum(dim=-1) <= spare
    first = within.sum(dim=-1, keepdim=True).clamp(max=scores.shape[-1] - 1)
    return scores < ordered.gather(-1, first)


def _below_by_digits(scores: Tensor, mass: Tensor, spare: Tensor) -> Tensor:
    """The filter for a large vocabulary, which takes a CPU several times as long to sort.

    The score at the edge is found bit by bit, by the mass of all scores that begin alike.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    # in [0, 2**32), ascending as the scores do
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31
    edge, below = torch.zeros_like(spare), torch.zeros_like(spare)
    for shift in (22, 11, 0):
        alike = torch.where(order >> (shift + 11) == edge, mass, 0)
        sums = mass.new_zeros(*mass.shape[:-1], 2048)
        sums.scatter_add_(-1, (order >> shift) & 2047, alike)
        cumulative = below + sums.cumsum(dim=-1)
        # of the groups that stay, at least in part
        first = (cumulative <= spare).sum(dim=-1, keepdim=True).clamp(max=2047)
        below = (cumulative - sums).gather(-1, first)
        edge = edge << 11 | first
    return order < edge
