"""Building mixtures of experts from the tensors of their families."""

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

import specdec.device.device
from specdec.kernels import aiter
from specdec.kernels.aiter import AiterRouter
from specdec.layers.experts.joined import JoinedExperts
from specdec.layers.experts.router import KERNEL as ROUTER
from specdec.layers.experts.router import Router, aiter_reasons
from specdec.layers.experts.routing import PLAIN, Experts
from specdec.layers.linear import DenseLinear
from specdec.layers.mlp import GatedMLP, MixtureOfExperts, MlpBesideExperts
from specdec.layers.ops.norm import Norm
from specdec.layers.packed.gguf import GgufWeight, Quantized
from specdec.layers.packed.weight import PackedWeight
from verifiers.description import TRANSPOSED, Description
from verifiers.weights.weights import Weights

logger = logging.getLogger(__name__)


def mixture(weights: Weights, description: Description) -> MixtureOfExperts:
    """The mixture of experts whose tensors these are."""
    routed = _experts(weights.under("experts."), description)
    shared = shared_gate = latent = joined = None
    for name in ("shared_experts.", "shared_expert."):
        if weights.has(f"{name}down_proj.weight"):
            # What both give is added before the ranks' parts are.
            own = replace(weights.under(name), group=None)
            shared = gated_mlp(own, description.activation)
    if weights.has("shared_expert_gate.weight"):
        shared_gate = weights.linear("shared_expert_gate")
    if weights.has("fc1_latent_proj.weight"):
        latent = weights.linear("fc1_latent_proj"), weights.linear("fc2_latent_proj")
    chooses = router(weights, description)
    if shared is not None and latent is None and not description.weighs_inputs:
        joined = JoinedExperts.of(chooses, routed, shared, shared_gate)
    return MixtureOfExperts(
        chooses,
        routed,
        shared,
        shared_gate,
        latent,
        description.weighs_inputs,
        weights.group,
        joined,
    )


def mlp_beside_experts(
    weights: Weights, description: Description, norm: Callable[[str], Norm]
) -> MlpBesideExperts:
    """The feed-forward sublayer of a layer with both; `norm` makes the norms of that layer by their
    names.
    """
    mlp_norm, scale = norm("post_feedforward_layernorm_1"), weights.tensor("router.scale")
    scale = scale.to(torch.promote_types(scale.dtype, torch.float32)) * len(scale) ** -0.5
    return MlpBesideExperts(
        gated_mlp(weights.under("mlp."), description.activation),
        mlp_norm,
        Norm(scale, mlp_norm.epsilon),
        router(weights, description),
        weights.tensor("router.per_expert_scale"),
        norm("pre_feedforward_layernorm_2"),
        _experts(weights.under("experts."), description),
        norm("post_feedforward_layernorm_2"),
        weights.group,
    )


def _experts(experts: Weights, description: Description) -> Experts:
    """The routed experts whose tensors these are."""
    first = "up_proj" if description.activation in PLAIN else "gate_up_proj"
    transposed = description.experts in TRANSPOSED
    names = (first, "down_proj")
    gate_up, down = (_as_run(experts.experts(name, transposed=transposed)) for name in names)
    gate_up_bias = experts.optional("gate_up_proj_bias")
    if description.experts == "interleaved":
        order = torch.arange(gate_up.shape[1], device=gate_up.device).view(-1, 2).t().flatten()
        if isinstance(gate_up, PackedWeight):
            gate_up = gate_up.select(order)
        else:
            gate_up = gate_up.index_select(1, order)
        if gate_up_bias is not None:
            gate_up_bias = gate_up_bias.index_select(1, order)
    down_bias = experts.optional("down_proj_bias")
    return Experts(gate_up, down, description.activation, gate_up_bias, down_bias)


def _as_run(weight: Tensor | Quantized) -> Tensor | PackedWeight:
    """Plain numbers on a CPU, as `linear` has them, and what kernels of experts do not take."""
    packed = weight.packed() if isinstance(weight, GgufWeight) else weight
    if not isinstance(packed, PackedWeight) or (packed.plain and packed.device.type != "cpu"):
        return packed
    if packed.device.type != "cpu":
        logger.warning("experts of %s in GGUF's blocks become plain numbers", packed.code)
    return packed.dequantized()


def gated_mlp(weights: Weights, activation: str) -> GatedMLP:
    """The gated MLP whose tensors these are, or the one without a gate."""
    names = ["gate_up_proj"] if weights.has("gate_up_proj.weight") else ["gate_proj", "up_proj"]
    if activation in PLAIN:
        names = ["up_proj"]
    return GatedMLP(weights.linear(*names), weights.output("down_proj"), activation)


def router(weights: Weights, description: Description) -> Router:
    """What chooses among those experts; AITER's kernels on AMD GPUs that they are built for."""
    routing = description.routing
    assert routing is not None, "a family with experts says how they are chosen"
    scopes = ("router.", "router.proj.", "gate.")
    scope = next(weights.under(name) for name in scopes if weights.has(f"{name}weight"))
    weight, gate_bias = scope.tensor("weight"), scope.optional("bias")
    if (bias := scope.optional("e_score_correction_bias")) is not None:
        bias = bias.flatten()  # ERNIE's has an axis of one
    if specdec.device.device.rocm_architecture(weight.device) is not None:
        reasons = aiter_reasons(routing, weight.device)
        if not reasons and ROUTER.runs_on(weight.device, weight.dtype):
            # its kernels read the bias in the type of the logits
            cast: Tensor | None = None if bias is None else bias.to(weight.dtype)
            return Router(DenseLinear(weight, gate_bias), routing, cast, aiter.load(AiterRouter))
        if reasons:
            _say_once(f"experts are not chosen by AITER: {'; '.join(reasons)}")
    if description.wide_router:
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
    return Router(DenseLinear(weight, gate_bias), routing, bias)


@lru_cache(maxsize=16)
def _say_once(message: str) -> None:
    """Logs what is the same for all layers."""
    logger.info("%s", message)
