"""A target of any supported shape with random weights, made on its device from a config alone: no checkpoint, no tokenizer.

It says nothing, and takes as long as the real one: for measuring how fast a shape runs.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.attention.mla import MlaSpec
from specdec.attention.selector import select_backend
from specdec.core import Verifier
from specdec.errors import CheckpointError, InvalidInputError
from verifiers.hf import verifier_for
from verifiers.hf_attention import ATTENTION_NAME
from verifiers.load import NO_FOREIGN_CODE
from verifiers.shape import backend_spec
from verifiers.support import check_supported


def read_config(path: Path) -> PreTrainedConfig:
    """The config in a JSON file, or in the config.json of a folder.

    Raises:
        CheckpointError: it cannot be read, or describes no model that transformers knows.
        InvalidInputError: it describes quantized weights.
        UnsupportedModelError: the model cannot be a target.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, **NO_FOREIGN_CODE)
    except Exception as error:  # a damaged file ends in any kind of error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"cannot read a model's config from {str(path)!r}: {reason[:300]}; give a config.json") from error
    if getattr(config, "quantization_config", None):
        raise InvalidInputError(
            f"the config {str(path)!r} describes quantized weights and random ones are plain numbers; remove quantization_config"
        )
    check_supported(str(path), config)
    return config


def dummy_verifier(
    config: PreTrainedConfig,
    *,
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    fp8_prefill: bool = True,
    fuse: bool = True,
    seed: int = 0,
) -> Verifier:
    """A target with random weights; `load_verifier` says what the arguments mean.

    Args:
        config: the shape, see `read_config`.
        name: how to call it in messages and reports.
        seed: of the weights.

    Raises:
        BackendError: no backend, or not the named one, can serve the model.
    """
    spec = replace(backend_spec(config, device=device, dtype=dtype, block_size=block_size), cache_dtype=cache_dtype)
    if isinstance(spec, MlaSpec):
        spec = replace(spec, fp8_prefill=fp8_prefill)
    backend = select_backend(attention, spec)
    return verifier_for(random_model(config, device, dtype, seed=seed), name=name, backend=backend, fuse=fuse)


def random_model(config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0) -> PreTrainedModel:
    """A model with the random weights that its training would start from, on its device.

    transformers' own initialization of the family fills each tensor where it was allocated: matrices normal with the config's
    `initializer_range`, norms that scale by 1, biases 0, RoPE's frequencies as they are. Tied weights are one tensor. At no time
    is there more than the model.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME, **NO_FOREIGN_CODE
        )
    wide = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())  # as reading a checkpoint would keep them
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if any(part in name for part in wide):
            tensor.data = tensor.data.float()
    return model.eval()
