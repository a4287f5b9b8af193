"""What tells one family of decoders from another, beside its tensors and the sizes in its config."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from specdec.kernels.experts import Routing


class NormNames(NamedTuple):
    """Names of a layer's norms, by place; None where there is none. See `specdec.layers.decoder.DecoderLayer`."""

    input: str | None
    attention: str | None  # of what attention puts out
    mlp: str | None
    output: str | None  # of what the feed-forward sublayer puts out


BEFORE = NormNames("input_layernorm", None, "post_attention_layernorm", None)
AFTER = NormNames(None, "post_attention_layernorm", None, "post_feedforward_layernorm")
AROUND = NormNames("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """A family, as far as it is not the Llama family; the defaults are that one.

    Attributes:
        ropes: RoPE parameters of each layer, as `specdec.layers.rotary.Rope.of` takes them; None where nothing is rotated.
        interleaved: RoPE turns neighboring numbers against each other instead of halves.
        activation: see `specdec.layers.activation`.
        norms: where a layer has norms.
        norm_kind: "early" rounds before the weight, "late" after it, "zero_centered" is late and its weight is short of 1.
        norms_of_queries: norms of queries and keys, of each head or of all together.
        scale: factor of the attention scores; None for `head_dim ** -0.5`.
        embedding_scale: factor of the input embeddings.
        rounds_embedding_scale: that factor is rounded to the model's type.
        residual_scale: factor of what a sublayer adds.
        logits_scale: factor of the logits.
        final_softcap: bound of the logits, or None.
        routing: how experts are chosen, where layers have them.
        wide_router: the logits of experts are computed in float32.
        gated_attention: queries come with gates of what attention puts out.
        interleaved_experts: expert weights are stored transposed, with gate and up in turns.
    """

    ropes: Sequence[Mapping[str, Any] | None]
    interleaved: bool = False
    activation: str = "silu"
    norms: NormNames = BEFORE
    norm_kind: Literal["early", "late", "zero_centered"] = "early"
    norms_of_queries: Literal["each head", "all heads"] | None = None
    scale: float | None = None
    embedding_scale: float = 1.0
    rounds_embedding_scale: bool = False
    residual_scale: float = 1.0
    logits_scale: float = 1.0
    final_softcap: float | None = None
    routing: Routing | None = None
    wide_router: bool = False
    interleaved_experts: bool = False
    gated_attention: bool = False

    def embedding_scale_in(self, dtype: torch.dtype) -> float:
        """Factor of the input embeddings of a model in this type."""
        return torch.tensor(self.embedding_scale, dtype=dtype).item() if self.rounds_embedding_scale else self.embedding_scale
