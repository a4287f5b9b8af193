"""GGUF files, as llama.cpp writes them, in plain numbers: transformers knows their names, codes and orders of rows."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from specdec.base.errors import CheckpointError, one_line
from verifiers.formats.format import Stored
from verifiers.weights.shares import Share
from verifiers.weights.weights import COMPUTED


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path names, or that a folder without safetensors holds; None where there is none.

    Raises:
        CheckpointError: the folder holds several.
    """
    if path.suffix == ".gguf" and path.is_file():
        return path
    found = sorted(path.glob("*.gguf")) if path.is_dir() else []
    if not found or any(path.glob("*.safetensors*")):
        return None
    if len(found) > 1:
        raise CheckpointError(f"{str(path)!r} holds {len(found)} GGUF files; name one of them, such as {str(found[0])!r}")
    return found[0]


def read_gguf(
    path: Path, config: Any, *, device: torch.device, dtype: torch.dtype, share: Share | None = None
) -> dict[str, Stored]:
    """All weights of a GGUF file.

    Args:
        path: the file.
        config: of the model.
        device: where they go.
        dtype: of the model.
        share: what is wanted of each tensor, once transformers has read the file into the memory of the host; None for all.

    Returns:
        Tensors by transformers' names.

    Raises:
        CheckpointError: package `gguf` is missing, transformers does not read files of this architecture, or tensors are missing.
    """
    if find_spec("gguf") is None:
        raise CheckpointError(f"{path.name!r} needs package gguf, which is not installed; run: python -m pip install gguf")
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    options: dict[str, Any] = {}
    if hasattr(transformers, "GgufConfig"):  # without it every file becomes plain numbers
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    try:
        model, report = model_class.from_pretrained(
            path.parent, gguf_file=path.name, config=config, dtype=dtype, output_loading_info=True, **options
        )
    except (ValueError, RuntimeError, KeyError, NotImplementedError) as error:
        raise CheckpointError(
            f"transformers does not read {path.name!r} ({one_line(error)}); take the safetensors files of the model"
        ) from error
    if missing := sorted(report["missing_keys"]):
        raise CheckpointError(f"{path.name!r} lacks {len(missing)} tensors, the first being {missing[0]!r}; fetch it again")
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    whole = {name: tensor.detach() for name, tensor in tensors.items() if not name.endswith(COMPUTED)}
    parts = whole if share is None else {name: share.part(name, tensor) for name, tensor in whole.items()}
    return {name: part.to(device) for name, part in parts.items()}
