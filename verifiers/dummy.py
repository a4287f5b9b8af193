"""A target of any supported shape with random weights, made on its device from a config alone: no
checkpoint, no tokenizer.

It says nothing, and takes as long as the real one: for measuring how fast a shape runs.
"""

import json
import re
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from specdec.attention.selector import select_backend
from specdec.base.errors import (
    CheckpointError,
    InvalidInputError,
    SpecDecError,
    UnsupportedModelError,
    one_line,
)
from specdec.base.writing import write_atomically, write_text
from specdec.layers.packed.weight import PackedWeight
from specdec.model.core import Verifier
from specdec.parallel.group import Group
from verifiers.config.families import describe
from verifiers.config.reading import check_numbers
from verifiers.config.shape import backend_spec, eos_token_ids
from verifiers.config.wrappers import config_entries, shapes_of, text_class, text_config
from verifiers.config.wrappers import read_config as config_in
from verifiers.decoder import DecoderVerifier
from verifiers.description import TRANSPOSED
from verifiers.formats.format import Stored
from verifiers.hf import description_of, verifier_for
from verifiers.hf_attention import ATTENTION_NAME
from verifiers.support import check_supported
from verifiers.weights.quantize import WAYS
from verifiers.weights.shards import Shard, sharded
from verifiers.weights.weights import Weights

Made = TypeVar("Made", bound=Verifier)

_LEFT_PLAIN = re.compile(r"\.(in_proj_a|in_proj_b|shared_expert_gate|weights_proj)$")
"""Linear layers of few outputs, which published checkpoints do not quantize."""

_SHARD_BYTES = 4 * 2**30
"""Bytes of a file of weights; its last tensor may exceed it."""


def read_config(path: Path) -> PreTrainedConfig:
    """The config in a JSON file, or in the config.json of a folder.

    Raises:
        CheckpointError: it cannot be read, or describes no model that transformers knows.
        InvalidInputError: it describes quantized weights.
        UnsupportedModelError: the model cannot be a target.
    """
    try:
        check_numbers(config_entries(str(path)))
        config = text_config(config_in(str(path)))
        check_supported(str(path), config)
    except SpecDecError:
        raise
    except Exception as error:  # a damaged file ends in any kind of error
        what = f"cannot read a model's config from {str(path)!r}: {one_line(error, 300)}"
        raise CheckpointError(f"{what}; give a config.json") from error
    if getattr(config, "quantization_config", None):
        raise InvalidInputError(
            f"the config {str(path)!r} describes quantized weights and random ones are plain"
            f" numbers; remove quantization_config"
        )
    return config


