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
from specdec.kernels.looking import Looking
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


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A layer among others.

    Attributes:
        attention_join, mlp_join, gate_join: how what its sublayers put out joins the stream.
        second, following: weights that a kernel may ask for ahead: of what comes after its
            attention, and of the next layer's first sublayer; None behind the last layer.
    """

    layer: DecoderLayer
    attention_join: Join
    mlp_join: Join
    gate_join: Join
    second: Linear | None
    following: Linear | None


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
        next_weights = [*(layer.linears[0] for layer in self.layers[1:]), None]
        self._places = list[_Place]()
        for layer, norm, following in zip(self.layers, next_norms, next_weights, strict=True):
            within = norm if layer.mlp is None else layer.mlp_norm
            after = None if layer.input_gate is None else layer.input_gate.norm
            last = Join(norm, after or layer.output_norm, residual_scale, layer.factor)
            before = Join(None, layer.output_norm, residual_scale)
            place = _Place(
                layer,
                Join(within, layer.attention_norm, residual_scale),
                last if after is None else before,
                last,
                following if layer.mlp is None else layer.mlp.linears[0],
                following,
            )
            self._places.append(place)

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
        del self.layers[count:], self._places[count:]

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
            normed = ops.norm(hidden, first, self._places[0].layer.linears[0])
        run = _run if Looking.now is None else Looking.now.forward(_run)
        given = zip(self._places, backends, caches, plans, strict=False)
        for index, (place, backend, cache, plan) in enumerate(given):
            drops = keep if place.following is None else None
            own = None if inputs is None else inputs[:, index]
            layer = ops, place, backend, cache
            normed, residual, shared, kept = run(
                layer, plan, angles, shared, normed, residual, drops, own
            )
            keep = None if kept else keep
            if index in taps:
                tapped[index] = residual
        return normed if keep is None else keep(normed), [tapped[index] for index in taps]


def _run(
    lasting: tuple[Ops, _Place, AttentionBackend | MlaBackend, Any],
    plan: Any,
    angles: dict[Rope, Angles],
    shared: dict[str, Tensor],
    normed: Tensor,
    residual: Tensor,
    keep: Callable[[Tensor], Tensor] | None,
    inputs: Tensor | None,
) -> tuple[Tensor, Tensor, dict[str, Tensor], bool]:
    """One layer: what the next is given, the stream, what layers leave for others, and whether only
    the rows of `keep` are left.
    """
    ops, place, backend, cache = lasting
    layer, following, kept = place.layer, place.following, False
    if layer.attention is not None and layer.output is not None:
        rows = Rows(backend, cache, plan, angles, shared)
        join, second = place.attention_join, place.second
        if (convolution := layer.convolution) is not None:
            dynamic = ops.project(convolution.projection, normed)
            given = ops.mix_rows(normed, dynamic, convolution, 0)
            attended = layer.attention(ops, given, rows, layer.output)
            output = ops.project(layer.output, attended)
            output = ops.mix_rows(output, dynamic, convolution, 1)
            normed, residual = ops.add(output, residual, join, second)
        else:
            attended = layer.attention(ops, normed, rows, layer.output)
            if keep is not None:
                attended, residual, kept = keep(attended), keep(residual), True
            normed, residual = ops.project_add(layer.output, attended, residual, join, second)
    if layer.mlp is not None:
        normed, residual = layer.mlp(ops, normed, residual, place.mlp_join, following)
    if layer.input_gate is not None and inputs is not None:
        normed, residual = layer.input_gate(ops, residual, inputs, place.gate_join, following)
    return normed, residual, shared, kept
