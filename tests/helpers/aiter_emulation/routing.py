"""Choice of experts. The order of a row's experts is not specified: here it is the reverse of the
obvious one.
"""

import torch
from torch import Tensor

from tests.helpers.aiter_emulation.machine import Machine, refuse_unless


def _check(machine: Machine, name: str, gating: Tensor, weights: Tensor, ids: Tensor) -> None:
    machine.needs_cdna(name)
    machine.record(name)
    floats = (torch.bfloat16, torch.float16, torch.float32)
    refuse_unless(
        gating.dtype in floats and gating.stride(-1) == 1,
        f"{name}: scores of {gating.dtype}, or strided",
    )
    refuse_unless(
        weights.dtype == torch.float32 and ids.dtype == torch.int32,
        f"{name} writes float32 weights and int32 ids",
    )
    refuse_unless(
        weights.shape == ids.shape and len(ids) == len(gating),
        f"{name}: outputs {tuple(weights.shape)}, {tuple(ids.shape)}",
    )
    refuse_unless(weights.is_contiguous() and ids.is_contiguous(), f"{name}: outputs must be dense")
    refuse_unless(
        ids.shape[1] <= gating.shape[1], f"{name}: {ids.shape[1]} of {gating.shape[1]} experts"
    )
    machine.compile(name, gating.dtype, gating.shape[1], ids.shape[1])


def _check_groups(name: str, experts: int, groups: int, kept: int, topk: int) -> None:
    refuse_unless(
        groups in (1, 2, 4, 8) and experts % groups == 0,
        f"{name}: {experts} experts in {groups} groups",
    )
    refuse_unless(1 <= kept <= groups, f"{name}: {kept} of {groups} groups")
    refuse_unless(
        topk <= experts // groups * kept,
        f"{name}: {topk} experts from {kept} groups of {experts // groups}",
    )


def _best(scores: Tensor, count: int) -> Tensor:
    """Indices [T, count] of the largest, the lower one of equals."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def _write(
    weights: Tensor, ids: Tensor, chosen: Tensor, values: Tensor, renorm: bool, factor: float
) -> None:
    values = values / values.sum(-1, keepdim=True) if renorm else values
    ids.copy_(chosen.flip(-1).int())
    weights.copy_((values * factor).flip(-1))


def _keep_groups(scores: Tensor, group_scores: Tensor, kept: int) -> Tensor:
    """Scores with every group but the best at -inf."""
    groups = group_scores.shape[1]
    lost = torch.ones_like(group_scores, dtype=torch.bool).scatter_(
        1, _best(group_scores, kept), False
    )
    return scores.masked_fill(lost.repeat_interleave(scores.shape[1] // groups, 1), -torch.inf)


def biased_grouped_topk(
    machine: Machine,
    gating_output: Tensor,
    correction_bias: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Sigmoid scores; the bias takes part in the choice but not in the weight; a group counts by
    its two best experts.
    """
    name = "biased_grouped_topk"
    _check(machine, name, gating_output, topk_weights, topk_ids)
    tokens, experts = gating_output.shape
    same = correction_bias.dtype == gating_output.dtype
    refuse_unless(
        same,
        f"{name} reads the bias of {correction_bias.dtype} as if it were {gating_output.dtype}",
    )
    refuse_unless(
        correction_bias.shape == (experts,) and correction_bias.is_contiguous(),
        f"{name}: one bias per expert",
    )
    _check_groups(name, experts, num_expert_group, topk_group, topk_ids.shape[1])
    refuse_unless(experts // num_expert_group >= 2, f"{name}: a group is scored by two experts")
    if tokens > machine.num_compute_units * 212 and experts // num_expert_group <= 32:
        assert need_renorm, "Renormalization is required for moe_fused_gate."
    scores = gating_output.float().sigmoid()
    biased = scores + correction_bias.float()
    group_scores = biased.view(tokens, num_expert_group, -1).topk(2, -1).values.sum(-1)
    chosen = _best(_keep_groups(biased, group_scores, topk_group), topk_ids.shape[1])
    _write(
        topk_weights, topk_ids, chosen, scores.gather(1, chosen), need_renorm, routed_scaling_factor
    )


def grouped_topk(
    machine: Machine,
    gating_output: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    num_expert_group: int,
    topk_group: int,
    need_renorm: bool,
    is_softmax: bool = True,
    routed_scaling_factor: float = 1.0,
) -> None:
    """Softmax or sigmoid scores; a group counts by its best expert."""
    name = "grouped_topk"
    _check(machine, name, gating_output, topk_weights, topk_ids)
    tokens, experts = gating_output.shape
    _check_groups(name, experts, num_expert_group, topk_group, topk_ids.shape[1])
    scores = gating_output.float().softmax(-1) if is_softmax else gating_output.float().sigmoid()
    group_scores = scores.view(tokens, num_expert_group, -1).amax(-1)
    chosen = _best(_keep_groups(scores, group_scores, topk_group), topk_ids.shape[1])
    _write(
        topk_weights, topk_ids, chosen, scores.gather(1, chosen), need_renorm, routed_scaling_factor
    )


def topk_softmax(
    machine: Machine,
    topk_weights: Tensor,
    topk_indices: Tensor,
    token_expert_indices: Tensor,
    gating_output: Tensor,
    need_renorm: bool,
    num_shared_experts: int = 0,
    shared_expert_scoring_func: str = "",
) -> None:
    """Softmax over all experts, then the best; `token_expert_indices` is scratch."""
    name = "topk_softmax"
    _check(machine, name, gating_output, topk_weights, topk_indices)
    refuse_unless(
        num_shared_experts == 0 and not shared_expert_scoring_func,
        f"{name}: not emulated: shared experts",
    )
    scratch = (
        token_expert_indices.dtype == torch.int32
        and token_expert_indices.numel() >= topk_indices.numel()
    )
    refuse_unless(scratch, f"{name}: token_expert_indices is int32 of the size of the ids")
    refuse_unless(gating_output.is_contiguous(), f"{name}: scores must be dense")
    token_expert_indices.fill_(-1)
    scores = gating_output.float().softmax(-1)
    chosen = _best(scores, topk_indices.shape[1])
    _write(topk_weights, topk_indices, chosen, scores.gather(1, chosen), need_renorm, 1.0)
