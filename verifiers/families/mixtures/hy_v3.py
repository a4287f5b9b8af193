"""Hy3."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import Description
from verifiers.families.deepseek import PREDICTION
from verifiers.family import Family


def _describe(config: Any, common: Mapping[str, Any]) -> Description:
    routing = Routing(
        config.num_local_experts,
        config.num_experts_per_tok,
        scores="sigmoid",
        biased=True,
        scaling=config.router_scaling_factor,
    )
    return Description(
        **common,
        names=((r"\.mlp\.(?=e_score_correction_bias$)", ".mlp.gate."),),
        norms_of_queries="each head",
        routing=routing,
        wide_router=True,
    )


FAMILIES = {
    "hy_v3": Family(
        describe=_describe,
        renamed=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
        ),
        prediction=PREDICTION,
    )
}
