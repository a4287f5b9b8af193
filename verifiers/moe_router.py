"""The router of DeepSeek's and GLM's expert layers on AMD GPUs: the modules of transformers replaced by AITER's kernels.

transformers casts hidden states and gate to float32 in every layer. Here the logits have the gate's own type, and the bias is cast
to it once, when the router is made. In float32 the experts are the same; in bfloat16 near ties may fall differently.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

import specdec.device
from specdec.kernels import aiter
from specdec.kernels.experts import Routing
from specdec.layers.router import aiter_reasons, route, route_with_aiter

logger = logging.getLogger(__name__)

ROUTERS = frozenset(
    {
        "DeepseekV2TopkRouter",
        "DeepseekV3TopkRouter",
        "DeepseekV32TopkRouter",
        "Glm4MoeTopkRouter",
        "Glm4MoeLiteTopkRouter",
        "GlmMoeDsaTopkRouter",
    }
)
"""Classes of transformers that are replaced: what they compute is what `Routing` says."""


Route = Callable[[Tensor, Routing, Tensor | None], tuple[Tensor, Tensor]]
"""`(logits, routing, bias) -> weights, expert ids`."""


class MoeRouter(nn.Module):
    """Stands in for a router of transformers: `hidden -> logits, weights, expert ids`.

    Args:
        source: the module replaced, on its device; its gate is taken over.
    """

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.routing = routing_of(source)
        self.weight: nn.Parameter = source.weight
        bias: Tensor | None = getattr(source, "e_score_correction_bias", None)
        self.bias = None if bias is None else bias.to(self.weight.dtype)
        self.reasons = aiter_reasons(self.routing, self.weight.device)
        self._route: Route = route if self.reasons else partial(route_with_aiter, aiter.load(aiter.AiterRouter))

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Routes `hidden` [..., H].

        Returns:
            logits [num_tokens, num_experts], weights float32 [num_tokens, top_k], expert ids int64 [num_tokens, top_k].
        """
        logits = F.linear(hidden.reshape(-1, hidden.shape[-1]), self.weight)
        return logits, *self._route(logits, self.routing, self.bias)


def routing_of(source: Any) -> Routing:
    """How a router of transformers chooses."""
    biased = hasattr(source, "e_score_correction_bias")
    grouped = biased or source.topk_method == "group_limited_greedy"
    return Routing(
        num_experts=source.num_experts,
        top_k=source.top_k,
        num_groups=source.num_group if grouped else 1,
        topk_groups=source.topk_group if grouped else 1,
        scores="sigmoid" if biased else "softmax",
        biased=biased,
        renormalized=biased and source.norm_topk_prob,  # DeepSeek-V2's is not, whatever its config says
        scaling=source.routed_scaling_factor,
    )


def replace_routers(model: nn.Module) -> None:
    """Replaces the routers of a model on an AMD GPU, in place; on other devices they stay as they are."""
    reasons: dict[str, None] = {}
    for layer in list(model.modules()):
        gate: Any = getattr(layer, "gate", None)
        if type(gate).__name__ in ROUTERS and specdec.device.rocm_architecture(gate.weight.device) is not None:
            layer.gate = router = MoeRouter(gate)
            reasons.update(dict.fromkeys(router.reasons))
    if reasons:
        logger.info("experts are chosen in plain torch, not by AITER: %s", "; ".join(reasons))
