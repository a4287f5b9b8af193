"""What the weights of a target take, told from configs alone."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedConfig

from verifiers.config.wrappers import shapes_of
from verifiers.formats.format import Format
from verifiers.formats.method import format_of

_ALWAYS_PLAIN = (
    "embed_tokens", "lm_head", "norm", "conv1d", "A_log", "dt_bias", "mlp.gate.", "router", "sinks",
    "bias",
)  # fmt: skip
"""Parts of names of what no format packs."""


def parameters(config: PreTrainedConfig) -> dict[str, int]:
    """Numbers in every tensor of a text model, made without memory from its config; tied ones count
    once.
    """
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
        quantization: how the file has them, None for plain numbers.
        total_size: bytes of the file, if its index says; of a multimodal checkpoint with the tower,
            which is small.
        packed: quantized weights stay as they are, otherwise they become plain numbers.
    """
    form = None if quantization is None else format_of(quantization)
    packed = packed and form is not None and form.stays_packed
    if form is None and total_size is not None:
        return total_size * dtype.itemsize // _itemsize(config, dtype)
    if packed and form is not None and not form.widens and total_size is not None:
        return total_size
    counts = parameters(config)
    plain, of_packed = sum(counts.values()), 0
    if packed and form is not None:
        narrow = sum(counts[name] for name in packed_names(counts, form))
        plain, of_packed = plain - narrow, int(narrow * form.bits / 8)
    return of_packed + plain * dtype.itemsize


def _itemsize(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Bytes of a number in the file."""
    stated = getattr(config, "dtype", None)
    return stated.itemsize if isinstance(stated, torch.dtype) else dtype.itemsize


def packed_names(names: Iterable[str], form: Format) -> Iterator[str]:
    """Names of the tensors that the file has quantized, as far as the config tells."""
    for name in names:
        plain = any(part in name for part in _ALWAYS_PLAIN)
        if not plain and not form.lists_as_plain(name.removesuffix(".weight")):
            yield name
