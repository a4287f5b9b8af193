"""The DFlash drafter's forward around Triton kernels, where `fuses_layers` says so; see `drafters.dflash.drafter`."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from drafters.dflash.model import DFlashLayer, DFlashModel, Keep
from specdec.attention.backend import AttentionBackend
from specdec.kernels.linear import Linear
from specdec.kernels.triton_fused import rms_norm
from specdec.kv_cache import LayerCache
from specdec.layers.rotary import half_angles
from specdec.layers.triton_decoder import DecoderLayer, TritonDecoder
from specdec.layers.triton_rotary import write_rotated


class TritonDFlash:
    """`DFlashModel.block_forward` and `context_kv` in few launches, with the cache writes in them.

    Args:
        model: on its device, after `prepare_inference`.
        layers: its layers, as `join_layers` gives them.
        attention: of the draft layers.
    """

    def __init__(self, model: DFlashModel, layers: Sequence[DecoderLayer], attention: AttentionBackend) -> None:
        self._model, self._attention = model, attention
        self._decoder = TritonDecoder(layers, model.norm.weight, epsilon=model.config.rms_norm_eps, attention=attention)
        self._project, norms = model.context_projection()
        self._key_norms = norms.flatten(1)  # [num_layers, head_dim]
        self._frequencies = model.rotary.inv_freq.to(norms.device)
        self._known: tuple[Tensor, Tensor, Tensor] | None = None  # the block's position ids, cosines and sines

    def embed(self, token_ids: Tensor) -> Tensor:
        """Rows [..., H] of the drafter's own embedding table, which it has."""
        assert self._model.embed_tokens is not None
        return self._decoder.embed(token_ids, self._model.embed_tokens.weight)

    def block_forward(
        self,
        embeddings: Tensor,
        position_ids: Tensor,
        caches: Sequence[LayerCache],
        plans: Sequence[Any],
        keep: Keep,
    ) -> Tensor:
        """Final hidden states [rows to keep, H], normed, of block rows `embeddings` [T, H]; one cache and one plan per layer."""
        cos, sin = self._angles(position_ids, embeddings.dtype)
        self._known = position_ids, cos, sin
        return self._decoder(embeddings, cos, sin, caches, plans, self._model.config.windows, keep=keep)[0]

    def write_context(self, features: Tensor, position_ids: Tensor, caches: Sequence[LayerCache], slot_mapping: Tensor) -> None:
        """Writes what rows of the target's features [T, num_taps * H_target] contribute to every layer's cache."""
        config = self._model.config
        context = rms_norm(self._model.fc(features), self._model.hidden_norm.weight, config.rms_norm_eps)
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        rows = self._project(context).unflatten(-1, shape)
        cos, sin = self._angles(position_ids, rows.dtype)
        self._known = None  # nothing outlives a step, for its memory may be a graph's
        for layer, cache in enumerate(caches):
            write_rotated(
                self._attention,
                rows[:, layer, 0],
                rows[:, layer, 1],
                cache,
                slot_mapping,
                cos=cos,
                sin=sin,
                key_norm=self._key_norms[layer],
                epsilon=config.rms_norm_eps,
            )

    def _angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, head_dim / 2]. The context of a step lies where its block was, when both have as many rows."""
        if self._known is not None and self._known[0] is position_ids:
            return self._known[1:]
        return half_angles(position_ids, self._frequencies, dtype, amplitude=self._model.rotary.amplitude)


def join_layers(model: DFlashModel) -> list[DecoderLayer]:
    """The layers with joined projections; the model's own become views of these, so that nothing is stored twice."""
    return [_join_layer(cast(DFlashLayer, layer)) for layer in model.layers]


def _join_layer(layer: DFlashLayer) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return DecoderLayer(
        input_norm=layer.input_layernorm.weight,
        qkv=_join(attention.q_proj, attention.k_proj, attention.v_proj),
        query_norm=attention.q_norm.weight,
        key_norm=attention.k_norm.weight,
        output=Linear(attention.o_proj.weight, attention.o_proj.bias),
        mlp_norm=layer.post_attention_layernorm.weight,
        gate_up=_join(mlp.gate_proj, mlp.up_proj),
        down=Linear(mlp.down_proj.weight, mlp.down_proj.bias),
    )


@torch.no_grad()
def _join(*projections: nn.Linear) -> Linear:
    """The projections as one product; their own weights become views of it."""
    weight = torch.cat([projection.weight for projection in projections])
    biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
    for projection, part in zip(projections, weight.split([p.out_features for p in projections]), strict=True):
        projection.weight.data = part
    return Linear(weight, torch.cat(biases) if biases else None)
