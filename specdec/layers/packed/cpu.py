"""Products with weights in ggml's blocks on a CPU."""

import ctypes

import torch
from torch import Tensor

from specdec.kernels.native import Part, native
from specdec.layers.linear import Linear
from specdec.layers.packed.gguf import GgufWeight

TYPES = {
    **{"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8},
    **{"Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "IQ4_NL": 20},
}
"""ggml's numbers of the types that the library knows."""

FEW_ROWS = 64
"""Most rows that are rounded to 8 bits on a CPU with AMX. It multiplies more of them faster as they
are, by bfloat16 numbers that codes are turned into. Other CPUs round any number of rows."""


class GgufLinear(Linear):
    """A weight in ggml's blocks, laid out for this CPU's instructions.

    Up to `FEW_ROWS` rows are rounded to 8 bits, with a scale for every 32 inputs; llama.cpp does
    the same, for a "K" type with one for 256. Codes and scales of the weight are exact. A group's
    products are summed in integers, and groups in float32, so a row has the same bits whatever
    rows are beside it, and however many.

    Args:
        weight: [out, in], of `TYPES`, for bfloat16 rows; it may be released once the object exists.
        bias: [out], or None.
    """

    def __init__(self, weight: GgufWeight, bias: Tensor | None = None) -> None:
        library = native()
        assert library is not None, "see `multiplies`"
        self._library, self.dtype = library, weight.dtype
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.bias = None if bias is None else bias.float()
        parts = [(raw, TYPES[kind]) for raw, kind in weight.parts]
        self._tiles = [_laid_out(library, raw, kind, self.in_features) for raw, kind in parts]
        pairs = zip(self._tiles, parts, strict=True)
        fields = [Part(tiles.data_ptr(), kind, len(raw)) for tiles, (raw, kind) in pairs]
        self._parts = (Part * len(fields))(*fields)
        self._bias = None if self.bias is None else self.bias.data_ptr()

    @property
    def nbytes(self) -> int:
        return sum(tiles.nbytes for tiles in self._tiles)

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        shape = (*x.shape[:-1], self.out_features)
        _check(x, "rows are", (*x.shape[:-1], self.in_features), self.dtype)
        if residual is not None:
            _check(residual, "a residual is", shape, self.dtype)
        rows = x.reshape(-1, self.in_features)
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        out = x.new_empty(shape)
        residual = None if residual is None else residual.contiguous()
        self._library.multiply(
            *(self._parts, len(self._parts), rows.data_ptr(), rows.stride(0), len(rows)),
            *(self.in_features, self._bias, None if residual is None else residual.data_ptr()),
            *(out.data_ptr(), FEW_ROWS, torch.get_num_threads()),
        )
        return out


def multiplies_in(dtype: torch.dtype) -> bool:
    """Whether rows of a type are multiplied so: bfloat16, where there is a compiler."""
    return dtype == torch.bfloat16 and native() is not None


def multiplies(weight: GgufWeight) -> bool:
    """Whether this machine multiplies a weight as it is stored."""
    mine = weight.device.type == "cpu" and len(weight.shape) == 2
    return mine and all(kind in TYPES for kind in weight.kinds) and multiplies_in(weight.dtype)


def _check(x: Tensor, what: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if x.dtype != dtype or x.shape != shape:
        raise ValueError(f"{what} {dtype} {list(shape)}, not {x.dtype} {list(x.shape)}")


def _laid_out(library: ctypes.CDLL, raw: Tensor, kind: int, inputs: int) -> Tensor:
    """uint8 [bytes], from ggml's own rows [out, bytes]."""
    size = library.packed_bytes(kind, len(raw), inputs)
    tiles = torch.empty(size, dtype=torch.uint8)
    blocks = raw.contiguous()
    where = tiles.data_ptr()
    library.pack(kind, blocks.data_ptr(), len(raw), inputs, where, torch.get_num_threads())
    return tiles
