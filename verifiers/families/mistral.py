"""Mistral and Mixtral."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.rotary.rotary import Temperature
from verifiers.description import Description, routing_of
from verifiers.families.llama import llama_entries
from verifiers.family import Family, plain
from verifiers.gguf.entries import Gguf
from verifiers.gguf.file import Entries, Facts


def _ministral3(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(**{**common, "ropes": [_tempered(rope) for rope in common["ropes"]]})


def _mistral4(config: Any, common: Mapping[str, Any]) -> Description | None:
    renormalized, scaling = config.norm_topk_prob, config.routed_scaling_factor
    routing = routing_of(config, renormalized=renormalized, scaling=scaling)
    if config.topk_group < config.n_group:  # groups of which the best two count, of softmax scores
        return None
    # The config's share of what is rotated is that of a whole head, and the part that is has a
    # width of its own.
    ropes = [_tempered({**rope, "partial_rotary_factor": 1.0}) for rope in common["ropes"]]
    interleaved = bool(config.rope_interleave)
    return Description(**{**common, "ropes": ropes}, interleaved=interleaved, routing=routing)


def _tempered(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """RoPE parameters with the factor of queries that stands among them."""
    period = rope["original_max_position_embeddings"]
    temperature = Temperature(rope["llama_4_scaling_beta"], period, rounds=True)
    return {**rope, "temperature": temperature}


def _ministral3_entries(facts: Facts, entries: Entries) -> Entries:
    scale = facts("rope.scaling.yarn_log_multiplier")
    scaling = facts("attention.temperature_scale")
    more = {"mscale": 1.0, "mscale_all_dim": scale, "llama_4_scaling_beta": scaling}
    if facts("rope.scaling.type") != "yarn" or None in more.values():
        return {"model_type": "llama", **llama_entries(facts, entries)}
    return {"rope_parameters": entries["rope_parameters"] | more}


FAMILIES = {
    "ministral3": Family(
        describe=_ministral3, gguf={"mistral3": Gguf(_ministral3_entries, neighbors=True)}
    ),
    "mistral": Family(describe=plain(), wrappers=("mistral3",)),
    "mistral4": Family(describe=_mistral4, partial_rope=True, latent=True),
    "mixtral": Family(describe=plain(routing=routing_of)),
}
