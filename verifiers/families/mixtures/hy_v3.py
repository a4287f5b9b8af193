"""Hy3."""

from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.families.deepseek import PREDICTION
from verifiers.family import Family, plain


def _routing(config: Any) -> Routing:
    return Routing(
        config.num_local_experts,
        config.num_experts_per_tok,
        scores="sigmoid",
        biased=True,
        scaling=config.router_scaling_factor,
    )


FAMILIES = {
    "hy_v3": Family(
        describe=plain(
            names=((r"\.mlp\.(?=e_score_correction_bias$)", ".mlp.gate."),),
            norms_of_queries="each head",
            routing=_routing,
            wide_router=True,
        ),
        renamed=(
            (r"\.mlp\.router\.gate\.", ".mlp.gate."),
            (r"\.mlp\.expert_bias$", ".mlp.e_score_correction_bias"),
            (r"\.mlp\.shared_mlp\.", ".mlp.shared_experts."),
        ),
        prediction=PREDICTION,
    )
}
