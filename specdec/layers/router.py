"""Choosing a token's experts: grouped top-k of router logits, in plain torch and with AITER's kernels.

    DeepSeek-V2 (arXiv 2405.04434)        softmax scores; a group counts as its best expert
    DeepSeek-V3 (arXiv 2412.19437), GLM   sigmoid scores; a bias joins the choice, not the weights; a group counts as its best two

Both take logits and bias in one type and compute in float32. The order of a token's experts means nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import specdec.device
from specdec.kernels import aiter
from specdec.kernels.aiter import AiterRouter

ARCHITECTURES = ("gfx942", "gfx950")
"""AMD architectures that AITER's kernels of this kind are built for."""

AITER_GROUPS = (1, 2, 4, 8)
"""Numbers of expert groups that AITER's kernels are built for."""


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are chosen.

    Attributes:
        num_experts: experts to choose from.
        top_k: experts per token.
        num_groups: groups of neighboring experts, equally large.
        topk_groups: groups per token whose experts may be chosen.
        biased: sigmoid scores and a bias; otherwise softmax scores.
        renormalized: weights of a token sum to `scaling`.
        scaling: factor of the weights.
    """

    num_experts: int
    top_k: int
    num_groups: int = 1
    topk_groups: int = 1
    biased: bool = True
    renormalized: bool = True
    scaling: float = 1.0


def aiter_reasons(routing: Routing, device: torch.device) -> list[str]:
    """All reasons why AITER cannot choose on `device`; empty when it can."""
    architecture = specdec.device.rocm_architecture(device)
    if architecture is None:
        return [f"{device} is not a ROCm device"]
    reasons = []
    if architecture not in ARCHITECTURES:
        reasons.append(f"architecture {architecture} (AITER's kernels are for {' and '.join(ARCHITECTURES)})")
    reasons += aiter.unavailable_reasons(AiterRouter)
    if routing.num_groups not in AITER_GROUPS:
        reasons.append(f"{routing.num_groups} groups of experts (the kernels take {', '.join(map(str, AITER_GROUPS))})")
    if routing.biased and not routing.renormalized:
        reasons.append("weights that are not normalized (the kernel for many tokens always does that)")
    return reasons


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses experts in plain torch.

    Args:
        logits: [num_tokens, num_experts].
        routing: how.
        bias: [num_experts], when `routing.biased`.

    Returns:
        weights float32 [num_tokens, top_k], and expert ids int64 of the same shape.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.biased else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias.float()
    if routing.topk_groups < routing.num_groups:
        groups = choice.unflatten(-1, (routing.num_groups, -1))
        strength = groups.topk(2, dim=-1).values.sum(-1) if routing.biased else groups.amax(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool).scatter_(-1, strength.topk(routing.topk_groups, dim=-1).indices, True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = choice.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if routing.renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scaling, ids


def route_with_aiter(ops: AiterRouter, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The same with AITER's kernels; `bias` has the type of `logits`, since a kernel reads it as such."""
    assert bias is None or bias.dtype == logits.dtype, "the kernel reads the bias in the type of the logits"
    shape = (len(logits), routing.top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    common = {"gating_output": logits, "topk_weights": weights, "need_renorm": routing.renormalized}
    groups = {"num_expert_group": routing.num_groups, "topk_group": routing.topk_groups, "routed_scaling_factor": routing.scaling}
    if routing.biased:
        ops.biased_grouped_topk(**common, **groups, topk_ids=ids, correction_bias=bias)
    elif routing.num_groups > 1:
        ops.grouped_topk(**common, **groups, topk_ids=ids, is_softmax=True)
    else:
        ops.topk_softmax(**common, topk_indices=ids, token_expert_indices=torch.empty_like(ids))
        weights *= routing.scaling
    return weights, ids.long()  # experts are looked up with 64 bits
