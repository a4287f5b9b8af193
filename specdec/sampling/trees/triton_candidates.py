"""The likeliest tokens of rows in Triton, with the target's noise: see `trees.candidates`.

Programs first find the best token of every group of columns in their slice of a row, and what the
slice adds to the row's normalizer, so that even one row keeps many processors busy. The best C
tokens of a row lie in the C groups whose best ones are highest, so one program per row then looks
at those alone. As a score and its token are compared as one integer, how a row is divided changes
no choice.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_argmax import DTYPES, SLICE, token_key
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.sampling.triton_filters import COLDEST, min_kept, number_of
from specdec.sampling.triton_sampler import gumbel, noise_bits

MAX_CANDIDATES = 64
GROUP = 64
"""Columns: more mean more tokens to compare in a row's program, fewer more groups."""

_LEAST = tl.constexpr(-(2**63))
_LOWEST_FINITE = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _scores(
    logits: tl.tensor,  # [groups, width, vocab_size]
    floats: tl.tensor,  # float32 [6, groups]: temperature, top-p, min-p, then penalties
    ints: tl.tensor,  # int64 [3, groups]: top-k, seed, first position
    positions: tl.tensor,  # int64 [groups * width]
    least: tl.tensor,  # float32 [groups * width]
    weights: tl.tensor,  # float32 [2, groups * width], of log-probability and noise, or None
    target_ids: tl.tensor,  # int64 [vocab_size], or None
    groups: tl.tensor,
    width: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    exists: tl.tensor,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
) -> tl.tensor:
    """What columns of a row are ranked by, float32; -inf for those that do not exist."""
    group = row // width
    place = logits + group * group_stride + (row % width) * row_stride
    x = tl.load(place + column, mask=exists, other=-float("inf")).to(tl.float32)
    if SAMPLED:
        temperature = tl.load(floats + group)
        if temperature > 0:
            token = column
            if target_ids is not None:
                token = tl.load(target_ids + column, mask=exists, other=0).to(tl.int32)
            noise = gumbel(noise_bits(ints + groups + group, positions + row), token)
            kept = exists
            if FILTERED:
                kept = exists & (x >= tl.load(least + row))
            x = x / tl.maximum(temperature, COLDEST)
            if weights is not None:
                x = tl.load(weights + row) * x
                noise = tl.load(weights + groups * width + row) * noise
            x = tl.where(kept, x + noise, -float("inf"))
    return x