def random_model(
    config: PreTrainedConfig, device: torch.device, dtype: torch.dtype, *, seed: int = 0
) -> PreTrainedModel:
    """A model with the random weights that its training would start from, on its device.

    transformers' own initialization of the family fills each tensor where it was allocated:
    matrices normal with the config's `initializer_range`, norms that scale by 1, biases 0, RoPE's
    frequencies as they are. Tied weights are one tensor. At no time is there more than the model.

    Raises:
        UnsupportedModelError: transformers has the text model without a head alone.
    """
    found = text_class(config)
    if found is None:
        raise UnsupportedModelError(
            f"transformers has no causal language model of type {config.model_type!r} to give"
            f" random weights; give another config"
        )
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        model: PreTrainedModel = found._from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    # as reading a checkpoint would keep them
    wide = tuple(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if any(part in name for part in wide):
            tensor.data = tensor.data.float()
    return model.eval()


@torch.no_grad()
def write_weights(model: PreTrainedModel, folder: Path, *, wrapped: bool = False) -> None:
    """Writes the weights of what `random_model` made, so that another system has the same.

    Args:
        model: whose tensors are published under other names and shapes, which are written.
        folder: for the safetensors files, and their index.
        wrapped: name the tensors as within a multimodal checkpoint.
    """
    named: dict[str, Tensor] = revert_weight_conversion(model, model.state_dict())
    if wrapped:
        named = {
            re.sub(r"^model\.", "model.language_model.", name): tensor
            for name, tensor in named.items()
        }
    seen, files = set[tuple[int, torch.Size]](), dict[str, str]()
    shard, size = dict[str, Tensor](), 0
    for number, (name, tensor) in enumerate(named.items(), start=1):
        place = tensor.data_ptr(), tensor.shape
        if place not in seen:  # else it is tied to another one
            shard[name], size = tensor.to("cpu", copy=True).contiguous(), size + tensor.nbytes
        seen.add(place)
        if size >= _SHARD_BYTES or number == len(named):
            file = f"model-{number}.safetensors"
            write_atomically(folder / file, partial(save_file, shard, metadata={"format": "pt"}))
            files |= dict.fromkeys(shard, file)
            shard, size = {}, 0
    empty = json.dumps({"metadata": {}, "weight_map": files})
    write_text(folder / "model.safetensors.index.json", empty)


def dummy_verifier(
    model: PreTrainedModel,
    *,
    name: str,
    attention: str = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    fp8_prefill: bool = True,
    fuse: bool = True,
    quantize: str | None = None,
) -> Verifier:
    """What `random_model` made as a target; `load_verifier` says what the other arguments mean.

    Args:
        model: gives its weights up.
        quantize: one of `verifiers.weights.quantize.WAYS`, for all linear layers and experts of the
            decoder layers; None for none.

    Raises:
        BackendError: no backend, or not the named one, can serve the model.
        InvalidInputError: there is no such way, or our own layers, which alone take packed weights,
            do not run the model.
    """
    check_way(quantize)
    spec = backend_spec(
        model.config,
        device=model.device,
        dtype=model.dtype,
        block_size=block_size,
        cache_dtype=cache_dtype,
        fp8_prefill=fp8_prefill,
    )
    backend = select_backend(attention, spec)
    if quantize is None:
        return _random(verifier_for(model, name=name, backend=backend, fuse=fuse))
    description = description_of(model)
    if description is None:
        raise InvalidInputError(
            f"{name!r} of type {model.config.model_type!r} runs through transformers' modules,"
            f" which take plain numbers; leave out weights {quantize!r}"
        )
    weights, eos = quantized_weights(model, quantize), eos_token_ids(model.config.eos_token_id)
    given: dict[str, Any] = {"name": name, "backend": backend, "eos": eos}
    return _random(DecoderVerifier(model.config, description, weights, **given))


def dummy_rank(
    config: PreTrainedConfig,
    group: Group | None,
    device: torch.device,
    dtype: torch.dtype,
    *,
    name: str,
    attention: str = "auto",
    block_size: int = 16,
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> DecoderVerifier:
    """A rank's shard of a target with random weights, which are the same whatever the number of
    ranks; None is a process alone.

    Tensors are made one by one, each from a seed of its own, and cut: at no time is there more than
    the shard and one tensor. Matrices are normal with the config's `initializer_range`, norms scale
    by 1, all else is 0.

    Raises:
        BackendError: no backend, or not the named one, can serve the model.
        UnsupportedModelError: our own layers do not run it, or the ranks do not divide it.
    """
    local = sharded(config, group)
    description = describe(local)
    if description is None:
        what = f"{name!r} of type {config.model_type!r} runs through transformers' modules"
        raise UnsupportedModelError(f"{what}; give another config")
    shard = None if group is None else Shard(config, description, group, name=name)
    shapes = shapes_of(config)
    if shard is not None:
        shard.check(shapes)
    spec = backend_spec(
        local, device=device, dtype=dtype, block_size=block_size, cache_dtype=cache_dtype
    )
    backend, generator = select_backend(attention, spec), torch.Generator(device)
    norm = float(description.norm_kind != "zero_centered")
    spread = getattr(config, "initializer_range", 0.02)
    tensors = dict[str, Stored]()
    for key, shape in shapes.items():
        value = norm if key.endswith("norm.weight") else 0.0
        whole = torch.full(shape, value, device=device, dtype=dtype)
        if len(shape) > 1:
            whole.normal_(std=spread, generator=generator.manual_seed(seed + crc32(key.encode())))
        tensors[key] = whole if shard is None else shard.part(key, whole)
    eos = eos_token_ids(config.eos_token_id)
    given: dict[str, Any] = {"name": name, "backend": backend, "eos": eos}
    return _random(DecoderVerifier(config, description, Weights(tensors, group=group), **given))


def _random(verifier: Made) -> Made:
    verifier.random_weights = True
    return verifier


def check_way(quantize: str | None) -> None:
    """Whether random weights can be quantized so.

    Raises:
        InvalidInputError: they cannot.
    """
    if quantize is not None and quantize not in WAYS:
        what = f"random weights cannot be {quantize!r}"
        raise InvalidInputError(f"{what}; choose {', '.join(WAYS)}, or bfloat16 for plain numbers")


@torch.no_grad()
def quantized_weights(model: PreTrainedModel, quantize: str) -> Weights:
    """Weights of a model that our own layers run, of which it keeps none of those that are packed:
    all linear layers and experts of its layers, in one of `verifiers.weights.quantize.WAYS`.
    """
    weights = Weights.of_model(model)
    linear = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and name.startswith("model.layers.")
        and not _LEFT_PLAIN.search(name)
    }
    description = description_of(model)
    for name, tensor in list(weights.tensors.items()):
        experts = name.endswith((".experts.gate_up_proj", ".experts.down_proj"))
        if not experts and name not in linear:
            continue
        assert isinstance(tensor, Tensor) and description is not None
        numbers = tensor.detach()
        if experts:
            numbers = numbers.mT if description.experts in TRANSPOSED else numbers
            weights.tensors[name] = PackedWeight.stacked([WAYS[quantize](one) for one in numbers])
        else:
            weights.tensors[name] = WAYS[quantize](numbers)
        tensor.data = numbers.new_empty(0)
    return weights


@torch.inference_mode()
def experts_met(model: PreTrainedModel, rows: int, *, context: int = 8) -> float | None:
    """Different experts that `rows` rows meet in a layer, on average over the layers with experts;
    None in a model without.

    The rows are the last ones of as many prompts of `context` random tokens, which transformers
    alone runs, so this belongs before `dummy_verifier`. `RoutedExperts.expected` is what rows that
    choose evenly and independently would meet.
    """
    chosen: list[int] = []

    def count(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(inputs) > 1:  # hidden states, indices and weights; Llama 4's are given rows alone
            chosen.append(inputs[1].view(rows, context, -1)[:, -1].unique().numel())

    layers = [module for name, module in model.named_modules() if name.endswith(".experts")]
    hooks = [layer.register_forward_pre_hook(count) for layer in layers]
    generator = torch.Generator(model.device).manual_seed(0)
    token_ids = torch.randint(
        model.config.vocab_size, (rows, context), device=model.device, generator=generator
    )
    try:
        if layers:
            model.set_attn_implementation("eager")
            model(token_ids, use_cache=False, logits_to_keep=1)
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        for hook in hooks:
            hook.remove()
    return sum(chosen) / len(chosen) if chosen else None
