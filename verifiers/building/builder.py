"""Building decoder layers from the tensors of their families."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from specdec.attention.backend import AttentionBackend, AttentionSpec
from specdec.attention.mla import MlaBackend, MlaSpec
from specdec.layers.attention import Attention, HeadAttention
from specdec.layers.decoder import DecoderLayer
from specdec.layers.layer_inputs import InputGate, LayerInputs
from specdec.layers.linear import Linear
from specdec.layers.mlp import FeedForward
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Heads
from specdec.layers.rotary.rotary import Rope, rotation_order
from verifiers.building.latent import latent_attention
from verifiers.building.mixture import gated_mlp, mixture, mlp_beside_experts
from verifiers.building.recurrent import mamba, mixer
from verifiers.building.shared_blocks import SharedBlocks
from verifiers.config.shape import cache_layers, layer_kinds, position_embeddings
from verifiers.config.states import attends, is_recurrent
from verifiers.description import Description, norm_epsilon
from verifiers.entries import layer_windows
from verifiers.weights.weights import Reorder, Weights


class LayerBuilder:
    """Builds decoder layers from tensors, for attention over the cache of a backend."""

    def __init__(
        self, config: Any, description: Description, backend: AttentionBackend | MlaBackend
    ) -> None:
        self._config, self._description = config, description
        self._device, self._dtype = backend.spec.device, backend.spec.dtype
        self._specs = [backend.each[kind].spec for kind in layer_kinds(config, backend)]
        self._windows, self._reads = layer_windows(config), cache_layers(config)
        self._ropes: dict[str, Rope] = {}  # one object for equal parameters
        self._blocks: SharedBlocks | None = None

    def layer(self, index: int, weights: Weights) -> DecoderLayer:
        """Decoder layer `index` from the tensors in `weights`."""
        config, description = self._config, self._description
        recurs, names = is_recurrent(config, index), description.norms
        if recurs:
            names = description.norms_of_recurrent or names
        weights.scale(description.factors)
        if description.shared_blocks and recurs and attends(config, index):
            return self._after_shared_block(index, weights)
        own = partial(self._attention, index, weights.under("self_attn."))
        attention, output = mixer(weights, config, index, own)
        alone = attention is not None and description.one_sublayer
        mlp = None if alone else self._feed_forward(weights)
        # Some families have one in layers with experts alone.
        has_output_norm = weights.has(f"{names.output}.weight")
        return DecoderLayer(
            input_norm=self._norm(weights, names.input if attention else None),
            attention=attention,
            output=output,
            mlp_norm=self._norm(weights, names.mlp if mlp else None),
            mlp=mlp,
            attention_norm=self._norm(weights, names.attention),
            output_norm=self._norm(weights, names.output if has_output_norm else None),
            input_gate=self._input_gate(weights) if description.layer_inputs else None,
            factor=weights.tensor("layer_scalar") if description.scales_layers else None,
        )

    def _after_shared_block(self, index: int, weights: Weights) -> DecoderLayer:
        if self._blocks is None:
            root = replace(weights, prefix="")
            self._blocks = SharedBlocks(self._config, self._description.shared_blocks, root)
        output, spec = weights.output("linear_attn.out_proj"), self._specs[index]
        assert isinstance(spec, AttentionSpec)
        attention = self._blocks.before(
            index,
            lambda scope: self._head_attention(index, scope, spec),
            self.norm,
            projection=weights.linear("linear"),
            norm_after=self.norm(weights, "input_layernorm"),
            linear=mamba(weights.under("linear_attn."), self._config),
            activation=self._description.activation,
        )
        return DecoderLayer(None, attention, output, None, None)

    def inputs(self, weights: Weights) -> LayerInputs:
        """What makes the inputs that every layer is given, from the tensors in `weights`."""
        return LayerInputs(
            table=weights.tensor("embed_tokens_per_layer.weight"),
            scale=torch.tensor(self._description.layer_inputs**0.5, dtype=self._dtype).item(),
            projection=weights.linear("per_layer_model_projection"),
            projection_scale=self._config.hidden_size**-0.5,
            norm=self.norm(weights, "per_layer_projection_norm"),
        )

    def _input_gate(self, weights: Weights) -> InputGate:
        gate = weights.linear("per_layer_input_gate")
        projection = weights.linear("per_layer_projection")
        norm = self.norm(weights, "post_per_layer_input_norm")
        return InputGate(gate, projection, norm, self._description.activation)

    def _norm(self, weights: Weights, name: str | None) -> Norm | None:
        return None if name is None else self.norm(weights, name)

    def norm(self, weights: Weights, name: str, reorder: Reorder | None = None) -> Norm:
        """The norm of that name."""
        weight, kind = weights.tensor(f"{name}.weight"), self._description.norm_kind
        if kind != "early":
            wide = torch.promote_types(weight.dtype, torch.float32)
            weight = weight.to(wide) + (kind == "zero_centered")
        return Norm(weight if reorder is None else reorder(weight), norm_epsilon(self._config))

    def _attention(self, index: int, weights: Weights) -> Attention:
        spec, description = self._specs[index], self._description
        parameters = description.ropes[index]
        if isinstance(spec, MlaSpec):
            rope = None if parameters is None else self._rope(parameters, spec.qk_rope_head_dim)
            return latent_attention(
                weights, self._config, spec, rope, interleaved=description.interleaved
            )
        return self._head_attention(index, weights, spec)

    def _head_attention(self, index: int, weights: Weights, spec: AttentionSpec) -> HeadAttention:
        description, parameters = self._description, self._description.ropes[index]
        rope = None if parameters is None else self._rope(parameters, spec.head_dim)
        rotated = spec.head_dim if rope is None or rope.rotated is None else rope.rotated
        interleaved = description.interleaved and rope is not None
        order = rotation_order(spec.head_dim, rotated, interleaved=interleaved)
        reorder = (
            None
            if order is None
            else lambda rows: rows.unflatten(0, (-1, spec.head_dim))[:, order].flatten(0, 1)
        )
        kind, own = description.norms_of_queries, self._reads[index] == index
        query_norm, key_norm = self._query_norms(index, weights, spec, reorder)
        wide = (query_norm, key_norm) if kind == "all heads" and query_norm and key_norm else None
        value_norm = self._unweighted(spec.head_dim) if description.norms_values and own else None
        heads = Heads(
            scale=spec.head_dim**-0.5 if description.scale is None else description.scale,
            window=self._windows[index],
            softcap=spec.softcap,
            sinks=weights.optional("sinks"),  # which one kind of layers may have alone
            query_norm=None if wide else query_norm,
            key_norm=None if wide else key_norm,
            value_norm=value_norm,
        )
        if description.gates == "sigmoid":  # each head has its query, then its gate
            numbers = torch.arange(2 * spec.num_heads * spec.head_dim).view(-1, 2, spec.head_dim)
            query, gate = (rows.flatten() for rows in numbers.unbind(1))
            weights.split("q_proj", {"q_proj": query, "gate_proj": gate})
        if not own:
            qkv = weights.linear("q_proj", reorder=(reorder,))
        elif index in description.keys_as_values:
            assert reorder is None, "values stay in their order"
            qkv = weights.linear("q_proj", "k_proj")
        else:
            gates = {"sigmoid": ["gate_proj"], "softplus": ["g_proj"], None: []}
            qkv = _qkv(weights, spec, reorder, gates[description.gates])
        return HeadAttention(
            qkv,
            heads,
            rope,
            wide,
            description.gates,
            description.value_dim,
            description.value_scale,
            weights.group,
        )

    def _query_norms(
        self, index: int, weights: Weights, spec: AttentionSpec, reorder: Reorder | None
    ) -> tuple[Norm | None, Norm | None]:
        """The norms of queries and of keys; of one head a norm without weights is the same before
        its rotation and after it.
        """
        kind, own = self._description.norms_of_queries, self._reads[index] == index
        if kind == "unweighted":
            parameters = self._description.ropes[index]
            rotated = parameters is not None and parameters["rope_type"] != "none"
            norm = self._unweighted(spec.head_dim) if rotated else None
            return norm, norm
        if kind is None:
            return None, None
        query_norm = self.norm(weights, "q_norm", reorder)
        return query_norm, self.norm(weights, "k_norm", reorder) if own else None

    def _unweighted(self, width: int) -> Norm:
        wide = torch.promote_types(self._dtype, torch.float32)
        ones = torch.ones(width, dtype=wide, device=self._device)
        return Norm(ones, norm_epsilon(self._config))

    def _rope(self, parameters: Any, head_dim: int) -> Rope:
        key = repr((head_dim, *sorted(parameters.items())))
        if key not in self._ropes:
            rope = Rope.of(parameters, head_dim, position_embeddings(self._config))
            self._ropes[key] = rope.to(self._device)
        return self._ropes[key]

    def _feed_forward(self, weights: Weights) -> FeedForward:
        if self._description.experts_beside_mlp:
            return mlp_beside_experts(weights, self._description, partial(self.norm, weights))
        weights = weights.under("mlp.")
        if weights.has("experts.down_proj"):
            return mixture(weights, self._description)
        return gated_mlp(weights, self._description.activation)


def _qkv(
    weights: Weights, spec: AttentionSpec, reorder: Reorder | None, gates: list[str]
) -> Linear:
    """The projections to heads, and to gates; `reorder` is for the rows of queries and keys."""
    if not weights.has("qkv_proj.weight"):
        orders = (reorder, reorder, None, *[None for _ in gates])
        return weights.linear("q_proj", "k_proj", "v_proj", *gates, reorder=orders)
    if reorder is None:
        return weights.linear("qkv_proj")
    rotated = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
    return weights.linear(
        "qkv_proj", reorder=(lambda rows: torch.cat([reorder(rows[:rotated]), rows[rotated:]]),)
    )
