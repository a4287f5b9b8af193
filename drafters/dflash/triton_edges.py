"""`drafters.dflash.edges` in Triton: what a head says of candidates behind candidates.

One program per slot gathers the candidates' rows of the head's table, multiplies, adds what is
known of them without the head, and makes log-probabilities of the sums if they are wanted: in plain
torch these are four small kernels, and seven more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

_RANK = 64
"""Numbers of both sides that are multiplied at a time."""


@triton.jit
def _edges_kernel(
    left: tl.tensor,  # [slots, COUNT, RANK]
    columns: tl.tensor,  # int64 [slots, COUNT]
    right: tl.tensor,  # [vocab_size, RANK]
    scores: tl.tensor,  # float32 [slots, COUNT]
    scale: tl.tensor,  # float32 [slots], or None
    edges: tl.tensor,  # float32 [slots, COUNT, COUNT]
    RANK: tl.constexpr,
    COUNT: tl.constexpr,
    DEPTH: tl.constexpr,  # slots of a request
    FIRST: tl.constexpr,  # slots of it that are not corrected
    LOGS: tl.constexpr,
    SIDE: tl.constexpr,
    STEP: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    slot = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, SIDE)
    exists = candidate < COUNT
    part = tl.arange(0, STEP)
    place = slot * COUNT + candidate
    await_previous(OVERLAP)
    column = tl.load(columns + place, mask=exists, other=0)
    total = tl.zeros([SIDE, SIDE], tl.float32)
    for start in range(0, RANK, STEP):
        within = start + part < RANK
        before = tl.load(
            left + place[:, None] * RANK + (start + part)[None, :],
            mask=exists[:, None] & within[None, :],
            other=0.0,
        )
        after = tl.load(
            right + column[None, :] * RANK + (start + part)[:, None],
            mask=exists[None, :] & within[:, None],
            other=0.0,
        )
        total = tl.dot(before, after, total, input_precision="ieee")
    bonus = total.to(left.dtype.element_ty).to(tl.float32)  # rounded as a product by itself
    if scale is not None:
        bonus *= tl.load(scale + slot)
    if FIRST > 0:
        bonus = tl.where(slot % DEPTH < FIRST, 0.0, bonus)
    score = tl.load(scores + place, mask=exists, other=float("-inf"))
    edge = score[None, :] + bonus
    if LOGS:
        peak = tl.max(score, 0)
        together = peak + tl.log(tl.sum(tl.exp(score - peak), 0))
        edge -= tl.max(edge, 1)[:, None]
        edge -= tl.log(tl.sum(tl.exp(edge), 1))[:, None]
        edge = tl.minimum(edge + together, 0.0)
    tl.store(
        edges + place[:, None] * COUNT + candidate[None, :],
        edge,
        mask=exists[:, None] & exists[None, :],
    )


def edges(
    left: Tensor,
    columns: Tensor,
    right: Tensor,
    scores: Tensor,
    scale: Tensor | None,
    *,
    first_slot: int,
    as_logprobs: bool,
) -> Tensor:
    """What `drafters.dflash.edges.edges_of` computes of a head without a state; `left`
    [num_reqs, K, C, r] and `right` are contiguous and of one type.
    """
    num_reqs, depth, count, rank = left.shape
    assert (
        left.is_contiguous()
        and right.is_contiguous()
        and left.dtype == right.dtype
        and scores.dtype == torch.float32
    )
    table = torch.empty(num_reqs, depth, count, count, dtype=torch.float32, device=left.device)
    side = max(16, triton.next_power_of_2(count))
    with on_device(left):
        _edges_kernel[(num_reqs * depth,)](
            left,
            columns.contiguous(),
            right,
            scores.contiguous(),
            None if scale is None else scale.contiguous(),
            table,
            RANK=rank,
            COUNT=count,
            DEPTH=depth,
            FIRST=first_slot,
            LOGS=as_logprobs,
            SIDE=side,
            STEP=max(16, min(_RANK, triton.next_power_of_2(rank))),
            num_warps=1 if side == 16 else 4,
            **overlap_options(left.device),
        )
    return table
