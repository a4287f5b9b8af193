"""The network of an EAGLE-3 head on the decoder stack, over the paged cache."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from drafters.attention import attention_like, latent_like
from drafters.eagle3.config import Eagle3Config
from drafters.eagle3.latent import latent_attention
from drafters.sequential.network import Mask, Rows, SequentialNetwork
from drafters.vocabulary import target_ids
from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.kv_cache import KVLayerSpec, LayerSpec
from specdec.layers.attention import Attention, HeadAttention
from specdec.layers.attention import Rows as AttentionRows
from specdec.layers.decoder import Decoder, DecoderLayer
from specdec.layers.latent_attention import LatentAttention
from specdec.layers.linear import DenseLinear, Linear
from specdec.layers.linear_choice import linear
from specdec.layers.mlp import GatedMLP
from specdec.layers.ops.choice import ops_for
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Heads, Ops
from specdec.layers.rotary.rotary import Rope
from specdec.layers.shared_block import EMBEDDINGS
from specdec.model.core import Verifier


@dataclass(frozen=True, slots=True, eq=False)
class AttentionToBoth(Attention):
    """Attention that is given the embeddings, normed, and the stream side by side.

    Attributes:
        attention: of twice the width.
        norm: of the embeddings.
    """

    attention: HeadAttention | LatentAttention
    norm: Norm

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.attention.linears

    def __call__(self, ops: Ops, hidden: Tensor, rows: AttentionRows, prefetch: Linear) -> Tensor:
        embeddings = ops.norm(rows.shared[EMBEDDINGS], self.norm)
        return self.attention(ops, torch.cat([embeddings, hidden], dim=1), rows, prefetch)


class Eagle3Network(SequentialNetwork):
    """An EAGLE-3 head (arXiv 2503.01840): the target's low, middle and high features, projected
    together, beside the next token's embedding. Drafted tokens have the head's own output.

    Args:
        config: what it is like.
        tensors: on the target's device and in its type.
        verifier: the target.
        rope: of an earlier network of the same config and device; None makes one.

    Raises:
        BackendError: the target's attention backend cannot serve the layers.
    """

    def __init__(
        self,
        config: Eagle3Config,
        tensors: Mapping[str, Tensor],
        verifier: Verifier,
        rope: Rope | None = None,
    ) -> None:
        self._config, self._verifier, layers = config, verifier, config.layers
        self._attention = _attention(config, verifier)
        self._ops = ops_for(self._attention)
        if rope is None:
            sizes = layers.head_dim, layers.max_position_embeddings
            rope = Rope.of(layers.rope_parameters, *sizes).to(verifier.device)
        self.rope = rope
        make = DenseLinear if self._attention.differentiable else linear
        self._fc = make(tensors["fc.weight"], tensors.get("fc.bias"))
        weights = _Weights(tensors, layers.rms_norm_eps, config.gemma is not None, make)
        self._taps_norm = weights.norm("input_norm") if config.norm_before_fc else None
        normed = range(config.num_taps if config.fc_norm else 0)
        self._tap_norms = [weights.norm(f"fc_norm.{index}") for index in normed]
        self._stream_norm = weights.norm("layers.0.hidden_norm")
        self._table = tensors.get("embed_tokens.weight")
        self._embedding_scale = layers.hidden_size**0.5 if config.gemma is not None else 1.0
        head = tensors.get("lm_head.weight")
        if head is None and layers.tie_word_embeddings:
            head = self._table
        self._head = None if head is None else make(head)
        decoder_layers = [self._layer(index, weights) for index in range(layers.num_hidden_layers)]
        self._decoder = Decoder(decoder_layers, weights.norm("norm"), ops=self._ops)
        self.aux_layer_ids, self.feature_size = config.taps(verifier.num_layers), layers.hidden_size
        self.target_ids = None if config.draft_vocab_size is None else target_ids(tensors["d2t"])
        if config.mask_token_id is not None:
            features = self.condense(tensors["mask_hidden"].flatten(0, 1))[0]
            self.mask = Mask(config.mask_token_id, features)

    @property
    def kv_specs(self) -> Sequence[LayerSpec]:
        layers = self._config.layers
        if isinstance(self._attention, MlaBackend):
            return [self._attention.cache_spec] * layers.num_hidden_layers
        return [KVLayerSpec(layers.num_key_value_heads, layers.head_dim)] * layers.num_hidden_layers

    @property
    def weight_bytes(self) -> int:
        target = self._verifier
        borrowed = target.vocab_size * target.hidden_size * target.dtype.itemsize
        head = borrowed if self._head is None else self._head.nbytes
        return self._decoder.nbytes + self._fc.nbytes + head

    def condense(self, aux_hidden: Tensor) -> Tensor:
        """Features [T, H] of the target's tapped layers side by side."""
        if self._taps_norm is not None:
            aux_hidden = self._ops.norm(aux_hidden, self._taps_norm)
        if self._tap_norms:
            taps = aux_hidden.chunk(len(self._tap_norms), dim=-1)
            pairs = zip(taps, self._tap_norms, strict=True)
            normed = [self._ops.norm(tap.contiguous(), norm) for tap, norm in pairs]
            aux_hidden = torch.cat(normed, dim=-1)
        return self._fc(aux_hidden)

    def forward(self, rows: Rows, caches: Sequence[Any], wanted: Tensor | None) -> Tensor:
        """Hidden states [n, 2, H]: normed, for the head, and the stream itself."""
        assert rows.features is not None
        if self._table is not None:
            embeddings = self._ops.embed(rows.token_ids, self._table, self._embedding_scale)
        else:
            embeddings = self._verifier.embed(rows.token_ids)
            if self._embedding_scale != 1:
                embeddings = embeddings * self._embedding_scale
        hidden = rows.features
        if self._config.norm_before_residual:
            hidden = self._ops.norm(hidden, self._stream_norm)
        angles = self._decoder.angles(rows.position_ids, self._attention.spec.dtype)
        count = len(self._decoder.layers)
        normed, (stream,) = self._decoder(
            hidden,
            angles,
            [self._attention] * count,
            caches,
            [self._attention.plan(rows.metadata)] * count,
            (count - 1,),
            keep=None if wanted is None else lambda x: x.index_select(0, wanted),
            embeddings=embeddings,
        )
        return torch.stack([normed, stream], dim=1)

    def logits(self, hidden: Tensor) -> Tensor:
        normed, gemma = hidden[:, 0].contiguous(), self._config.gemma
        if self._head is None:
            return self._verifier.head(normed)
        logits = self._head(normed)
        if gemma is None or gemma.softcap is None:
            return logits
        return torch.tanh(logits / gemma.softcap) * gemma.softcap

    def next_features(self, hidden: Tensor) -> Tensor:
        """The stream, or in EAGLE-3.1 what the head is given."""
        return hidden[:, 0 if self._config.norm_output else 1].contiguous()

    def _layer(self, index: int, weights: "_Weights") -> DecoderLayer:
        config, name = self._config, f"layers.{index}"
        attention = self._attention_of(index, weights)
        input_norm = weights.norm(f"{name}.input_layernorm")
        stream_norm = None if config.norm_before_residual else self._stream_norm
        shared: dict[str, Any] = {
            "input_norm": input_norm if index else stream_norm,
            "attention": attention if index else AttentionToBoth(attention, input_norm),
            "output": weights.join(f"{name}.self_attn", "o_proj"),
        }
        gate_up = weights.join(f"{name}.mlp", "gate_proj", "up_proj")
        products = (gate_up, weights.join(f"{name}.mlp", "down_proj"))
        attended = weights.norm(f"{name}.post_attention_layernorm")
        if config.gemma is None:
            return DecoderLayer(**shared, mlp_norm=attended, mlp=GatedMLP(*products))
        return DecoderLayer(
            **shared,
            attention_norm=attended,
            mlp_norm=weights.norm(f"{name}.pre_feedforward_layernorm"),
            mlp=GatedMLP(*products, "gelu_tanh"),
            output_norm=weights.norm(f"{name}.post_feedforward_layernorm"),
            factor=weights.tensors[f"{name}.layer_scalar"],
        )

    def _attention_of(self, index: int, weights: "_Weights") -> HeadAttention | LatentAttention:
        config, name = self._config, f"layers.{index}.self_attn"
        if config.latent is not None:
            assert isinstance(self._attention, MlaBackend)
            parameters, spec = config.layers.rope_parameters, self._attention.spec
            return latent_attention(
                weights.tensors, name, config.latent, self.rope, spec, rope_parameters=parameters
            )
        gemma, head_dim = config.gemma, config.layers.head_dim
        ones = torch.ones(head_dim, dtype=torch.float32, device=self._verifier.device)
        heads = Heads(
            scale=head_dim**-0.5 if gemma is None else 1.0,
            window=config.windows[index],
            query_norm=weights.norm(f"{name}.q_norm") if config.has_head_norms else None,
            key_norm=weights.norm(f"{name}.k_norm") if config.has_head_norms else None,
            value_norm=None if gemma is None else Norm(ones, weights.epsilon),
        )
        values = "k_proj" if gemma is not None and gemma.keys_as_values else "v_proj"
        return HeadAttention(weights.join(name, "q_proj", "k_proj", values), heads, self.rope)


def _attention(config: Eagle3Config, verifier: Verifier) -> AttentionBackend | MlaBackend:
    """The target's kind of attention, for the head's layers."""
    layers = config.layers
    if config.latent is not None:
        return latent_like(verifier, layers.num_attention_heads, config.latent)
    return attention_like(
        verifier,
        num_heads=layers.num_attention_heads,
        num_kv_heads=layers.num_key_value_heads,
        head_dim=layers.head_dim,
        windows=config.windows,
    )


class _Weights(NamedTuple):
    tensors: Mapping[str, Tensor]
    epsilon: float
    rounds_last: bool  # behind the weight of a norm, as Gemma does
    linear: Callable[[Tensor, Tensor | None], Linear]

    def norm(self, name: str) -> Norm:
        weight = self.tensors[f"{name}.weight"]
        if self.rounds_last:
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        return Norm(weight, self.epsilon)

    def join(self, module: str, *names: str) -> Linear:
        """Projections as one product."""
        weight = torch.cat([self.tensors[f"{module}.{name}.weight"] for name in names])
        stated = [f"{module}.{name}.bias" for name in names]
        biases = [self.tensors[name] for name in stated if name in self.tensors]
        return self.linear(weight, torch.cat(biases) if biases else None)
