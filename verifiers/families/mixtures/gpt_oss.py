"""gpt-oss."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from specdec.layers.ops.activation import LIMIT, SLOPE
from verifiers.description import Description
from verifiers.family import Family
from verifiers.gguf.entries import LOCAL_COUNTS, Gguf, expert_width, needed, windows
from verifiers.gguf.file import Entries, Facts


def _describe(config: Any, common: Mapping[str, Any]) -> Description | None:
    slope, limit = getattr(config, "swiglu_alpha", SLOPE), getattr(config, "swiglu_limit", LIMIT)
    if (slope, limit) != (SLOPE, LIMIT):
        return None
    routing = Routing(config.num_local_experts, config.num_experts_per_tok)
    common = {**common, "activation": "swiglu_oai"}
    return Description(**common, norm_kind="late", routing=routing)


def _entries(facts: Facts, entries: Entries) -> Entries:
    return {
        **needed(facts, LOCAL_COUNTS),
        **expert_width(facts, entries),
        "layer_types": windows(facts, 2),
        "rope_parameters": entries["rope_parameters"] | {"truncate": False},
    }


FAMILIES = {
    "gpt_oss": Family(
        describe=_describe, sinks=True, experts="interleaved", gguf={"gpt-oss": Gguf(_entries)}
    )
}
