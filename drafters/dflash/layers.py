"""Draft layers as modules: every family's weights, and the forward of Qwen3's, to train.

What else checkpoints have (`DFlashConfig.peculiarities`) runs on the decoder stack alone.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drafters.dflash.config.config import DFlashConfig
from drafters.dflash.convolution import DFlashConvolution
from drafters.dflash.latent import LatentProjections
from specdec.layers.rotary.rotary import rotate

Projected = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""Query, key and value, and the kernels of the convolution behind them."""


class DFlashAttention(nn.Module):
    """Projections of a draft layer; the attention itself is the caller's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        query = config.num_attention_heads * config.head_dim
        kv = config.num_key_value_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, query, bias=bias)
        self.k_proj = nn.Linear(hidden, kv, bias=bias)
        self.v_proj = None if config.keys_as_values else nn.Linear(hidden, kv, bias=bias)
        self.o_proj = nn.Linear(query, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        sinks, gate = torch.zeros(config.num_attention_heads), config.attention_gate
        self.attention_sink_bias = nn.Parameter(sinks) if config.attention_sinks else None
        gates = query if gate == "per-element" else config.num_attention_heads
        self.g_proj = None if gate is None else nn.Linear(hidden, gates, bias=False)
        self.k_proj_target = nn.Linear(hidden, kv, bias=bias) if config.mixes_taps else None
        self.v_proj_target = nn.Linear(hidden, kv, bias=bias) if config.mixes_taps else None

    def project(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [..., heads, head_dim] of block rows [..., H]."""
        assert self.v_proj is not None
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (p(hidden).unflatten(-1, (-1, self.head_dim)) for p in projections)
        return turned(self.q_norm(query), cos, sin), turned(self.k_norm(key), cos, sin), value


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
        norm = partial(nn.RMSNorm, config.hidden_size, eps=config.rms_norm_eps)
        self.input_layernorm = norm()
        self.self_attn: DFlashAttention | LatentProjections
        latent = config.latent is not None
        self.self_attn = LatentProjections(config) if latent else DFlashAttention(config)
        self.post_attention_layernorm = norm()
        self.mlp = DFlashMLP(config)
        self.pre_feedforward_layernorm = norm() if config.gemma else None
        self.post_feedforward_layernorm = norm() if config.gemma else None
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if config.gemma else None)
        self.attention_conv = DFlashConvolution(config) if config.convolves else None
        self.mlp_conv = DFlashConvolution(config) if config.convolves else None

    def forward(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
    ) -> Tensor:
        """[..., H] to [..., H]."""
        query, key, value, kernels = self.before(hidden, cos, sin)
        return self.behind(hidden, attend(query, key, value), kernels)

    def before(self, hidden: Tensor, cos: Tensor, sin: Tensor) -> Projected:
        """What goes before the attention of rows [..., H]."""
        attention = self.self_attn
        assert isinstance(attention, DFlashAttention)
        rows, kernels = _into(self.attention_conv, self.input_layernorm(hidden))
        return *attention.project(rows, cos, sin), kernels

    def behind(self, hidden: Tensor, attended: Tensor, kernels: Tensor | None) -> Tensor:
        """Output [..., H] of the layer's input and the attention's [..., heads, head_dim]."""
        attention = self.self_attn
        output = attention.o_proj(attended.flatten(-2))
        hidden = hidden + _out_of(self.attention_conv, output, kernels)
        rows, kernels = _into(self.mlp_conv, self.post_attention_layernorm(hidden))
        return hidden + _out_of(self.mlp_conv, self.mlp(rows), kernels)


def compile_layer(layer: nn.Module) -> None:
    """Has torch compile what a `DFlashLayer` does around its attention."""
    for name in ("before", "behind"):
        setattr(layer, name, torch.compile(getattr(layer, name)))


def _into(convolution: DFlashConvolution | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """What a sublayer is given of rows [..., H], and the kernels of its convolutions, if any."""
    if convolution is None:
        return x, None
    kernels = convolution.kernels(x)
    return convolution(x, kernels, 0), kernels


def _out_of(convolution: DFlashConvolution | None, x: Tensor, kernels: Tensor | None) -> Tensor:
    """What comes out of a sublayer, behind its second convolution."""
    return x if convolution is None else convolution(x, kernels, 1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [..., heads, head_dim], turned as far as there are angles."""
    if not (still := x.shape[-1] - cos.shape[-1]):
        return rotate(x, cos, sin)
    return torch.cat([rotate(x[..., :-still], cos, sin), x[..., -still:]], dim=-1)
