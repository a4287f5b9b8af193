"""Laguna."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import Description
from verifiers.family import Family


def _describe(config: Any, common: Mapping[str, Any]) -> Description | None:
    if config.moe_router_logit_softcapping:
        return None
    routing = Routing(
        config.num_experts,
        config.num_experts_per_tok,
        scores="sigmoid",
        biased=True,
        scaling=config.moe_routed_scaling_factor,
    )
    return Description(**common, norms_of_queries="each head", gates="softplus", routing=routing)


FAMILIES = {
    "laguna": Family(
        describe=_describe,
        partial_rope=True,
        renamed=(
            (r"\.experts\.(?=e_score_correction_bias)", ".gate."),
            (r"\.shared_expert\.", ".shared_experts."),
        ),
    )
}
