"""What a step comes to where drafts are point masses, in Triton; see `specdec.engine.acceptance`.

One program per request tells the outcome; one per row of a path, and piece of its features, copies
what goes on from there.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous

_BLOCK = 1024
"""Features of a row that a program copies."""


@triton.jit
def _outcome_kernel(
    target_ids: tl.tensor,  # int64 [requests, ROWS], what the target puts behind each row
    finite: tl.tensor,  # bool [requests, ROWS]
    tokens: tl.tensor,  # int64 [requests, ROWS], the anchor and a chain of drafts; None with a path
    num_drafts: tl.tensor,  # int64 [requests] or None, of the chain
    path: tl.tensor,  # int64 [requests, WIDTH], rows of a tree; None for a chain
    num_accepted: tl.tensor,  # int64 [requests], written for a chain
    chosen: tl.tensor,  # int64 [requests, WIDTH], written for a tree
    next_anchors: tl.tensor,  # int64 [requests]
    whole: tl.tensor,  # bool [requests]
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, triton.next_power_of_2(WIDTH))
    within = place < WIDTH
    target_ids += request * ROWS
    finite += request * ROWS
    await_previous(OVERLAP)
    row = place.to(tl.int64)
    if path is not None:
        row = tl.load(path + request * WIDTH + place, mask=within, other=0)
    token = tl.load(target_ids + row, mask=within, other=0)
    if path is None:
        draft = tl.load(tokens + request * ROWS + place + 1, mask=place + 1 < ROWS, other=-1)
        count = tl.min(tl.where((token == draft) & (place + 1 < ROWS), WIDTH, place), 0).to(
            tl.int64
        )
        if num_drafts is not None:
            count = tl.minimum(count, tl.load(num_drafts + request))
        tl.store(num_accepted + request, count)
    else:
        count = tl.load(num_accepted + request)
        tl.store(chosen + request * WIDTH + place, token, mask=within)
    counts = place <= count
    fine = tl.load(finite + row, mask=within & counts, other=1) != 0
    tl.store(next_anchors + request, tl.sum(tl.where(place == count, token, 0), 0))
    tl.store(whole + request, tl.min(fine.to(tl.int32), 0) != 0)


@triton.jit
def _follow_kernel(
    path: tl.tensor,  # int64 [requests, WIDTH]
    token_ids: tl.tensor,  # int64 [requests, ROWS]
    features: tl.tensor,  # [requests * ROWS, FEATURES], or None
    kept_ids: tl.tensor,  # int64 [requests, WIDTH]
    kept: tl.tensor,  # [requests * WIDTH, FEATURES]
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    FEATURES: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64)
    await_previous(OVERLAP)
    row = place // WIDTH * ROWS + tl.load(path + place)
    tl.store(kept_ids + place, tl.load(token_ids + row), mask=tl.program_id(1) == 0)
    if features is not None:
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        numbers = tl.load(features + row * FEATURES + column, mask=column < FEATURES)
        tl.store(kept + place * FEATURES + column, numbers, mask=column < FEATURES)


def follow(
    path: Tensor, token_ids: Tensor, features: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Tokens int64 [num_reqs, depth + 1] and features [num_reqs * (depth + 1), F] of a path's rows.

    Args:
        path: int64 [num_reqs, depth + 1].
        token_ids: int64 [num_reqs, N + 1].
        features: [num_reqs * (N + 1), F], or None.
    """
    rows, width = token_ids.shape[1], path.shape[1]
    kept_ids = torch.empty_like(path, memory_format=torch.contiguous_format)
    count = 0 if features is None else features.shape[1]
    kept = None if features is None else features.new_empty(path.numel(), count)
    with on_device(path):
        _follow_kernel[(path.numel(), max(1, triton.cdiv(count, _BLOCK)))](
            path.contiguous(),
            token_ids.contiguous(),
            None if features is None else features.contiguous(),
            kept_ids,
            kept,
            ROWS=rows,
            WIDTH=width,
            FEATURES=count,
            BLOCK=_BLOCK,
            num_warps=4,
            **overlap_options(path.device),
        )
    return kept_ids, kept


def chain_outcome(
    tokens: Tensor, target_ids: Tensor, num_drafts: Tensor | None, finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Accepted drafts int64, next anchors int64, and whether all is finite that counts, bool, each
    [num_reqs].

    Args:
        tokens: int64 [num_reqs, k + 1], the anchor and the drafts.
        target_ids: int64 [num_reqs, k + 1].
        num_drafts: int64 [num_reqs], drafts that count; None means all.
        finite: bool [num_reqs, k + 1].
    """
    num_accepted = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
    return num_accepted, *_launch(
        target_ids, finite, tokens.contiguous(), num_drafts, None, num_accepted, None
    )


def path_outcome(
    path: Tensor, num_accepted: Tensor, target_ids: Tensor, finite: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The target's tokens along a path through a tree, int64 [num_reqs, depth + 1], then as
    `chain_outcome`.

    Args:
        path: int64 [num_reqs, depth + 1], rows.
        num_accepted: int64 [num_reqs].
        target_ids: int64 [num_reqs, N + 1].
        finite: bool [num_reqs, N + 1].
    """
    chosen = torch.empty_like(path)
    return chosen, *_launch(target_ids, finite, None, None, path.contiguous(), num_accepted, chosen)


def _launch(
    target_ids: Tensor,
    finite: Tensor,
    tokens: Tensor | None,
    num_drafts: Tensor | None,
    path: Tensor | None,
    num_accepted: Tensor,
    chosen: Tensor | None,
) -> tuple[Tensor, Tensor]:
    num_reqs, rows = target_ids.shape
    next_anchors = torch.empty_like(num_accepted)
    whole = torch.empty(num_reqs, dtype=torch.bool, device=target_ids.device)
    with on_device(target_ids):
        _outcome_kernel[(num_reqs,)](
            target_ids.contiguous(),
            finite.contiguous(),
            tokens,
            num_drafts,
            path,
            num_accepted,
            chosen,
            next_anchors,
            whole,
            ROWS=rows,
            WIDTH=rows if path is None else path.shape[1],
            num_warps=1,
            **overlap_options(target_ids.device),
        )
    return next_anchors, whole
