"""GLM, and dots.llm1, which is made as GLM-4.5 is."""

from specdec.base.errors import UnsupportedModelError
from verifiers.description import NormNames, sigmoid_routing
from verifiers.families.deepseek import PREDICTION, latent_entries, v3
from verifiers.family import Family, plain
from verifiers.gguf.entries import BIAS, NO_WINDOW, Gguf, experts_of, partial_rotation, present
from verifiers.gguf.file import Entries, Facts

_AROUND = NormNames(
    "input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"
)


_MOE = plain(
    norms_of_queries=lambda config: "each head" if getattr(config, "use_qk_norm", True) else None,
    routing=sigmoid_routing,
    wide_router=True,
)


def _glm4_entries(facts: Facts, entries: Entries) -> Entries:
    if facts("rope.dimension_sections"):
        what = f"{facts.name!r} is the text part of GLM-4V, whose rows are in another order"
        raise UnsupportedModelError(f"{what}; take its safetensors files")
    return {**present(facts, BIAS), **partial_rotation(facts, entries)}


FAMILIES = {
    "dots1": Family(
        describe=_MOE,
        gguf={
            "dots1": Gguf(
                experts_of, needs={"n_routed_experts": "expert_count"}, has=BIAS, fixed=NO_WINDOW
            )
        },
    ),
    "glm": Family(describe=plain(interleaved=True), partial_rope=True),
    "glm4": Family(
        describe=plain(norms=_AROUND, interleaved=True),
        partial_rope=True,
        gguf={"glm4": Gguf(_glm4_entries)},
    ),
    "glm4_moe": Family(
        describe=_MOE,
        partial_rope=True,
        prediction=PREDICTION,
        gguf={
            "glm4moe": Gguf(
                experts_of,
                partial_rotation,
                needs={"n_routed_experts": "expert_count"},
                has={**BIAS, "use_qk_norm": "attn_q_norm.weight"},
                fixed={"num_nextn_predict_layers": 0},
            )
        },
    ),
    "glm4_moe_lite": Family(describe=v3, partial_rope=True, latent=True, prediction=PREDICTION),
    "glm4v_moe_text": Family(wrappers=("glm4v_moe",)),
    "glm4v_text": Family(wrappers=("glm46v", "glm4v")),
    "glm_moe_dsa": Family(
        describe=v3,
        latent=True,
        indexer="neighbors",
        prediction=PREDICTION,
        gguf={"glm-dsa": Gguf(latent_entries)},
    ),
}
