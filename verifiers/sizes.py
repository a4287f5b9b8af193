"""What the weights of a target take, told from configs alone."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from verifiers.complete import shapes_of
from verifiers.formats.method import method_of

_ALWAYS_PLAIN = ("embed_tokens", "lm_head", "norm", "conv1d", "A_log", "dt_bias", "mlp.gate.", "router", "sinks", "bias")
"""Parts of names of what no format packs."""

_EXPERTS_ALONE = ("mxfp4",)
"""Methods that pack routed experts and nothing else."""


def parameters(config: PreTrainedConfig) -> dict[str, int]:
    """Numbers in every tensor of a text model, made without memory from its config; tied ones count once."""
    return {name: shape.numel() for name, shape in shapes_of(config).items()}


def weight_bytes(
    config: PreTrainedConfig,
    quantization: Mapping[str, Any] | None,
    dtype: torch.dtype,
    *,
    total_size: int | None = None,
    packed: bool = True,
) -> int:
    """Bytes of the weights in memory.

    Args:
        config: of the text model.
        quantization: how the file has them, None for plain numbers.
        dtype: what plain numbers become.
        total_size: bytes of the file, if its index says; of a multimodal checkpoint with the tower, which is small.
        packed: quantized weights stay as they are, otherwise they become plain numbers.
    """
    if quantization is None and total_size is not None:
        stored = _itemsize(config, dtype)
        return total_size * dtype.itemsize // stored
    if quantization is not None and packed and total_size is not None:
        return total_size
    counts = parameters(config)
    if quantization is None or not packed:
        return sum(counts.values()) * dtype.itemsize
    narrow = sum(counts[name] for name in packed_names(counts, quantization))
    return int(narrow * _bits(quantization) / 8) + (sum(counts.values()) - narrow) * dtype.itemsize


def _itemsize(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a number in the file."""
    stated = getattr(config, "dtype", None)
    return stated.itemsize if isinstance(stated, torch.dtype) else dtype.itemsize


def packed_names(names: Iterable[str], quantization: Mapping[str, Any]) -> Iterator[str]:
    """Those of the tensors that the file has quantized, as far as the config tells."""
    experts_alone = method_of(quantization) in _EXPERTS_ALONE or any("self_attn" in entry for entry in _left_out(quantization))
    for name in names:
        if any(part in name for part in _ALWAYS_PLAIN):
            continue
        if not experts_alone or ".experts." in name:
            yield name


def _left_out(quantization: Mapping[str, Any]) -> list[str]:
    stated = quantization.get("modules_to_not_convert") or quantization.get("ignore") or []
    return [str(entry) for entry in stated]


def _bits(quantization: Mapping[str, Any]) -> float:
    """Bits of a packed weight, its part of a scale included."""
    method = method_of(quantization)
    if method == "fp8":
        return 8.0
    if method == "mxfp4":
        return 4.25
    if method == "modelopt":
        return 4.5 if "4" in str(quantization.get("quant_algo", "")) else 8.0
    if method == "compressed-tensors":
        group: Mapping[str, Any] = next(iter((quantization.get("config_groups") or {}).values()), {})
        weights = group.get("weights") or {}
        return float(weights.get("num_bits", 8)) + 16 / (weights.get("group_size") or 1024)
    return float(quantization.get("bits", 4)) + 16 / max(int(quantization.get("group_size", 128)), 1)
