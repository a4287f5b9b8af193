"""AWQ (arXiv 2306.00978): 4-bit integers with zeros, eight outputs to a word."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from verifiers.formats.bits import bytes_of, halves, paired
from verifiers.formats.format import Format, Parts, Stored
from verifiers.formats.integers import integers
from verifiers.formats.lists import matches, part_of_name

ORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""Where the outputs of a word lie in it, counted from its lowest half byte."""


class Awq(Format):
    """`quant_method: awq`, version "gemm": `qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` [groups, out].

    Args:
        quantization: the config's `quantization_config`.

    Raises:
        CheckpointError: other bits, or another version.
    """

    required = (("qweight",), ("qzeros",), ("scales",))

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        bits = quantization.get("bits", quantization.get("w_bit", 4))
        version = str(quantization.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise CheckpointError(
                f"AWQ with {bits} bits in version {version!r} is not read; take one with 4 bits in version 'gemm'"
            )
        self._group = int(quantization.get("group_size", quantization.get("q_group_size", 128)))
        self._plain: Sequence[str] = quantization.get("modules_to_not_convert") or ()

    def lists_as_plain(self, module: str) -> bool:
        return matches(module, self._plain, part_of_name)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        codes, zeros = (_ordered(parts[name]).t() for name in ("qweight", "qzeros"))
        group = self._group if self._group > 0 else codes.shape[1]
        return integers(module, paired(codes.contiguous()), parts["scales"].t().float(), zeros, None, 4, group, dtype)


def _ordered(words: Tensor) -> Tensor:
    """uint8 [n, out] from int32 [n, out / 8]."""
    return halves(bytes_of(words))[..., ORDER].flatten(-2)
