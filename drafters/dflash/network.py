"""A DFlash network for drafting: `DFlashModel`'s layers on the decoder stack."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.dflash.context import Context, norm_of
from drafters.dflash.convolution import DFlashConvolution
from drafters.dflash.divided import gathered
from drafters.dflash.latent import LatentProjections, split_latents
from drafters.dflash.layers import DFlashAttention, DFlashLayer
from drafters.dflash.model import DFlashModel, rope_of
from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.layers.attention import HeadAttention
from specdec.layers.decoder import Decoder, DecoderLayer
from specdec.layers.latent_attention import LatentAttention
from specdec.layers.linear import Linear
from specdec.layers.linear_choice import drafting_linear
from specdec.layers.mlp import ConvolvedMLP, GatedMLP
from specdec.layers.ops.choice import ops_for
from specdec.layers.ops.grouped_convolution import GroupedConvolution
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Heads
from specdec.layers.rotary.rotary import Angles, Rope, rotate, rotation_order
from specdec.layers.sharded import GatheredLinear, SummedLinear
from specdec.parallel.group import Group

Keep = Callable[[Tensor], Tensor]
"""Rows of `[rows, ...]` whose final states are wanted."""


class DFlashNetwork:
    """`DFlashModel.block_forward` and `context_kv` with the cache writes in them. Runs share it.

    Args:
        model: on its device; its projections become views of joined ones, so that nothing is stored
            twice, and heads of which a part alone is rotated are put into another order.
        attention: of the draft layers.
        group: ranks that the model is divided among; None for one that is whole.

    Attributes:
        head: the drafter's own head; None where it borrows the target's.
    """

    def __init__(
        self,
        model: DFlashModel,
        attention: AttentionBackend | MlaBackend,
        group: Group | None = None,
    ) -> None:
        self._config, self._attention, self._group = model.config, attention, group
        self._ops = ops_for(
            attention, convolves=model.config.convolves, group=group, width=model.config.hidden_size
        )
        self._backends = [attention] * len(model.layers)
        self._rope = rope_of(model.config, whole=True).to(attention.spec.device)
        _pair_up(model, self._rope)
        ones = torch.ones(model.config.head_dim, dtype=torch.float32, device=attention.spec.device)
        self._value_norm = Norm(ones, model.config.rms_norm_eps) if model.config.gemma else None
        layers = [
            self._layer(cast(DFlashLayer, layer), index) for index, layer in enumerate(model.layers)
        ]
        self._decoder = Decoder(layers, norm_of(model.norm, model.config.gemma), ops=self._ops)
        self._context = Context(model, self._ops, group)
        rounds_last, gains = model.config.gemma, model.context_projection()[2]
        wide = torch.promote_types(gains.dtype, torch.float32) if rounds_last else gains.dtype
        self._norms = [Norm(gain.to(wide), model.config.rms_norm_eps) for gain in gains]
        self._table = None if model.embed_tokens is None else model.embed_tokens.weight
        self.head: Linear | None = None
        if model.lm_head is not None:
            columns = model.config.draft_vocab_size or model.config.vocab_size
            self.head = gathered(drafting_linear(model.lm_head.weight), group, columns)

    @property
    def saved_bytes(self) -> int:
        """Bytes of weights that are not read, since `drafting_linear` rounds numbers."""
        own = [one for layer in self._decoder.layers for one in layer.linears]
        own += self._context.linears + ([] if self.head is None else [self.head])
        own = [one.part if isinstance(one, GatheredLinear) else one for one in own]
        full = sum(one.in_features * one.out_features * one.dtype.itemsize for one in own)
        return full - sum(one.nbytes for one in own)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [..., H] of the drafter's own embedding table, which it has."""
        assert self._table is not None
        return self._ops.embed(token_ids, self._table)

    def angles(self, position_ids: Tensor) -> dict[Rope, Angles]:
        """Angles of positions int64 [T]."""
        return self._decoder.angles(position_ids, self._attention.spec.dtype)

    def block_forward(
        self,
        embeddings: Tensor,
        angles: dict[Rope, Angles],
        caches: Sequence[Any],
        plans: Mapping[bool, Any],
        keep: Keep,
    ) -> Tensor:
        """Final hidden states [rows to keep, H] of block rows `embeddings` [T, H].

        One cache per layer, and a plan for causal layers and for others as far as there are any.
        """
        layer_plans = [plans[causal] for causal in self._config.causal]
        return self._decoder(embeddings, angles, self._backends, caches, layer_plans, keep=keep)[0]

    def context_state(self, features: Tensor) -> Tensor:
        """See `drafters.dflash.context.Context.states`."""
        return self._context.states(features)

    def write_context(
        self,
        features: Tensor,
        angles: dict[Rope, Angles],
        caches: Sequence[Any],
        slot_mapping: Tensor,
    ) -> None:
        """Writes the context of features [T, num_taps * H_target] to every layer's cache."""
        rows, turn = self._context.rows(features), angles[self._rope]
        if isinstance(self._attention, MlaBackend):
            compressed, key_rope = split_latents(rows, self._config)
            # the same for all layers, which stand where heads do
            rotated = rotate(key_rope, *turn.doubled)
            for index, (cache, norm) in enumerate(zip(caches, self._norms, strict=True)):
                part = self._ops.norm(compressed[:, index].contiguous(), norm)
                self._attention.write(cache, part, rotated[:, index], slot_mapping)
            return
        values = rows[:, :, -1]
        if self._value_norm is not None:
            values = self._ops.norm(values.reshape(-1, values.shape[-1]), self._value_norm).view(
                values.shape
            )
        for index, (cache, norm) in enumerate(zip(caches, self._norms, strict=True)):
            key = rows[:, index, 0]
            self._ops.write(self._attention, key, values[:, index], norm, turn, cache, slot_mapping)

    def _layer(self, layer: DFlashLayer, index: int) -> DecoderLayer:
        gemma, mlp = self._config.gemma, layer.mlp
        shared: dict[str, Any] = {
            "input_norm": norm_of(layer.input_layernorm, gemma),
            "attention": self._latent_attention_of(layer.self_attn)
            if isinstance(layer.self_attn, LatentProjections)
            else self._attention_of(layer.self_attn, index),
            "output": self._summed(layer.self_attn.o_proj),
        }
        gate_up = _join(mlp.gate_proj, mlp.up_proj)
        gated = GatedMLP(gate_up, self._summed(mlp.down_proj), "gelu_tanh" if gemma else "silu")
        # as Gemma has them
        if (
            layer.pre_feedforward_layernorm is not None
            and layer.post_feedforward_layernorm is not None
        ):
            return DecoderLayer(
                **shared,
                attention_norm=norm_of(layer.post_attention_layernorm, gemma),
                mlp_norm=norm_of(layer.pre_feedforward_layernorm, gemma),
                mlp=gated,
                output_norm=norm_of(layer.post_feedforward_layernorm, gemma),
                factor=layer.layer_scalar,
            )
        return DecoderLayer(
            **shared,
            mlp_norm=norm_of(layer.post_attention_layernorm),
            mlp=gated
            if layer.mlp_conv is None
            else ConvolvedMLP(gated, _convolution(layer.mlp_conv)),
            convolution=None
            if layer.attention_conv is None
            else _convolution(layer.attention_conv),
        )

    def _summed(self, projection: nn.Linear) -> Linear:
        """A projection back to the stream, to which all ranks that divide its inputs add."""
        part = _join(projection)
        return part if self._group is None else SummedLinear(part, self._group)

    def _latent_attention_of(self, attention: LatentProjections) -> LatentAttention:
        assert isinstance(self._attention, MlaBackend)
        down = _join(*attention.first)
        return attention.on_the_stack(self._config, down, self._rope, self._attention.spec)

    def _attention_of(self, attention: DFlashAttention, index: int) -> HeadAttention:
        config, sinks = self._config, attention.attention_sink_bias
        heads = Heads(
            scale=1.0 if config.gemma else config.head_dim**-0.5,
            window=config.windows[index],
            sinks=None if sinks is None else sinks.detach(),
            query_norm=norm_of(attention.q_norm, config.gemma),
            key_norm=norm_of(attention.k_norm, config.gemma),
            value_norm=self._value_norm,
        )
        joined = [attention.q_proj, attention.k_proj, attention.v_proj, attention.g_proj]
        return HeadAttention(
            _join(*(projection for projection in joined if projection is not None)),
            heads,
            self._rope,
            gate=None if attention.g_proj is None else "softplus",
            value_scale=config.attention_value_scale,
        )


