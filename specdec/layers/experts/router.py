"""Choosing a token's experts: top-k of router logits, in plain torch and with AITER's kernels.

    Mixtral (arXiv 2401.04088), Qwen      softmax scores, mostly renormalized
    gpt-oss, Granite                      the same: softmax over the logits of the chosen
    DeepSeek-V2 (arXiv 2405.04434)        softmax scores, not renormalized; a group counts as its
                                          best expert
    DeepSeek-V3 (arXiv 2412.19437), GLM   sigmoid scores; a bias joins the choice, not the weights;
                                          a group counts as its best two

All compute in float32. `specdec.layers.experts.triton_router` is the same in a kernel.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

import specdec.device.device
from specdec.device.deviation import Deviation, worst
from specdec.kernels import aiter
from specdec.kernels.aiter import AiterRouter
from specdec.kernels.kernel import FLOATS, Kernel
from specdec.layers.experts.routing import Routing
from specdec.layers.linear import Linear

ARCHITECTURES = ("gfx942", "gfx950")
"""AMD architectures that AITER's kernels of this kind are built for."""

AITER_GROUPS = (1, 2, 4, 8)
"""Numbers of expert groups that AITER's kernels are built for."""

CHECKED = (
    Routing(64, 6, renormalized=False),
    Routing(160, 6, num_groups=8, topk_groups=3, renormalized=False, scaling=16.0),
    Routing(160, 8, scores="sigmoid", biased=True, scaling=2.5),
    Routing(256, 8, scores="sigmoid", biased=True, num_groups=8, topk_groups=4, scaling=2.5),
)
"""What DeepSeek's and GLM's models ask of each of AITER's kernels."""


@dataclass(frozen=True, slots=True, eq=False)
class Router:
    """What chooses the experts of a layer.

    Attributes:
        gate: to one logit per expert. A gate in float32 has its logits computed in float32 from
            hidden states of any type.
        routing: how experts are chosen from logits.
        bias: [num_experts], if and only if `routing.biased`.
        aiter: AITER's kernels where they choose; None where we do.
    """

    gate: Linear
    routing: Routing
    bias: Tensor | None = None
    aiter: AiterRouter | None = None

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Weights float32 [T, top_k] and expert ids of the same shape for `hidden` [T, H], by AITER
        or in plain torch.
        """
        logits = self.gate(hidden.to(self.gate.dtype))
        if self.aiter is not None:
            return route_with_aiter(self.aiter, logits, self.routing, self.bias)
        return route(logits, self.routing, self.bias)


def aiter_reasons(routing: Routing, device: torch.device) -> list[str]:
    """All reasons why AITER cannot choose on `device`; empty when it can."""
    architecture = specdec.device.device.rocm_architecture(device)
    if architecture is None:
        return [f"{device} is not a ROCm device"]
    reasons = []
    if architecture not in ARCHITECTURES:
        reasons.append(
            f"architecture {architecture} (AITER's kernels are for {' and '.join(ARCHITECTURES)})"
        )
    reasons += aiter.unavailable_reasons(AiterRouter)
    if routing.num_groups not in AITER_GROUPS:
        reasons.append(
            f"{routing.num_groups} groups of experts (the kernels take"
            f" {', '.join(map(str, AITER_GROUPS))})"
        )
    if routing.biased != (routing.scores == "sigmoid"):
        bias = "with a" if routing.biased else "without a"
        reasons.append(f"{routing.scores} scores {bias} bias")
    if routing.biased and not routing.renormalized:
        normalizes = "the kernel for many tokens always does that"
        reasons.append(f"weights that are not normalized ({normalizes})")
    return reasons


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Chooses experts in plain torch.

    Args:
        logits: [num_tokens, num_experts].
        bias: [num_experts], if and only if `routing.biased`.

    Returns:
        weights float32 [num_tokens, top_k], and expert ids int64 of the same shape, from the
        highest score to the lowest.

    >>> weights, ids = route(torch.tensor([[0.0, 3.0, 3.0, 1.0]]), Routing(4, 2))
    >>> weights, ids
    (tensor([[0.5000, 0.5000]]), tensor([[1, 2]]))
    """
    assert routing.biased == (bias is not None), "a bias belongs to what is biased"
    logits = logits.float()
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(dim=-1)
    # Logits also tell apart what a softmax rounds to the same number.
    unbiased = logits if routing.scores == "softmax" else scores
    choice = unbiased if bias is None else scores + bias.float()
    if routing.grouped:
        groups = choice.unflatten(-1, (routing.num_groups, -1))
        strength = groups.topk(2 if routing.scores == "sigmoid" else 1, dim=-1).values.sum(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool)
        kept.scatter_(-1, _highest(strength, routing.topk_groups), True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
    ids = _highest(choice, routing.top_k)
    if routing.scores == "softmax" and routing.renormalized:
        return logits.gather(-1, ids).softmax(dim=-1) * routing.scaling, ids
    weights = scores.gather(-1, ids)
    if routing.renormalized:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.epsilon)
    return weights * routing.scaling, ids


