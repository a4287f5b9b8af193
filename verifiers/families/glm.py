"""GLM, and dots.llm1, which is made as GLM-4.5 is."""

from collections.abc import Mapping
from typing import Any

from verifiers.description import Description, NormNames, sigmoid_routing
from verifiers.families.deepseek import PREDICTION, v3
from verifiers.family import Family, plain

_AROUND = NormNames(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


def _glm4_moe(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(
        **common,
        norms_of_queries="each head" if getattr(config, "use_qk_norm", True) else None,
        routing=sigmoid_routing(config),
        wide_router=True,
    )


FAMILIES = {
    "dots1": Family(describe=_glm4_moe),
    "glm": Family(describe=plain(interleaved=True), partial_rope=True),
    "glm4": Family(describe=plain(norms=_AROUND, interleaved=True), partial_rope=True),
    "glm4_moe": Family(describe=_glm4_moe, partial_rope=True, prediction=PREDICTION),
    "glm4_moe_lite": Family(describe=v3, partial_rope=True, latent=True, prediction=PREDICTION),
    "glm4v_moe_text": Family(wrappers=("glm4v_moe",)),
    "glm4v_text": Family(wrappers=("glm46v", "glm4v")),
    "glm_moe_dsa": Family(describe=v3, latent=True, indexer="neighbors", prediction=PREDICTION),
}
