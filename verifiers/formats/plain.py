"""Quantized tensors as plain numbers, for checkpoints that are no targets, such as drafters'."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specdec.layers.packed.gguf import Quantized
from verifiers.config.places import UNUSED, place_of
from verifiers.formats.format import check_floats, check_known
from verifiers.formats.method import format_of


def plain_numbers(
    tensors: Mapping[str, Tensor], quantization: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every weight in plain numbers, under its own name.

    Args:
        tensors: of a checkpoint, by name.
        dtype: of the numbers; tensors that are not quantized keep theirs.

    Returns:
        The same without the parts of quantized weights, without scales of activations and caches.

    Raises:
        CheckpointError: a format that is not read, or tensors that do not go together.
    """
    form = format_of(quantization)
    found, modules = dict[str, Tensor](), dict[str, dict[str, Tensor]]()
    for name, tensor in tensors.items():
        if UNUSED.search(name):
            continue
        module, part = place_of(name)
        if part is None:
            found[name] = tensor
        else:
            modules.setdefault(module, {})[part] = tensor
    check_known(found, {module for module, parts in modules.items() if set(parts) != {"weight"}})
    for module, parts in modules.items():
        if set(parts) == {"weight"}:
            check_floats({module: parts["weight"]})
            found[f"{module}.weight"] = parts["weight"]
            continue
        weight = form.weight(module, parts, dtype)
        found[f"{module}.weight"] = (
            weight.dequantized(dtype) if isinstance(weight, Quantized) else weight.to(dtype)
        )
    return found
