"""Llama, and families that differ from it in nothing."""

from collections.abc import Mapping
from typing import Any

from specdec.layers.experts.routing import Routing
from specdec.layers.rotary.rotary import Temperature
from verifiers.description import Description
from verifiers.family import Family, plain


def _llama4(config: Any, common: Mapping[str, Any]) -> Description | None:
    ropes = common["ropes"]
    if config.use_qk_norm and any(
        rope and rope["rope_type"] in ("yarn", "longrope") for rope in ropes
    ):
        return None  # an amplitude would change what the norms after the rotation have to do
    if config.attn_temperature_tuning:
        still = {
            "rope_type": "none",
            "temperature": Temperature(config.attn_scale, config.floor_scale, offset=1),
        }
        ropes = [still if rope is None else rope for rope in ropes]
    return Description(
        **{**common, "ropes": ropes},
        names=((r"\.feed_forward\.", ".mlp."),),
        interleaved=True,
        norms_of_queries="unweighted" if config.use_qk_norm else None,
        routing=Routing(
            config.num_local_experts,
            config.num_experts_per_tok,
            scores="sigmoid",
            renormalized=False,
        ),
        weighs_inputs=True,
    )


FAMILIES = {
    "llama": Family(describe=plain(), wrappers=("llava",)),
    "llama4_text": Family(
        describe=_llama4, chunked=True, experts="transposed", wrappers=("llama4",)
    ),
    "phi3": Family(describe=plain(), partial_rope=True),
    "seed_oss": Family(describe=plain()),
    "smollm3": Family(describe=plain()),
}
