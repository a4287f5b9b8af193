"""The text part of a multimodal checkpoint, as a target of its own: its config, its class and its
tensors, without the tower.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.device.meta import shapes_alone
from verifiers.config.families import READ_AS, family_of
from verifiers.config.names import EMBEDDING, HEAD, TEXT_PART
from verifiers.entries import PlainConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

OURS = frozenset(
    {
        *(f"{mark}{part}_implementation" for part in ("attn", "experts") for mark in ("", "_")),
        *(f"_{part}_implementation_internal" for part in ("attn", "experts")),
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "use_return_dict",
    }
)
"""Entries that say how to run a model and not what it is: whatever a file says, that is for us to
choose.
"""

_SENSES = {"image": "an image", "video": "a video", "audio": "a sound"}


def read_config(path: str) -> PreTrainedConfig:
    """The config of a checkpoint, of the composite if it is one."""
    from transformers import CONFIG_MAPPING, AutoConfig

    entries = config_entries(path)
    model_type = entries.get("model_type")
    if isinstance(model_type, str) and (model_type in READ_AS or model_type in CONFIG_MAPPING):
        return config_of(entries)
    config: PreTrainedConfig = AutoConfig.from_pretrained(path, trust_remote_code=False)
    return config


def config_entries(path: str) -> dict[str, Any]:
    """What the config.json of a checkpoint states."""
    entries: dict[str, Any] = PreTrainedConfig.get_config_dict(path)[0]
    return entries


def config_of(entries: dict[str, Any]) -> PreTrainedConfig:
    """The config that the entries of a config.json make; the code of a repository is left alone.

    Raises:
        ValueError: transformers knows no such model type.
    """
    from transformers import AutoConfig

    kept = _with_types(_settled(entries))
    kept = {name: value for name, value in kept.items() if name not in ("model_type", "auto_map")}
    model_type = entries.get("model_type", "")
    config: PreTrainedConfig = AutoConfig.for_model(READ_AS.get(model_type, model_type), **kept)
    return config


def _with_types(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Entries whose types of numbers have names that transformers knows; "auto" says nothing.

    >>> _with_types({"torch_dtype": "torch.bfloat16", "text_config": {"dtype": "auto"}})
    {'torch_dtype': 'bfloat16', 'text_config': {}}

    Raises:
        CheckpointError: torch has no such type.
    """
    found: dict[str, Any] = {}
    for name, value in entries.items():
        nested = name.endswith("_config") and name != "quantization_config"
        if nested and isinstance(value, Mapping):
            found[name] = _with_types(value)
        elif name not in ("dtype", "torch_dtype") or not isinstance(value, str):
            found[name] = value
        elif value != "auto":
            found[name] = value.removeprefix("torch.")
            if not isinstance(getattr(torch, found[name], None), torch.dtype):
                what = f"{name} is {value!r}, which is no type of numbers"
                raise CheckpointError(f"{what}; write one such as bfloat16")
    return found


def _settled(entries: Mapping[str, Any]) -> dict[str, Any]:
    """The entries without those of `OURS`, at any depth."""
    kept = {name: value for name, value in entries.items() if name not in OURS}
    return {key: _settled(one) if isinstance(one, Mapping) else one for key, one in kept.items()}


def is_composite(config: PreTrainedConfig) -> bool:
    """Whether the config nests that of a text model."""
    return bool(config.sub_configs) and getattr(config, "text_config", None) is not None


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the text part, with what stands in the outer one alone; of a text model the
    config itself.
    """
    if isinstance(config, PlainConfig) or not is_composite(config):
        return config
    text: PreTrainedConfig = copy.deepcopy(config.get_text_config(decoder=True))
    # The composite ties by its own entry, whatever the nested one says.
    for name in ("tie_word_embeddings", "quantization_config", "eos_token_id", "dtype"):
        stated = getattr(config, name, None)
        if stated is not None:
            setattr(text, name, stated)
    return text


def media_token_ids(config: PreTrainedConfig) -> dict[int, str]:
    """Token ids that stand for what a tower would have seen or heard, with what that is in words;
    empty for a text model.
    """
    if isinstance(config, PlainConfig):
        return config.media
    if not is_composite(config):
        return {}
    found = {}
    for sense, words in _SENSES.items():
        for name in (f"{sense}_token_id", f"{sense}_token_index"):
            if isinstance(number := getattr(config, name, None), int):
                found[number] = words
    return found


def text_class(config: PreTrainedConfig) -> Any:
    """The causal language model of a text config; None where transformers has the bare text model
    alone, or nothing.
    """
    from transformers.models.auto import modeling_auto as auto

    found: Any = auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if found is None and not is_composite(config):  # transformers has Mistral 4 on another list
        found = auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


def bare_class(config: PreTrainedConfig) -> Any:
    """The model of a text config without a head; None where there is none."""
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    found: Any = MODEL_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found


class ClassFacts(NamedTuple):
    """What transformers' class of a text model says of its tensors.

    Attributes:
        missed: expressions for names that files may lack.
        ignored: expressions for names in files that the model lacks, beyond its last layer.
        wide: parts of names of tensors that are float32 where others have 16 bits.
        wider: the same where others are float16.
    """

    missed: Sequence[str]
    ignored: Sequence[str]
    wide: Sequence[str]
    wider: Sequence[str]


def class_facts(config: Any) -> ClassFacts:
    """What transformers' class of a text model says of its tensors."""
    if isinstance(config, PlainConfig):
        facts: ClassFacts = config.of_class
        return facts
    found = text_class(config)

    def said(name: str) -> list[str]:
        return sorted(getattr(found, name, None) or ())

    return ClassFacts(
        said("_keys_to_ignore_on_load_missing"),
        said("_keys_to_ignore_on_load_unexpected"),
        said("_keep_in_fp32_modules_strict"),
        said("_keep_in_fp32_modules"),
    )


