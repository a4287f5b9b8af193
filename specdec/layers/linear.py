"""Linear layers: one interface, behind which weights differ in how they are stored and by which
kernel they are read.
"""

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TypedDict, Unpack

import torch
from torch import Tensor
from torch.nn import functional as F

LONE_ROW_INPUTS = 1024
"""oneDNN adds up more inputs than this in another order for one row than for several. One row is
then run as two, so that a token decoded alone has the same bits as the same token verified among
drafts. Of fewer inputs only some CPUs round it alike; there a second row would cost more than it is
worth."""


class FewRows(TypedDict, total=False):
    """Options of `Linear.few_rows`, as `specdec.layers.triton_linear.few_rows` has them."""

    activation: str | None
    may_split: bool
    prefetch: Tensor | None


class Linear(ABC):
    """`x W^T + b`, and optionally a residual added in the same pass.

    Attributes:
        in_features, out_features: widths of a row before and after.
        bias: [out], or None.
        dtype: of rows before and after.
    """

    in_features: int
    out_features: int
    bias: Tensor | None
    dtype: torch.dtype

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of the weight that a product with few rows reads."""

    @abstractmethod
    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., out] from `x` [..., in] and, when there is one, `residual` [..., out]."""

    @property
    def prefetchable(self) -> Tensor | None:
        """What a kernel before this product may ask the memory for; see
        `specdec.kernels.triton_prefetch`.
        """
        return None

    def few_rows(self, x: Tensor, **how: Unpack[FewRows]) -> Tensor | None:
        """The product of few rows by our own kernel, see `specdec.layers.triton_linear.few_rows`;
        None where there is none.
        """
        return None


class DenseLinear(Linear):
    """A weight [out, in] as it is."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias, self.dtype = weight, bias, weight.dtype
        self.out_features, self.in_features = weight.shape

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is None or x.ndim != 2:
            out = F.linear(x, self.weight, self.bias)
            return out if residual is None else out + residual
        out = torch.addmm(residual, x, self.weight.t())
        return out if self.bias is None else out.add_(self.bias)

    @cached_property
    def prefetchable(self) -> Tensor | None:
        from specdec.kernels.triton_prefetch import worth_prefetching  # it imports Triton

        return self.weight if worth_prefetching(self.weight) else None

    def few_rows(self, x: Tensor, **how: Unpack[FewRows]) -> Tensor | None:
        from specdec.layers.triton_linear import few_rows  # it imports Triton

        return few_rows(x, self.weight, self.bias, **how)


class BlockedLinear(Linear):
    """A bfloat16 weight on a CPU, in oneDNN's blocked layout.

    Otherwise every call would rearrange it, which for a few rows costs more than the product. The
    result is the same to the bit. Rows get gradients, the weight none.

    Args:
        weight: [out, in]; it may be released once the object exists.
        bias: [out], or None.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias, self.dtype = bias, weight.dtype
        self._blocks = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16)

    @property
    def nbytes(self) -> int:
        return self._blocks.numel() * self._blocks.element_size()

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:  # which oneDNN's product does not tell
            out = F.linear(x, self._blocks.to_dense(), self.bias)
            return out if residual is None else out + residual
        if x.ndim == 2 and x.shape[0] == 1 and self.in_features > LONE_ROW_INPUTS:
            return self._multiply(_twice(x), None if residual is None else _twice(residual))[:1]
        return self._multiply(x, residual)

    def _multiply(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            multiply = torch.ops.mkldnn._linear_pointwise.default
            return multiply(x, self._blocks, self.bias, "none", [], "")
        multiply = torch.ops.mkldnn._linear_pointwise.binary
        return multiply(x, residual, self._blocks, self.bias, "add")


def can_block(weight: Tensor) -> bool:
    """Whether this machine has a blocked layout for `weight`: bfloat16 on a CPU that multiplies it,
    with oneDNN in the build.
    """
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def _twice(row: Tensor) -> Tensor:
    return torch.cat([row, row])
