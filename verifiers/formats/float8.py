"""8-bit floats with scales: per block as in DeepSeek-V3 (arXiv 2412.19437), per output, or one for all."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.errors import CheckpointError
from specdec.kernels.packed import PackedWeight
from verifiers.formats.format import Format, Parts, as_number, per_output
from verifiers.formats.lists import matches, part_of_name

SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scales; the first only sounds like a divisor."""


class Float8(Format):
    """`quant_method: fp8`: blocks whose size the config states, or one scale for the whole weight.

    Args:
        quantization: the config's `quantization_config`.
    """

    required = (("weight",), SCALES)

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        self._block: Sequence[int] | None = quantization.get("weight_block_size")
        self._plain: Sequence[str] = quantization.get("modules_to_not_convert") or ()

    def lists_as_plain(self, module: str) -> bool:
        return matches(module, self._plain, part_of_name)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> PackedWeight:
        scale = next(parts[name] for name in SCALES if name in parts)
        return float8(module, parts["weight"], scale, block_of(scale, parts["weight"], self._block), dtype)


def block_of(scale: Tensor, weight: Tensor, block: Sequence[int] | None) -> tuple[int, int]:
    """Outputs and inputs that share a scale; the block's size comes from the config, since ragged shapes do not tell it."""
    *leading, out_features, in_features = weight.shape
    if block and scale.numel() != torch.Size(leading).numel():
        return block[0], block[1]
    return out_features, in_features


def float8(module: str, weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> PackedWeight:
    """A weight of 8-bit floats.

    Args:
        module: it belongs to, for messages.
        weight: float8_e4m3fn [..., out, in].
        scale: see `per_output`; factors in float32 or bfloat16, or exponents in bytes.
        block: outputs and inputs that share a scale.
        dtype: of the model.

    Raises:
        CheckpointError: another type, or scales that do not fit.
    """
    if weight.dtype != torch.float8_e4m3fn:
        raise CheckpointError(
            f"{module!r} has a scale beside {str(weight.dtype)[6:]}; float8_e4m3fn is read, so take another checkpoint"
        )
    scales = per_output(as_number(scale), module, weight.shape, block)
    return PackedWeight(weight, scales, None, min(block[1], weight.shape[-1]), "e4m3", dtype)


def plain_float8(module: str, weight: Tensor) -> Tensor:
    """The weight itself, which has no scale beside it.

    Raises:
        CheckpointError: it is of 8-bit floats, which need one.
    """
    if weight.is_floating_point() and weight.element_size() == 1:
        raise CheckpointError(f"{module!r} holds 8-bit floats without a scale; fetch the whole checkpoint again")
    return weight