@triton.jit
def _group_maxima_kernel(
    logits: tl.tensor,  # these and what follows, up to the strides, as in `_scores`
    floats: tl.tensor,
    ints: tl.tensor,
    positions: tl.tensor,
    least: tl.tensor,
    weights: tl.tensor,
    target_ids: tl.tensor,
    maxima: tl.tensor,  # int64 [groups * width, slices, SLICE // GROUP]
    # float32 [groups * width, slices, 2]: the best score, and the sum of exp(score - best)
    parts: tl.tensor,
    groups: tl.tensor,
    width: tl.tensor,
    vocab_size: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
    exists = column < vocab_size
    await_previous(OVERLAP)
    x = _scores(
        logits, floats, ints, positions, least, weights, target_ids, groups, width, group_stride,
        row_stride, row, column, exists, SAMPLED, FILTERED,
    )  # fmt: skip
    best = tl.max(x, 0)
    # A slice of -inf alone is nothing, not NaN.
    total = tl.sum(tl.exp(x - tl.maximum(best, _LOWEST_FINITE)), 0)
    slot = row * tl.num_programs(1) + tl.program_id(1)
    tl.store(parts + slot * 2, best)
    tl.store(parts + slot * 2 + 1, total)
    key = tl.reshape(tl.where(exists, token_key(x, column), _LEAST), [SLICE // GROUP, GROUP])
    tl.store(maxima + slot * (SLICE // GROUP) + tl.arange(0, SLICE // GROUP), tl.max(key, 1))


@triton.jit
def _row_candidates_kernel(
    logits: tl.tensor,  # these and what follows, up to the strides, as in `_scores`
    floats: tl.tensor,
    ints: tl.tensor,
    positions: tl.tensor,
    least: tl.tensor,
    weights: tl.tensor,
    target_ids: tl.tensor,
    maxima: tl.tensor,  # int64 [groups * width, SLICES, SLICE // GROUP]
    parts: tl.tensor,  # float32 [groups * width, SLICES, 2]
    token_ids: tl.tensor,  # int64 [groups * width, COUNT]
    scores: tl.tensor,  # float32 [groups * width, COUNT]
    groups: tl.tensor,
    width: tl.tensor,
    vocab_size: tl.tensor,
    group_stride: tl.tensor,
    row_stride: tl.tensor,
    SAMPLED: tl.constexpr,
    FILTERED: tl.constexpr,
    SLICE: tl.constexpr,
    GROUP: tl.constexpr,
    COUNT: tl.constexpr,
    SLICES: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    entry = tl.arange(0, triton.next_power_of_2(SLICES * (SLICE // GROUP)))
    part = tl.arange(0, triton.next_power_of_2(SLICES))
    number = tl.arange(0, triton.next_power_of_2(COUNT))
    await_previous(OVERLAP)
    there = entry < SLICES * (SLICE // GROUP)
    maxima += row * (SLICES * (SLICE // GROUP))
    highest = _highest(tl.load(maxima + entry, mask=there, other=_LEAST), number, COUNT)
    of_slices = tl.load(parts + (row * SLICES + part) * 2, mask=part < SLICES, other=-float("inf"))
    totals = tl.load(parts + (row * SLICES + part) * 2 + 1, mask=part < SLICES, other=0.0)
    best = tl.max(of_slices, 0)
    total = tl.sum(tl.exp(of_slices - tl.maximum(best, _LOWEST_FINITE)) * totals, 0)
    # A group that does not exist has columns beyond the last.
    first = (0x7FFFFFFF - (highest & 0x7FFFFFFF)).to(tl.int32) // GROUP * GROUP
    column = tl.ravel(first[:, None] + tl.arange(0, GROUP)[None, :])
    exists = column < vocab_size
    x = _scores(
        logits, floats, ints, positions, least, weights, target_ids, groups, width, group_stride,
        row_stride, row, column, exists, SAMPLED, FILTERED,
    )  # fmt: skip
    chosen = _highest(tl.where(exists, token_key(x, column), _LEAST), number, COUNT)
    score = number_of((chosen >> 32).to(tl.int32)) - best - tl.log(total)
    token_id = 0x7FFFFFFF - (chosen & 0x7FFFFFFF)
    within = number < COUNT
    if target_ids is not None:
        token_id = tl.load(target_ids + token_id, mask=within, other=0)
    tl.store(token_ids + row * COUNT + number, token_id, mask=within)
    # A NaN has no probability; and whatever rounds how, no child is likelier than its parent.
    score = tl.where(score == score, tl.minimum(score, 0.0), -float("inf"))
    tl.store(scores + row * COUNT + number, score, mask=within)


@triton.jit
def _highest(key: tl.tensor, number: tl.tensor, COUNT: tl.constexpr) -> tl.tensor:
    """The COUNT highest of different keys, in falling order, where `number` counts from 0."""
    chosen = tl.full([triton.next_power_of_2(COUNT)], _LEAST, tl.int64)
    for place in range(COUNT):
        highest = tl.max(key, 0)
        chosen = tl.where(number == place, highest, chosen)
        key = tl.where(key == highest, _LEAST, key)
    return chosen


def candidates(
    logits: Tensor,
    floats: Tensor,
    ints: Tensor,
    positions: Tensor,
    count: int,
    weights: Tensor | None,
    target_ids: Tensor | None,
    *,
    sampled: bool,
    filtered: bool,
) -> tuple[Tensor, Tensor]:
    """See `specdec.sampling.trees.candidates.candidates`.

    Args:
        logits: [num_reqs, n, V], bfloat16, float16 or float32; the last axis is contiguous.
        floats, ints: as in `SamplingTensors`, contiguous; not read unless `sampled`.
        positions: int64 [num_reqs, n].
        weights: float32 [2, num_reqs, n], or None.
        target_ids: int64 [V], or None.
        sampled: a request may sample.
        filtered: a request may have top-k, top-p or min-p.
    """
    assert logits.stride(-1) == 1 and logits.dtype in DTYPES and positions.shape == logits.shape[:2]
    assert all(x is None or x.is_contiguous() for x in (floats, ints, weights))
    assert 1 <= count <= min(MAX_CANDIDATES, logits.shape[-1])
    least = min_kept(logits, floats, ints) if filtered else floats  # which is not read then
    rows, slices, device = positions.numel(), triton.cdiv(logits.shape[-1], SLICE), logits.device
    maxima = torch.empty(rows, slices, SLICE // GROUP, dtype=torch.int64, device=device)
    parts = torch.empty(rows, slices, 2, dtype=torch.float32, device=device)
    token_ids = torch.empty(*positions.shape, count, dtype=torch.int64, device=device)
    scores = torch.empty(token_ids.shape, dtype=torch.float32, device=device)
    inputs = logits, floats, ints, positions.contiguous(), least, weights, target_ids
    numbers, sizes = (*inputs, maxima, parts), (*logits.shape, *logits.stride()[:2])
    options = {"SAMPLED": sampled, "FILTERED": filtered, "SLICE": SLICE, "GROUP": GROUP}
    options |= {"num_warps": 4, **overlap_options(device)}
    with on_device(logits):
        _group_maxima_kernel[(rows, slices)](*numbers, *sizes, **options)
        _row_candidates_kernel[(rows,)](
            *numbers, token_ids, scores, *sizes, COUNT=count, SLICES=slices, **options
        )
    return token_ids, scores
