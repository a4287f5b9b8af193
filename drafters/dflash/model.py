"""The network of a DFlash drafter (arXiv 2602.06036) as a module: its state dict is the checkpoint, and it can be trained."""

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.dflash.config import DFlashConfig
from drafters.dflash.convolution import DFlashConvolution
from specdec.layers.rotary import Angles, Rope, rotate

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, query [..., heads, D], key [..., kv_heads, D], value [..., kv_heads, D]) -> [..., heads, D]`, context included."""

Keep = Callable[[Tensor], Tensor]
"""Rows of `[rows, ...]` whose final states are wanted."""


class DFlashAttention(nn.Module):
    """Projections of one draft layer; the attention itself is the caller's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, query, bias=bias)
        self.k_proj = nn.Linear(hidden, kv, bias=bias)
        self.v_proj = nn.Linear(hidden, kv, bias=bias)
        self.o_proj = nn.Linear(query, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [..., heads, head_dim] of block rows [..., H]."""
        query, key, value = (p(hidden).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return rotate(self.q_norm(query), cos, sin), rotate(self.k_norm(key), cos, sin), value


class DFlashMLP(nn.Module):
    """Gated SiLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        return self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class DFlashLayer(nn.Module):
    """One draft layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = DFlashMLP(config)
        self.attention_conv = DFlashConvolution(config) if config.convolves else None
        self.mlp_conv = DFlashConvolution(config) if config.convolves else None

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        keep: Keep | None = None,
    ) -> Tensor:
        """[..., H] to [..., H], of the rows to keep."""
        normed = self.input_layernorm(hidden)
        if self.attention_conv is None or self.mlp_conv is None:
            query, key, value = self.self_attn.project(normed, cos, sin)
            attended = attend(query, key, value).flatten(-2)
            if keep is not None:
                hidden, attended = keep(hidden), keep(attended)
            hidden = hidden + self.self_attn.o_proj(attended)
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        kernels = self.attention_conv.kernels(normed)
        query, key, value = self.self_attn.project(self.attention_conv(normed, kernels, 0), cos, sin)
        output = self.self_attn.o_proj(attend(query, key, value).flatten(-2))
        hidden = hidden + self.attention_conv(output, kernels, 1)
        normed = self.post_attention_layernorm(hidden)
        kernels = self.mlp_conv.kernels(normed)
        output = self.mlp(self.mlp_conv(normed, kernels, 0))
        hidden = hidden + self.mlp_conv(output, kernels, 1)
        return hidden if keep is None else keep(hidden)


class DFlashModel(nn.Module):
    """The network; `drafters.dflash.network` runs it. All shapes may carry batch axes.

    Args:
        config: the drafter.
        own_embeddings, own_head: the checkpoint brings its own instead of borrowing the target's; a reduced vocabulary always
            brings its head.
    """

    def __init__(self, config: DFlashConfig, *, own_embeddings: bool = False, own_head: bool = False) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.fc = nn.Linear(config.feature_size, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=eps)
        self.norm = nn.RMSNorm(hidden, eps=eps)
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if own_embeddings else None
        draft_vocab = config.draft_vocab_size
        own_head = own_head or draft_vocab is not None
        self.lm_head = nn.Linear(hidden, draft_vocab or config.vocab_size, bias=False) if own_head else None
        self.d2t: Tensor | None
        self.register_buffer("d2t", None if draft_vocab is None else torch.zeros(draft_vocab, dtype=torch.long))
        for name, module in ({} if config.head is None else config.head.modules(config.head_sizes)).items():
            self.add_module(name, module)
        # mscale and mscale_all_dim describe the target's attention; drafters are trained with YaRN's plain 1 + 0.1 ln(factor).
        rope = {name: value for name, value in config.rope_parameters.items() if not name.startswith("mscale")}
        self.rope = Rope.of(rope, config.head_dim, config.max_position_embeddings)

    def context_kv(self, features: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that context positions contribute to every layer; they depend on nothing but the target's features.

        Args:
            features: [..., num_taps * H_target], raw outputs of the tapped layers side by side.
            position_ids: int64 [...].

        Returns:
            Two tensors [..., num_layers, num_kv_heads, head_dim]; keys are normed and rotated.
        """
        config = self.config
        weight, bias, norms = self.context_projection()
        context = self.hidden_norm(self.fc(features))
        shape = (config.num_hidden_layers, 2, config.num_key_value_heads, config.head_dim)
        key, value = F.linear(context, weight, bias).unflatten(-1, shape).unbind(-3)
        key = F.rms_norm(key, (config.head_dim,), eps=config.rms_norm_eps) * norms[:, None]
        cos, sin = self._angles(position_ids, key.dtype)
        return rotate(key, cos[..., None, :, :], sin[..., None, :, :]), value

    def block_forward(self, embeddings: Tensor, position_ids: Tensor, attend: Attend, keep: Keep | None = None) -> Tensor:
        """Final hidden states [..., H], normed, of block rows.

        Args:
            embeddings: [..., H], scaled input embeddings of the anchor and the masks; with convolutions [..., n * block_size, H].
            position_ids: int64 [...].
            attend: attention of a layer over its context and the block.
            keep: rows that are wanted, since nothing sees the others after the last attention; None for all.
        """
        hidden = embeddings
        cos, sin = self._angles(position_ids, hidden.dtype)
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden, cos, sin, partial(attend, i), keep if i == len(self.layers) - 1 else None)
        return self.norm(hidden)

    def context_projection(self) -> tuple[Tensor, Tensor | None, Tensor]:
        """Key and value projections of all layers as one weight and bias, and the key norms [num_layers, head_dim]."""
        attentions = [cast(DFlashLayer, layer).self_attn for layer in self.layers]
        projections = [projection for attention in attentions for projection in (attention.k_proj, attention.v_proj)]
        weight = torch.cat([projection.weight for projection in projections])
        bias = torch.cat([projection.bias for projection in projections]) if self.config.attention_bias else None
        norms: list[Tensor] = [attention.k_norm.weight for attention in attentions]
        return weight, bias, torch.stack(norms)

    def _angles(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self.rope.frequencies.device != position_ids.device:
            self.rope = self.rope.to(position_ids.device)
        return Angles.of(position_ids, self.rope, dtype).doubled
