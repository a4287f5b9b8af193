"""AWQ (arXiv 2306.00978): 4-bit integers with zeros, eight outputs to a word."""

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from verifiers.formats.bits import bytes_of, halves, paired
from verifiers.formats.format import Format, Parts, Stored, as_number
from verifiers.formats.integers import integers, memory_bits
from verifiers.formats.lists import Listed
from verifiers.formats.settings import Settings, group_size, integer, names, word

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where the outputs of a word lie in it, counted from its lowest half byte."""


class Awq(Format):
    """`quant_method: awq`, version "gemm": `qweight` int32 [in, out / 8], `qzeros` int32 [groups,
    out / 8], `scales` [groups, out].

    Raises:
        CheckpointError: other bits, or another version.
    """

    required = (("qweight",), ("qzeros",), ("scales",))

    def __init__(self, quantization: Settings) -> None:
        bits = integer(quantization, "bits", "w_bit", default=4)
        version = word(quantization, "version", default="gemm")
        if bits != 4 or version != "gemm":
            what = f"AWQ with {bits} bits in version {version!r} is not read"
            raise CheckpointError(f"{what}; take one with 4 bits in version 'gemm'")
        group = group_size(quantization, "group_size", "q_group_size", default=128)
        plain = Listed(names(quantization, "modules_to_not_convert"))
        super().__init__(memory_bits(bits, group), plain, group=group)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        codes, zeros = (in_order(parts[name]).t() for name in ("qweight", "qzeros"))
        group, scale = self.group or codes.shape[1], as_number(parts["scales"]).t().float()
        return integers(module, paired(codes.contiguous()), scale, zeros, None, 4, group, dtype)


def in_order(words: Tensor) -> Tensor:
    """uint8 [n, out] from int32 [n, out / 8]."""
    return halves(bytes_of(words))[..., ORDER].flatten(-2)
