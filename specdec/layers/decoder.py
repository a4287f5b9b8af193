"""A stack of decoder layers on the paged cache: the forward of targets and of drafters, whatever their families."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.layers.attention import Attention, Rows
from specdec.layers.linear import Linear
from specdec.layers.mlp import FeedForward, MixtureOfExperts
from specdec.layers.norm import Norm
from specdec.layers.ops import Join, Ops
from specdec.layers.rotary import Angles, Rope


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer: attention, then a feed-forward sublayer, each of which joins the residual stream.

    Attributes:
        input_norm, mlp_norm: before attention and before the feed-forward sublayer; None where there is none.
        attention_norm, output_norm: of what they put out, before it joins the stream; None where there is none.
        output: projection of what attention gives.
    """

    input_norm: Norm | None
    attention: Attention
    output: Linear
    mlp_norm: Norm | None
    mlp: FeedForward
    attention_norm: Norm | None = None
    output_norm: Norm | None = None


class Decoder:
    """Layers, and the norm after them.

    Args:
        layers: in order.
        final_norm: the norm after the last layer.
        ops: what computes between the products.
        residual_scale: factor of what a sublayer adds to the stream.

    Attributes:
        layers: as given.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        final_norm: Norm,
        *,
        ops: Ops,
        residual_scale: float = 1.0,
    ) -> None:
        self.layers, self.ops = list(layers), ops
        self._ropes = {layer.attention.rope for layer in self.layers if layer.attention.rope is not None}
        self._attention_joins = [Join(layer.mlp_norm, layer.attention_norm, residual_scale) for layer in self.layers]
        # The norm after a layer is the one that the next layer, or the head, begins with.
        next_norms = [*(layer.input_norm for layer in self.layers[1:]), final_norm]
        self._mlp_joins = [
            Join(norm, layer.output_norm, residual_scale) for layer, norm in zip(self.layers, next_norms, strict=True)
        ]
        # Weights that a kernel may ask for ahead: of a layer's attention, and of its feed-forward sublayer.
        self._attention_weights = [layer.attention.linears[0] for layer in self.layers] + [None]
        self._mlp_weights = [layer.mlp.linears[0] for layer in self.layers]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, experts included."""
        linears = (one for layer in self.layers for one in (*layer.attention.linears, layer.output, *layer.mlp.linears))
        experts = (layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MixtureOfExperts))
        return sum(one.nbytes for one in linears) + sum(one.nbytes for one in experts)

    def keep_layers(self, count: int) -> None:
        """Drops the layers from `count` on; what comes after the norm means nothing any more."""
        del self.layers[count:]

    def angles(self, position_ids: Tensor, dtype: torch.dtype) -> dict[Rope, Angles]:
        """Of positions int64 [T], once for every kind of rotation."""
        return {rope: Angles.of(position_ids, rope, dtype) for rope in self._ropes}

    def __call__(
        self,
        hidden: Tensor,
        angles: dict[Rope, Angles],
        backend: AttentionBackend | MlaBackend,
        caches: Sequence[Any],
        plans: Sequence[Any],
        taps: Sequence[int] = (),
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs packed rows through all layers.

        Args:
            hidden: [T, H], embeddings.
            angles: of the rows.
            backend: attention over the caches.
            caches, plans: one per layer, the plans of `backend`.
            taps: layers whose raw outputs are wanted.
            keep: rows of [T, ...] that go on after the last attention, since nothing sees the others any more; None for all.

        Returns:
            [T or rows kept, H] after the final norm, and the raw outputs [T, H] of the layers in `taps`.
        """
        ops, tapped, shared, residual = self.ops, dict[int, Tensor](), dict[str, Tensor](), hidden
        first = self.layers[0]
        normed = hidden if first.input_norm is None else ops.norm(hidden, first.input_norm, self._attention_weights[0])
        for index, layer in enumerate(self.layers):
            rows = Rows(backend, caches[index], plans[index], angles, shared)
            attended = layer.attention(ops, normed, rows, layer.output)
            following = self._attention_weights[index + 1]
            if keep is not None and following is None:
                attended, residual = keep(attended), keep(residual)
            join = self._attention_joins[index]
            normed, residual = ops.project_add(layer.output, attended, residual, join, self._mlp_weights[index])
            normed, residual = layer.mlp(ops, normed, residual, self._mlp_joins[index], following)
            if index in taps:
                tapped[index] = residual
        return normed, [tapped[index] for index in taps]
