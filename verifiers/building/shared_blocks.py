"""Building the blocks that several layers of Zamba2 share, with what each layer adds to them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from specdec.layers.attention import HeadAttention
from specdec.layers.linear import Linear
from specdec.layers.linear_attention import LinearAttention
from specdec.layers.mlp import GatedMLP
from specdec.layers.ops.norm import Norm
from specdec.layers.shared_block import AdaptedLinear, AfterSharedBlock
from verifiers.building.mixture import gated_mlp
from verifiers.config.states import attends
from verifiers.weights.weights import Weights


@dataclass(frozen=True, slots=True)
class _Block:
    """What layers share."""

    weights: Weights  # that are left are adapters
    norm: Norm
    attention: HeadAttention
    output: Linear
    mlp_norm: Norm
    mlp: GatedMLP


class SharedBlocks:
    """The blocks of a model, which stand before its hybrid layers in turn. Their tensors lie in the
    first layers that have them.

    Args:
        count: of blocks.
        weights: of the model, from which they are taken.
    """

    def __init__(self, config: Any, count: int, weights: Weights) -> None:
        self._layers = [one for one in range(config.num_hidden_layers) if attends(config, one)]
        self._count, self._weights = count, weights
        self._blocks: list[_Block] = []

    def before(
        self,
        layer: int,
        attention: Callable[[Weights], HeadAttention],
        norm: Callable[[Weights, str], Norm],
        *,
        projection: Linear,
        norm_after: Norm,
        linear: LinearAttention,
        activation: str,
    ) -> AfterSharedBlock:
        """What a hybrid layer has in the place of attention; layers are asked for in order.

        Args:
            attention: builds a block's attention.
            norm: builds a norm of that name.
            projection, norm_after, linear: of the layer itself, see `AfterSharedBlock`.
            activation: of the feed-forward sublayers.
        """
        use = self._layers.index(layer)
        if use < self._count:
            self._blocks.append(self._block(layer, attention, norm, activation))
        block = self._blocks[use % self._count]
        names = [f"self_attn.linear_{part}_adapter_list.{use}" for part in "qkv"]
        qkv = _adapted(block.attention.qkv, block.weights, names)
        name = f"feed_forward.gate_up_proj_adapter_list.{use}"
        gate_up = _adapted(block.mlp.gate_up, block.weights, [name])
        adapted = replace(block.attention, qkv=qkv)
        mlp = replace(block.mlp, gate_up=gate_up)
        return AfterSharedBlock(
            block.norm, adapted, block.output, block.mlp_norm, mlp, projection, norm_after, linear
        )

    def _block(
        self,
        layer: int,
        attention: Callable[[Weights], HeadAttention],
        norm: Callable[[Weights, str], Norm],
        activation: str,
    ) -> _Block:
        weights = self._weights.under(f"model.layers.{layer}.shared_transformer.")
        return _Block(
            weights,
            norm(weights, "input_layernorm"),
            attention(weights.under("self_attn.")),
            weights.output("self_attn.o_proj"),
            norm(weights, "pre_ff_layernorm"),
            gated_mlp(weights.under("feed_forward."), activation),
        )


def _adapted(base: Linear, weights: Weights, names: list[str]) -> Linear:
    """A shared projection with the adapters of these names; as it is where there are none."""
    if not weights.has(f"{names[0]}.0.weight"):
        return base
    down = weights.linear(*[f"{name}.0" for name in names])
    return AdaptedLinear(base, down, tuple(weights.linear(f"{name}.1") for name in names))
