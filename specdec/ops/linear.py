"""Linear layers whose weight is laid out once for the kernel that will read it."""

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """`x W^T + b`, and optionally a residual added in the same pass.

    On a CPU in bfloat16 the weight is stored in oneDNN's blocked layout; otherwise every call would rearrange it, which for a few
    rows costs more than the product. The result is the same to the bit. Elsewhere the weight is used as it is.

    Args:
        weight: [out, in]; it may be released once the object exists.
        bias: [out], or None.
        pack: use a blocked layout where there is one; it has no gradient.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        self.packed = pack and can_pack(weight)
        self.bias = bias
        self.out_features, self.in_features = weight.shape
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16) if self.packed else weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., out] from `x` [..., in] and, when there is one, `residual` [..., out]."""
        if self.packed:
            if residual is None:
                return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return torch.ops.mkldnn._linear_pointwise(x, residual, self.weight, self.bias, "add")
        if residual is None or x.ndim != 2:
            out = F.linear(x, self.weight, self.bias)
            return out if residual is None else out + residual
        out = torch.addmm(residual, x, self.weight.t())
        return out if self.bias is None else out.add_(self.bias)


def can_pack(weight: Tensor) -> bool:
    """Whether this machine has a blocked layout for `weight`: bfloat16 on a CPU that multiplies it, with oneDNN in the build."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
    )
