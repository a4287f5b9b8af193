"""Random blocks in ggml's types, and their numbers as package `gguf` has them."""

import math

import gguf
import torch
from torch import Tensor

from specdec.layers.packed.gguf import BLOCK_SHAPES


def blocks(kind: str, outputs: int, inputs: int, *experts: int) -> Tensor:
    """Bytes [..., outputs, bytes] of any codes,
    whose products with normal rows are about normal.
    """
    shape = BLOCK_SHAPES[kind]
    count = math.prod(experts) * outputs * inputs // shape.inputs
    raw = torch.randint(0, 256, (count, shape.size), dtype=torch.uint8)
    for start in shape.floats:
        scale = torch.randn(count, 1) / (shape.typical * inputs**0.5)
        raw[:, start : start + 2] = scale.half().view(torch.uint8)
    return raw.view(*experts, outputs, -1)


def numbers_of(raw: Tensor, kind: str) -> Tensor:
    """float32 [..., out, in]."""
    return torch.from_numpy(gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))
