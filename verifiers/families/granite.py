"""Granite, and Bamba, from which its hybrids descend."""

from collections.abc import Mapping
from typing import Any

from verifiers.description import BEFORE, Description, routing_of
from verifiers.family import Family, Recurrent, Sizes, plain
from verifiers.gguf.entries import BIASES, FULL, Gguf, partial_rotation, present
from verifiers.gguf.file import Entries, Facts

MAMBA = (r"\.mamba\.", ".linear_attn.")
BAMBA_NAMES = (MAMBA, (r"\.feed_forward\.", ".mlp."), (r"^model\.final_layernorm\.", "model.norm."))
_HYBRID_NAMES = (
    MAMBA,
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.shared_mlp\.input_linear", ".mlp.shared_expert.gate_up_proj"),
    (r"\.shared_mlp\.output_linear", ".mlp.shared_expert.down_proj"),
)


def mamba_sizes(config: Any) -> Sizes:
    """Sizes of Mamba-2 layers (arXiv 2405.21060)."""
    return Sizes(
        key_heads=config.mamba_n_groups,
        value_heads=config.mamba_n_heads,
        key_dim=config.mamba_d_state,
        value_dim=config.mamba_d_head,
        taps=config.mamba_d_conv,
        gates=1,
    )


MAMBA_LAYERS = Recurrent("mamba", mamba_sizes, same_activation=True)


def _granite(config: Any, common: Mapping[str, Any], **options: Any) -> Description:
    return Description(
        **common,
        **options,
        scale=config.attention_multiplier,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logits_scale=1 / config.logits_scaling,
    )


def _hybrid(config: Any, common: Mapping[str, Any]) -> Description:
    experts = config.num_local_experts
    if config.position_embedding_type != "rope":
        common = {**common, "ropes": [None] * config.num_hidden_layers}
    names = _HYBRID_NAMES if experts else (*_HYBRID_NAMES, (r"\.mlp\.shared_expert\.", ".mlp."))
    return _granite(config, common, names=names, routing=routing_of(config) if experts else None)


def _granite_entries(facts: Facts, entries: Entries) -> Entries:
    return {
        "attention_multiplier": facts("attention.scale", entries["head_dim"] ** -0.5),
        "embedding_multiplier": facts("embedding_scale", 1.0),
        "residual_multiplier": facts("residual_scale", 1.0),
        "logits_scaling": facts("logit_scale", 1.0),
        **present(facts, BIASES),
    }


def _hybrid_entries(facts: Facts, entries: Entries) -> Entries:
    heads, inner = facts.need("ssm.time_step_rank"), facts.need("ssm.inner_size")
    attends, experts = facts.layers_with("attn_q.weight"), facts("expert_count", 0)
    kinds = [FULL if layer in attends else "linear_attention" for layer in range(facts.layers)]
    counts = facts.each("attention.head_count_kv")
    mamba = {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // entries["hidden_size"],
        "mamba_n_groups": facts.need("ssm.group_count"),
        "mamba_d_state": facts.need("ssm.state_size"),
        "mamba_d_conv": facts.need("ssm.conv_kernel"),
        "mamba_conv_bias": facts.has("ssm_conv1d.bias"),
        "mamba_proj_bias": facts.has("ssm_in.bias"),
    }
    if facts("rope.scaling.finetuned", True):  # Bamba goes by the same name, and rotates
        mamba |= {"attn_layer_indices": attends, **partial_rotation(facts, entries)}
        return {"model_type": "bamba", "num_key_value_heads": max(counts), **mamba}
    return {
        **_granite_entries(facts, entries),
        **mamba,
        "layer_types": kinds,
        "num_key_value_heads": max(counts),
        "num_local_experts": experts,
        **({"num_experts_per_tok": facts.need("expert_used_count")} if experts else {}),
        "shared_intermediate_size": facts(
            "expert_shared_feed_forward_length", facts("feed_forward_length")
        ),
        "position_embedding_type": None,
    }


FAMILIES = {
    "bamba": Family(
        describe=plain(names=BAMBA_NAMES, norms=BEFORE._replace(mlp="pre_ff_layernorm")),
        partial_rope=True,
        recurrent=MAMBA_LAYERS,
    ),
    "granite": Family(describe=_granite, gguf={"granite": Gguf(_granite_entries, neighbors=True)}),
    "granitemoehybrid": Family(
        describe=_hybrid,
        recurrent=MAMBA_LAYERS,
        renamed=(
            (r"(?<=\d\.)mlp\.input_linear\.weight$", "block_sparse_moe.experts.gate_up_proj"),
            (r"(?<=\d\.)mlp\.output_linear\.weight$", "block_sparse_moe.experts.down_proj"),
            (r"(?<=\d\.)mlp\.router\.layer\.", "block_sparse_moe.router."),
        ),
        gguf={"granitehybrid": Gguf(_hybrid_entries, neighbors=True)},
    ),
}
