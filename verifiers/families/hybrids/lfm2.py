"""LFM2, with gated convolutions."""

from collections.abc import Mapping
from typing import Any

from verifiers.description import Description, NormNames, routing_of
from verifiers.family import Family, Recurrent, Sizes
from verifiers.gguf.entries import Gguf, experts_of
from verifiers.gguf.file import Entries, Facts

_NAMES = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.conv\.conv\.", ".linear_attn.conv1d."),
    (r"\.conv\.", ".linear_attn."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.(q|k)_layernorm\.", r".\1_norm."),
    (r"\.feed_forward\.expert_bias$", ".mlp.gate.e_score_correction_bias"),
    (r"\.feed_forward\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w2\.", ".down_proj."),
    (r"\.w3\.", ".up_proj."),
)


def _describe(config: Any, common: Mapping[str, Any]) -> Description:
    routing = None
    if getattr(config, "num_experts", None):
        routing = routing_of(
            config,
            scores="sigmoid",
            biased=config.use_expert_bias,
            renormalized=config.norm_topk_prob,
            scaling=config.routed_scaling_factor,
            epsilon=1e-6,
        )
    norms = NormNames("operator_norm", None, "ffn_norm", None)
    return Description(
        **common, names=_NAMES, norms=norms, norms_of_queries="each head", routing=routing
    )


def _sizes(config: Any) -> Sizes:
    """A head for each channel, without keys."""
    return Sizes(0, config.hidden_size, 0, 1, config.conv_L_cache, 0)


_RECURRENT = Recurrent("convolution", _sizes)


def _entries(facts: Facts, entries: Entries) -> Entries:
    heads = facts.each("attention.head_count_kv")
    found = {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "norm_eps": entries["rms_norm_eps"],
        "conv_L_cache": facts.need("shortconv.l_cache"),
        "conv_bias": facts.has("shortconv.in_proj.bias"),
    }
    if not facts("expert_count"):
        return {**found, "block_auto_adjust_ff_dim": False}
    return {
        **found,
        **experts_of(facts, entries),
        "num_experts": facts("expert_count"),
        "num_dense_layers": facts("leading_dense_block_count", 0),
        "norm_topk_prob": True,
        "use_expert_bias": facts.has("exp_probs_b.bias"),
    }


FAMILIES = {
    "lfm2": Family(describe=_describe, recurrent=_RECURRENT, gguf={"lfm2": Gguf(_entries)}),
    "lfm2_moe": Family(
        describe=_describe,
        recurrent=_RECURRENT,
        wide=("expert_bias",),
        gguf={"lfm2moe": Gguf(_entries)},
    ),
}
