"""A leaner forward for models of the Llama family: the same weights and maths as transformers' modules, in fewer operations.

On a CPU a forward of a few tokens through transformers' modules spends more time between matrix products than in them. Here the
query, key and value projections are one product, and so are gate and up; query and key are rotated together; residuals are added by
the products; weights lie in the layout that the device's kernels read. The model's own layers give up their projections.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from specdec.ops.linear import Linear

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, query [T, heads, D], key [T, kv_heads, D], value [T, kv_heads, D]) -> [T, heads, D]`."""

FAMILY = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Model types whose decoder layers are: norm, attention, residual, norm, gated SiLU MLP, residual."""


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` computes what this model does: a member of the family with ordinary, unquantised layers."""
    config = model.config
    linear = [module for name, module in model.named_modules() if name.endswith("_proj")]
    return config.model_type in FAMILY and config.hidden_act == "silu" and all(type(module) is nn.Linear for module in linear)


class RMSNorm:
    """Root mean square norm over the last axis, computed in float32 as transformers does.

    Args:
        module: holds `weight` and `variance_epsilon`.
    """

    def __init__(self, module: Any) -> None:
        self.weight: Tensor = module.weight.detach()
        self.epsilon = torch.tensor(module.variance_epsilon, dtype=torch.float32, device=self.weight.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        """[..., H] in the dtype of `hidden`."""
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self.epsilon, norm, norm, value=1 / hidden.shape[-1]).rsqrt_()
        return torch.mul(hidden, scale, out=torch.empty_like(hidden)).mul_(self.weight)


@dataclass(slots=True)
class FusedLayer:
    """One decoder layer with joined projections."""

    input_norm: RMSNorm
    query_norm: RMSNorm | None
    key_norm: RMSNorm | None
    qkv: Linear
    output: Linear
    mlp_norm: RMSNorm
    gate_up: Linear
    down: Linear


class FusedDecoder:
    """Decoder layers of a model for which `can_fuse` holds.

    Args:
        model: in eval mode, on its device. Its decoder layers cannot run any more.
        layers: its decoder layers.
        head_dim: size of an attention head.
    """

    def __init__(self, model: PreTrainedModel, layers: Iterable[nn.Module], head_dim: int) -> None:
        self.head_dim = head_dim
        self._rotary = model.base_model.rotary_emb
        self._norm = RMSNorm(model.base_model.norm)
        self._layers = [_fused_layer(layer) for layer in layers]
        half = head_dim // 2
        self._sign = torch.cat([-torch.ones(half), torch.ones(half)]).to(model.device, model.dtype)

    def forward(self, hidden: Tensor, position_ids: Tensor, attend: Attend, taps: Sequence[int]) -> tuple[Tensor, list[Tensor]]:
        """Runs all layers.

        Args:
            hidden: [T, H], input embeddings.
            position_ids: int64 [T].
            attend: attention of a layer.
            taps: layers whose raw outputs are wanted.

        Returns:
            [T, H], not normed, and the tapped outputs [T, H] in the order of `taps`.
        """
        cos, sin = self._rotary(hidden[None], position_ids[None])
        cos, sin = cos[0, :, None], sin[0, :, None] * self._sign  # [T, 1, head_dim]
        tapped: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            hidden = self._attention(index, layer, hidden, cos, sin, attend)
            hidden = _mlp(layer, hidden)
            if index in taps:
                tapped[index] = hidden
        return hidden, [tapped[index] for index in taps]

    def final_norm(self, hidden: Tensor) -> Tensor:
        """What the output head takes, [..., H]."""
        return self._norm(hidden)

    def _attention(self, index: int, layer: FusedLayer, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> Tensor:
        qkv = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, self.head_dim)  # [T, heads + 2 * kv_heads, head_dim]
        num_heads = layer.output.in_features // self.head_dim
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        rotated, value = qkv.split([num_heads + num_kv_heads, num_kv_heads], dim=1)
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = rotated.split([num_heads, num_kv_heads], dim=1)
            rotated = torch.cat([layer.query_norm(query), layer.key_norm(key)], dim=1)
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, dims=-1), sin)
        query, key = rotated.split([num_heads, num_kv_heads], dim=1)
        return layer.output(attend(index, query, key, value).reshape(len(hidden), -1), hidden)


def _mlp(layer: FusedLayer, hidden: Tensor) -> Tensor:
    gate, up = layer.gate_up(layer.mlp_norm(hidden)).chunk(2, dim=-1)
    return layer.down(F.silu(gate).mul_(up), hidden)


def _fused_layer(layer: Any) -> FusedLayer:
    attention, mlp = layer.self_attn, layer.mlp
    return FusedLayer(
        input_norm=RMSNorm(layer.input_layernorm),
        query_norm=RMSNorm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key_norm=RMSNorm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        qkv=_take(attention.q_proj, attention.k_proj, attention.v_proj),
        output=_take(attention.o_proj),
        mlp_norm=RMSNorm(layer.post_attention_layernorm),
        gate_up=_take(mlp.gate_proj, mlp.up_proj),
        down=_take(mlp.down_proj),
    )


@torch.no_grad()
def _take(*projections: nn.Linear) -> Linear:
    """The projections as one; they are left empty, so that nothing is stored twice."""
    weights = [projection.weight.detach() for projection in projections]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    bias = None if projections[0].bias is None else torch.cat([projection.bias.detach() for projection in projections])
    joined = Linear(weight, bias)
    for projection in projections:
        projection.weight.data = weight.new_empty(0)
    return joined
