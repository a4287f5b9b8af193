"""A target of any supported shape with random weights, made on its device from a config alone: no checkpoint, no tokenizer.

It says nothing, and takes as long as the real one: for measuring how fast a shape runs.
"""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn
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
from verifiers.wrappers import text_config


def read_config(path: Path) -> PreTrainedConfig:
    """The config in a JSON file, or in the config.json of a folder.

    Raises:
        CheckpointError: it cannot be read, or describes no model that transformers knows.
        InvalidInputError: it describes quantized weights.
        UnsupportedModelError: the model cannot be a target.
    """
    try:
        config = text_config(AutoConfig.from_pretrained(path, **NO_FOREIGN_CODE))
    except Exception as error:  # a damaged file ends in any kind of error
        reason = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"cannot read a model's config from {str(path)!r}: {reason[:300]}; give a config.json") from error
    if getattr(config, "quantization_config", None):
        raise InvalidInputError(
            f"the config {str(path)!r} describes quantized weights and random ones are plain numbers; remove quantization_config"
        )
    check_supported(str(path), config)
    return config


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


def dummy_verifier(
    model: PreTrainedModel,
    *,
    name: str,
    attention: str = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    fp8_prefill: bool = True,
    fuse: bool = True,
) -> Verifier:
    """What `random_model` made as a target; `load_verifier` says what the arguments mean.

    Raises:
        BackendError: no backend, or not the named one, can serve the model.
    """
    spec = backend_spec(model.config, device=model.device, dtype=model.dtype, block_size=block_size)
    spec = replace(spec, cache_dtype=cache_dtype)
    if isinstance(spec, MlaSpec):
        spec = replace(spec, fp8_prefill=fp8_prefill)
    return verifier_for(model, name=name, backend=select_backend(attention, spec), fuse=fuse)


@torch.inference_mode()
def experts_met(model: PreTrainedModel, rows: int, *, context: int = 8) -> float | None:
    """Different experts that `rows` rows meet in a layer, on average over the layers with experts; None in a model without.

    The rows are the last ones of as many prompts of `context` random tokens, which transformers alone runs, so this belongs before
    `dummy_verifier`. `RoutedExperts.expected` is what rows that choose evenly and independently would meet.
    """
    chosen: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        chosen.append(inputs[1].view(rows, context, -1)[:, -1].unique().numel())  # of hidden states, indices and weights

    layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    generator = torch.Generator(model.device).manual_seed(0)
    token_ids = torch.randint(model.config.vocab_size, (rows, context), device=model.device, generator=generator)
    try:
        if layers:
            model.set_attn_implementation("eager")
            model(token_ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        for hook in hooks:
            hook.remove()
    return sum(chosen) / len(chosen) if chosen else None
