"""GPTQ (arXiv 2210.17323): 4- or 8-bit integers with zeros, whose inputs may be sorted by size."""

from collections.abc import Mapping
from typing import Any

import torch

from specdec.errors import CheckpointError
from verifiers.formats.bits import bytes_of, halves
from verifiers.formats.format import Format, Parts, Stored
from verifiers.formats.integers import integers


class Gptq(Format):
    """`quant_method: gptq`.

    `qweight` int32 [in * bits / 32, out], `qzeros` int32 [groups, out * bits / 32], `scales` [groups, out], perhaps `g_idx` [in].

    Args:
        quantization: the config's `quantization_config`.

    Raises:
        CheckpointError: other bits, another layout, or modules with settings of their own.
    """

    required = (("qweight",), ("qzeros",), ("scales",))

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._bits = int(quantization.get("bits", 4))
        layout = str(quantization.get("checkpoint_format") or "gptq").lower()
        if self._bits not in (4, 8) or layout not in ("gptq", "gptq_v2"):
            raise CheckpointError(
                f"GPTQ with {self._bits} bits in layout {layout!r} is not read; 4 and 8 bits in layouts gptq and gptq_v2 are"
            )
        dynamic = quantization.get("dynamic") or {}
        if own := [rule for rule, settings in dynamic.items() if settings and not rule.startswith("-")]:
            raise CheckpointError(f"GPTQ with settings of their own for {own[0]!r} is not read; take one with the same for all")
        self._stored_less_one = layout == "gptq"  # a zero is stored less by one, so that 0 becomes the highest code
        self._group = int(quantization.get("group_size", 128))

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        raw = bytes_of(parts["qweight"]).transpose(0, 1).flatten(1).contiguous()
        zeros = bytes_of(parts["qzeros"]).flatten(1)
        if self._bits == 4:
            zeros = halves(zeros)
        if self._stored_less_one:
            zeros = (zeros + 1) & (2**self._bits - 1)
        group = self._group if self._group > 0 else raw.shape[1] * 8 // self._bits
        return integers(module, raw, parts["scales"].t().float(), zeros.t(), parts.get("g_idx"), self._bits, group, dtype)
