"""Linear layers whose weight is laid out once for the kernel that will read it."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.device import uses_avx512

GROUP = 32
"""Inputs of a row that share a scale and a minimum in a four-bit weight."""

FEW_ROWS = 16
"""Most rows that read the four-bit weight: a token with its 15 drafts. It is a quarter of the bytes, but each row pays for turning
codes into numbers, so from 9 rows on the other form would be faster; but then a token scored among many drafts and the same token
decoded alone would see weights that were rounded differently."""

LONE_ROW_INPUTS = 1024
"""oneDNN adds up more inputs than this in another order for one row than for several. One row is then run as two, so that a token
decoded alone has the same bits as the same token verified among drafts. Of fewer inputs only some CPUs round it alike; there
a second row would cost more than it is worth."""


@dataclass(frozen=True, slots=True)
class FourBitWeight:
    """A weight as its checkpoint stores it: `scale * code + minimum`, in groups of 32 inputs, which is GGUF's Q4_1.

    Attributes:
        codes: uint8 [out, in / 2]; byte `j` holds the code of input `2j` in its low half, of input `2j + 1` in its high half.
        scale, minimum: [out, in / 32].
    """

    codes: Tensor
    scale: Tensor
    minimum: Tensor


class Linear:
    """`x W^T + b`, and optionally a residual added in the same pass.

    On a CPU in bfloat16 the weight is stored in oneDNN's blocked layout; otherwise every call would rearrange it, which for a few
    rows costs more than the product. The result is the same to the bit. Elsewhere the weight is used as it is.

    Where a blocked layout is used and the four-bit form of the weight is given, up to `FEW_ROWS` rows read that one instead. Its
    scale and the value of its middle code are rounded to bfloat16, which is about as near to the checkpoint as a bfloat16 weight;
    products and sums are in float32, rounded once, and a row gives the same bits whatever rows are beside it.

    Args:
        weight: [out, in]; it may be released once the object exists.
        bias: [out], or None.
        pack: use a blocked layout where there is one; it has no gradient.
        four_bit: what `weight` was made from, if anything.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True, four_bit: FourBitWeight | None = None
    ) -> None:
        self.packed = pack and can_pack(weight)
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16) if self.packed else weight
        self._four_bit = _pack_four_bit(four_bit) if four_bit is not None and self.packed and can_pack_four_bit(weight) else None

    @property
    def nbytes(self) -> int:
        """Bytes that a product with few rows reads."""
        parts = [self.weight] if self._four_bit is None else [*self._four_bit]
        return sum(part.numel() * part.element_size() for part in parts)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., out] from `x` [..., in] and, when there is one, `residual` [..., out]."""
        if self._four_bit is not None and x.ndim == 2 and x.shape[0] <= FEW_ROWS:
            codes, scales = self._four_bit
            out = torch._weight_int4pack_mm_for_cpu(x, codes, GROUP, scales)
            out = out if self.bias is None else out.add_(self.bias)
            return out if residual is None else out.add_(residual)
        if self.packed:
            if x.ndim == 2 and x.shape[0] == 1 and self.in_features > LONE_ROW_INPUTS:
                return self._blocked(_twice(x), None if residual is None else _twice(residual))[:1]
            return self._blocked(x, residual)
        if residual is None or x.ndim != 2:
            out = F.linear(x, self.weight, self.bias)
            return out if residual is None else out + residual
        out = torch.addmm(residual, x, self.weight.t())
        return out if self.bias is None else out.add_(self.bias)

    def _blocked(self, x: Tensor, residual: Tensor | None) -> Tensor:
        if residual is None:
            return torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")


def _twice(row: Tensor) -> Tensor:
    return torch.cat([row, row])


def can_pack(weight: Tensor) -> bool:
    """Whether this machine has a blocked layout for `weight`: bfloat16 on a CPU that multiplies it, with oneDNN in the build."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )


def can_pack_four_bit(weight: Tensor) -> bool:
    """Whether the four-bit form of `weight` is of use here: its kernel is written for AVX-512, and elsewhere it is slow."""
    return can_pack(weight) and uses_avx512()


def _pack_four_bit(weight: FourBitWeight) -> tuple[Tensor, Tensor]:
    """Codes in the layout of torch's product, and bfloat16 [in / 32, out, 2]: scale, and value of code 8, of each group."""
    codes = torch.stack([weight.codes & 15, weight.codes >> 4], dim=-1).flatten(1)
    scale = weight.scale.float()
    middle = weight.minimum.float() + 8 * scale
    scales = torch.stack([scale.t(), middle.t()], dim=-1).to(torch.bfloat16).contiguous()
    return torch._convert_weight_to_int4pack_for_cpu(codes.int(), 1), scales
