"""Latent attention (DeepSeek-V2, arXiv 2405.04434) of draft layers, as module and on the stack."""

from typing import cast

import torch
from torch import Tensor, nn

from drafters.dflash.config.config import DFlashConfig
from specdec.attention.mla import MlaSpec
from specdec.layers.latent_attention import LatentAttention, halves_first, latent_scale, split_up
from specdec.layers.linear import Linear
from specdec.layers.linear_choice import linear
from specdec.layers.ops.norm import Norm
from specdec.layers.rotary.rotary import Rope


class LatentProjections(nn.Module):
    """Weights of one layer's attention, which runs on the decoder stack alone."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        sizes, hidden, eps = config.latent, config.hidden_size, config.rms_norm_eps
        assert sizes is not None
        query, compressed = config.num_attention_heads * config.head_dim, sizes.query_rank
        self.q_proj = nn.Linear(hidden, query, bias=False) if compressed is None else None
        self.q_a_proj = None if compressed is None else nn.Linear(hidden, compressed, bias=False)
        self.q_a_layernorm = None if compressed is None else nn.RMSNorm(compressed, eps=eps)
        self.q_b_proj = None if compressed is None else nn.Linear(compressed, query, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, sizes.rank + sizes.rope, bias=False)
        self.kv_a_layernorm = nn.RMSNorm(sizes.rank, eps=eps)
        out_features = config.num_attention_heads * (sizes.nope + sizes.value)
        self.kv_b_proj = nn.Linear(sizes.rank, out_features, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * sizes.value, hidden, bias=False)

    @property
    def first(self) -> list[nn.Linear]:
        """The projections of the layer's input."""
        first = cast(nn.Linear, self.q_proj if self.q_a_proj is None else self.q_a_proj)
        return [first, self.kv_a_proj_with_mqa]

    @torch.no_grad()
    def put_halves_first(self, config: DFlashConfig) -> None:
        """Puts neighbors that RoPE turns half the rotated part apart, as the stack has them."""
        sizes = config.latent
        assert sizes is not None
        if not sizes.interleaved:
            return
        query = cast(nn.Linear, self.q_proj if self.q_b_proj is None else self.q_b_proj)
        for projection, width, start in (
            (query, config.head_dim, sizes.nope),
            (self.kv_a_proj_with_mqa, sizes.rank + sizes.rope, sizes.rank),
        ):
            projection.weight.data = halves_first(width, start, sizes.rope)(projection.weight.data)

    def on_the_stack(
        self, config: DFlashConfig, down: Linear, rope: Rope, spec: MlaSpec
    ) -> LatentAttention:
        """The attention over the paged cache; `down` is the product of `first`."""
        query = None
        if self.q_a_layernorm is not None and self.q_b_proj is not None:
            norm = Norm(self.q_a_layernorm.weight.detach(), config.rms_norm_eps)
            query = (norm, linear(self.q_b_proj.weight))
        return LatentAttention(
            down=down,
            query=query,
            latent_norm=Norm(self.kv_a_layernorm.weight.detach(), config.rms_norm_eps),
            up=split_up(self.kv_b_proj.weight.detach(), spec),
            rope=rope,
            scale=latent_scale(config.rope_parameters, config.head_dim),
        )


def split_latents(rows: Tensor, config: DFlashConfig) -> tuple[Tensor, Tensor]:
    """Compressed parts and parts to rotate of latents [T, layers, rank + rope]."""
    sizes = config.latent
    assert sizes is not None
    compressed, key_rope = rows.split([sizes.rank, sizes.rope], dim=-1)
    return compressed, key_rope
