"""Qwen3-Next, Qwen3.5 and their successors."""

from collections.abc import Iterator, Mapping
from typing import Any

from verifiers.description import Description, routing_of
from verifiers.families.qwen import PREDICTION, shared_mixture
from verifiers.family import Family, Recurrent, Sizes
from verifiers.gguf.entries import FULL, Gguf, partial_rotation
from verifiers.gguf.file import Entries, Facts


def delta_sizes(config: Any) -> Sizes:
    """Sizes of layers with the gated delta rule (arXiv 2412.06464)."""
    key_heads, value_heads = config.linear_num_key_heads, config.linear_num_value_heads
    key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
    return Sizes(key_heads, value_heads, key_dim, value_dim, config.linear_conv_kernel_dim, 2)


def _describe(config: Any, common: Mapping[str, Any]) -> Description:
    routing = None
    if getattr(config, "num_experts", None):
        # The newer family has no choice.
        renormalized = config.norm_topk_prob if config.model_type == "qwen3_next" else True
        routing = routing_of(config, renormalized=renormalized)
    return Description(
        **common,
        norm_kind="zero_centered",
        norms_of_queries="each head",
        gates="sigmoid",
        routing=routing,
    )


def _against(config: Any) -> Iterator[str]:
    """Entries that transformers' classes of these types do not look at."""
    if getattr(config, "attn_output_gate", True) is False:
        yield (
            "its attention has no output gate (attn_output_gate false), and the layers of its type"
            " have one"
        )
    gate = getattr(config, "output_gate_type", None)
    if gate not in (None, "silu", "swish"):
        yield (
            f"its linear attention is gated by {gate} (output_gate_type), and the layers of its"
            f" type by silu"
        )


def _family(gguf: str, *wrappers: str) -> Family:
    return Family(
        describe=_describe,
        partial_rope=True,
        recurrent=Recurrent("delta", delta_sizes, same_activation=True),
        against=_against,
        prediction=PREDICTION,
        wrappers=wrappers,
        gguf={gguf: Gguf(_entries, adds_one=True, groups_values=gguf != "qwen3next")},
    )


def _entries(facts: Facts, entries: Entries) -> Entries:
    heads, mixture = facts.need("ssm.time_step_rank"), bool(facts("expert_count"))
    full = facts.layers_with("attn_q.weight")
    kinds = [FULL if layer in full else "linear_attention" for layer in range(facts.layers)]
    found = {
        "linear_conv_kernel_dim": facts.need("ssm.conv_kernel"),
        "linear_key_head_dim": facts.need("ssm.state_size"),
        "linear_num_key_heads": facts.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": facts.need("ssm.inner_size") // heads,
        "layer_types": kinds,
        **partial_rotation(facts, entries),
    }
    if facts.files.architecture == "qwen3next":
        found |= shared_mixture(facts, entries)
        return {**found, "norm_topk_prob": True}
    if sections := facts("rope.dimension_sections"):
        more = {"mrope_section": [one for one in sections if one], "mrope_interleaved": True}
        found["rope_parameters"] |= more
    kind = "qwen3_5_moe_text" if mixture else "qwen3_5_text"
    return {"model_type": kind, **found, **(shared_mixture(facts, entries) if mixture else {})}


FAMILIES = {
    "qwen3_5_moe_text": _family("qwen35moe", "qwen3_5_moe"),
    "qwen3_5_text": _family("qwen35", "qwen3_5"),
    "qwen3_next": _family("qwen3next"),
}