def _convolution(module: DFlashConvolution) -> GroupedConvolution:
    base = module.base_kernel.detach()
    return GroupedConvolution(base, _join(module.kernel_projection), module.width)


@torch.no_grad()
def _pair_up(model: DFlashModel, rope: Rope) -> None:
    """Puts numbers of query and key heads into the order in which the stack rotates them."""
    if model.config.latent is not None:
        for layer in model.layers:
            cast(LatentProjections, cast(DFlashLayer, layer).self_attn).put_halves_first(
                model.config
            )
        return
    width = model.config.head_dim
    order = rotation_order(width, rope.rotated or width, interleaved=model.config.interleaved)
    if order is None:
        return
    for layer in model.layers:
        attention = cast(DFlashAttention, cast(DFlashLayer, layer).self_attn)
        for projection in (attention.q_proj, attention.k_proj, attention.k_proj_target):
            for parameter in () if projection is None else projection.parameters():
                parameter.data = parameter.data.unflatten(0, (-1, width))[:, order].flatten(0, 1)
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.data = norm.weight.data[order]


@torch.no_grad()
def _join(*projections: nn.Linear) -> Linear:
    """The projections as one product; if several, their own weights become views of it.

    Gates have no bias where the projections beside them have one.
    """
    if len(projections) == 1:
        return drafting_linear(projections[0].weight, projections[0].bias)
    weight = torch.cat([projection.weight for projection in projections])
    biases: list[Tensor] = [
        weight.new_zeros(projection.out_features) if projection.bias is None else projection.bias
        for projection in projections
    ]
    bias = None if all(projection.bias is None for projection in projections) else torch.cat(biases)
    for projection, part in zip(
        projections, weight.split([p.out_features for p in projections]), strict=True
    ):
        projection.weight.data = part
    return drafting_linear(weight, bias)
