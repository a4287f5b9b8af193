"""Which of several continuations to draft, in Triton, one program per request: what
`drafters.suffix.choice` chooses and weighs.

How far each continuation agrees with another is added up for every length of match at once, in
integers, so the means are torch's.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

_NOTHING = tl.constexpr(-1)


@triton.jit
def _best_chain_kernel(
    continuations: tl.tensor,  # int64 [requests, COUNT, DEPTH]
    lengths: tl.tensor,  # int64 [requests, COUNT]
    token_ids: tl.tensor,  # int64 [requests, DEPTH]
    num_drafts: tl.tensor,  # int64 [requests]
    scores: tl.tensor,  # float32 [requests]
    request_stride: tl.tensor,
    path_stride: tl.tensor,
    lengths_stride: tl.tensor,
    LONGEST: tl.constexpr,
    COUNT: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    path = tl.arange(0, triton.next_power_of_2(COUNT))
    step = tl.arange(0, triton.next_power_of_2(DEPTH))
    level = tl.arange(0, triton.next_power_of_2(LONGEST))
    trusted = LONGEST - level  # tokens of a match, the longest first
    continuations += request * request_stride
    lengths += request * lengths_stride
    await_previous(OVERLAP)
    there = (path < COUNT)[:, None] & (step < DEPTH)[None, :]
    token = tl.load(
        continuations + path[:, None] * path_stride + step[None, :], mask=there, other=_NOTHING
    ).to(tl.int32)
    length = tl.load(lengths + path, mask=path < COUNT, other=0).to(tl.int32)
    agreed = tl.zeros([triton.next_power_of_2(COUNT), triton.next_power_of_2(LONGEST)], tl.int32)
    counts = tl.zeros([triton.next_power_of_2(LONGEST)], tl.int32)
    for other in range(COUNT):
        its = tl.load(
            continuations + other * path_stride + step, mask=step < DEPTH, other=_NOTHING
        ).to(tl.int32)
        alike = (token == its[None, :]) & (token >= 0)
        common = tl.min(tl.where(alike, DEPTH, step[None, :]), 1)
        counted = (tl.load(lengths + other).to(tl.int32) >= trusted) & (trusted > 0)
        agreed += tl.where(counted[None, :], tl.minimum(common[:, None], trusted[None, :]), 0)
        counts += counted.to(tl.int32)
    exists = (path < COUNT)[:, None] & (trusted > 0)[None, :]
    mean = tl.div_rn(agreed.to(tl.float32), tl.maximum(counts, 1).to(tl.float32)[None, :])
    mean = tl.where(exists & (length[:, None] >= trusted[None, :]), mean, 0.0)
    score = tl.max(tl.max(mean, 1), 0)
    cell = tl.where(
        exists & (mean == score), level[None, :] * COUNT + path[:, None], LONGEST * COUNT
    )
    best = tl.min(tl.min(cell, 1), 0) % COUNT
    chosen = tl.load(continuations + best * path_stride + step, mask=step < DEPTH, other=_NOTHING)
    count = tl.sum((chosen >= 0).to(tl.int64), 0)
    tl.store(token_ids + request * DEPTH + step, tl.maximum(chosen, 0), mask=step < DEPTH)
    tl.store(num_drafts + request, tl.where(score > 0, count, 0))
    tl.store(scores + request, score)


@triton.jit
def _weigh_kernel(
    continuations: tl.tensor,  # int64 [requests, COUNT, DEPTH]
    lengths: tl.tensor,  # int64 [requests, COUNT]
    tokens: tl.tensor,  # int64 [requests, COUNT]
    weights: tl.tensor,  # float32 [requests, COUNT]
    keep: tl.tensor,  # the same
    request_stride: tl.tensor,
    path_stride: tl.tensor,
    lengths_stride: tl.tensor,
    log_length: tl.tensor,  # to the base 2
    log_age: tl.tensor,
    SHORTEST: tl.constexpr,
    COUNT: tl.constexpr,
    DEPTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    path = tl.arange(0, triton.next_power_of_2(COUNT))
    step = tl.arange(0, triton.next_power_of_2(DEPTH))
    exists = path < COUNT
    place = continuations + request * request_stride + path[:, None] * path_stride + step[None, :]
    await_previous(OVERLAP)
    token = tl.load(place, mask=exists[:, None] & (step < DEPTH)[None, :], other=_NOTHING)
    length = tl.load(lengths + request * lengths_stride + path, mask=exists, other=0).to(tl.int32)
    shorter = tl.maximum(length - tl.max(length, 0), SHORTEST)
    count = tl.where(length > 0, tl.sum((token >= 0).to(tl.int64), 1), 0)
    weight = tl.exp2(shorter * log_length) * tl.exp2(path * log_age)
    place = request * COUNT + path
    tl.store(tokens + place, count, mask=exists)
    tl.store(weights + place, weight, mask=exists)
    tl.store(
        keep + place, tl.div_rn(length.to(tl.float32), (length + 1).to(tl.float32)), mask=exists
    )


def best_chain(
    continuations: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `drafters.suffix.choice.best_chain`; the last axis of both is contiguous."""
    num_reqs, count, depth = continuations.shape
    assert continuations.stride(2) == 1 and lengths.stride(1) == 1
    token_ids = torch.empty(num_reqs, depth, dtype=torch.int64, device=lengths.device)
    num_drafts = torch.empty(num_reqs, dtype=torch.int64, device=lengths.device)
    scores = torch.empty(num_reqs, dtype=torch.float32, device=lengths.device)
    arguments = (
        continuations,
        lengths,
        token_ids,
        num_drafts,
        scores,
        *continuations.stride()[:2],
        lengths.stride(0),
    )
    sizes = {"LONGEST": longest, "COUNT": count, "DEPTH": depth}
    with on_device(lengths):
        _best_chain_kernel[(num_reqs,)](
            *arguments, **sizes, num_warps=4, **overlap_options(lengths.device)
        )
    return token_ids, num_drafts, scores


def weigh(
    continuations: Tensor, lengths: Tensor, *, by_length: float, by_age: float, shortest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See `drafters.suffix.choice.weigh`; the last axis of both is contiguous."""
    num_reqs, count, depth = continuations.shape
    assert continuations.stride(2) == 1 and lengths.stride(1) == 1
    tokens = torch.empty(num_reqs, count, dtype=torch.int64, device=lengths.device)
    weights, keep = torch.empty(2, num_reqs, count, dtype=torch.float32, device=lengths.device)
    strides = (*continuations.stride()[:2], lengths.stride(0))
    sizes = {"SHORTEST": shortest, "COUNT": count, "DEPTH": depth}
    with on_device(lengths):
        _weigh_kernel[(num_reqs,)](
            continuations,
            lengths,
            tokens,
            weights,
            keep,
            *strides,
            math.log2(by_length),
            math.log2(by_age),
            **sizes,
            num_warps=4,
            **overlap_options(lengths.device),
        )
    return tokens, weights, keep
