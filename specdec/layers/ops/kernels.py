"""`specdec.layers.ops.ops.Ops` around Triton kernels: for a layer the matrix products, and five
small launches between them.

    norm+residual | qkv product | norm+RoPE+cache write | attention (, merge) | output product
    norm+residual | gate and up product | activation | down product

For few rows the products are our own: the activation is part of one then, the norm after one adds
up its partial sums, and a kernel before one asks for the weight that it will read. Nothing here
reads a value on the host, so a forward can be captured in a graph.
"""

from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.triton.fa import TritonFaBackend
from specdec.kernels.triton_norm import add_rms_norm, rms_norm
from specdec.kernels.triton_rope import rope, rope_store, rotated_rows
from specdec.kv_cache import LayerCache, StateCache
from specdec.layers.experts import experts
from specdec.layers.experts.joined import JoinedExperts
from specdec.layers.experts.router import Router
from specdec.layers.experts.routing import PLAIN, Experts
from specdec.layers.experts.triton_experts import FEW_ROWS, unsupported_reasons
from specdec.layers.experts.triton_experts import experts as mix
from specdec.layers.experts.triton_router import route
from specdec.layers.linear import Linear
from specdec.layers.ops import fused
from specdec.layers.ops.grouped_convolution import GroupedConvolution, Side
from specdec.layers.ops.norm import GroupNorm, Norm
from specdec.layers.ops.ops import AttentionInputs, Join, Ops
from specdec.layers.ops.triton_activation import gated
from specdec.layers.ops.triton_embedding import embed
from specdec.layers.ops.triton_gated_norm import gated_norm, sigmoid_gate
from specdec.layers.ops.triton_grouped_convolution import mix_rows
from specdec.layers.recurrence import check as recurrence_check
from specdec.layers.recurrence.recurrence import Recurrence, RecurrentRows
from specdec.layers.recurrence.triton_recurrence import recur
from specdec.layers.recurrence.triton_short_convolution import convolve
from specdec.layers.rotary.rotary import Angles
from specdec.layers.sharded import SummedLinear
from specdec.layers.triton_linear import MAX_ROWS
from specdec.parallel.collectives import summed
from specdec.parallel.group import Group
from specdec.parallel.shared_rows import MAX_ROWS as MAX_SUMMED
from specdec.parallel.shared_rows import SharedRows


