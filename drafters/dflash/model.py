"""The network of DFlash (arXiv 2602.06036) as a module, whose state is the checkpoint."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.latent import LatentProjections
from drafters.dflash.layers import DFlashAttention, DFlashLayer, turned
from specdec.layers.rotary.rotary import Angles, Rope

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, query [..., heads, D], key [..., kv_heads, D], value) -> [..., heads, D]`; `value` is of
the shape of `key`. The context is included.
"""


class DFlashModel(nn.Module):
    """The network; `drafters.dflash.network` drafts with it. Its own forward is for training, which
    knows no drafter with `DFlashConfig.peculiarities`; all shapes may carry batch axes.

    Args:
        config: the drafter.
        own_embeddings, own_head: the checkpoint brings its own instead of borrowing the target's; a
            reduced vocabulary always brings its head.
        own_mask: it brings the embedding of the rows after the anchor.
    """

    def __init__(
        self,
        config: DFlashConfig,
        *,
        own_embeddings: bool = False,
        own_head: bool = False,
        own_mask: bool = False,
    ) -> None:
        super().__init__()
        hidden, eps, taps = config.hidden_size, config.rms_norm_eps, len(config.target_layer_ids)
        self.config = config
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.fc = None if config.mixes_taps else nn.Linear(config.feature_size, hidden, bias=False)
        mixture = torch.zeros(config.num_hidden_layers, taps)
        self.layer_fusion_weights = nn.Parameter(mixture) if config.mixes_taps else None
        norms = nn.ModuleList(nn.RMSNorm(config.tap_width, eps=eps) for _ in range(taps))
        self.aux_hidden_norms = norms if config.tap_norms else None
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if own_embeddings else None
        draft_vocab = config.draft_vocab_size
        own_head = own_head or draft_vocab is not None
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if own_mask else None
        columns = draft_vocab or config.vocab_size
        self.lm_head = nn.Linear(hidden, columns, bias=False) if own_head else None
        self.d2t: Tensor | None
        none_yet = None if draft_vocab is None else torch.zeros(draft_vocab, dtype=torch.long)
        self.register_buffer("d2t", none_yet)
        modules = {} if config.head is None else config.head.modules(config.head_sizes)
        for name, module in modules.items():
            self.add_module(name, module)
        self.rope = rope_of(config, whole=False)

    def context_kv(self, features: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of context positions for every layer, from the target's features.

        Args:
            features: [..., num_taps * H_target], raw outputs of the tapped layers side by side.
            position_ids: int64 [...].

        Returns:
            Two tensors [..., num_layers, num_kv_heads, head_dim]; keys are normed and rotated.
        """
        config = self.config
        assert self.fc is not None and not config.peculiarities, (
            "such a drafter runs on the decoder stack alone"
        )
        weight, bias, norms = self.context_projection()
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        rows = F.linear(self.context_state(features), weight, bias).unflatten(-1, shape)
        key, value = rows.unbind(-3)
        key = F.rms_norm(key, (config.head_dim,), eps=config.rms_norm_eps) * norms[:, None]
        cos, sin = self._angles(position_ids, key.dtype)
        return turned(key, cos[..., None, :, :], sin[..., None, :, :]), value

    def context_state(self, features: Tensor) -> Tensor:
        """What raw features [..., num_taps * H_target] are to the draft layers, [..., H]."""
        assert self.fc is not None
        return cast(Tensor, self.hidden_norm(self.fc(features)))

    def block_forward(self, embeddings: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        """Final hidden states [..., H], normed, of block rows.

        Args:
            embeddings: [..., H], scaled input embeddings of the anchor and the masks; with
                convolutions [..., n * block_size, H].
            position_ids: int64 [...].
            attend: attention of a layer over its context and the block.
        """
        hidden = embeddings
        cos, sin = self._angles(position_ids, hidden.dtype)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, partial(attend, i))
        return self.norm(hidden)

    def context_projection(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Key and value projections of all layers as one weight and bias, and the key norms
        [num_layers, head_dim].

        Where layers norm the context, the weight of their norm is a part of it. Of latent attention
        it is what makes the latents, and the norms [num_layers, rank] are of compressed parts.
        """
        if self.config.latent is not None:
            latents = [cast(LatentProjections, layer.self_attn) for layer in self.layers]
            weights: list[Tensor] = [latent.kv_a_proj_with_mqa.weight for latent in latents]
            norms: list[Tensor] = [latent.kv_a_layernorm.weight for latent in latents]
            return torch.cat(weights), None, torch.stack(norms)
        weights, biases, norms = [], list[Tensor](), []
        for layer in (cast(DFlashLayer, layer) for layer in self.layers):
            attention = cast(DFlashAttention, layer.self_attn)
            pair = [attention.k_proj, attention.v_proj]
            if self.config.mixes_taps:
                pair = [attention.k_proj_target, attention.v_proj_target]
            for projection in pair:
                if projection is not None:
                    gain = layer.input_layernorm.weight if self.config.norms_context else None
                    weights.append(projection.weight if gain is None else projection.weight * gain)
                    biases.append(projection.bias)
            norms.append(attention.k_norm.weight)
        bias = torch.cat(biases) if self.config.attention_bias else None
        return torch.cat(weights), bias, torch.stack(norms)

    def _angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.rope.frequencies.device != position_ids.device:
            self.rope = self.rope.to(position_ids.device)
        return Angles.of(position_ids, self.rope, dtype).doubled


def rope_of(config: DFlashConfig, *, whole: bool) -> Rope:
    """The rotation of heads: all numbers in the stack's order, or the turned ones alone."""
    if config.latent is not None:
        return Rope.of(config.rope_parameters, config.latent.rope, config.max_position_embeddings)
    # mscale and mscale_all_dim describe the target's attention; drafters are trained with YaRN's
    # plain 1 + 0.1 ln(factor).
    parameters = {
        name: value
        for name, value in config.rope_parameters.items()
        if not name.startswith("mscale")
    }
    rope = Rope.of(parameters, config.head_dim, config.max_position_embeddings)
    if whole or rope.rotated in (None, config.head_dim):
        return rope
    turned = parameters | {"partial_rotary_factor": None}
    return Rope.of(turned, rope.rotated, config.max_position_embeddings)
