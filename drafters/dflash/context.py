"""What the target's features become before they are keys and values, on the decoder stack."""

from typing import cast

import torch
from torch import Tensor, nn

from drafters.dflash.divided import gathered
from drafters.dflash.model import DFlashModel
from specdec.layers.linear import Linear
from specdec.layers.linear_choice import drafting_linear
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Ops
from specdec.parallel.group import Group


class Context:
    """From features to the rows that layers cache; of drafters that are trained what
    `DFlashModel.context_kv` does. Ranks that divide the model have those of their own heads.
    """

    def __init__(self, model: DFlashModel, ops: Ops, group: Group | None = None) -> None:
        self._config, self._ops = model.config, ops
        weight, bias, _ = model.context_projection()
        self._norm = norm_of(model.hidden_norm, model.config.gemma)
        self._tap_norms = [norm_of(cast(nn.RMSNorm, norm)) for norm in model.aux_hidden_norms or ()]
        self._unit_norm = Norm(torch.ones_like(model.hidden_norm.weight), model.config.rms_norm_eps)
        self._features: Linear | None = None
        if model.fc is not None:
            width = model.config.hidden_size
            self._features = gathered(drafting_linear(model.fc.weight), group, width)
        self._projection, self._layers, self._mixture = drafting_linear(weight, bias), None, None
        if model.layer_fusion_weights is not None:
            self._mixture = torch.softmax(model.layer_fusion_weights.float(), dim=-1).to(
                weight.dtype
            )
            # [layers, H_target, 2 * kv]
            self._layers = weight.view(len(model.layers), -1, weight.shape[1]).mT
            self._bias = None if bias is None else bias.view(len(model.layers), 1, -1)

    @property
    def linears(self) -> list[Linear]:
        """The products of a layer's context."""
        return [self._projection] if self._features is None else [self._features, self._projection]

    def states(self, features: Tensor) -> Tensor:
        """`DFlashModel.context_state` of rows [T, num_taps * H_target], with norms of taps."""
        assert self._features is not None
        return self._ops.norm(self._features(self._tapped(features)), self._norm)

    def _tapped(self, features: Tensor) -> Tensor:
        if not self._tap_norms:
            return features
        taps = features.split(self._config.tap_width, dim=1)
        pairs = zip(taps, self._tap_norms, strict=True)
        return torch.cat([self._ops.norm(tap.contiguous(), norm) for tap, norm in pairs], dim=1)

    def rows(self, features: Tensor) -> Tensor:
        """Raw keys, and values behind them unless they are the same, of all layers.

        Args:
            features: [T, num_taps * H_target].

        Returns:
            [T, num_layers, 1 or 2, num_kv_heads, head_dim], or [T, num_layers, rank + rope].
        """
        config, ops = self._config, self._ops
        heads = (config.num_key_value_heads, config.head_dim) if config.latent is None else ()
        shape = config.num_hidden_layers, -1, *heads
        if self._layers is not None and self._mixture is not None:
            # [T, layers, H_target]
            mixed = self._mixture @ self._tapped(features).view(len(features), -1, config.tap_width)
            normed = ops.norm(mixed.flatten(0, 1), self._norm).view(mixed.shape).transpose(0, 1)
            if self._bias is None:
                product = normed @ self._layers
            else:
                product = torch.baddbmm(self._bias, normed, self._layers)
            return product.transpose(0, 1).flatten(1).unflatten(1, shape)
        context = self.states(features)
        if config.norms_context:
            context = ops.norm(context, self._unit_norm)
        return self._projection(context).unflatten(1, shape)


def norm_of(module: nn.RMSNorm, rounds_last: bool = False) -> Norm:
    """The norm of a module, which rounds before the weight or, as Gemma does, after it."""
    weight, epsilon = module.weight.detach(), module.eps
    assert epsilon is not None
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32)) if rounds_last else weight
    return Norm(wide, epsilon)
