"""Qwen2 and Qwen3 with attention in every layer, and Mellum."""

from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import routing_of
from verifiers.family import Family, Prediction, plain
from verifiers.gguf.entries import BIAS, COUNTS, NO_WINDOW, Gguf, first_sparse, needed
from verifiers.gguf.file import Entries, Facts

PREDICTION = Prediction(
    (
        (r"^(?:model\.)?mtp\.fc\.", "projection."),
        (r"^(?:model\.)?mtp\.pre_fc_norm_embedding\.", "embedding_norm."),
        (r"^(?:model\.)?mtp\.pre_fc_norm_hidden\.", "hidden_norm."),
        (r"^(?:model\.)?mtp\.norm\.", "norm."),
        (r"^(?:model\.)?mtp\.layers\.0\.", "model.layers.0."),
    )
)
"""As vLLM's `*_mtp.py` and SGLang's `*_nextn.py` read them."""


def sliding(config: Any) -> tuple[str, ...]:
    """Kinds of layers for multi-token prediction that slide where the config says nothing."""
    return getattr(config, "mtp_layer_types", None) or ("sliding_attention",)


def routing(config: Any) -> Routing:
    """As Qwen's mixtures choose experts."""
    return routing_of(config, renormalized=config.norm_topk_prob)


def _mixture(facts: Facts, entries: Entries) -> Entries:
    """Sizes of Qwen's mixtures, whose sizes older files do not say."""
    sparse = facts.layers_with("ffn_gate_exps.weight")
    shape = facts.files.shape(f"blk.{first_sparse(facts)}.ffn_gate_exps.weight")
    return {
        **needed(facts, COUNTS),
        "moe_intermediate_size": facts("expert_feed_forward_length", shape[1]),
        "mlp_only_layers": [layer for layer in range(facts.layers) if layer not in sparse],
        "decoder_sparse_step": 1,
    }


def shared_mixture(facts: Facts, entries: Entries) -> Entries:
    """A description of a mixture with an expert that all rows have."""
    shared = facts.files.shape(f"blk.{first_sparse(facts)}.ffn_gate_shexp.weight")[0]
    return {**_mixture(facts, entries), "shared_expert_intermediate_size": shared}


_QWEN3 = plain(norms_of_queries="each head")
_MOE = plain(norms_of_queries="each head", routing=routing)
_QWEN3_MOE = Gguf(_mixture, has=BIAS, fixed={"norm_topk_prob": True} | NO_WINDOW)

FAMILIES = {
    "mellum": Family(
        describe=_MOE, partial_rope=True, prediction=PREDICTION._replace(kinds=sliding)
    ),
    "qwen2": Family(
        describe=plain(),
        wrappers=("internvl",),
        gguf={"qwen2": Gguf(fixed=NO_WINDOW), "qwen2vl": Gguf(fixed=NO_WINDOW)},
    ),
    "qwen2_5_vl_text": Family(describe=plain(), wrappers=("qwen2_5_vl",)),
    "qwen2_moe": Family(
        describe=plain(routing=routing),
        gguf={"qwen2moe": Gguf(shared_mixture, fixed={"norm_topk_prob": False})},
    ),
    "qwen2_vl_text": Family(describe=plain(), wrappers=("qwen2_vl",)),
    "qwen3": Family(
        describe=_QWEN3,
        gguf={"qwen3": Gguf(has=BIAS, fixed=NO_WINDOW), "qwen3vl": Gguf(has=BIAS, fixed=NO_WINDOW)},
    ),
    "qwen3_moe": Family(describe=_MOE, gguf={"qwen3moe": _QWEN3_MOE, "qwen3vlmoe": _QWEN3_MOE}),
    "qwen3_vl_moe_text": Family(wrappers=("qwen3_vl_moe",)),
    "qwen3_vl_text": Family(describe=_QWEN3, wrappers=("qwen3_vl",)),
}
