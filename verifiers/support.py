"""Which Hugging Face models can be targets, told from the config alone: an unfit one is refused
before its weights are read.

A target has to be a decoder whose every layer attends exactly once, through transformers' attention
interface, to keys and values of its own, or one of a family that our own layers build
(`verifiers.config.families`). Its rows must not depend on each other in any other way, because
requests share a forward. Of a multimodal model the text part is judged.
"""

from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

from specdec.base.errors import CheckpointError, UnsupportedModelError
from verifiers.config.families import WRAPPERS, describe, family_of
from verifiers.config.shape import CHUNKED, rope_kinds, value_widths
from verifiers.config.states import MIXERS_ALONE, STATES
from verifiers.config.wrappers import bare_class, is_composite, text_class, text_config
from verifiers.formats.method import format_of, stated_quantization
from verifiers.formats.settings import SettingError

LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
# one thing, in two releases of transformers
INDEXED_LAYER_TYPES = frozenset({"indexed_attention", "deepseek_sparse_attention"})

PECULIAR = {
    "diffllama": "each of its layers attends twice",
    "doge": "its attention mask depends on the values",
    "hrm_text": "its layers run several times per token",
    "jetmoe": "it attends to each stored key and value head several times",
    "nemotron": "its layers do not pass the paged cache on to their attention",
}
"""Model types whose obstacle shows in their code only."""

OTHER_LATENT = {
    "axk2": "gates what it returns",
    "hy_v4": "has sinks and gates what it returns",
    "longcat_flash": "runs twice in each layer",
    "minicpm3": "rotates halves where DeepSeek's rotates neighbors",
}
"""What sets the latent attention of other model types apart."""

HEADS = frozenset({"head_dim", "num_attention_heads", "num_key_value_heads"})
"""Entries in which layers may differ."""


def check_supported(name: str, config: PreTrainedConfig) -> None:
    """Refuses a model that cannot be a target.

    Raises:
        UnsupportedModelError: naming the model, its type and every reason.
    """
    reasons = unsupported_reasons(config)
    if not reasons:
        return
    message = f"model {name!r} of type {config.model_type!r} is not supported: {'; '.join(reasons)}"
    if reasons != [*_weight_reasons(text_config(config))]:  # which say what to take instead
        message += "; choose a decoder-only text model such as Llama, Qwen3 or Gemma 2"
    raise UnsupportedModelError(message)


def unsupported_reasons(config: PreTrainedConfig) -> list[str]:
    """All reasons why a model of this config cannot be a target; empty when it can.

    Raises:
        SettingError: its `quantization_config` is none.
    """
    text = text_config(config)
    model_class = text_class(text)
    described = describe(text) is not None
    # its tensors are all that our own layers need
    if model_class is None and (described or is_composite(config)):
        model_class = bare_class(text)
    return [
        *_whole_reasons(config),
        *_model_reasons(text, model_class, described),
        *_attention_reasons(text, _own_kinds(text) if described else frozenset()),
        *_cache_reasons(text, described),
        *_position_reasons(text, described),
        *_weight_reasons(text),
    ]


def _whole_reasons(config: PreTrainedConfig) -> Iterator[str]:
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder model"
    if config.sub_configs and config.model_type not in WRAPPERS:
        parts = ", ".join(sorted(config.sub_configs))
        multimodal = any(sense in parts for sense in ("vision", "audio"))
        kind = "multimodal" if multimodal else "composed of nested configs"
        known = " and its text part is not known to run alone" if is_composite(config) else ""
        yield f"it is {kind} ({parts}){known}"


def _model_reasons(config: PreTrainedConfig, model_class: Any, described: bool) -> Iterator[str]:
    if config.model_type in PECULIAR:
        yield PECULIAR[config.model_type]
    if model_class is None:
        has_code = getattr(config, "auto_map", None)
        remote = " and code from its repository is never run" if has_code else ""
        yield f"this transformers version has no causal language model of that type{remote}"
        return
    if described:
        return  # our own layers run it, which need nothing of transformers' attention
    if getattr(model_class, "_is_stateful", False):
        yield (
            "it keeps a recurrent state (state-space model or linear attention),"
            " which cannot be rolled back"
        )
    if not getattr(model_class, "_supports_attention_backend", False):
        yield f"{model_class.__name__} does not go through transformers' attention interface"


