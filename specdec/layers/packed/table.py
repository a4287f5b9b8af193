"""A table of embeddings that stays in few bits: a lookup makes numbers of the rows it asks for."""

import torch
from torch import Tensor

from specdec.layers.packed.check import kernels_take
from specdec.layers.packed.gguf import GgufWeight, Quantized


class PackedTable:
    """Rows of a weight [V, H] of few bits.

    Args:
        weight: of embeddings; on an accelerator it may be released once the object exists.
    """

    def __init__(self, weight: Quantized) -> None:
        packed = weight.packed() if isinstance(weight, GgufWeight) else weight
        self.weight: Quantized = weight if weight.device.type == "cpu" else packed.arranged()
        self.device, self.dtype = weight.device, weight.dtype

    def __len__(self) -> int:
        return self.weight.out_features

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.weight.nbytes

    def rows(self, token_ids: Tensor, scale: float = 1.0) -> Tensor:
        """Rows [..., H] times `scale` for int64 ids [...], each below V: none is checked."""
        if not isinstance(self.weight, GgufWeight) and kernels_take(self.weight):
            from specdec.layers.packed.triton_packed import dequantized  # it imports Triton

            return dequantized(self.weight, self.dtype, token_ids, scale)
        rows = self.weight.select(token_ids.flatten()).dequantized()
        rows = rows.view(*token_ids.shape, self.weight.in_features)
        return rows if scale == 1 else torch.mul(rows, scale)
