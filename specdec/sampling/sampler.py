"""From logits to probabilities to tokens, batched, with one random stream per request.

Random numbers are a function of (request seed, position, purpose) alone. A request's output therefore does not depend on its
neighbors, on preemption, or, for point-mass drafts, on whether drafts were used at all. The numbers of a position are used
once per purpose: those behind a rejection have influenced nothing yet when the next step draws them again.
"""

from enum import IntEnum

import torch
from torch import Tensor

from specdec.layers.argmax import argmax
from specdec.sampling.tensors import SamplingTensors


class Purpose(IntEnum):
    """Independent random streams of one position."""

    SAMPLE = 0  # the target's own token
    ACCEPT = 1  # the acceptance test of a draft
    DRAFT = 2  # the drafter's token


def _signed(bits: int) -> int:
    """The int64 with these 64 bits."""
    return bits - 2**64 if bits >= 2**63 else bits


_STEP = _signed(0x9E3779B97F4A7C15)
_FACTORS = (_signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB))
_UNIT = 2**52  # probability 1 in the integer sums of top-p
SORTED_VOCABULARY = 4096
"""Largest vocabulary that top-p sorts."""
_COLDEST = 1e-20  # already one-hot for any logits that differ in float32; dividing by less could overflow


def _shift_right(bits: Tensor, count: int) -> Tensor:
    # `>>` copies the sign bit of an int64; the hash wants zeros.
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    """Bijective 64-bit finalizer: flipping any input bit flips every output bit with probability near one half."""
    bits = (bits ^ _shift_right(bits, 30)) * _FACTORS[0]
    bits = (bits ^ _shift_right(bits, 27)) * _FACTORS[1]
    return bits ^ _shift_right(bits, 31)