def wide_names(config: Any, dtype: torch.dtype) -> re.Pattern[str] | None:
    """An expression for the tensors of a model that are float32 whatever `dtype` the others have;
    None where there are none.
    """
    facts, kept = class_facts(config), set(family_of(config).wide)
    if dtype in (torch.float16, torch.bfloat16):
        kept |= set(facts.wide)
    if dtype == torch.float16:
        kept |= set(facts.wider)
    return re.compile("|".join(name.replace("*", ".*") for name in sorted(kept))) if kept else None


def shapes_of(config: Any) -> dict[str, torch.Size]:
    """Shapes of all tensors of a text model by transformers' names, made without memory from its
    config; a tied head is none.

    Raises:
        InvalidInputError: a tensor would be empty, as of a size of 0.
    """
    if isinstance(config, PlainConfig):
        return dict(config.shapes)
    own = text_class(config)
    found: Any = own or bare_class(config)
    with shapes_alone(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")  # an error of ours below
        model: nn.Module = found(config)
    # those that layers share once, under the first name
    tensors: dict[int, tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        tensors.setdefault(id(tensor), (name, tensor))
    shapes = {name if own else f"model.{name}": tensor.shape for name, tensor in tensors.values()}
    if getattr(config, "tie_word_embeddings", False):
        shapes.pop(HEAD, None)
    elif own is None:
        shapes[HEAD] = shapes[EMBEDDING]
    empty = next((name for name, shape in shapes.items() if 0 in shape), None)
    if empty is not None:
        raise InvalidInputError(
            f"its config asks for {empty!r} of the sizes {list(shapes[empty])}, which no model has;"
            f" fetch config.json again"
        )
    return shapes


def say_text_only(config: PreTrainedConfig) -> None:
    """Logs which parts of a composite are left out; nothing of a text model."""
    if said := text_only(config):
        logger.warning("%s", said)


def text_only(config: Any) -> str:
    """What `say_text_only` says; empty for a text model."""
    if isinstance(config, PlainConfig):
        return config.text_only
    if not is_composite(config):
        return ""
    names = sorted(part.removesuffix("_config") for part in config.sub_configs)
    parts = ", ".join(name for name in names if name != "text")
    return f"{config.model_type} is taken as a text model: text only, without its {parts} part"


def load_text(
    path: str, config: PreTrainedConfig, dtype: torch.dtype, attention: str
) -> tuple[Any, list[str]]:
    """The text part of a composite, whose config this is, on the CPU, and its tensors that the
    checkpoint lacks; `attention` is the value of `attn_implementation`.
    """
    from transformers import AutoModelForImageTextToText

    text = text_config(config)
    options: dict[str, Any] = {
        "dtype": dtype,
        "attn_implementation": attention,
        "output_loading_info": True,
    }
    with without_reports():
        if (own := text_class(text)) is not None:
            options["key_mapping"] = dict(TEXT_PART)
            model, report = own.from_pretrained(path, config=text, **options)
            return model, sorted(report["missing_keys"])
        composite, report = AutoModelForImageTextToText.from_pretrained(
            path, config=config, trust_remote_code=False, **options
        )
    of_text = re.compile(r"(^|\.)(language_model|lm_head)\.")
    return TextPart(composite, text), sorted(filter(of_text.search, report["missing_keys"]))


@contextmanager
def without_reports() -> Iterator[None]:
    """Keeps transformers from telling, such as of tensors of the tower, left out on purpose."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)


class TextPart(nn.Module):
    """The text model of a composite and its head, as much like a causal language model as verifiers
    need; the rest is given up.
    """

    def __init__(self, composite: PreTrainedModel, config: PreTrainedConfig) -> None:
        super().__init__()
        kind = bare_class(config)
        self.model: Any = next(module for module in composite.modules() if type(module) is kind)
        self.lm_head: Any = composite.get_output_embeddings()
        self.config, self.generation_config = self.model.config, composite.generation_config
        for name in ("tie_word_embeddings", "quantization_config", "eos_token_id"):
            if hasattr(config, name):
                setattr(self.config, name, getattr(config, name))

    @property
    def base_model(self) -> Any:
        """The text model without its head."""
        return self.model

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        device: torch.device = self.model.embed_tokens.weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        dtype: torch.dtype = self.model.embed_tokens.weight.dtype
        return dtype

    def get_decoder(self) -> Any:
        """The text model without its head."""
        return self.model

    def get_input_embeddings(self) -> Any:
        """The embedding table."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> Any:
        """The head."""
        return self.lm_head

    def forward(
        self, input_ids: Tensor, *, logits_to_keep: int | Tensor = 0, **options: Any
    ) -> SimpleNamespace:
        """Logits of all rows, or of the last ones or those that `logits_to_keep` names, as
        transformers' own classes do.
        """
        hidden = self.model(input_ids=input_ids, **options).last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept, :])
        if (factor := getattr(self.config, "output_multiplier", None)) is not None:
            logits = logits * factor
        if (bound := getattr(self.config, "final_logit_softcapping", None)) is not None:
            logits = torch.tanh(logits / bound) * bound
        return SimpleNamespace(logits=logits)
