"""A linear layer whose weight stays in 8 or 4 bits."""

from functools import cached_property
from typing import Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.layers.linear import FewRows, Linear
from specdec.layers.packed.check import kernels_take
from specdec.layers.packed.weight import PackedWeight

SLICE_OUTPUTS = 4096
"""Outputs whose weights exist as numbers at a time, where there are no kernels."""


class PackedLinear(Linear):
    """A weight of few bits, of which a product makes numbers where it needs them: our kernels in
    registers, see `specdec.layers.packed.triton_packed`. Without them, and in float32, it makes
    `SLICE_OUTPUTS` outputs at a time in memory.

    Args:
        weight: [out, in]; it may be released once the object exists, which keeps another
            arrangement of it.
        bias: [out], or None.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.dtype = weight.arranged(), bias, weight.dtype
        self.out_features, self.in_features = weight.out_features, weight.in_features

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._has_kernels and x.dtype == self.dtype:
            from specdec.layers.packed.triton_packed import product  # it imports Triton

            out = product(rows, self.weight, self.bias)
        else:
            starts = range(0, self.out_features, SLICE_OUTPUTS)
            slices = (
                self.weight.rows(start, start + SLICE_OUTPUTS).dequantized(x.dtype)
                for start in starts
            )
            out = torch.cat([F.linear(rows, numbers) for numbers in slices], dim=-1)
            out = out if self.bias is None else out + self.bias
        out = out.view(*x.shape[:-1], self.out_features)
        return out if residual is None else out + residual

    @cached_property
    def prefetchable(self) -> Tensor | None:
        if not self._has_kernels:
            return None
        # it imports Triton
        from specdec.kernels.triton_prefetch import beginning, worth_prefetching

        # Products of half-byte codes compute about as long as they read, so a large weight's
        # beginning is worth it, too.
        codes = beginning(self.weight.codes) if self.weight.halves else self.weight.codes
        return codes if worth_prefetching(codes) else None

    def few_rows(self, x: Tensor, **how: Unpack[FewRows]) -> Tensor | None:
        if not self._has_kernels:
            return None
        from specdec.layers.packed.triton_packed import few_rows  # it imports Triton

        return few_rows(x, self.weight, self.bias, **how)

    @cached_property
    def _has_kernels(self) -> bool:
        """Whether our kernels run here, are right, and take this weight."""
        return kernels_take(self.weight)