def _highest(numbers: Tensor, count: int) -> Tensor:
    """Places of the highest numbers of each row, in order; of equal ones the first comes first,
    which `topk` does not promise.
    """
    return numbers.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def route_with_aiter(
    ops: AiterRouter, logits: Tensor, routing: Routing, bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Routes with AITER's kernels; `bias` has the type of `logits`, as a kernel reads it."""
    assert bias is None or bias.dtype == logits.dtype, (
        "the kernel reads the bias in the type of the logits"
    )
    shape = (len(logits), routing.top_k)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    ids = torch.empty(shape, dtype=torch.int32, device=logits.device)
    common = {"gating_output": logits, "topk_weights": weights, "need_renorm": routing.renormalized}
    groups = {
        "num_expert_group": routing.num_groups,
        "topk_group": routing.topk_groups,
        "routed_scaling_factor": routing.scaling,
    }
    if routing.biased:
        ops.biased_grouped_topk(**common, **groups, topk_ids=ids, correction_bias=bias)
    elif routing.num_groups > 1:
        ops.grouped_topk(**common, **groups, topk_ids=ids, is_softmax=True)
    else:
        ops.topk_softmax(**common, topk_indices=ids, token_expert_indices=torch.empty_like(ids))
        weights *= routing.scaling
    # Experts are looked up with 64 bits, and what a kernel says of a row of NaN must be one of
    # them.
    own = torch.empty_like(ids, dtype=torch.int64)
    return weights, torch.remainder(ids, routing.num_experts, out=own)


def check_router(device: torch.device, dtype: torch.dtype) -> Deviation:
    """How far the weights of all experts are off, zeros for those not chosen; the weights multiply
    numbers of 16 bits, so they may be off by what those round.
    """
    kernels = aiter.load(AiterRouter)

    def all_weights(chosen: tuple[Tensor, Tensor], routing: Routing) -> Tensor:
        weights, ids = (part.cpu() for part in chosen)
        return torch.zeros(len(ids), routing.num_experts).scatter_add_(1, ids, weights)

    def found(routing: Routing) -> Deviation:
        generator = torch.Generator().manual_seed(routing.num_experts)
        count = routing.num_experts
        orders = [torch.randperm(count, generator=generator) for _ in range(6)]
        numbers = (torch.stack(orders) - count // 2) / 32  # exact in every type, and distinct
        logits, bias = numbers[1:].to(dtype), numbers[0].to(dtype) / 8 if routing.biased else None
        there = None if bias is None else bias.to(device)
        got = all_weights(route_with_aiter(kernels, logits.to(device), routing, there), routing)
        right = all_weights(route(logits, routing, bias), routing)
        bound = torch.finfo(torch.float16).eps * float(right.norm())
        return Deviation(float((got - right).norm()), bound)

    return worst(map(found, CHECKED))


KERNEL = Kernel(
    "aiter_router",
    check_router,
    dtypes=FLOATS,
    reasons=lambda device, dtype: aiter_reasons(CHECKED[0], device),
)
