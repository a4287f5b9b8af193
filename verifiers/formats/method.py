"""Which format a checkpoint has, told from its config before any weight is read."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from specdec.base.checkpoint.hub import json_object
from specdec.base.errors import CheckpointError
from verifiers.formats.awq import Awq
from verifiers.formats.bitsandbytes import BitsAndBytes
from verifiers.formats.float4 import Mxfp4
from verifiers.formats.float8 import Float8
from verifiers.formats.format import Format
from verifiers.formats.gptq import Gptq
from verifiers.formats.settings import SettingError, Settings
from verifiers.formats.toolkits.auto_round import AutoRound
from verifiers.formats.toolkits.compressed_tensors import CompressedTensors
from verifiers.formats.toolkits.modelopt import ModelOpt
from verifiers.formats.toolkits.quark import Quark

FORMATS: dict[str, Callable[[Settings], Format]] = {
    "auto-round": AutoRound, "awq": Awq, "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors, "fbgemm-fp8": Float8, "fp8": Float8, "gptq": Gptq,
    "modelopt": ModelOpt, "mxfp4": Mxfp4, "mxfp8": Float8, "quark": Quark,
}  # fmt: skip
"""What is read, by `quant_method`."""

QUANTIZATION = "hf_quant_config.json"
"""File of ModelOpt that says it."""


def check_quantization(entries: Settings) -> None:
    """Whether weights are read, from the entries of a config.json.

    Raises:
        CheckpointError: they are quantized in a way that is not.
    """
    if (quantization := stated_quantization(entries)) is not None:
        format_of(quantization)


def stated_quantization(config: Any) -> Settings | None:
    """How weights are quantized, as a model's config or its entries say it; None for plain numbers.

    Raises:
        SettingError: what it says is no object.
    """
    entry = config.get if isinstance(config, Mapping) else partial(getattr, config)
    stated = entry("quantization_config", None)
    if stated is None or isinstance(stated, Mapping):
        return stated or None
    if not hasattr(stated, "to_dict"):
        what = f"quantization_config is {str(stated)[:60]!r}"
        raise SettingError(f"{what}; it must be an object, so fetch config.json again")
    return dict(stated.to_dict()) or None


def quantization_of(path: Path, config: Any) -> Settings | None:
    """The `quantization_config` of a checkpoint, from `config` or from its files; None for plain
    numbers.
    """
    if stated := stated_quantization(config):
        return stated
    files = (path / "config.json", path / QUANTIZATION)
    whole, own = (json_object(f, path.name, what="folder") if f.is_file() else {} for f in files)
    apart = {"quantization_config": own.get("quantization")}
    for entries in (whole, whole.get("text_config"), apart):
        if isinstance(entries, Mapping) and (stated := stated_quantization(entries)):
            return stated
    return None


def method_of(quantization: Settings) -> str:
    """The name of the method; not all files of ModelOpt, bitsandbytes and MLX state it."""
    stated = quantization.get("quant_method")
    if stated is None:
        if quantization.keys() & {"load_in_4bit", "load_in_8bit"}:
            return "bitsandbytes"
        if quantization.keys() & {"quant_algo", "quantization"}:
            return "modelopt"
        named = {"bits", "group_size"} <= quantization.keys()
        return "mlx" if named else "a method that it does not name"
    name = str(getattr(stated, "value", stated)).lower().replace("_", "-").removeprefix("intel/")
    if name.startswith("modelopt-"):
        return "modelopt"
    return name.removesuffix("-4bit").removesuffix("-8bit")


def format_of(quantization: Settings) -> Format:
    """The format of a quantized checkpoint.

    Raises:
        CheckpointError: it is none of those that are read, or has settings that are not.
    """
    method = method_of(quantization)
    if method not in FORMATS:
        raise CheckpointError(
            f"weights quantized with {method[:60]!r} are not read, but {', '.join(sorted(FORMATS))}"
            f" and GGUF are; take such a checkpoint of the model or an unquantized one"
        )
    return FORMATS[method](quantization)
