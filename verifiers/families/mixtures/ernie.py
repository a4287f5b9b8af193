"""ERNIE 4.5, dense and with experts."""

from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.family import Family, Prediction, plain
from verifiers.gguf.entries import Gguf
from verifiers.gguf.file import Entries, Facts

_PREDICTION_NAMES = (
    (r"^model\.mtp_emb_norm\.0\.", "embedding_norm."),
    (r"^model\.mtp_hidden_norm\.0\.", "hidden_norm."),
    (r"^model\.mtp_linear_proj\.0\.", "projection."),
    (r"^model\.mtp_block\.0\.", "model.layers.0."),
)
"""As FastDeploy's `ernie4_5_mtp.py` reads them."""


def _routing(config: Any) -> Routing:
    return Routing(config.num_experts, config.num_experts_per_tok, biased=True)


def _moe_entries(facts: Facts, entries: Entries) -> Entries:
    sparse = facts.layers_with("ffn_gate_exps.weight")
    return {
        "use_bias": facts.has("attn_q.bias"),
        "moe_num_experts": facts.need("expert_count"),
        "moe_k": facts.need("expert_used_count"),
        "moe_intermediate_size": facts.need("expert_feed_forward_length"),
        "moe_num_shared_experts": facts("expert_shared_count", 0),
        "moe_layer_interval": facts("interleave_moe_layer_step", 1),
        "moe_layer_start_index": min(sparse, default=0),
        "moe_layer_end_index": max(sparse, default=-1),
    }


FAMILIES = {
    "ernie4_5": Family(
        describe=plain(interleaved=True), gguf={"ernie4_5": Gguf(has={"use_bias": "attn_q.bias"})}
    ),
    "ernie4_5_moe": Family(
        describe=plain(
            names=((r"\.moe_statics\.", "."),), interleaved=True, routing=_routing, wide_router=True
        ),
        renamed=((r"\.mlp\.moe_statics\.", ".mlp.gate.moe_statics."),),
        prediction=Prediction(_PREDICTION_NAMES, feed_forward="dense"),
        gguf={"ernie4_5-moe": Gguf(_moe_entries)},
    ),
}
