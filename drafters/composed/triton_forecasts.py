"""What became of forecasts, in Triton: how many drafts the output agrees with, and the mean error
of forecasts that were alike.

It is what `drafters.composed.calibration` and `agreement` compute in plain torch, in some sixty
small kernels of each step.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.base.blocks import DraftTree
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

_BLOCK = 64
"""Requests of which a program looks at all buckets together."""


@triton.jit
def _bucket(forecast: tl.tensor, COUNT: tl.constexpr, PER_DOUBLING: tl.constexpr) -> tl.tensor:
    # Rows that only pad a batch may have what is no number.
    bounded = tl.where(forecast > 0, tl.minimum(forecast, 1e6), 0.0)
    return tl.minimum((PER_DOUBLING * tl.log2(bounded + 1.0)).to(tl.int32), COUNT - 1)


@triton.jit
def _agree_kernel(
    token_ids: tl.tensor,  # int64 [requests, DRAFTS]
    num_drafts: tl.tensor,  # int64 [requests] or None
    depths: tl.tensor,  # int64 [requests, DRAFTS] of a tree, or None
    ancestors: tl.tensor,  # the same
    output_ids: tl.tensor,  # int64 [requests, OUTPUT]
    num_accepted: tl.tensor,  # int64 [requests], tokens of the output that count but one
    agreed: tl.tensor,  # int64 [requests]
    DRAFTS: tl.constexpr,
    OUTPUT: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, triton.next_power_of_2(DRAFTS))
    place = request * DRAFTS + row
    within = row < DRAFTS
    await_previous(OVERLAP)
    depth = row + 1
    if depths is not None:
        depth = tl.load(depths + place, mask=within, other=1).to(tl.int32)
    draft = tl.load(token_ids + place, mask=within, other=-1)
    wanted = tl.load(output_ids + request * OUTPUT + tl.minimum(depth, OUTPUT) - 1)
    fits = (
        within
        & (draft == wanted)
        & (depth <= tl.load(num_accepted + request) + 1)
        & (depth <= OUTPUT)
    )
    if num_drafts is not None:
        fits = fits & (row < tl.load(num_drafts + request))
    if ancestors is None:
        best = tl.min(tl.where(fits, DRAFTS, row), 0)
    else:
        fitting = tl.sum(tl.where(fits, tl.full(row.shape, 1, tl.int64) << row, 0), 0)
        whole = within & ((tl.load(ancestors + place, mask=within, other=0) & ~fitting) == 0)
        best = tl.max(tl.where(whole, depth, 0), 0)
    tl.store(agreed + request, best.to(tl.int64))


@triton.jit
def _correct_kernel(
    forecasts: tl.tensor,  # float32 [parts, requests]
    sums: tl.tensor,  # float32 [2, parts * COUNT], errors and observations
    corrected: tl.tensor,  # like forecasts
    shifts: tl.tensor,  # the same
    num_reqs: tl.tensor,
    prior: tl.tensor,
    least: tl.tensor,
    COUNT: tl.constexpr,
    PER_DOUBLING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    part = tl.program_id(0)
    request = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    place, exists = part * num_reqs + request, request < num_reqs
    await_previous(OVERLAP)
    forecast = tl.load(forecasts + place, mask=exists, other=0.0)
    bucket = sums + part * COUNT + _bucket(forecast, COUNT, PER_DOUBLING)
    late = forecast + tl.load(bucket) / (tl.load(bucket + tl.num_programs(0) * COUNT) + prior)
    ratio = late / tl.maximum(forecast, least)
    tl.store(corrected + place, late, mask=exists)
    tl.store(shifts + place, tl.log(tl.minimum(tl.maximum(ratio, least), 1.0)), mask=exists)


@triton.jit
def _observe_kernel(
    sums: tl.tensor,  # float32 [2, PARTS * COUNT], updated
    forecasts: tl.tensor,  # float32 [PARTS, requests]
    corrected: tl.tensor,  # the same
    agreed: tl.tensor,  # int64 [PARTS, requests]
    num_accepted: tl.tensor,  # int64 [requests]
    counts: tl.tensor,  # float32 [requests]
    best: tl.tensor,  # int64 [requests] or None
    num_reqs: tl.tensor,
    log_keep: tl.tensor,  # to the base 2, of the weight that an observation leaves to those before
    PARTS: tl.constexpr,
    COUNT: tl.constexpr,
    PER_DOUBLING: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    bucket = tl.arange(0, triton.next_power_of_2(COUNT))
    await_previous(OVERLAP)
    for part in tl.static_range(PARTS):
        error = tl.zeros(bucket.shape, tl.float32)
        seen = tl.zeros(bucket.shape, tl.float32)
        for start in range(0, num_reqs, BLOCK):
            request = start + tl.arange(0, BLOCK)
            exists = request < num_reqs
            forecast = tl.load(forecasts + part * num_reqs + request, mask=exists, other=0.0)
            right = tl.load(agreed + part * num_reqs + request, mask=exists, other=0)
            count = tl.load(counts + request, mask=exists, other=0.0)
            # What fits everything that came out might have gone on: for as long as it was expected
            # to.
            expected = tl.load(corrected + part * num_reqs + request, mask=exists, other=0.0)
            whole = right > tl.load(num_accepted + request, mask=exists, other=0)
            observed = tl.where(
                whole, tl.maximum(right.to(tl.float32), expected), right.to(tl.float32)
            )
            wrong = observed - forecast
            # What is no number says nothing, and would never be forgotten.
            count = tl.where(tl.abs(wrong) < float("inf"), count, 0.0)
            wrong = tl.where(count > 0, wrong, 0.0)
            own = (_bucket(forecast, COUNT, PER_DOUBLING)[:, None] == bucket[None, :]) & exists[
                :, None
            ]
            error += tl.sum(tl.where(own, wrong[:, None], 0.0), 0)
            seen += tl.sum(tl.where(own, count[:, None], 0.0), 0)
        kept = tl.exp2(seen * log_keep)
        errors = sums + part * COUNT + bucket
        tl.store(
            errors,
            tl.load(errors, mask=bucket < COUNT, other=0.0) * kept + error,
            mask=bucket < COUNT,
        )
        observations = errors + PARTS * COUNT
        tl.store(
            observations,
            tl.load(observations, mask=bucket < COUNT, other=0.0) * kept + seen,
            mask=bucket < COUNT,
        )
    if best is not None:
        for start in range(0, num_reqs, BLOCK):
            request = start + tl.arange(0, BLOCK)
            most = tl.full([BLOCK], -1, tl.int64)
            who = tl.zeros([BLOCK], tl.int64)
            for part in tl.static_range(PARTS):
                right = tl.load(
                    agreed + part * num_reqs + request, mask=request < num_reqs, other=0
                )
                who = tl.where(right > most, part, who)
                most = tl.maximum(most, right)
            tl.store(best + request, who, mask=request < num_reqs)


def agree(
    agreed: Tensor,
    token_ids: Tensor,
    num_drafts: Tensor | None,
    tree: DraftTree | None,
    output_ids: Tensor,
    num_accepted: Tensor,
) -> None:
    """Writes to `agreed`, contiguous, what `drafters.composed.agreement.agreement` returns."""
    (num_reqs, drafts), output = token_ids.shape, output_ids.shape[1]
    of_tree = (
        (None, None) if tree is None else (tree.depths.contiguous(), tree.ancestors.contiguous())
    )
    with on_device(agreed):
        _agree_kernel[(num_reqs,)](
            token_ids.contiguous(),
            num_drafts,
            *of_tree,
            output_ids.contiguous(),
            num_accepted,
            agreed,
            DRAFTS=drafts,
            OUTPUT=output,
            num_warps=1,
            **overlap_options(agreed.device),
        )


def correct(
    forecasts: Tensor, sums: Tensor, *, buckets: int, per_doubling: int, prior: float, least: float
) -> tuple[Tensor, Tensor]:
    """Contiguous forecasts put right, and logs of ratios, at most 0; float32 [P, num_reqs]."""
    parts, num_reqs = forecasts.shape
    corrected, shifts = torch.empty_like(forecasts), torch.empty_like(forecasts)
    with on_device(forecasts):
        _correct_kernel[(parts, triton.cdiv(num_reqs, _BLOCK))](
            forecasts,
            sums,
            corrected,
            shifts,
            num_reqs,
            prior,
            least,
            COUNT=buckets,
            PER_DOUBLING=per_doubling,
            BLOCK=_BLOCK,
            num_warps=1,
            **overlap_options(forecasts.device),
        )
    return corrected, shifts


def observe(
    sums: Tensor,
    forecasts: Tensor,
    corrected: Tensor,
    agreed: Tensor,
    num_accepted: Tensor,
    counts: Tensor,
    best: Tensor | None,
    *,
    buckets: int,
    per_doubling: int,
    keep: float,
) -> None:
    """Takes a step, all contiguous, into `sums`; `best` takes the first part that agrees most."""
    parts, num_reqs = forecasts.shape
    with on_device(sums):
        _observe_kernel[(1,)](
            sums,
            forecasts,
            corrected,
            agreed,
            num_accepted,
            counts,
            best,
            num_reqs,
            math.log2(keep),
            PARTS=parts,
            COUNT=buckets,
            PER_DOUBLING=per_doubling,
            BLOCK=_BLOCK,
            num_warps=4,
            **overlap_options(sums.device),
        )
