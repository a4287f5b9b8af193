"""Draft layers as modules, as Qwen3 and Gemma 4 have them; the attention itself is the caller's."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.dflash.config import DFlashConfig
from drafters.dflash.convolution import DFlashConvolution
from drafters.dflash.latent import LatentProjections
from specdec.layers.rotary import rotate

Keep = Callable[[Tensor], Tensor]
"""Rows of `[rows, ...]` whose final states are wanted."""


class DFlashAttention(nn.Module):
    """Projections of one draft layer; the attention itself is the caller's, with scores over the square root of `head_dim`.

    Attributes:
        attention_sink_bias: [heads], logits that join the softmax and attend to nothing; None without.
    """

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        query, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
        self.config, self.head_dim = config, config.head_dim
        self.q_proj = nn.Linear(hidden, query, bias=bias)
        self.k_proj = nn.Linear(hidden, kv, bias=bias)
        self.v_proj = None if config.keys_as_values else nn.Linear(hidden, kv, bias=bias)
        self.o_proj = nn.Linear(query, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads)) if config.attention_sinks else None
        gates = config.num_attention_heads * (config.head_dim if config.attention_gate == "per-element" else 1)
        self.g_proj = None if config.attention_gate is None else nn.Linear(hidden, gates, bias=False)
        self.k_proj_target = nn.Linear(hidden, kv, bias=bias) if config.mixes_taps else None
        self.v_proj_target = nn.Linear(hidden, kv, bias=bias) if config.mixes_taps else None

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [..., heads, head_dim] of block rows [..., H]."""
        query, key = (p(hidden).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj))
        value = key if self.v_proj is None else self.v_proj(hidden).unflatten(-1, (-1, self.head_dim))
        query = turned(self.q_norm(query), cos, sin)
        if self.config.gemma:  # whose scores are not divided
            query = query * self.head_dim**0.5
        return query, turned(self.k_norm(key), cos, sin), values_of(value, self.config)

    def scaled(self, attended: Tensor, hidden: Tensor) -> Tensor:
        """What attention [..., heads, head_dim] puts out, flat, times its gates for block rows [..., H]."""
        if self.config.attention_value_scale != 1:
            attended = attended * self.config.attention_value_scale
        if self.g_proj is not None:
            gates = F.softplus(self.g_proj(hidden).float()).to(attended.dtype)
            attended = attended * gates.unflatten(-1, (self.config.num_attention_heads, -1))
        return attended.flatten(-2)


class DFlashMLP(nn.Module):
    """Gated SiLU, or GELU in Gemma's layers."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gelu = config.gemma
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] to [..., H]."""
        gate = self.gate_proj(hidden)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return self.down_proj(gate * self.up_proj(hidden))


class DFlashLayer(nn.Module):
    """One draft layer."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn: DFlashAttention | LatentProjections
        self.self_attn = DFlashAttention(config) if config.latent is None else LatentProjections(config)
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
        assert isinstance(self.self_attn, DFlashAttention), "latent attention runs on the decoder stack alone"
        if self.attention_conv is None or self.mlp_conv is None:
            query, key, value = self.self_attn.project(normed, cos, sin)
            attended = self.self_attn.scaled(attend(query, key, value), normed)
            if keep is not None:
                hidden, attended = keep(hidden), keep(attended)
            hidden = hidden + self.self_attn.o_proj(attended)
            return hidden + self.mlp(self.post_attention_layernorm(hidden))
        kernels = self.attention_conv.kernels(normed)
        mixed = self.attention_conv(normed, kernels, 0)
        query, key, value = self.self_attn.project(mixed, cos, sin)
        output = self.self_attn.o_proj(self.self_attn.scaled(attend(query, key, value), mixed))
        hidden = hidden + self.attention_conv(output, kernels, 1)
        normed = self.post_attention_layernorm(hidden)
        kernels = self.mlp_conv.kernels(normed)
        output = self.mlp(self.mlp_conv(normed, kernels, 0))
        hidden = hidden + self.mlp_conv(output, kernels, 1)
        return hidden if keep is None else keep(hidden)


class GemmaLayer(nn.Module):
    """One draft layer as Gemma 4 has it: what sublayers put out is normed, too, and the stream has a factor."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.self_attn = DFlashAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.pre_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.mlp = DFlashMLP(config)
        self.post_feedforward_layernorm = nn.RMSNorm(hidden, eps=eps)
        self.layer_scalar: Tensor
        self.register_buffer("layer_scalar", torch.ones(1))

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
        attended = self.self_attn.scaled(attend(*self.self_attn.project(normed, cos, sin)), normed)
        if keep is not None:
            hidden, attended = keep(hidden), keep(attended)
        hidden = hidden + self.post_attention_layernorm(self.self_attn.o_proj(attended))
        output = self.mlp(self.pre_feedforward_layernorm(hidden))
        return (hidden + self.post_feedforward_layernorm(output)) * self.layer_scalar


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [..., heads, head_dim], of which as many numbers are rotated as there are angles; the others follow them."""
    still = x.shape[-1] - cos.shape[-1]
    return torch.cat([rotate(x[..., :-still], cos, sin), x[..., -still:]], dim=-1) if still else rotate(x, cos, sin)


def values_of(value: Tensor, config: DFlashConfig) -> Tensor:
    """Value heads [..., head_dim] as the cache holds them."""
    return F.rms_norm(value, value.shape[-1:], eps=config.rms_norm_eps) if config.gemma else value
