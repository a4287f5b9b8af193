"""A stack of decoder layers on the paged cache: the forward of targets and of drafters, whatever
their families.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.layers.attention import Attention, Rows
from specdec.layers.layer_inputs import InputGate
from specdec.layers.linear import Linear
from specdec.layers.mlp import FeedForward, MixtureOfExperts, MlpBesideExperts
from specdec.layers.ops.grouped_convolution import GroupedConvolution
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Join, Ops
from specdec.layers.rotary.rotary import Angles, Rope
from specdec.layers.shared_block import EMBEDDINGS


@dataclass(frozen=True, slots=True, eq=False)
class DecoderLayer:
    """One layer: attention, then a feed-forward sublayer, each of which joins the residual stream.
    One of them may be missing.

    Attributes:
        input_norm, mlp_norm: before attention and before the feed-forward sublayer; None for none.
        attention_norm, output_norm: of what they put out, before it joins the stream; None where
            there is none.
        output: projection of what attention gives.
        input_gate: a third sublayer, which adds what the layer has of the token itself; None where
            there is none.
        factor: [1], of the stream after the layer; None is 1.
        convolution: of what attention is given, and of what its projection puts out; None for none.
    """

    input_norm: Norm | None
    attention: Attention | None
    output: Linear | None
    mlp_norm: Norm | None
    mlp: FeedForward | None
    attention_norm: Norm | None = None
    output_norm: Norm | None = None
    input_gate: InputGate | None = None
    factor: Tensor | None = None
    convolution: GroupedConvolution | None = None

    @property
    def first_norm(self) -> Norm | None:
        """Before its first sublayer."""
        return self.mlp_norm if self.attention is None else self.input_norm

    @property
    def linears(self) -> tuple[Linear, ...]:
        """The layer's weights that every token reads, the first product's first."""
        convolution = () if self.convolution is None else (self.convolution.projection,)
        output = () if self.output is None else (self.output,)
        sublayers = (self.mlp, self.input_gate)
        attention = () if self.attention is None else self.attention.linears
        rest = [linear for one in sublayers if one is not None for linear in one.linears]
        return *convolution, *attention, *output, *rest


class Decoder:
    """Layers, and the norm after them.

    Args:
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
        attentions = [layer.attention for layer in self.layers if layer.attention is not None]
        self._ropes = {attention.rope for attention in attentions if attention.rope is not None}
        # The norm after a layer is the one that the next layer, or the head, begins with.
        next_norms = [*(layer.first_norm for layer in self.layers[1:]), final_norm]
        self._attention_joins, self._mlp_joins = list[Join](), list[Join]()
        self._gate_joins = list[Join]()
        for layer, norm in zip(self.layers, next_norms, strict=True):
            within = norm if layer.mlp is None else layer.mlp_norm
            self._attention_joins.append(Join(within, layer.attention_norm, residual_scale))
            after = None if layer.input_gate is None else layer.input_gate.norm
            last = Join(norm, after or layer.output_norm, residual_scale, layer.factor)
            before = Join(None, layer.output_norm, residual_scale)
            self._mlp_joins.append(last if after is None else before)
            self._gate_joins.append(last)
        # Weights that a kernel may ask for ahead: of a layer's first sublayer, and of what comes
        # after its attention.
        self._first_weights = [layer.linears[0] for layer in self.layers] + [None]
        self._second_weights = [
            after if layer.mlp is None else layer.mlp.linears[0]
            for layer, after in zip(self.layers, self._first_weights[1:], strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of all weights, experts included."""
        linears = sum(one.nbytes for layer in self.layers for one in layer.linears)
        return linears + sum(mlp.experts.nbytes for mlp in self.mixtures)

    @property
    def mixtures(self) -> list[MixtureOfExperts | MlpBesideExperts]:
        """Feed-forward sublayers with experts."""
        kinds = MixtureOfExperts | MlpBesideExperts
        return [layer.mlp for layer in self.layers if isinstance(layer.mlp, kinds)]

    def keep_layers(self, count: int) -> None:
        """Drops the layers from `count` on; what comes after the norm means nothing any more."""
        del self.layers[count:]

    def angles(
        self, position_ids: Tensor, dtype: torch.dtype, rope_lens: Tensor | None = None
    ) -> dict[Rope, Angles]:
        """Angles of positions int64 [T], once for every kind of rotation; for `rope_lens` see
        `specdec.model.batch.ForwardInput`.
        """
        return {rope: Angles.of(position_ids, rope, dtype, rope_lens) for rope in self._ropes}

    def __call__(
        self,
        hidden: Tensor,
        angles: dict[Rope, Angles],
        backends: Sequence[AttentionBackend | MlaBackend],
        caches: Sequence[Any],
        plans: Sequence[Any],
        taps: Sequence[int] = (),
        keep: Callable[[Tensor], Tensor] | None = None,
        inputs: Tensor | None = None,
        embeddings: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs packed rows through all layers.

        Args:
            hidden: [T, H], what the first layer is given.
            backends: attention over the caches, one per layer.
            caches, plans: one per layer, the plans of its backend.
            taps: layers whose raw outputs are wanted; -1 is the embeddings.
            keep: rows of [T, ...] that are wanted; they alone go on after the last attention,
                unless a convolution after it sees others, too. None for all.
            inputs: [T, layers, P], for layers with an `input_gate`.
            embeddings: [T, H], for layers that see them, where they are not `hidden`.

        Returns:
            [T or rows kept, H] after the final norm, and raw outputs [T, H] of layers in `taps`.
        """
        ops, tapped, residual = self.ops, {-1: hidden}, hidden
        shared = {EMBEDDINGS: hidden if embeddings is None else embeddings}
        first, normed = self.layers[0].first_norm, hidden
        if first is not None:
            normed = ops.norm(hidden, first, self._first_weights[0])
        for index, layer in enumerate(self.layers):
            following = self._first_weights[index + 1]
            if layer.attention is not None and layer.output is not None:
                rows = Rows(backends[index], caches[index], plans[index], angles, shared)
                join, second = self._attention_joins[index], self._second_weights[index]
                if (convolution := layer.convolution) is not None:
                    dynamic = ops.project(convolution.projection, normed)
                    given = ops.mix_rows(normed, dynamic, convolution, 0)
                    attended = layer.attention(ops, given, rows, layer.output)
                    output = ops.project(layer.output, attended)
                    output = ops.mix_rows(output, dynamic, convolution, 1)
                    normed, residual = ops.add(output, residual, join, second)
                else:
                    attended = layer.attention(ops, normed, rows, layer.output)
                    if keep is not None and following is None:
                        attended, residual, keep = keep(attended), keep(residual), None
                    normed, residual = ops.project_add(
                        layer.output, attended, residual, join, second
                    )
            if layer.mlp is not None:
                join = self._mlp_joins[index]
                normed, residual = layer.mlp(ops, normed, residual, join, following)
            if layer.input_gate is not None and inputs is not None:
                normed, residual = layer.input_gate(
                    ops, residual, inputs[:, index], self._gate_joins[index], following
                )
            if index in taps:
                tapped[index] = residual
        return normed if keep is None else keep(normed), [tapped[index] for index in taps]