class TritonOps(Ops):
    """`Ops` in Triton, and in plain torch where a kernel does not pass its check or gains nothing.

    Args:
        mixes: there will be experts, which are then chosen and multiplied with by our kernels, if
            those pass their check.
        recurs: the same of recurrent layers.
        convolves: the same of convolutions around sublayers.
        ranks: where few rows are added up over the ranks of a group, in the kernel that follows;
            None adds them before.
    """

    def __init__(
        self,
        device: torch.device,
        dtype: torch.dtype,
        *,
        mixes: bool = False,
        recurs: bool = False,
        convolves: bool = False,
        ranks: SharedRows | None = None,
    ) -> None:
        self._ranks = ranks
        self._embeds = fused.EMBEDDING.runs_on(device, dtype)
        self._multiplies_few_rows = fused.FEW_ROWS.runs_on(device, dtype)
        self._convolves = convolves and fused.GROUPED_CONVOLUTION.runs_on(device, dtype)
        self._mixes = mixes and experts.KERNEL.runs_on(device, dtype)
        self._recurs = recurs and recurrence_check.KERNEL.runs_on(device, dtype)
        # whether the kernels have these experts, by the object that they are
        self._suited: dict[int, bool] = {}

    def embed(self, token_ids: Tensor, table: Tensor, scale: float = 1.0) -> Tensor:
        look_up = embed if self._embeds else super().embed
        return look_up(token_ids, table, scale)

    def norm(self, x: Tensor, norm: Norm, prefetch: Linear | None = None) -> Tensor:
        return rms_norm(x, norm.weight, norm.epsilon, prefetch=_hint(prefetch, x))

    def project(self, linear: Linear, x: Tensor) -> Tensor:
        product = linear.few_rows(x) if self._multiplies_few_rows else None
        return linear(x) if product is None else product

    def gated(self, linear: Linear, x: Tensor, activation: str, prefetch: Linear) -> Tensor:
        # The next weight is asked for while this product runs, which leaves the memory idle only if
        # its own was asked for.
        hint = None if linear.prefetchable is None else _hint(prefetch, x)
        if activation in PLAIN:  # which is not part of a product
            return self.activate(self.project(linear, x), activation)
        product = None
        if self._multiplies_few_rows:
            product = linear.few_rows(x, activation=activation, prefetch=hint)
        return self.activate(linear(x), activation) if product is None else product

    def activate(self, joined: Tensor, activation: str) -> Tensor:
        """The activation [T, width] of a product [T, 2 * width], or without a gate [T, width], that
        has been computed.
        """
        return gated(joined, activation)

    def add(
        self,
        x: Tensor,
        residual: Tensor,
        join: Join,
        prefetch: Linear | None = None,
        group: Group | None = None,
    ) -> tuple[Tensor, Tensor]:
        ranks = self._ranks if group is not None and len(residual) <= MAX_SUMMED else None
        if group is not None and ranks is None:
            x = summed(x, group, residual.dtype)
        norm, after = join.norm, join.after
        same = norm is None or after is None or norm.epsilon == after.epsilon
        assert same, "the kernel takes one epsilon"
        some = norm or after
        return add_rms_norm(
            x,
            residual,
            None if norm is None else norm.weight,
            0.0 if some is None else some.epsilon,
            after=None if after is None else after.weight,
            scale=join.scale,
            factor=join.factor,
            prefetch=_hint(prefetch, residual),
            ranks=ranks,
        )

    def project_add(
        self, layer: Linear, x: Tensor, residual: Tensor, join: Join, prefetch: Linear | None = None
    ) -> tuple[Tensor, Tensor]:
        group = None
        if isinstance(layer, SummedLinear) and self._ranks is not None and len(x) <= MAX_SUMMED:
            group, layer = layer.group, layer.part
        product = layer.few_rows(x, may_split=True) if self._multiplies_few_rows else None
        return self.add(layer(x) if product is None else product, residual, join, prefetch, group)

    def route(self, router: Router, hidden: Tensor) -> tuple[Tensor, Tensor]:
        if router.aiter is not None or not self._mixes:
            return super().route(router, hidden)
        return route(self._logits(router.gate, hidden), router.routing, router.bias)

    def joined_experts(self, joined: JoinedExperts, hidden: Tensor) -> Tensor | None:
        # many rows are better multiplied with what is shared by themselves
        if not self._mixes or len(hidden) > FEW_ROWS:
            return None
        logits, shared = self._logits(joined.gate, hidden), joined.shared
        weights, ids = route(
            logits, joined.routing, joined.bias, shared=shared.count, shared_gate=joined.gated
        )
        return mix(hidden, weights, ids, joined.experts, shared)

    def _logits(self, gate: Linear, hidden: Tensor) -> Tensor:
        """Router logits of rows [T, H], for experts; perhaps as partial sums."""
        rows = hidden.to(gate.dtype)
        logits = gate.few_rows(rows, may_split=True) if self._multiplies_few_rows else None
        return gate(rows) if logits is None else logits

    def experts(self, experts: Experts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        if id(experts) not in self._suited:
            suited = self._mixes and not unsupported_reasons(experts, ids.shape[1])
            self._suited[id(experts)] = suited
        if self._suited[id(experts)]:
            return mix(x, weights, ids.int(), experts)
        return super().experts(experts, x, weights, ids.long())

    def attend(self, qkv: Tensor, inputs: AttentionInputs) -> Tensor:
        backend, heads, angles, cache, plan, prefetch = inputs
        spec = backend.spec
        if qkv.shape[1] == spec.num_heads:  # the cache holds keys and values
            rotated = rope(qkv, **_rotation(angles, heads.query_norm, None))
            return backend.read(rotated, cache, plan, **heads.attention_options).flatten(1)
        query, key = qkv.split_with_sizes([spec.num_heads, qkv.shape[1] - spec.num_heads], dim=1)
        key, value = key[:, : spec.num_kv_heads], key[:, -spec.num_kv_heads :]
        rotation = _rotation(angles, heads.query_norm, heads.key_norm)
        rotation["prefetch"] = _hint(prefetch, qkv)
        if heads.value_norm is not None:
            rotation["value_norm"] = heads.value_norm.weight
        if isinstance(backend, TritonFaBackend):  # whose cache is ours to write
            rotated = rope_store(query, key, value, cache, plan.slot_mapping, **rotation)
            return backend.read(rotated, cache, plan, **heads.attention_options).flatten(1)
        turned = rotated_rows(query, key, value, **rotation)
        return backend.run(*turned, cache, plan, **heads.attention_options).flatten(1)

    def write(
        self,
        backend: AttentionBackend,
        key: Tensor,
        value: Tensor,
        key_norm: Norm | None,
        angles: Angles,
        cache: LayerCache,
        slot_mapping: Tensor,
    ) -> None:
        rotation = _rotation(angles, None, key_norm)
        if isinstance(backend, TritonFaBackend):
            rope_store(None, key, value, cache, slot_mapping, **rotation)
        else:
            backend.write(cache, *rotated_rows(None, key, value, **rotation)[1:], slot_mapping)

    def gate(self, x: Tensor, gate: Tensor) -> Tensor:
        return sigmoid_gate(x, gate)

    def recur(
        self, x: Tensor, recurrence: Recurrence, cache: StateCache, rows: RecurrentRows
    ) -> Tensor:
        return (recur if self._recurs else super().recur)(x, recurrence, cache, rows)

    def convolve(
        self, x: Tensor, kernel: Tensor, bias: Tensor | None, cache: StateCache, rows: RecurrentRows
    ) -> Tensor:
        return (convolve if self._recurs else super().convolve)(x, kernel, bias, cache, rows)

    def mix_rows(
        self, x: Tensor, dynamic: Tensor, convolution: GroupedConvolution, side: Side
    ) -> Tensor:
        if not self._convolves:
            return super().mix_rows(x, dynamic, convolution, side)
        return mix_rows(x, dynamic, convolution.base, convolution.width, side)

    def gated_norm(self, x: Tensor, gate: Tensor, norm: GroupNorm) -> Tensor:
        return gated_norm(x, gate, **norm._asdict())


def _rotation(
    angles: Angles | None, query_norm: Norm | None, key_norm: Norm | None
) -> dict[str, Any]:
    """Options of `rope_store`."""
    options: dict[str, Any] = {} if angles is None else {"cos": angles.cos, "sin": angles.sin}
    for name, norm in (("query_norm", query_norm), ("key_norm", key_norm)):
        if norm is not None:
            options |= {name: norm.weight, "epsilon": norm.epsilon}
    return options


def _hint(prefetch: Linear | None, rows: Tensor) -> Tensor | None:
    """The weight to ask for; none before a product of many rows, which has time enough."""
    return prefetch.prefetchable if prefetch is not None and len(rows) <= MAX_ROWS else None
