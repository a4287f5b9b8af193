"""Random blocks in ggml's types, and their numbers as package `gguf` has them."""

import math

import gguf
import torch
from torch import Tensor

_FLOATS = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Where a block has its numbers in half precision, if not one at its beginning."""


def blocks(kind: str, outputs: int, inputs: int, *experts: int) -> Tensor:
    """Bytes [..., outputs, bytes] that say anything, but for scales, with which products are about normal."""
    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    raw = torch.randint(0, 256, (math.prod(experts) * outputs * inputs // count, size), dtype=torch.uint8)
    for start in _FLOATS.get(kind, (0,)):
        raw[:, start : start + 2] = (torch.randn(len(raw), 1) / 512).half().view(torch.uint8)
    return raw.view(*experts, outputs, -1)


def numbers_of(raw: Tensor, kind: str) -> Tensor:
    """float32 [..., out, in]."""
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