def uniform(seeds: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Random numbers that depend on nothing but their arguments.

    Each request walks its own SplitMix64 sequence (Steele, Lea and Flood, OOPSLA 2014), started at its hashed seed and
    addressed directly instead of step by step. Products wrap around, as the generator wants.

    Args:
        seeds: int64 [num_reqs].
        positions: int64 [num_reqs, n], positions of the tokens that the numbers decide.
        purpose: what they decide.

    Returns:
        float64 [num_reqs, n] in [0, 1), multiples of 2**-53.
    """
    counter = positions * len(Purpose) + (int(purpose) + 1)
    bits = _mix(_mix(seeds)[:, None] + counter * _STEP)
    return _shift_right(bits, 11).double() * 2.0**-53


def penalized(logits: Tensor, sampling: SamplingTensors, tokens: Tensor) -> Tensor:
    """Applies the repetition penalty to rows that were fed `tokens`: a row counts the tokens up to its own.

    Args:
        logits: [num_reqs, n, V].
        sampling: `seen` must be there; requests with penalty 1 are left as they are.
        tokens: int64 [num_reqs, n], the anchor, then the drafts.

    Returns:
        float32 [num_reqs, n, V].
    """
    assert sampling.seen is not None, "no request has a repetition penalty"
    width = tokens.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=tokens.device).tril()
    # Row j names its tokens 0..j; in place of later ones it names the anchor again, which every row has.
    fed = torch.where(causal, tokens[:, None, :], tokens[:, :1, None])
    seen = sampling.seen[:, None, :].repeat(1, width, 1).scatter_(-1, fed, True)
    scores = logits.float()
    penalty = sampling.repetition_penalty[:, None, None]
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


def processed_probs(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Distributions that tokens are drawn from: temperature, top-k, top-p and min-p, in Transformers' order.

    Every row is computed from its own values only, bit for bit the same whichever filters its neighbors use.

    Args:
        logits: [num_reqs, n, V], after the repetition penalty if there is one.
        sampling: rows of greedy requests become one-hot at their first maximum.

    Returns:
        float32 [num_reqs, n, V]. A row with a NaN or infinite maximum has no meaning and disturbs no other.
    """
    temperature = sampling.temperature[:, None, None]
    scores = logits.float() / temperature.clamp(min=_COLDEST)
    if sampling.plan.max_top_k:
        scores = _filter_top_k(scores, sampling)
    if sampling.plan.any_top_p:
        scores = _filter_top_p(scores, sampling)
    if sampling.plan.any_min_p:
        probs = scores.softmax(dim=-1)
        floor = sampling.min_p[:, None, None] * probs.amax(dim=-1, keepdim=True)
        scores = scores.masked_fill(probs < floor, -torch.inf)
    probs = scores.softmax(dim=-1)
    greedy = torch.zeros_like(probs).scatter_(-1, argmax(logits)[0][..., None], 1.0)
    return torch.where(temperature == 0, greedy, probs)


def _filter_top_k(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """Keeps the `top_k` largest of each row, and whatever equals the last of them."""
    most = min(sampling.plan.max_top_k, scores.shape[-1])
    largest = scores.topk(most, dim=-1).values
    last = (sampling.top_k - 1).clamp(0, most - 1)[:, None, None].expand(-1, scores.shape[1], 1)
    least = largest.gather(-1, last).where(sampling.top_k[:, None, None] > 0, -torch.inf)
    return scores.masked_fill(scores < least, -torch.inf)


def _filter_top_p(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """Keeps the fewest tokens of each row whose probability reaches `top_p`; of equal scores at the edge, the last.

    Probabilities are added up as integers, whose sums do not depend on the order, so the edge is the same for every batch shape
    and device.
    """
    mass = (scores.softmax(dim=-1).double() * _UNIT).long()
    spare = ((1 - sampling.top_p).double() * _UNIT).long()[:, None, None]  # the least likely tokens up to this much go
    spare = torch.minimum(spare, mass.sum(dim=-1, keepdim=True) - 1)  # never all of them
    search = _tail_by_sorting if scores.shape[-1] <= SORTED_VOCABULARY else _tail_by_digits
    return scores.masked_fill(search(scores, mass, spare), -torch.inf)


def _tail_by_sorting(scores: Tensor, mass: Tensor, spare: Tensor) -> Tensor:
    """bool [..., V]: the lowest scores whose mass, int64 [..., V], adds up to at most `spare` [..., 1]."""
    token_ids = scores.sort(dim=-1, stable=True).indices
    dropped = mass.gather(-1, token_ids).cumsum(dim=-1) <= spare
    return torch.zeros_like(dropped).scatter_(-1, token_ids, dropped)


def _tail_by_digits(scores: Tensor, mass: Tensor, spare: Tensor) -> Tensor:
    """The same for a large vocabulary, which takes a CPU several times as long to sort.

    The score at the edge is found from its leading bits down, by adding up the mass of all scores that begin alike.
    """
    bits = (scores + 0.0).view(torch.int32)  # + 0.0 makes -0.0 equal to 0.0
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long() + 2**31  # in [0, 2**32), ascending as the scores do
    edge, below = torch.zeros_like(spare), torch.zeros_like(spare)
    for shift in (22, 11, 0):
        alike = torch.where(order >> (shift + 11) == edge, mass, 0)
        sums = mass.new_zeros(*mass.shape[:-1], 2048).scatter_add_(-1, (order >> shift) & 2047, alike)
        cumulative = below + sums.cumsum(dim=-1)
        first = (cumulative <= spare).sum(dim=-1, keepdim=True).clamp(max=2047)  # of the groups that stay, at least in part
        below = (cumulative - sums).gather(-1, first)
        edge = edge << 11 | first
    ties = order == edge
    return (order < edge) | (ties & (below + torch.where(ties, mass, 0).cumsum(dim=-1) <= spare))


def sample_from(probs: Tensor, u: Tensor) -> Tensor:
    """Inverse of the cumulative distribution: the first token whose cumulative probability exceeds `u` times the total.

    A token of probability 0 is never returned while the row has any other.

    Args:
        probs: float32 [..., V], at least 0; need not sum to 1.
        u: float64 [...] in [0, 1).

    Returns:
        int64 [...] in [0, V), also for rows that are zero or not finite.
    """
    cumulative = probs.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[..., -1:]
    # Staying below the total keeps the search off zeros at the end of a row.
    target = torch.minimum(u[..., None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True).squeeze(-1).clamp(max=probs.shape[-1] - 1)
