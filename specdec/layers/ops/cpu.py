"""`specdec.layers.ops.ops.Ops` on a CPU in bfloat16, by our own C++: one call between products."""

import ctypes
from ctypes import byref
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.torch_ref.fa import TorchRefBackend, TorchRefPlan
from specdec.kernels.native import Attention
from specdec.kv_cache import LayerCache
from specdec.layers.linear import Linear
from specdec.layers.ops.activation import activate
from specdec.layers.ops.norm import Norm
from specdec.layers.ops.ops import Heads, Join, TorchOps
from specdec.layers.rotary.rotary import Angles

LANES = 16
"""Widths have to be multiples of this."""
MOST_DIM = 256


class CpuOps(TorchOps):
    """`Ops` in C++ where it has what is asked for, otherwise in plain torch.

    A row's bits do not depend on other rows. Attention is computed in float32, in the order of the
    keys; plain torch computes that of prompts.

    Args:
        library: see `specdec.kernels.native`.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def norm(self, x: Tensor, norm: Norm, ahead: Linear | None = None) -> Tensor:
        return self._normed(x, norm)

    def gated(self, linear: Linear, x: Tensor, activation: str, ahead: Linear) -> Tensor:
        width = linear.out_features // 2
        if activation != "silu" or width % LANES:
            return super().gated(linear, x, activation, ahead)
        joined = linear(x)
        if not _plain(joined):
            return activate(joined, activation)
        out = joined.new_empty(len(joined), width)
        threads = torch.get_num_threads()
        self._library.gate_rows(joined.data_ptr(), len(out), width, out.data_ptr(), threads)
        return out

    def attend(
        self,
        backend: AttentionBackend,
        qkv: Tensor,
        heads: Heads,
        angles: Angles | None,
        cache: LayerCache,
        plan: Any,
        ahead: Linear,
    ) -> Tensor:
        spec = backend.spec
        suits = _suits(heads, angles, qkv)
        suits &= qkv.shape[1] == spec.num_heads + 2 * spec.num_kv_heads
        call = _call(plan, backend) if suits and isinstance(backend, TorchRefBackend) else None
        if call is None:
            return super().attend(backend, qkv, heads, angles, cache, plan, ahead)
        qkv = qkv.contiguous()  # it may be columns of a product that has gates, too
        out = qkv.new_empty(len(qkv), spec.num_heads * spec.head_dim)
        call.qkv, call.out, call.scale = qkv.data_ptr(), out.data_ptr(), heads.scale
        call.keys, call.values = cache.key.data_ptr(), cache.value.data_ptr()
        call.cos = call.sin = call.query_norm = call.key_norm = None
        if heads.query_norm is not None and heads.key_norm is not None:
            call.epsilon = heads.query_norm.epsilon
            call.query_norm = heads.query_norm.weight.data_ptr()
            call.key_norm = heads.key_norm.weight.data_ptr()
        if angles is not None:
            call.cos, call.sin = angles.cos.data_ptr(), angles.sin.data_ptr()
        self._library.attend(byref(call))
        return out

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


def _suits(heads: Heads, angles: Angles | None, qkv: Tensor) -> bool:
    """Whether heads meet without window, softcap and sinks; norms are of queries and keys alike."""
    if qkv.dtype != torch.bfloat16 or (angles is not None and not _plain(angles.cos)):
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
    if metadata.query_lens is not None or spec.head_dim % LANES or spec.head_dim > MOST_DIM:
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
