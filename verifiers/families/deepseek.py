"""DeepSeek, and families with its latent attention."""

from collections.abc import Mapping
from typing import Any

from verifiers.description import BEFORE, Description, routing_of, sigmoid_routing
from verifiers.family import Family, Prediction
from verifiers.gguf.entries import SIGMOID, Gguf, experts_of, first_sparse
from verifiers.gguf.file import Entries, Facts

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
    how: dict[str, Any] = {"scaling": config.routed_scaling_factor}
    if config.topk_method == "group_limited_greedy":
        how |= {"num_groups": config.n_group, "topk_groups": config.topk_group}
    routing = None  # a config may say nothing of experts
    if config.num_experts_per_tok:
        routing = routing_of(config, renormalized=False, **how)  # whatever the config says
    return Description(**common, interleaved=True, routing=routing, wide_router=True)


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


GROUPS = {160: (8, 3), 256: (8, 4)}
"""Groups of experts, and those that a row chooses from, of DeepSeek-V2 and V3 by their experts:
files of before October 2025 do not say them. Other models had no groups until then.
"""


def latent_entries(facts: Facts, entries: Entries) -> Entries:
    """The families with latent attention, which are one in llama.cpp."""
    rotated = facts.need("rope.dimension_count")
    key_dim = facts("attention.key_length_mla", facts("attention.key_length"))
    found = {
        "q_lora_rank": facts("attention.q_lora_rank"),
        "kv_lora_rank": facts.need("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_dim - rotated,
        "v_head_dim": facts("attention.value_length_mla", facts("attention.value_length")),
        "num_key_value_heads": entries["num_attention_heads"],
        "head_dim": rotated,
    }
    if (scale := facts("rope.scaling.yarn_log_multiplier")) is not None:
        stretch = float(f"{10 * scale:.6g}")
        rope = entries["rope_parameters"]
        found["rope_parameters"] = rope | {"mscale": stretch, "mscale_all_dim": stretch}
    experts = facts("expert_count", 0)
    if not experts:
        return {"model_type": "youtu", **found}
    if facts.files.architecture == "glm-dsa":
        found |= _indexed(facts)
    own = facts.files.architecture == "deepseek2"
    groups, chosen = GROUPS.get(experts, (1, 1)) if own else (1, 1)
    found |= {
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": groups,
        "topk_group": chosen,
        **experts_of(facts, entries),
        "n_routed_experts": experts,
        "first_k_dense_replace": first_sparse(facts),
    }
    if facts.files.architecture == "glm-dsa":
        return {"model_type": "glm_moe_dsa", **found}
    if facts("expert_gating_func", 0) == SIGMOID or facts.has("exp_probs_b.bias"):
        return {"model_type": "deepseek_v3", **found, "num_nextn_predict_layers": 0}
    method = "group_limited_greedy" if found["n_group"] > 1 else "greedy"
    return {"model_type": "deepseek_v2", **found, "topk_method": method}


def _indexed(facts: Facts) -> Entries:
    """A description of attention to positions that an indexer chooses, in layers that have one."""
    sparse = facts.layers_with("ffn_gate_exps.weight")
    own, layers = facts.layers_with("indexer.proj.weight"), range(facts.layers)
    return {
        "index_n_heads": facts.need("attention.indexer.head_count"),
        "index_head_dim": facts.need("attention.indexer.key_length"),
        "index_topk": facts.need("attention.indexer.top_k"),
        "indexer_types": ["full" if layer in own else "shared" for layer in layers],
        "mlp_layer_types": ["sparse" if layer in sparse else "dense" for layer in layers],
    }


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
        gguf={"deepseek2": Gguf(latent_entries)},
    ),
    "deepseek_v32": Family(describe=v3, latent=True, indexer="halves", prediction=PREDICTION),
    "youtu": Family(describe=v3, latent=True),
}
