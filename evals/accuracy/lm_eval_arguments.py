"""Arguments of lm-eval's commands and tasks, in the engine's words."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from typing import Any

import torch
from lm_eval.utils import simple_parse_args_string

from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError

logger = logging.getLogger(__name__)

DEFAULT_DEVICE = "cuda:0"
"""What lm-eval's command hands over where nobody names a device."""

SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "min_tokens", "skip_special_tokens",
)  # fmt: skip
"""Generation arguments of a task that mean the same here."""

_ANYTHING: tuple[Any, ...] = ()

WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "num_beams": (1,), "num_beam_groups": (1,), "num_return_sequences": (1,), "n": (1,),
    "length_penalty": (1.0,), "diversity_penalty": (0.0,), "no_repeat_ngram_size": (0,),
    "typical_p": (1.0,), "early_stopping": (False,), "output_scores": (False,),
    "return_dict_in_generate": (False,), "ignore_eos": (False,), "use_cache": _ANYTHING,
    "pad_token_id": _ANYTHING, "bos_token_id": _ANYTHING,
}  # fmt: skip
"""Generation arguments that ask for nothing when they have one of these values, or ever."""

MODEL_ARGUMENTS: dict[str, tuple[tuple[Any, ...], str]] = {
    "trust_remote_code": ((False, True), ""),
    "parallelize": ((False,), "start the command with torchrun to spread the target"),
    "tensor_parallel_size": ((1,), "start the command with torchrun to spread the target"),
    "data_parallel_size": ((1,), "one engine answers; specdec eval --ray has several"),
    "tokenizer": (("",), "the tokenizer is the target's own"),
    "peft": (("",), "adapters are not applied; merge them into the checkpoint"),
    "load_in_4bit": ((False,), "name a checkpoint that is quantized"),
    "load_in_8bit": ((False,), "name a checkpoint that is quantized"),
    "gpu_memory_utilization": ((), "leave it out: the cache takes what is free"),
    "max_model_len": ((), "it is called max_length here"),
    "prefix_token_id": ((), "it is the tokenizer's own"),
    "add_bos_token": ((), "the tokenizer decides"),
}
"""Arguments of other models of lm-eval: values that ask for nothing, and what to do else."""


def check_model_arguments(others: Mapping[str, Any], model: type) -> None:
    """Looks at arguments that the model does not have.

    Raises:
        InvalidInputError: one asks for something.
    """
    for name, value in others.items():
        harmless, way_out = MODEL_ARGUMENTS.get(name, ((), ""))
        if value is None or value in harmless:
            if name == "trust_remote_code" and value:
                text = "trust_remote_code has no effect"
                logger.warning(f"{text}: code that comes with a checkpoint is never run")
            continue
        if not way_out:
            own = [
                one
                for one in inspect.signature(model).parameters
                if one not in ("decoder", "system", "journal", "title", "others")
            ]
            way_out = f"known are {', '.join(own)}"
        raise InvalidInputError(f"model argument {name}={value!r} is not offered: {way_out}")


def parsed_arguments(text: str) -> dict[str, Any]:
    """What lm-eval's option `--gen_kwargs` says.

    >>> parsed_arguments("top_p=0.5,do_sample=true")
    {'top_p': 0.5, 'do_sample': True}
    """
    found: dict[str, Any] = simple_parse_args_string(text)
    return found


def device_of(name: str | None) -> str:
    """The device that lm-eval names, or "auto" where it is merely its default and not there."""
    if name == DEFAULT_DEVICE and not torch.cuda.is_available():
        text = "device %s is lm-eval's default and not on this machine; auto is taken"
        logger.warning(text, DEFAULT_DEVICE)
        return "auto"
    return name or "auto"


def think_end(given: str | int | None, tokenizer: Any) -> str | int | None:
    """What ends the thinking: the id of a token, where the text is one, else the text.

    Raises:
        InvalidInputError: the tokenizer has no token of this id.
    """
    if given is None:
        return None
    if isinstance(given, int) or given.isdigit():
        if not 0 <= int(given) < len(tokenizer):
            what = f"think_end_token is {given}, of {len(tokenizer)} tokens"
            raise InvalidInputError(f"{what}; give its text")
        return int(given)
    known = {added.content: token for token, added in tokenizer.added_tokens_decoder.items()}
    return known.get(given, given)


def batch_size_of(value: int | str) -> int:
    """Requests at once.

    >>> batch_size_of("4"), batch_size_of("auto") == EngineConfig().max_num_seqs
    (4, True)
    """
    if str(value).startswith("auto"):
        return EngineConfig().max_num_seqs
    try:
        return int(value)
    except ValueError:
        what = f"batch_size is {value!r}"
        raise InvalidInputError(f"{what}; it must be a whole number or auto") from None


def sampling_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` that generation arguments ask for, those of lm-eval's own aside.

    Raises:
        InvalidInputError: one that the engine does not know.

    >>> sampling_of({"num_beams": 1, "top_k": -1, "min_new_tokens": 3, "top_p": None})
    {'top_k': 0, 'min_tokens': 3}
    """
    found: dict[str, Any] = {}
    for name, value in given.items():
        name = "min_tokens" if name == "min_new_tokens" else name
        if value is None or (
            name in WITHOUT_EFFECT and (not WITHOUT_EFFECT[name] or value in WITHOUT_EFFECT[name])
        ):
            continue
        if name not in (*SAMPLING, "stop_token_ids"):
            harmless = f" other than {WITHOUT_EFFECT[name][0]}" if name in WITHOUT_EFFECT else ""
            own = ("until", "max_gen_toks", "do_sample", "seed", "stop_token_ids")
            known = ", ".join((*own, *SAMPLING))
            raise InvalidInputError(
                f"generation argument {name!r}{harmless} is not known (known: {known})"
            )
        found[name] = 0 if (name, value) == ("top_k", -1) else value
    return found
