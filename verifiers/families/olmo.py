"""OLMo."""

from collections.abc import Mapping
from typing import Any

from verifiers.description import AFTER, BEFORE, Description
from verifiers.families.hybrids.qwen3_next import delta_sizes
from verifiers.families.qwen import routing
from verifiers.family import Family, Recurrent, plain
from verifiers.gguf.entries import COUNTS, Gguf, windows
from verifiers.gguf.file import Entries, Facts

_DENSE: dict[str, Any] = {"norms": AFTER, "norm_kind": "late", "norms_of_queries": "all heads"}

_HYBRID_NAMES = (
    (r"\.linear_attn\.o_proj\.", ".linear_attn.out_proj."),
    (r"\.linear_attn\.o_norm\.", ".linear_attn.norm."),
    (r"\.linear_attn\.a_proj\.", ".linear_attn.in_proj_a."),
    (r"\.linear_attn\.b_proj\.", ".linear_attn.in_proj_b."),
    (r"\.linear_attn\.g_proj\.", ".linear_attn.in_proj_z."),
)


def _olmoe(config: Any, common: Mapping[str, Any]) -> Description | None:
    if config.clip_qkv is not None:
        return None
    return Description(**common, norms_of_queries="all heads", routing=routing(config))


def _entries(facts: Facts, entries: Entries) -> Entries:
    if not facts("attention.sliding_window"):
        return {}
    full = entries["rope_parameters"]
    local = {"rope_type": "default", "rope_theta": facts("rope.freq_base_swa", full["rope_theta"])}
    ropes = {"sliding_attention": local, "full_attention": full}
    return {"model_type": "olmo3", "layer_types": windows(facts, 4), "rope_parameters": ropes}


FAMILIES = {
    "olmo2": Family(describe=plain(**_DENSE), gguf={"olmo2": Gguf(_entries)}),
    "olmo3": Family(describe=plain(**_DENSE)),
    "olmo_hybrid": Family(
        describe=plain(names=_HYBRID_NAMES, norms_of_recurrent=BEFORE, **_DENSE),
        recurrent=Recurrent("delta", delta_sizes, epsilon=1e-5, same_activation=True),
        renamed=(
            (r"\.attention_layer_norm\.", ".input_layernorm."),
            (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
        ),
        wide=("A_log",),
    ),
    "olmoe": Family(
        describe=_olmoe, gguf={"olmoe": Gguf(needs=COUNTS, fixed={"norm_topk_prob": False})}
    ),
}
