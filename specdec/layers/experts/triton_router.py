"""Choosing a token's experts in Triton: one program per row, for every kind of `Routing`; see
`specdec.layers.experts.router`.

A program holds all of a row's logits, in groups, and takes the highest one top_k times. A score and
its expert are compared as one integer, so that of equal scores the lower expert is chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_argmax import token_key
from specdec.kernels.triton_launch import on_device, overlap_options
from specdec.kernels.triton_overlap import await_previous
from specdec.layers.experts.routing import Routing

_LEAST = tl.constexpr(-(2**63))
_LOW_BITS = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _strongest(
    choice: tl.tensor, key: tl.tensor, group: tl.tensor, COUNT: tl.constexpr, BEST_TWO: tl.constexpr
) -> tl.tensor:
    """Whether each group [GROUPS, 1] is among the COUNT strongest, by its best expert or the sum of
    its best two.
    """
    best = tl.max(key, 1, keep_dims=True)
    strength = tl.sum(tl.where(key == best, choice, 0.0), 1, keep_dims=True)
    if BEST_TWO:
        second = tl.max(tl.where(key == best, _LEAST, key), 1, keep_dims=True)
        strength += tl.sum(tl.where(key == second, choice, 0.0), 1, keep_dims=True)
    # _LEAST: no group, for their number is padded
    order = tl.where(best == _LEAST, _LEAST, token_key(strength, group))
    kept = tl.zeros_like(order) > 0
    for _ in tl.static_range(COUNT):
        highest = tl.max(order, 0, keep_dims=True)
        kept = kept | (order == highest)
        order = tl.where(order == highest, _LEAST, order)
    return kept


@triton.jit
def _route_kernel(
    # [rows, EXPERTS], and with SHARED_GATE one more, or [PARTS, rows, EXPERTS] whose sum counts
    logits: tl.tensor,
    gate_bias: tl.tensor,  # [EXPERTS] or None, joins the logits
    bias: tl.tensor,  # [EXPERTS] or None, joins the choice
    weights: tl.tensor,  # float32 [rows, TOP_K + SHARED]
    ids: tl.tensor,  # int32 [rows, TOP_K + SHARED]
    part_stride: tl.tensor,
    row_stride: tl.tensor,
    scaling: tl.tensor,
    epsilon: tl.tensor,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZED: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    SHARED_GATE: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    SIZE: tl.constexpr = EXPERTS // GROUPS
    SLOTS: tl.constexpr = TOP_K + SHARED
    row = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, triton.next_power_of_2(GROUPS))[:, None]
    member = tl.arange(0, triton.next_power_of_2(SIZE))[None, :]
    expert = group * SIZE + member
    exists = (group < GROUPS) & (member < SIZE)
    place = logits + row * row_stride + expert
    gate_shift = (
        0.0
        if gate_bias is None
        else tl.load(gate_bias + expert, mask=exists, other=0.0).to(tl.float32)
    )
    shift = 0.0 if bias is None else tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
    await_previous(OVERLAP)
    x = tl.load(place, mask=exists, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(place + part * part_stride, mask=exists, other=0.0).to(tl.float32)
    share = 1.0
    if SHARED_GATE:
        gate = logits + row * row_stride + EXPERTS
        total = tl.load(gate).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            total += tl.load(gate + part * part_stride).to(tl.float32)
        share = tl.sigmoid(total)
    x += gate_shift
    score = x  # of a softmax the logits are enough where what is chosen is renormalized
    if SIGMOID:
        score = tl.sigmoid(x)
    elif bias is not None or not RENORMALIZED:
        power = tl.where(
            exists, tl.exp(x - tl.max(tl.max(tl.where(exists, x, -float("inf")), 1), 0)), 0.0
        )
        score = power / tl.sum(tl.sum(power, 1), 0)
    choice = score if SIGMOID else x
    if bias is not None:
        choice = score + shift
    key = tl.where(exists, token_key(choice, expert), _LEAST)
    if TOP_GROUPS < GROUPS:
        key = tl.where(_strongest(choice, key, group, TOP_GROUPS, SIGMOID), key, _LEAST)
    if not SIGMOID and RENORMALIZED:
        score = x
    slot = tl.arange(0, triton.next_power_of_2(TOP_K))
    chosen = tl.zeros([triton.next_power_of_2(TOP_K)], tl.int32)
    weight = tl.full(
        [triton.next_power_of_2(TOP_K)],
        0.0 if SIGMOID or not RENORMALIZED else -float("inf"),
        tl.float32,
    )
    for k in tl.static_range(TOP_K):
        highest = tl.max(tl.max(key, 1), 0)
        found = tl.sum(tl.sum(tl.where(key == highest, score, 0.0), 1), 0)
        chosen = tl.where(slot == k, _LOW_BITS - (highest & _LOW_BITS).to(tl.int32), chosen)
        weight = tl.where(slot == k, found, weight)
        key = tl.where(key == highest, _LEAST, key)
    if RENORMALIZED:
        if not SIGMOID:
            weight = tl.exp(weight - tl.max(weight, 0))
        weight = weight / (tl.sum(weight, 0) + epsilon)
    tl.store(weights + row * SLOTS + slot, weight * scaling, mask=slot < TOP_K)
    tl.store(ids + row * SLOTS + slot, chosen, mask=slot < TOP_K)
    if SHARED:
        other = tl.arange(0, triton.next_power_of_2(SHARED))
        tl.store(
            weights + row * SLOTS + TOP_K + other,
            tl.zeros_like(other).to(tl.float32) + share,
            mask=other < SHARED,
        )
        tl.store(ids + row * SLOTS + TOP_K + other, EXPERTS + other, mask=other < SHARED)


def route(
    logits: Tensor,
    routing: Routing,
    bias: Tensor | None = None,
    *,
    gate_bias: Tensor | None = None,
    shared: int = 0,
    shared_gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """See `specdec.layers.experts.router.route`; partial sums of logits are added up in float32 and
    not rounded.

    Args:
        logits: [rows, num_experts], or partial sums [parts, rows, num_experts]; the last axis is
            contiguous and may be longer.
        bias: [num_experts], if and only if `routing.biased`.
        gate_bias: [num_experts], added to the logits, or None.
        shared: parts of `specdec.layers.experts.routing.SharedExperts`, which all rows have behind
            what they choose.
        shared_gate: the sigmoid of what follows the logits is the weight of those, which else is 1.

    Returns:
        weights float32 [rows, top_k + shared], and expert ids int32 of the same shape, from the
        highest score to the lowest.
    """
    assert logits.stride(-1) == 1 and logits.shape[-1] >= routing.num_experts + shared_gate
    assert routing.biased == (bias is not None)
    shape = (logits.shape[-2], routing.top_k + shared)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    with on_device(logits):
        _route_kernel[(len(ids),)](
            logits,
            gate_bias,
            bias,
            weights,
            ids,
            logits.stride(0) if logits.ndim == 3 else 0,
            logits.stride(-2),
            routing.scaling,
            routing.epsilon,
            EXPERTS=routing.num_experts,
            TOP_K=routing.top_k,
            GROUPS=routing.num_groups if routing.grouped else 1,
            TOP_GROUPS=routing.topk_groups if routing.grouped else 1,
            SIGMOID=routing.scores == "sigmoid",
            RENORMALIZED=routing.renormalized,
            PARTS=len(logits) if logits.ndim == 3 else 1,
            SHARED=shared,
            SHARED_GATE=shared_gate,
            num_warps=1 if routing.num_experts <= 512 else 4,
            **overlap_options(logits.device),
        )
    return weights, ids
