"""8-bit floats with scales: per block as in DeepSeek-V3 (arXiv 2412.19437), per output, per group,
or one for all.
"""

import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.weight import PackedWeight
from verifiers.formats.float4 import MX_GROUP, float4, nvfp4
from verifiers.formats.format import Format, Parts, as_number, per_output
from verifiers.formats.lists import Listed
from verifiers.formats.settings import Settings, block_size, names

SCALES = ("weight_scale_inv", "weight_scale")
"""Names of the scales; the first only sounds like a divisor."""

BLOCK = (128, 128)
"""Where the config states none."""


class Float8(Format):
    """`quant_method: fp8`, `fbgemm_fp8` or `mxfp8`: blocks whose size the config states, one scale
    per output, or one for all.
    """

    required = (("weight",), SCALES)

    def __init__(self, quantization: Settings) -> None:
        self._block = block_size(quantization, "weight_block_size")
        plain = Listed(names(quantization, "modules_to_not_convert", "ignored_layers"))
        super().__init__(8, plain, group=self._block and self._block[1])

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> PackedWeight:
        return floats(module, parts, self._block, dtype)


def floats(
    module: str, parts: Parts, block: tuple[int, int] | None, dtype: torch.dtype
) -> PackedWeight:
    """A weight of floats whose kind its tensors tell.

    Args:
        parts: `weight` float8_e4m3fn [..., out, in] or uint8 [..., out, in / 2], which may be
            called `weight_packed`, with `weight_scale` or `weight_scale_inv`. The second scale of
            NVFP4 is `weight_scale_2`, a factor, or `weight_global_scale`, a divisor.
        block: of the scales of 8-bit floats, see `block_of`.

    Raises:
        CheckpointError: another type, or scales that do not fit.
    """
    weight = parts["weight_packed"] if "weight_packed" in parts else parts["weight"]
    scale = next(parts[name] for name in SCALES if name in parts)
    if weight.dtype != torch.uint8:
        return float8(module, weight, scale, block_of(scale, weight, block), dtype)
    if "weight_scale_2" in parts:
        return nvfp4(module, weight, scale, parts["weight_scale_2"], dtype)
    if "weight_global_scale" in parts:
        factor = 1 / as_number(parts["weight_global_scale"]).float()
        return nvfp4(module, weight, scale, factor, dtype)
    return float4(module, weight, scale, MX_GROUP, dtype)


def block_of(scale: Tensor, weight: Tensor, block: tuple[int, int] | None) -> tuple[int, int]:
    """Outputs and inputs that share a scale; the block's size comes from the config, since ragged
    shapes do not tell it.
    """
    *leading, out_features, in_features = weight.shape
    count = scale.numel() // max(torch.Size(leading).numel(), 1)
    rows, columns = block or BLOCK
    if block and -(-out_features // rows) * -(-in_features // columns) == count:
        return block
    if count == 1:
        return out_features, in_features
    if count == out_features:
        return 1, in_features
    return (1, MX_GROUP) if not block and scale.element_size() == 1 else (rows, columns)


def float8(
    module: str, weight: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype
) -> PackedWeight:
    """A weight of 8-bit floats.

    Args:
        weight: float8_e4m3fn [..., out, in].
        scale: see `per_output`; factors in float32 or bfloat16, or exponents in bytes.
        block: outputs and inputs that share a scale.

    Raises:
        CheckpointError: another type, or scales that do not fit.
    """
    if weight.dtype != torch.float8_e4m3fn:
        what = f"{module!r} has a scale beside {str(weight.dtype)[6:]}"
        raise CheckpointError(f"{what}; float8_e4m3fn is read, so take another checkpoint")
    scales = per_output(as_number(scale), module, weight.shape, block)
    return PackedWeight(weight, scales, None, min(block[1], weight.shape[-1]), "e4m3", dtype)
