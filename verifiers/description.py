"""What tells one family of decoders from another, beside its tensors and sizes in its config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from specdec.layers.experts.routing import Routing


class NormNames(NamedTuple):
    """Names of a layer's norms, by place; None where there is none. See
    `specdec.layers.decoder.DecoderLayer`.
    """

    input: str | None
    attention: str | None  # of what attention puts out
    mlp: str | None
    output: str | None  # of what the feed-forward sublayer puts out


BEFORE = NormNames("input_layernorm", None, "post_attention_layernorm", None)
AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = NormNames(
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


ExpertLayout = Literal["gated", "ungated", "transposed", "interleaved"]
TRANSPOSED: tuple[ExpertLayout, ...] = ("transposed", "interleaved")
"""Joined experts: [E, 2 * I, H] and [E, I, H]; the same without gates, [E, I, H] and [E, H, I]; in
the order [E, in, out]; that with gate and up in turns.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A family, as far as it is not the Llama family; the defaults are that one.

    Attributes:
        names: expressions, and what replaces them in the names of transformers' tensors, so that
            they become those of Llama or, for recurrent layers, of Qwen3-Next.
        factors: of tensors of every layer by name, which they are multiplied into.
        ropes: RoPE parameters of each layer, as `specdec.layers.rotary.rotary.Rope.of` takes them;
            None where nothing is rotated.
        interleaved: RoPE turns neighboring numbers against each other instead of halves.
        activation: see `specdec.layers.ops.activation`.
        norms: where a layer has norms.
        norms_of_recurrent: the same of recurrent layers, where it differs.
        shared_blocks: so many blocks of attention and a feed-forward sublayer stand before hybrid
            layers in turn, see `specdec.layers.shared_block`; 0 for none.
        one_sublayer: a layer has attention, a recurrence or a feed-forward sublayer alone.
        norm_kind: "early" rounds before the weight, "late" after it, "zero_centered" is late and
            its weight is short of 1.
        norms_of_queries: norms of queries and keys, of each head or of all together; "unweighted"
            ones are of each head that is rotated.
        scale: factor of the attention scores; None for `head_dim ** -0.5`.
        embedding_scale: factor of the input embeddings.
        rounds_embedding_scale: that factor is rounded to the model's type.
        residual_scale: factor of what a sublayer adds.
        logits_scale: factor of the logits.
        final_softcap: bound of the logits, or None.
        routing: how experts are chosen, where layers have them.
        wide_router: the logits of experts are computed in float32.
        gates: of what attention puts out, by this function: those for a sigmoid come with queries,
            those for a softplus have a projection of their own.
        experts: how transformers keeps their weights.
        weighs_inputs: see `specdec.layers.mlp.MixtureOfExperts`.
        experts_beside_mlp: layers have both, see `specdec.layers.mlp.MlpBesideExperts`.
        keys_as_values: layers whose values are their keys, before these are normed and rotated.
        value_dim, value_scale: see `specdec.layers.attention.HeadAttention`.
        norms_values: values are normed, without a weight.
        scales_layers: a tensor of each layer is a factor of the stream after it.
        layer_inputs: numbers that each layer is given of the token itself, see
            `specdec.layers.layer_inputs`; 0 for none.
    """

    ropes: Sequence[Mapping[str, Any] | None]
    names: Sequence[tuple[str, str]] = ()
    factors: Sequence[tuple[str, float | Tensor]] = ()
    interleaved: bool = False
    activation: str = "silu"
    norms: NormNames = BEFORE
    norms_of_recurrent: NormNames | None = None
    shared_blocks: int = 0
    one_sublayer: bool = False
    norm_kind: Literal["early", "late", "zero_centered"] = "early"
    norms_of_queries: Literal["each head", "all heads", "unweighted"] | None = None
    scale: float | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    final_softcap: float | None = None
    routing: Routing | None = None
    wide_router: bool = False
    experts: ExpertLayout = "gated"
    weighs_inputs: bool = False
    gates: Literal["sigmoid", "softplus"] | None = None
    experts_beside_mlp: bool = False
    keys_as_values: frozenset[int] = frozenset()
    value_dim: int | None = None
    value_scale: float = 1.0
    norms_values: bool = False
    scales_layers: bool = False
    layer_inputs: int = 0

    def embedding_scale_in(self, dtype: torch.dtype) -> float:
        """Factor of the input embeddings of a model in this type."""
        if not self.rounds_embedding_scale:
            return self.embedding_scale
        return torch.tensor(self.embedding_scale, dtype=dtype).item()


def routing_of(config: Any, **how: Any) -> Routing:
    """Experts of a config, whatever it calls their number, that are chosen as `how` says."""
    names = ("n_routed_experts", "num_local_experts", "num_experts")
    count = next(filter(None, (getattr(config, name, None) for name in names)), 0)
    return Routing(count, config.num_experts_per_tok, **how)


def sigmoid_routing(config: Any) -> Routing:
    """As in DeepSeek-V3 (arXiv 2412.19437)."""
    return routing_of(
        config,
        scores="sigmoid",
        biased=True,
        num_groups=config.n_group or 1,
        topk_groups=config.topk_group or 1,
        renormalized=config.norm_topk_prob,
        scaling=config.routed_scaling_factor,
    )


def norm_epsilon(config: Any) -> float:
    """Epsilon of a model's norms."""
    names = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps")
    values = (getattr(config, name, None) for name in names)
    return float(next(value for value in values if value is not None))
