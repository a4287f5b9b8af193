"""A DFlash network laid out for drafting: the layers of `DFlashModel` on the decoder stack, over the paged cache."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.dflash.convolution import DFlashConvolution
from drafters.dflash.model import DFlashLayer, DFlashModel, Keep
from specdec.attention.backend import AttentionBackend
from specdec.kv_cache import LayerCache
from specdec.layers.attention import HeadAttention
from specdec.layers.decoder import Decoder, DecoderLayer
from specdec.layers.grouped_convolution import GroupedConvolution
from specdec.layers.linear import Linear, linear
from specdec.layers.mlp import ConvolvedMLP, GatedMLP
from specdec.layers.norm import Norm
from specdec.layers.ops import Heads, ops_for
from specdec.layers.rotary import Angles, Rope


class DFlashNetwork:
    """`DFlashModel.block_forward` and `context_kv` with the cache writes in them. Runs share it.

    Args:
        model: on its device; its projections become views of joined ones, so that nothing is stored twice.
        attention: of the draft layers.

    Attributes:
        head: the drafter's own head; None where it borrows the target's.
    """

    def __init__(self, model: DFlashModel, attention: AttentionBackend) -> None:
        self._config, self._attention = model.config, attention
        self._ops = ops_for(attention, convolves=model.config.convolves)
        self._backends = [attention] * len(model.layers)
        device, epsilon = attention.spec.device, model.config.rms_norm_eps
        self._rope = model.rope.to(device)
        layers = [self._layer(cast(DFlashLayer, layer), index) for index, layer in enumerate(model.layers)]
        self._decoder = Decoder(layers, Norm(model.norm.weight, epsilon), ops=self._ops)
        self._features = linear(model.fc.weight)
        self._context_norm = Norm(model.hidden_norm.weight, epsilon)
        weight, bias, key_norms = model.context_projection()
        self._context_kv = linear(weight, bias)
        self._key_norms = [Norm(gain, epsilon) for gain in key_norms]
        self._table = None if model.embed_tokens is None else model.embed_tokens.weight
        self.head = None if model.lm_head is None else linear(model.lm_head.weight)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [..., H] of the drafter's own embedding table, which it has."""
        assert self._table is not None
        return self._ops.embed(token_ids, self._table)

    def angles(self, position_ids: Tensor) -> dict[Rope, Angles]:
        """Of positions int64 [T]."""
        return self._decoder.angles(position_ids, self._attention.spec.dtype)

    def block_forward(
        self,
        embeddings: Tensor,
        angles: dict[Rope, Angles],
        caches: Sequence[LayerCache],
        plans: Mapping[bool, Any],
        keep: Keep,
    ) -> Tensor:
        """Final hidden states [rows to keep, H], normed, of block rows `embeddings` [T, H].

        One cache per layer, and a plan for causal layers and for others as far as there are any.
        """
        layer_plans = [plans[causal] for causal in self._config.causal]
        return self._decoder(embeddings, angles, self._backends, caches, layer_plans, keep=keep)[0]

    def write_context(
        self, features: Tensor, angles: dict[Rope, Angles], caches: Sequence[LayerCache], slot_mapping: Tensor
    ) -> None:
        """Writes what rows of the target's features [T, num_taps * H_target] contribute to every layer's cache."""
        config = self._config
        context = self._ops.norm(self._features(features), self._context_norm)
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        rows, turn = self._context_kv(context).unflatten(-1, shape), angles[self._rope]
        for index, (cache, norm) in enumerate(zip(caches, self._key_norms, strict=True)):
            self._ops.write(self._attention, rows[:, index, 0], rows[:, index, 1], norm, turn, cache, slot_mapping)

    def _layer(self, layer: DFlashLayer, index: int) -> DecoderLayer:
        attention, mlp, epsilon = layer.self_attn, layer.mlp, self._config.rms_norm_eps
        heads = Heads(
            scale=self._config.head_dim**-0.5,
            window=self._config.windows[index],
            query_norm=Norm(attention.q_norm.weight, epsilon),
            key_norm=Norm(attention.k_norm.weight, epsilon),
        )
        gated = GatedMLP(_join(mlp.gate_proj, mlp.up_proj), _join(mlp.down_proj))
        return DecoderLayer(
            input_norm=Norm(layer.input_layernorm.weight, epsilon),
            attention=HeadAttention(_join(attention.q_proj, attention.k_proj, attention.v_proj), heads, self._rope),
            output=_join(attention.o_proj),
            mlp_norm=Norm(layer.post_attention_layernorm.weight, epsilon),
            mlp=gated if layer.mlp_conv is None else ConvolvedMLP(gated, _convolution(layer.mlp_conv)),
            convolution=None if layer.attention_conv is None else _convolution(layer.attention_conv),
        )


def _convolution(module: DFlashConvolution) -> GroupedConvolution:
    return GroupedConvolution(module.base_kernel.detach(), _join(module.kernel_projection), module.width)


@torch.no_grad()
def _join(*projections: nn.Linear) -> Linear:
    """The projections as one product; where there are several, their own weights become views of it."""
    if len(projections) == 1:
        return linear(projections[0].weight, projections[0].bias)
    weight = torch.cat([projection.weight for projection in projections])
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    for projection, part in zip(projections, weight.split([p.out_features for p in projections]), strict=True):
        projection.weight.data = part
    return linear(weight, torch.cat(biases) if biases else None)
