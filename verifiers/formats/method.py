"""Which format a checkpoint has, told from its config before any weight is read."""

from collections.abc import Callable, Mapping
from typing import Any

from specdec.errors import CheckpointError
from verifiers.formats.awq import Awq
from verifiers.formats.compressed_tensors import CompressedTensors
from verifiers.formats.float4 import Mxfp4
from verifiers.formats.float8 import Float8
from verifiers.formats.format import Format
from verifiers.formats.gptq import Gptq
from verifiers.formats.modelopt import ModelOpt

FORMATS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "awq": Awq,
    "compressed-tensors": CompressedTensors,
    "fp8": Float8,
    "gptq": Gptq,
    "modelopt": ModelOpt,
    "mxfp4": lambda quantization: Mxfp4(),
}
"""What is read, by `quant_method`."""


def stated_quantization(config: Any) -> Mapping[str, Any] | None:
    """How weights are quantized, as a model's config says it; None for plain numbers."""
    stated = getattr(config, "quantization_config", None)
    if not stated:
        return None
    return stated if isinstance(stated, Mapping) else dict(stated.to_dict())


def method_of(quantization: Mapping[str, Any]) -> str:
    """The name of the method; the files of ModelOpt do not always state it."""
    stated = quantization.get("quant_method") or ("modelopt" if "quant_algo" in quantization else None)
    return str(getattr(stated, "value", stated)).lower().replace("_", "-")


def format_of(quantization: Mapping[str, Any]) -> Format:
    """The format of a quantized checkpoint.

    Args:
        quantization: the config's `quantization_config`.

    Raises:
        CheckpointError: it is none of those that are read, or has settings that are not.
    """
    method = method_of(quantization)
    if method not in FORMATS:
        raise CheckpointError(
            f"weights quantized with {method!r} are not read, but {', '.join(sorted(FORMATS))} and GGUF are;"
            " take such a checkpoint of the model or an unquantized one"
        )
    return FORMATS[method](quantization)
