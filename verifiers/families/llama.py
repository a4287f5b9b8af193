"""Llama, and families that differ from it in nothing."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.rotary.rotary import Temperature
from verifiers.description import Description, routing_of
from verifiers.family import Family, plain
from verifiers.gguf.entries import BIASES, LOCAL_COUNTS, Gguf, needed, partial_rotation, present
from verifiers.gguf.file import Entries, Facts


def _llama4(config: Any, common: Mapping[str, Any]) -> Description | None:
    ropes = common["ropes"]
    scaled = any(rope and rope["rope_type"] in ("yarn", "longrope") for rope in ropes)
    if config.use_qk_norm and scaled:
        return None  # an amplitude would change what the norms after the rotation have to do
    if config.attn_temperature_tuning:
        temperature = Temperature(config.attn_scale, config.floor_scale, offset=1)
        still = {"rope_type": "none", "temperature": temperature}
        ropes = [still if rope is None else rope for rope in ropes]
    return Description(
        **{**common, "ropes": ropes},
        names=((r"\.feed_forward\.", ".mlp."),),
        interleaved=True,
        norms_of_queries="unweighted" if config.use_qk_norm else None,
        routing=routing_of(config, scores="sigmoid", renormalized=False),
        weighs_inputs=True,
    )


def llama_entries(facts: Facts, entries: Entries) -> Entries:
    if facts("expert_count"):
        return {"model_type": "mixtral", **needed(facts, LOCAL_COUNTS)}
    return present(facts, BIASES)


def _llama4_entries(facts: Facts, entries: Entries) -> Entries:
    experts = facts("expert_count", 0)
    chunked = facts("attention.sliding_window") != 0
    rotates = [not chunked or (layer + 1) % 4 != 0 for layer in range(facts.layers)]
    return {
        "intermediate_size": facts.need("expert_feed_forward_length"),
        "intermediate_size_mlp": facts.need("feed_forward_length"),
        "num_local_experts": experts,
        "num_experts_per_tok": facts.need("expert_used_count"),
        "interleave_moe_layer_step": facts.need("interleave_moe_layer_step"),
        "use_qk_norm": experts != 128,
        "no_rope_layers": [int(one) for one in rotates],
        "attention_chunk_size": 8192,
        "sliding_window": None,
    }


def _smollm3_entries(facts: Facts, entries: Entries) -> Entries:
    rotated = [int((layer + 1) % 4 != 0) for layer in range(facts.layers)]
    return {"no_rope_layers": rotated, **present(facts, BIASES)}


def _phi3_entries(facts: Facts, entries: Entries) -> Entries:
    original = facts("rope.scaling.original_context_length", entries["max_position_embeddings"])
    return {
        "original_max_position_embeddings": original,
        "sliding_window": facts("attention.sliding_window") or None,
        **partial_rotation(facts, entries),
    }


FAMILIES = {
    "llama": Family(
        describe=plain(), wrappers=("llava",), gguf={"llama": Gguf(llama_entries, neighbors=True)}
    ),
    "llama4_text": Family(
        describe=_llama4,
        chunked=True,
        experts="transposed",
        wrappers=("llama4",),
        gguf={"llama4": Gguf(_llama4_entries)},
    ),
    "phi3": Family(describe=plain(), partial_rope=True, gguf={"phi3": Gguf(_phi3_entries)}),
    "seed_oss": Family(
        describe=plain(),
        gguf={"seed_oss": Gguf(has={**BIASES, "attention_out_bias": "attn_output.bias"})},
    ),
    "smollm3": Family(describe=plain(), gguf={"smollm3": Gguf(_smollm3_entries, neighbors=True)}),
}
