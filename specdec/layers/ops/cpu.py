"""`specdec.layers.ops.ops.Ops` on a CPU in bfloat16, by our own C++: one call between products."""

import ctypes
from ctypes import byref

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.torch_ref.fa import TorchRefBackend, TorchRefPlan
from specdec.kernels.native import Attention
from specdec.kv_cache import LayerCache
from specdec.layers.linear import Linear
from specdec.layers.ops.activation import activate
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import AttentionInputs, Heads, Join, Ops
from specdec.layers.rotary.rotary import Angles

LANES = 16
"""Widths have to be multiples of this."""
MAX_DIM = 256


class CpuOps(Ops):
    """`Ops` in C++ where it has what is asked for, otherwise in plain torch.

    A row's bits do not depend on other rows. Attention is computed in float32, in the order of the
    keys; plain torch computes that of prompts.

    Args:
        library: see `specdec.kernels.native`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def norm(self, x: Tensor, norm: Norm, prefetch: Linear | None = None) -> Tensor:
        return self._normed(x, norm)

    def gated(self, linear: Linear, x: Tensor, activation: str, prefetch: Linear) -> Tensor:
        width = linear.out_features // 2
        if activation != "silu" or width % LANES:
            return super().gated(linear, x, activation, prefetch)
        joined = linear(x)
        if not _plain(joined):
            return activate(joined, activation)
        out = joined.new_empty(len(joined), width)
        threads = torch.get_num_threads()
        self._library.gate_rows(joined.data_ptr(), len(out), width, out.data_ptr(), threads)
        return out

    def attend(self, qkv: Tensor, inputs: AttentionInputs) -> Tensor:
        backend, heads, angles, cache, plan, _ = inputs
        spec = backend.spec
        suits = _suits(heads, angles, qkv)
        suits &= qkv.shape[1] == spec.num_heads + 2 * spec.num_kv_heads
        call = _call(plan, backend) if suits and isinstance(backend, TorchRefBackend) else None
        if call is None:
            return super().attend(qkv, inputs)
        out = qkv.new_empty(len(qkv), spec.num_heads * spec.head_dim)
        call.qkv, call.out, call.scale = qkv.data_ptr(), out.data_ptr(), heads.scale
        call.stride = qkv.stride(0)  # it may be columns of a product that has gates, too
        call.query_norm = None if heads.query_norm is None else heads.query_norm.weight.data_ptr()
        _fill(call, heads.key_norm, angles, cache)
        self._library.attend(byref(call))
        return out

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
        count, kv_heads, dim = key.shape
        behind = value.data_ptr() - key.data_ptr() == 2 * kv_heads * dim
        joined = behind and key.stride() == value.stride() == (key.stride(0), dim, 1)
        suits = joined and _suits(Heads(1.0, query_norm=key_norm, key_norm=key_norm), angles, key)
        suits &= isinstance(backend, TorchRefBackend) and dim % LANES == 0 and dim <= MAX_DIM
        if not suits:
            return super().write(backend, key, value, key_norm, angles, cache, slot_mapping)
        call = Attention(
            qkv=key.data_ptr(),
            slots=slot_mapping.data_ptr(),
            kv_heads=kv_heads,
            dim=dim,
            stride=key.stride(0),
        )
        _fill(call, key_norm, angles, cache)
        self._library.store(byref(call), count)
        return None

    def _next(self, residual: Tensor, join: Join) -> tuple[Tensor, Tensor]:
        return residual if join.norm is None else self._normed(residual, join.norm), residual

    def _normed(self, x: Tensor, norm: Norm) -> Tensor:
        if not x.dtype == norm.weight.dtype == torch.bfloat16 or x.ndim != 2:
            return super().norm(x, norm)
        if x.shape[1] % LANES or x.stride(1) != 1:
            return super().norm(x, norm)
        out = x.new_empty(x.shape)
        count, width = x.shape
        weight = norm.weight.data_ptr()
        given = (x.data_ptr(), x.stride(0), count, width, weight, norm.epsilon)
        self._library.norm_rows(*given, out.data_ptr())
        return out


def _plain(rows: Tensor) -> bool:
    """Whether rows are what the library reads: bfloat16 [T, width], one after another."""
    return rows.dtype == torch.bfloat16 and rows.ndim == 2 and rows.is_contiguous()


def _fill(call: Attention, norm: Norm | None, angles: Angles | None, cache: LayerCache) -> None:
    """What a call says of keys."""
    call.keys, call.values = cache.key.data_ptr(), cache.value.data_ptr()
    call.cos = None if angles is None else angles.cos.data_ptr()
    call.sin = None if angles is None else angles.sin.data_ptr()
    call.key_norm = None if norm is None else norm.weight.data_ptr()
    call.epsilon = 0.0 if norm is None else norm.epsilon


def _suits(heads: Heads, angles: Angles | None, qkv: Tensor) -> bool:
    """Whether heads meet without window, softcap and sinks; norms are of queries and keys alike."""
    if qkv.dtype != torch.bfloat16 or qkv.stride()[1:] != (qkv.shape[2], 1):
        return False
    if angles is not None and not _plain(angles.cos):
        return False
    query, key = heads.query_norm, heads.key_norm
    if heads[1:4] != (None, None, None) or heads.value_norm is not None:
        return False
    if query is None or key is None:
        return query is key
    return query.epsilon == key.epsilon and query.weight.dtype == key.weight.dtype == qkv.dtype


def _call(plan: TorchRefPlan, backend: TorchRefBackend) -> Attention | None:
    """The call for all layers of a forward; None for prompts, and heads that it does not take."""
    metadata, spec = plan.metadata, backend.spec
    if (
        metadata.query_lens is not None
        or metadata.ragged
        or spec.head_dim % LANES
        or spec.head_dim > MAX_DIM
    ):
        return None
    if plan.call is None:
        tree = metadata.tree
        plan.call = Attention(
            slots=metadata.slot_mapping.data_ptr(),
            ancestors=None if tree is None else tree.ancestors.data_ptr(),
            lengths=metadata.seq_lens.data_ptr(),
            blocks=metadata.block_table.data_ptr(),
            requests=metadata.num_reqs,
            width=metadata.max_query_len,
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            dim=spec.head_dim,
            num_blocks=metadata.block_table.stride(0),
            block_size=spec.block_size,
            causal=metadata.visibility != "full",
            threads=torch.get_num_threads(),
        )
    call: Attention = plan.call
    return call
