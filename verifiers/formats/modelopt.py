"""Checkpoints of NVIDIA's ModelOpt: 8-bit floats with one scale for all, and NVFP4."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from specdec.errors import CheckpointError
from verifiers.formats.float4 import nvfp4
from verifiers.formats.float8 import float8
from verifiers.formats.format import Format, Parts, Stored
from verifiers.formats.lists import matches, pattern

ALGORITHMS = ("FP8", "NVFP4", "MIXED_PRECISION")
"""What is read; tensors tell the first two apart."""


class ModelOpt(Format):
    """`quant_method: modelopt`, or the `quantization` of `hf_quant_config.json`.

    Args:
        quantization: either of them.

    Raises:
        CheckpointError: another algorithm.
    """

    required = (("weight",), ("weight_scale",))

    def __init__(self, quantization: Mapping[str, Any]) -> None:
        algorithm = str(quantization.get("quant_algo") or "NVFP4").upper()
        if algorithm not in ALGORITHMS:
            raise CheckpointError(
                f"ModelOpt's {algorithm} is not read, but {' and '.join(ALGORITHMS[:2])} are; take such a checkpoint"
            )
        self._plain: Sequence[str] = quantization.get("exclude_modules") or quantization.get("ignore") or ()

    def lists_as_plain(self, module: str) -> bool:
        return matches(module, self._plain, pattern)

    def read(self, module: str, parts: Parts, dtype: torch.dtype) -> Stored:
        weight, scale = parts["weight"], parts["weight_scale"]
        if "weight_scale_2" in parts:
            return nvfp4(module, weight, scale, parts["weight_scale_2"], dtype)
        rows = weight.shape[-2] if scale.numel() == torch.Size(weight.shape[:-2]).numel() else 1
        return float8(module, weight, scale, (rows, weight.shape[-1]), dtype)
