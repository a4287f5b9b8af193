"""DeepSeek, and families with its latent attention."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import BEFORE, Description, sigmoid_routing
from verifiers.family import Family, Prediction

PREDICTION = Prediction(
    (
        (r"^model\.layers\.{layers}\.enorm\.", "embedding_norm."),
        (r"^model\.layers\.{layers}\.hnorm\.", "hidden_norm."),
        (r"^model\.layers\.{layers}\.eh_proj\.", "projection."),
        (r"^model\.layers\.{layers}\.(?:shared_head\.norm|final_layernorm)\.", "norm."),
        # Copies of the target's embeddings and head lie there, too.
        (r"^model\.layers\.{layers}\.(?!embed_tokens\.|shared_head\.)", "model.layers.0."),
    )
)
"""Behind the layers of the target, as transformers' `MtpModel` has them."""


def _v2(config: Any, common: Mapping[str, Any]) -> Description:
    grouped = config.topk_method == "group_limited_greedy"
    routing = config.num_experts_per_tok and Routing(  # a config may say nothing of experts
        config.n_routed_experts,
        config.num_experts_per_tok,
        num_groups=config.n_group if grouped else 1,
        topk_groups=config.topk_group if grouped else 1,
        renormalized=False,  # whatever the config says
        scaling=config.routed_scaling_factor,
    )
    return Description(**common, interleaved=True, routing=routing or None, wide_router=True)


def v3(config: Any, common: Mapping[str, Any], **options: Any) -> Description:
    """DeepSeek-V3 (arXiv 2412.19437), with further entries of its description; without experts
    where the config has none.
    """
    routing = sigmoid_routing(config) if getattr(config, "n_routed_experts", None) else None
    interleaved = bool(getattr(config, "rope_interleave", True))
    return Description(
        **common, **options, interleaved=interleaved, routing=routing, wide_router=True
    )


def _axk1(config: Any, common: Mapping[str, Any]) -> Description:
    return v3(config, common, norms=BEFORE._replace(output="mlp.post_mlp_layernorm"))


FAMILIES = {
    "axk1": Family(
        describe=_axk1,
        latent=True,
        renamed=((r"(?<=\d\.)post_mlp_layernorm", "mlp.post_mlp_layernorm"),),
    ),
    "deepseek_v2": Family(describe=_v2, latent=True),
    "deepseek_v3": Family(
        describe=v3,
        latent=True,
        prediction=PREDICTION,
        wrappers=("kimi_k25",),
        aliases=("kimi_k2",),
    ),
    "deepseek_v32": Family(describe=v3, latent=True, indexer="halves", prediction=PREDICTION),
    "youtu": Family(describe=v3, latent=True),
}
