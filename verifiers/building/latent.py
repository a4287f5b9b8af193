"""Building latent attention from the tensors of its families."""

from typing import Any

from specdec.attention.mla import MlaSpec
from specdec.layers.latent_attention import (
    Indexer,
    LatentAttention,
    halves_first,
    latent_scale,
    split_up,
)
from specdec.layers.ops.norm import Norm
from specdec.layers.rotary.rotary import Rope
from verifiers.config.families import family_of
from verifiers.weights.weights import Weights

EPSILON = 1e-6
"""Epsilon of the norms within latent attention, which no config states."""


def latent_attention(
    weights: Weights, config: Any, spec: MlaSpec, rope: Rope | None, *, interleaved: bool
) -> LatentAttention:
    """The attention whose tensors these are.

    Args:
        rope: of the rotated parts; None where they are not.
        interleaved: the model's RoPE turns neighboring numbers; here they are stored as halves.
    """
    size, head = spec.qk_rope_head_dim, spec.qk_nope_head_dim + spec.qk_rope_head_dim
    latent_order = halves_first(spec.latent_dim, spec.kv_lora_rank, size) if interleaved else None
    query_order = halves_first(head, spec.qk_nope_head_dim, size) if interleaved else None
    compresses = weights.has("q_a_proj.weight")
    if compresses:
        down = weights.linear("q_a_proj", "kv_a_proj_with_mqa", reorder=(None, latent_order))
        query = _norm(weights, "q_a_layernorm"), weights.linear("q_b_proj", reorder=(query_order,))
    else:
        orders, query = (query_order, latent_order), None
        down = weights.linear("q_proj", "kv_a_proj_with_mqa", reorder=orders)
    indexer = None
    if weights.has("indexer.wk.weight"):
        indexer = _indexer(weights.under("indexer."), config, size)
    return LatentAttention(
        down=down,
        query=query,
        latent_norm=_norm(weights, "kv_a_layernorm"),
        up=split_up(weights.tensor("kv_b_proj.weight"), spec),
        rope=rope,
        scale=latent_scale(getattr(config, "rope_parameters", None) or {}, head),
        indexer=indexer,
    )


def _indexer(weights: Weights, config: Any, rope_dim: int) -> Indexer:
    turned = family_of(config).indexer == "neighbors"
    order = halves_first(config.index_head_dim, 0, rope_dim) if turned else None
    gain, bias = weights.tensor("k_norm.weight"), weights.tensor("k_norm.bias")
    return Indexer(
        query=weights.linear("wq_b", reorder=(order,)),
        key=weights.linear("wk", reorder=(order,)),
        key_norm=(gain, bias, EPSILON) if order is None else (order(gain), order(bias), EPSILON),
        weights=weights.linear("weights_proj"),
        rope_dim=rope_dim,
    )


def _norm(weights: Weights, name: str) -> Norm:
    return Norm(weights.tensor(f"{name}.weight"), EPSILON)
