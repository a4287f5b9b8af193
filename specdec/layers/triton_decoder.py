"""Decoder layers of the Llama family around Triton kernels: the matrix products, and five small launches between them.

    norm+residual | qkv product | norm+RoPE+cache write | attention (, merge) | output product
    norm+residual | gate and up product | SwiGLU | down product

For few rows the products are our own: SwiGLU is part of one then, the norm after one adds up its partial sums, and a kernel before
one asks for the weight that it will read. Nothing here reads a value on the host, so a forward can be captured in a graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import functional as F

from specdec.attention.backend import AttentionBackend
from specdec.kernels.linear import Linear
from specdec.kernels.triton_embedding import embed
from specdec.kernels.triton_fused import add_rms_norm, rms_norm, silu_mul
from specdec.kernels.triton_linear import MOST_ROWS, few_rows
from specdec.kernels.triton_prefetch import prefetchable_weight
from specdec.kv_cache import LayerCache
from specdec.layers.fused import embeds, multiplies_few_rows
from specdec.layers.triton_rotary import attend_rotated


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """Weights of one layer, with joined projections; H is the hidden width."""

    input_norm: Tensor  # [H]
    qkv: Linear  # to [num_heads + 2 * num_kv_heads] heads
    query_norm: Tensor | None  # [head_dim]
    key_norm: Tensor | None  # [head_dim]
    output: Linear
    mlp_norm: Tensor  # [H]
    gate_up: Linear  # to gate, then up
    down: Linear


class Hints(NamedTuple):
    """Weights of a layer to ask for before they are used; None for those that it does not pay to ask for."""

    qkv: Tensor | None = None
    output: Tensor | None = None
    gate_up: Tensor | None = None
    down: Tensor | None = None


class TritonDecoder:
    """A stack of layers and the norm after it.

    Args:
        layers: in order.
        final_norm: [H], weight of the norm after the last layer.
        epsilon: of every norm.
        attention: the backend, whose spec gives the shape of the heads.
    """

    def __init__(self, layers: Sequence[DecoderLayer], final_norm: Tensor, *, epsilon: float, attention: AttentionBackend) -> None:
        self._layers, self._epsilon, self._attention = list(layers), epsilon, attention
        device = attention.spec.device
        self._embeds, self._multiplies_few_rows = embeds(device), multiplies_few_rows(device, attention.spec.dtype)
        # The norm after a layer is the one that the next layer, or the head, begins with.
        self._next_norms = [layer.input_norm for layer in self._layers[1:]] + [final_norm]
        self._hints = [*map(_hints, self._layers), Hints()]

    def embed(self, token_ids: Tensor, table: Tensor) -> Tensor:
        """See `specdec.kernels.triton_embedding.embed`."""
        return embed(token_ids, table) if self._embeds else F.embedding(token_ids, table)

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        caches: Sequence[LayerCache],
        plans: Sequence[Any],
        windows: Sequence[int | None],
        taps: Sequence[int] = (),
        keep: Callable[[Tensor], Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Runs packed rows through all layers.

        Args:
            hidden: [T, H], embeddings.
            cos, sin: [T, head_dim / 2], of each row's position, with equal strides.
            caches, plans, windows: one per layer.
            taps: layers whose raw outputs are wanted.
            keep: rows of [T, ...] that go on after the last attention, since nothing sees the others any more; None for all.

        Returns:
            [T or rows kept, H] after the final norm, and the raw outputs [T, H] of the layers in `taps`.
        """
        tapped: dict[int, Tensor] = {}
        residual = hidden
        hints = self._hints if len(hidden) <= MOST_ROWS else [Hints()] * len(self._hints)
        normed = rms_norm(hidden, self._layers[0].input_norm, self._epsilon, ahead=hints[0].qkv)
        for index, (layer, next_norm) in enumerate(zip(self._layers, self._next_norms, strict=True)):
            ahead, next_qkv = hints[index], hints[index + 1].qkv
            attended = self._attend(layer, normed, cos, sin, caches[index], plans[index], windows[index], ahead.output)
            if keep is not None and layer is self._layers[-1]:
                attended, residual = keep(attended), keep(residual)
            product = self._product(layer.output, attended, may_split=True)
            normed, residual = add_rms_norm(product, residual, layer.mlp_norm, self._epsilon, ahead=ahead.gate_up)
            product = self._product(layer.down, self._gated(layer.gate_up, normed, ahead.down), may_split=True)
            normed, residual = add_rms_norm(product, residual, next_norm, self._epsilon, ahead=next_qkv)
            if index in taps:
                tapped[index] = residual
        return normed, [tapped[index] for index in taps]

    def _attend(
        self,
        layer: DecoderLayer,
        normed: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        plan: Any,
        window: int | None,
        ahead: Tensor | None,
    ) -> Tensor:
        """[T, num_heads * head_dim]; meanwhile hints about `ahead` are sent."""
        spec = self._attention.spec
        qkv = self._product(layer.qkv, normed).view(len(normed), -1, spec.head_dim)
        query, key, value = qkv.split_with_sizes([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], dim=1)
        return attend_rotated(
            self._attention,
            query,
            key,
            value,
            cache,
            plan,
            window=window,
            cos=cos,
            sin=sin,
            query_norm=layer.query_norm,
            key_norm=layer.key_norm,
            epsilon=self._epsilon,
            ahead=ahead,
        ).flatten(1)

    def _product(self, linear: Linear, x: Tensor, *, may_split: bool = False) -> Tensor:
        """[rows, out], or with `may_split` perhaps float32 [parts, rows, out]."""
        product = few_rows(x, linear, may_split=may_split) if self._multiplies_few_rows else None
        return linear(x) if product is None else product

    def _gated(self, linear: Linear, x: Tensor, ahead: Tensor | None) -> Tensor:
        """SwiGLU [rows, out / 2] of a joined product; meanwhile hints about `ahead` are sent."""
        product = few_rows(x, linear, gated=True, ahead=ahead) if self._multiplies_few_rows else None
        return silu_mul(linear(x)) if product is None else product


def _hints(layer: DecoderLayer) -> Hints:
    qkv, output, gate_up, down = map(prefetchable_weight, (layer.qkv, layer.output, layer.gate_up, layer.down))
    # Down is asked for while the product before it runs, which leaves the memory idle only if its own weight was asked for.
    return Hints(qkv, output, gate_up, down if gate_up is not None else None)
