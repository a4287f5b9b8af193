"""Gemma."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specdec.layers.experts.routing import Routing
from verifiers.description import AROUND, Description
from verifiers.entries import layer_windows
from verifiers.family import Family


def _gemma(config: Any, common: Mapping[str, Any]) -> Description:
    scale = config.hidden_size**0.5
    return Description(
        **common, norm_kind="zero_centered", embedding_scale=scale, rounds_embedding_scale=True
    )


def _gemma2(config: Any, common: Mapping[str, Any]) -> Description:
    return Description(
        **common,
        norms=AROUND,
        norm_kind="zero_centered",
        scale=config.query_pre_attn_scalar**-0.5,
        embedding_scale=config.hidden_size**0.5,
        rounds_embedding_scale=True,
        final_softcap=config.final_logit_softcapping,
    )


def _gemma3(config: Any, common: Mapping[str, Any]) -> Description:
    return replace(_gemma2(config, common), norms_of_queries="each head")


def _gemma4(config: Any, common: Mapping[str, Any]) -> Description:
    experts = getattr(config, "enable_moe_block", False)
    windows = layer_windows(config)
    same = getattr(config, "attention_k_eq_v", False)
    return Description(
        **common,
        norms=AROUND,
        norm_kind="late",
        norms_of_queries="each head",
        norms_values=True,
        keys_as_values=frozenset(
            layer for layer, window in enumerate(windows) if same and window is None
        ),
        scale=1.0,
        embedding_scale=config.hidden_size**0.5,
        rounds_embedding_scale=True,
        final_softcap=config.final_logit_softcapping,
        routing=Routing(config.num_experts, config.top_k_experts) if experts else None,
        experts_beside_mlp=experts,
        scales_layers=True,
        layer_inputs=getattr(config, "hidden_size_per_layer_input", None) or 0,
    )


FAMILIES = {
    "gemma": Family(describe=_gemma),
    "gemma2": Family(describe=_gemma2),
    "gemma3_text": Family(describe=_gemma3, wrappers=("gemma3",)),
    "gemma4_text": Family(describe=_gemma4, wrappers=("gemma4",)),
    "gemma4_unified_text": Family(describe=_gemma4, wrappers=("gemma4_unified",)),
}
