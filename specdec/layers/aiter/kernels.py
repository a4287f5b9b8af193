"""AITER's kernels for what lies between the products of a decoder layer: norms, gated activations,
RoPE with the cache write.

Norms and activations are HIP: computed in float32, each result written once. On gfx942 a bfloat16
is cut off there, where torch rounds, unless AITER is built with OPUS_FP32_to_BF16_DEFAULT=0, which
norms heed; on gfx950 clang 20 rounds. RoPE is Triton and rounds.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import torch
from torch import Tensor

from specdec.kernels.aiter import Function, takes
from specdec.kv_cache import LayerCache

WIDEST_NORM = 8192
"""Numbers of a row; for longer ones AITER has other kernels."""

VECTOR = 8
"""Numbers that these kernels load at a time: a row of another multiple would not begin where a load
may.
"""


@dataclass(frozen=True)
class AiterLayers:
    """Functions of a decoder layer."""

    version: tuple[int, ...]
    rmsnorm2d_fwd: Annotated[Function, "aiter", "input weight epsilon"]
    rmsnorm2d_fwd_with_add: Annotated[
        Function, "aiter", "out input residual_in residual_out weight epsilon"
    ]
    silu_and_mul: Annotated[Function, "aiter", "out input"]
    gelu_tanh_and_mul: Annotated[Function, "aiter", "out input"]
    fused_qk_rope_reshape_and_cache: Annotated[
        Function,
        "aiter.ops.triton.fusions.fused_kv_cache",
        "q k v key_cache value_cache slot_mapping pos cos sin k_scale v_scale is_neox flash_layout"
        " output_zeros",
    ]

    @cached_property
    def rope_options(self) -> dict[str, bool]:
        """`upcast_operand`, where the rotation can be told to compute in float32."""
        has = takes(self, "fused_qk_rope_reshape_and_cache", "upcast_operand", since=(0, 1, 16))
        return {"upcast_operand": True} if has else {}

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root mean square norm of rows [T, H], weighted before it is written: `x`, `weight` in one
        type, dense.
        """
        normed: Tensor = self.rmsnorm2d_fwd(input=x, weight=weight, epsilon=epsilon)
        return normed

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The norm of the sum of rows [T, H], taken before the sum is written, and the sum."""
        normed, added = torch.empty_like(residual), torch.empty_like(residual)
        self.rmsnorm2d_fwd_with_add(
            out=normed,
            input=x,
            residual_in=residual,
            residual_out=added,
            weight=weight,
            epsilon=epsilon,
        )
        return normed, added

    def has_activation(self, activation: str) -> bool:
        """Whether `gated` has it."""
        return activation in self._gated

    def gated(self, joined: Tensor, activation: str) -> Tensor:
        """The gated activation [T, width] of dense rows [T, 2 * width], gate first."""
        out = joined.new_empty(len(joined), joined.shape[1] // 2)
        self._gated[activation](out=out, input=joined)
        return out

    def rotate_and_store(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
        row_index: Tensor,
        cos: Tensor,
        sin: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Rotates the halves of heads against each other and writes keys and values to the cache.

        Args:
            query: [T, num_heads, head_dim], of any strides; head_dim is a power of two.
            key, value: [T, num_kv_heads, head_dim], likewise.
            cache: views of the plain or of the shuffled layout.
            slot_mapping: int64 [T].
            row_index: int64 [T], 0, 1, ...: AITER looks angles up by position, and here every row
                has its own.
            cos, sin: [T, head_dim / 2], with equal strides.

        Returns:
            The rotated query and the rotated key, contiguous.
        """
        query, key, *_ = self.fused_qk_rope_reshape_and_cache(
            q=query,
            k=key,
            v=value,
            key_cache=cache.key,
            value_cache=cache.value,
            slot_mapping=slot_mapping,
            pos=row_index,
            cos=cos,
            sin=sin,
            k_scale=None,
            v_scale=None,
            is_neox=True,
            flash_layout=cache.key.ndim == 4,
            output_zeros=False,
            **self.rope_options,
        )
        return query, key

    @cached_property
    def _gated(self) -> dict[str, Function]:
        return {"silu": self.silu_and_mul, "gelu_tanh": self.gelu_tanh_and_mul}