def _own_kinds(config: PreTrainedConfig) -> frozenset[str]:
    """Kinds of layers that our own ones of this type have beside those that any model may have."""
    family = family_of(config)
    if family.recurrent is not None:
        return STATES | MIXERS_ALONE
    return frozenset({CHUNKED}) if family.chunked else frozenset()


def _attention_reasons(config: PreTrainedConfig, own: frozenset[str]) -> Iterator[str]:
    kinds = set(_value(config, "layer_types") or ()) - own
    if family_of(config).indexer:
        kinds -= INDEXED_LAYER_TYPES
    if kinds - LAYER_TYPES:
        yield f"it has layers of type {', '.join(sorted(kinds - LAYER_TYPES))}"
    elif "sliding_attention" in kinds and _value(config, "sliding_window") is None:
        yield "it has sliding_attention layers without a sliding_window"
    if (chunk := _value(config, "attention_chunk_size")) and CHUNKED not in own:
        yield f"it attends within chunks of {chunk} tokens"
    if (
        config.model_type in (*MODEL_FOR_MASKED_LM_MAPPING_NAMES, "bert-generation")
        or _value(config, "use_bidirectional_attention") in (True, "all")
        or _value(config, "is_causal") is False
    ):
        yield "its attention is bidirectional"
    yield from family_of(config).against(config)


def _cache_reasons(config: PreTrainedConfig, described: bool) -> Iterator[str]:
    rank = _value(config, "kv_lora_rank")
    if rank and not family_of(config).latent:
        apart = OTHER_LATENT.get(config.model_type, "is not that of DeepSeek or GLM")
        apart = f"that {apart}, which is not available yet"
        yield f"it has latent attention (kv_lora_rank {rank}) {apart}"
    elif rank:
        yield from _latent_reasons(config)
    shared = _value(config, "num_kv_shared_layers")
    if shared and not described:
        yield f"{shared} of its layers use the keys and values of another layer"
    differing = sorted(set(getattr(config, "per_layer_attributes", None) or ()) - HEADS)
    if differing:
        yield f"its layers differ in {', '.join(differing)}"
    widths = value_widths(config)
    description = describe(config)
    narrower = description is not None and description.value_dim is not None
    if widths is not None and not (narrower and widths[1] < widths[0]):
        yield "its keys have {} numbers per head and its values {}".format(*widths)


def _latent_reasons(config: PreTrainedConfig) -> Iterator[str]:
    if (_value(config, "indexer_types") or ["full"])[0] == "shared":
        yield "its first layer has no indexer and no layer before it to share one with"
    if describe(config) is None:
        lacking = "lack its activation function or its RoPE"
        yield f"our layers, which alone have latent attention, {lacking}"


def _weight_reasons(config: PreTrainedConfig) -> Iterator[str]:
    try:
        quantization = stated_quantization(config)
        if quantization is not None:
            format_of(quantization)
    except SettingError:
        raise
    except CheckpointError as error:
        yield str(error)


def _position_reasons(config: PreTrainedConfig, described: bool) -> Iterator[str]:
    """LongRoPE looks at the longest sequence of a batch in transformers; our own layers look at
    each request alone.
    """
    lengths = {
        rope["original_max_position_embeddings"]
        for rope in rope_kinds(config)
        if rope.get("rope_type") == "longrope"
    }
    if lengths and not described:
        yield "its RoPE of type longrope changes with the longest sequence of a batch"
    elif len(lengths) > 1:
        several = ", ".join(map(str, sorted(lengths)))
        yield f"its layers have RoPE of type longrope that changes at several lengths ({several})"


def _value(config: PreTrainedConfig, name: str) -> Any:
    """A config entry; None when it is absent, or differs in layers, which is reported."""
    if name in (getattr(config, "per_layer_attributes", None) or ()):
        return None
    return getattr(config, name, None)
