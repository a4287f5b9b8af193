"""A model on our own decoder stack as the target: the same weights and maths as transformers' modules, in fewer operations."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.core import ForwardInput, RoutedExperts, VerifyOutput
from specdec.kv_cache import StateCache, StateLayerSpec
from specdec.layers.attention import Attention, HeadAttention
from specdec.layers.decoder import Decoder, DecoderLayer
from specdec.layers.linear import Linear, linear
from specdec.layers.mlp import FeedForward, MixtureOfExperts
from specdec.layers.norm import Norm
from specdec.layers.ops import Heads, ops_for
from specdec.layers.recurrence import RecurrentRows
from specdec.layers.rotary import Rope
from verifiers.description import Description
from verifiers.latent import latent_attention
from verifiers.mixture import gated_mlp, mixture
from verifiers.recurrent import delta_net, is_recurrent
from verifiers.shape import layer_specs, layer_windows, max_model_len
from verifiers.weights import Reorder, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class DecoderVerifier:
    """A decoder seen through the `Verifier` protocol.

    Args:
        config: the model's.
        description: of its family.
        weights: its tensors, which are taken over.
        name: how to call it in messages.
        backend: attention over the cache.
        eos: end-of-sequence ids.

    Raises:
        CheckpointError: a tensor is missing, or one is left that our layers know nothing of.
    """

    def __init__(
        self,
        config: "PreTrainedConfig",
        description: Description,
        weights: Weights,
        *,
        name: str,
        backend: AttentionBackend | MlaBackend,
        eos: tuple[int, ...] = (),
    ) -> None:
        self.name, self.attention, self.eos_token_ids = name, backend, eos
        self.config, self._description = config, description
        self._embedding = weights.tensor("model.embed_tokens.weight")
        self.device, self.dtype = self._embedding.device, self._embedding.dtype
        head = weights.optional("lm_head.weight")
        self._head = linear(self._embedding if head is None else head, weights.optional("lm_head.bias"))
        self.hidden_size, self.num_layers = config.hidden_size, config.num_hidden_layers
        self.max_model_len = max_model_len(config)
        self.vocab_size = self._head.out_features
        self.kv_specs = layer_specs(config, backend)
        self.windows = layer_windows(config)
        self.embedding_scale = description.embedding_scale_in(self.dtype)
        self.final_softcap = description.final_softcap
        self._states = next((index for index, spec in enumerate(self.kv_specs) if isinstance(spec, StateLayerSpec)), None)
        self._ops = ops_for(backend, mixes=description.routing is not None, recurs=self._states is not None)
        builder = LayerBuilder(config, description, backend)
        layers = [builder.layer(index, weights.under(f"model.layers.{index}.")) for index in range(self.num_layers)]
        final_norm = builder.norm(weights, "model.norm")
        assert final_norm is not None
        weights.check_all_taken()
        self._decoder = Decoder(layers, final_norm, ops=self._ops, residual_scale=description.residual_scale)

    @property
    def weight_bytes(self) -> int:
        """See `Verifier.weight_bytes`."""
        return self._decoder.nbytes + self._head.nbytes

    @property
    def routed_experts(self) -> RoutedExperts | None:
        """See `Verifier.routed_experts`."""
        mixtures = [layer.mlp for layer in self._decoder.layers if isinstance(layer.mlp, MixtureOfExperts)]
        if not mixtures:
            return None
        routing = mixtures[0].router.routing
        return RoutedExperts(routing.num_experts, routing.top_k, sum(one.experts.nbytes for one in mixtures))

    @torch.inference_mode()
    def forward(self, rows: ForwardInput, caches: Sequence[Any], aux_layer_ids: Sequence[int] = ()) -> VerifyOutput:
        """Scores packed rows; see `Verifier.forward`."""
        normed, tapped = self.hidden(rows, caches, aux_layer_ids)
        logits = self.head(normed if rows.logit_rows is None else normed.index_select(0, rows.logit_rows))
        if self._description.logits_scale != 1:
            logits = logits * self._description.logits_scale
        if self.final_softcap is not None:
            logits = torch.tanh(logits / self.final_softcap) * self.final_softcap
        return VerifyOutput(logits=logits, aux_hidden=torch.cat(tapped, dim=-1) if tapped else None)

    def hidden(self, rows: ForwardInput, caches: Sequence[Any], taps: Sequence[int] = ()) -> tuple[Tensor, list[Tensor]]:
        """Hidden states [T, H] after the final norm, and the raw outputs [T, H] of the layers in `taps`."""
        embeddings = self._ops.embed(rows.token_ids, self._embedding, self.embedding_scale)
        angles = self._decoder.angles(rows.position_ids, self.dtype)
        plan = self.attention.plan(rows.metadata)
        recurrent = None if self._states is None else recurrent_rows(rows)
        plans = [recurrent if isinstance(cache, StateCache) else plan for cache in caches]
        result = self._decoder(embeddings, angles, self.attention, caches, plans, taps)
        if recurrent is not None and self._states is not None:
            recurrent.finish(caches[self._states].lengths)
        return result

    def keep_layers(self, count: int) -> None:
        """Drops the layers from `count` on, for who wants the outputs of those before alone."""
        self._decoder.keep_layers(count)

    def embed(self, token_ids: Tensor) -> Tensor:
        """See `Verifier.embed`."""
        return self._ops.embed(token_ids, self._embedding)

    def head(self, hidden: Tensor) -> Tensor:
        """See `Verifier.head`."""
        return self._head(hidden)


def recurrent_rows(rows: ForwardInput) -> RecurrentRows:
    """The same rows as recurrent layers see them."""
    assert rows.slots is not None, "a state lies in a slot"
    return RecurrentRows.of(rows.slots, rows.metadata, max_pending=rows.max_pending, final=rows.final, counts=rows.row_counts)


class LayerBuilder:
    """Builds decoder layers from tensors.

    Args:
        config: the model's.
        description: of its family.
        backend: attention over the cache.
    """

    def __init__(self, config: Any, description: Description, backend: AttentionBackend | MlaBackend) -> None:
        self._config, self._description, self._spec = config, description, backend.spec
        self._windows = layer_windows(config)
        self._ropes: dict[str, Rope] = {}  # one object for equal parameters

    def layer(self, index: int, weights: Weights) -> DecoderLayer:
        """Decoder layer `index` from the tensors in `weights`."""
        names, recurrent = self._description.norms, is_recurrent(self._config, index)
        attention = delta_net(weights.under("linear_attn."), self._config) if recurrent else None
        return DecoderLayer(
            input_norm=self.norm(weights, names.input),
            attention=attention or self._attention(index, weights.under("self_attn.")),
            output=weights.linear("linear_attn.out_proj" if recurrent else "self_attn.o_proj"),
            mlp_norm=self.norm(weights, names.mlp),
            mlp=self._feed_forward(weights.under("mlp.")),
            attention_norm=self.norm(weights, names.attention),
            # Which some families have in layers with experts alone.
            output_norm=self.norm(weights, names.output) if weights.has(f"{names.output}.weight") else None,
        )

    def norm(self, weights: Weights, name: str | None, reorder: Reorder | None = None) -> Norm | None:
        """The norm of that name; None without one."""
        if name is None:
            return None
        weight, kind = weights.tensor(f"{name}.weight"), self._description.norm_kind
        if kind != "early":
            weight = weight.to(torch.promote_types(weight.dtype, torch.float32)) + (kind == "zero_centered")
        return Norm(weight if reorder is None else reorder(weight), self._config.rms_norm_eps)

    def _attention(self, index: int, weights: Weights) -> Attention:
        spec, description = self._spec, self._description
        parameters = description.ropes[index]
        if isinstance(spec, MlaSpec):
            assert parameters is not None, "a part of every head is rotated"
            rope = self._rope(parameters, spec.qk_rope_head_dim)
            return latent_attention(weights, self._config, spec, rope, interleaved=description.interleaved)
        return self._head_attention(index, weights, spec)

    def _head_attention(self, index: int, weights: Weights, spec: AttentionSpec) -> HeadAttention:
        description, parameters = self._description, self._description.ropes[index]
        rope = None if parameters is None else self._rope(parameters, spec.head_dim)
        rotated = spec.head_dim if rope is None or rope.rotated is None else rope.rotated
        order = rotation_order(spec.head_dim, rotated, interleaved=description.interleaved and rope is not None)
        reorder = None if order is None else lambda rows: rows.unflatten(0, (-1, spec.head_dim))[:, order].flatten(0, 1)
        kind = description.norms_of_queries
        query_norm, key_norm = (self.norm(weights, name if kind else None, reorder) for name in ("q_norm", "k_norm"))
        wide = (query_norm, key_norm) if kind == "all heads" and query_norm and key_norm else None
        heads = Heads(
            scale=spec.head_dim**-0.5 if description.scale is None else description.scale,
            window=self._windows[index],
            softcap=spec.softcap,
            sinks=weights.tensor("sinks") if spec.sinks else None,
            query_norm=None if wide else query_norm,
            key_norm=None if wide else key_norm,
        )
        if description.gated_attention:  # each head has its query, then its gate
            query, gate = torch.arange(2 * spec.num_heads * spec.head_dim).view(-1, 2, spec.head_dim).unbind(1)
            weights.split("q_proj", {"q_proj": query.reshape(-1), "gate_proj": gate.reshape(-1)})
        qkv = _qkv(weights, spec, reorder, gated=description.gated_attention)
        return HeadAttention(qkv, heads, rope, wide, description.gated_attention)

    def _rope(self, parameters: Any, head_dim: int) -> Rope:
        key = repr(sorted(parameters.items()))
        if key not in self._ropes:
            self._ropes[key] = Rope.of(parameters, head_dim, max_model_len(self._config)).to(self._spec.device)
        return self._ropes[key]

    def _feed_forward(self, weights: Weights) -> FeedForward:
        if weights.has("experts.down_proj"):
            return mixture(weights, self._description)
        return gated_mlp(weights, self._description.activation)


def _qkv(weights: Weights, spec: AttentionSpec, reorder: Reorder | None, *, gated: bool) -> Linear:
    """The projections to heads, and to gates; `reorder` is for the rows of queries and keys."""
    if gated:
        return weights.linear("q_proj", "k_proj", "v_proj", "gate_proj", reorder=(reorder, reorder, None, None))
    if not weights.has("qkv_proj.weight"):
        return weights.linear("q_proj", "k_proj", "v_proj", reorder=(reorder, reorder, None))
    if reorder is None:
        return weights.linear("qkv_proj")
    rotated = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return weights.linear("qkv_proj", reorder=(lambda rows: torch.cat([reorder(rows[:rotated]), rows[rotated:]]),))


def rotation_order(head_dim: int, rotated: int, *, interleaved: bool) -> Tensor | None:
    """Order of a head's numbers in which RoPE turns number `i` against number `i + head_dim / 2`, whatever the model pairs.

    Queries and keys are put into it alike, so their products stay what they are. The numbers that are not rotated come last in
    both halves. None where the order is that already.

    >>> rotation_order(8, 4, interleaved=False), rotation_order(8, 4, interleaved=True), rotation_order(8, 8, interleaved=False)
    (tensor([0, 1, 4, 5, 2, 3, 6, 7]), tensor([0, 2, 4, 5, 1, 3, 6, 7]), None)
    """
    if rotated == head_dim and not interleaved:
        return None
    numbers = torch.arange(head_dim)
    pairs = numbers[:rotated].view(-1, 2) if interleaved else numbers[:rotated].view(2, -1).t()
    first, second = pairs.unbind(-1)
    rest = numbers[rotated:].view(2, -1)
    return torch.cat([first, rest[0], second, rest[1]])
