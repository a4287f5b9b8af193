"""What the decoder layers of an EAGLE-3 head are like, read from `config.json`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from drafters.eagle3.rope import rope_parameters, whole_heads
from drafters.keys import LIMITS, Keys, count, require
from specdec.base.errors import one_line
from specdec.layers.rotary.rotary import Rope

Layers: TypeAlias = LlamaConfig | Qwen3Config | DeepseekV3Config
"""What a head's layers may be like."""


class _Llama(LlamaConfig):
    """Llama's config for heads of any size; Transformers' own takes widths that divide alone."""

    def validate_architecture(self) -> None:
        """Nothing: `_check_heads` does."""


_KINDS: dict[str, type[Layers]] = {
    "llama": _Llama,
    "qwen3": Qwen3Config,
    "deepseek_v3": DeepseekV3Config,
    "kimi_k2": DeepseekV3Config,
}
_CLASSES = {
    name: kind
    for kind, names in {
        "llama": (
            "Eagle3LlamaForCausalLM EAGLE3LlamaForCausalLM LlamaForCausalLMEagle3"
            " LlamaEagle3DraftModel Eagle3MiniMaxM2ForCausalLM Eagle3Qwen2_5vlForCausalLM"
            " Eagle3Qwen3vlForCausalLM LlamaForCausalLMPeagle PEagleDraftModel"
            " PeagleLlamaForCausalLM"
        ),
        "qwen3": "Eagle3Qwen3ForCausalLM PeagleQwen3ForCausalLM Qwen3Eagle3Model",
        "deepseek_v3": "Eagle3DeepseekV2ForCausalLM Eagle3DeepseekV3ForCausalLM",
    }.items()
    for name in names.split()
}
"""What layers a class has, whose config may be called like that of its target."""

_NEEDED = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size",
)  # fmt: skip
_FLAGS = (
    "attention_bias", "mlp_bias", "rope_interleave", "tie_word_embeddings", "use_sliding_window",
)  # fmt: skip
_PASSED_ON = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What no head looks at, and what converted checkpoints keep."""


def read_layers(shape: Mapping[str, Any], architecture: str | None = None) -> Layers:
    """What the layers are like, with Transformers' defaults for what is not said, as by a null.

    Args:
        shape: the object of `config.json` that describes them.
        architecture: the head's class, which decides what they are like where it can have but one
            kind of layers; else `model_type` does.

    Raises:
        CheckpointError: another kind of layers, or a missing, malformed or contradictory value.
    """
    kind, keys = _CLASSES.get(architecture or "", shape.get("model_type")), Keys([shape])
    known = isinstance(kind, str) and kind in _KINDS
    require(
        known,
        f"layers of type {kind!r} are not supported in an EAGLE-3 head; supported:"
        f" {', '.join(_KINDS)}",
    )
    made = _KINDS[str(kind)]
    said, rope = _said(shape, keys, made), rope_parameters(keys, made.default_theta)
    try:
        layers = made(**said, rope_parameters=rope)
    except Exception as error:  # whatever Transformers makes of values that passed
        what = f"the layers' part of config.json is not valid ({one_line(error)}); correct it"
        require(False, what)
    _check_heads(layers, stated=keys.find("head_dim") is not None)
    layers.rope_parameters = whole_heads(layers.rope_parameters, layers.head_dim)
    Rope.of(layers.rope_parameters, layers.head_dim, layers.max_position_embeddings)
    return layers


def windows(layers: Layers) -> tuple[int | None, ...]:
    """Per layer, the sliding window or None for full attention.

    Raises:
        CheckpointError: types of layers that are not known, or a window that is not stated.
    """
    kinds: Sequence[str] = (
        getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    )
    known = isinstance(kinds, list) and len(kinds) == layers.num_hidden_layers
    known = known and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    require(
        known,
        f"layer_types is {kinds!r}; it must name full_attention or sliding_attention for each"
        f" layer",
    )
    window = getattr(layers, "sliding_window", None)
    stated = "sliding_attention" not in kinds or (type(window) is int and window >= 1)
    require(
        stated, "a layer is sliding_attention but config.json enables no window; set sliding_window"
    )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _said(shape: Mapping[str, Any], keys: Keys, made: type[Layers]) -> dict[str, Any]:
    """Values for a config of that class, but for RoPE."""
    for name in _NEEDED:
        keys.required(name)
    found: dict[str, Any] = {name: count(keys, name) for name in LIMITS}
    # where the usual size is that of experts (Llama 4), this is that of layers without
    dense = Keys([{"intermediate_size": shape.get("intermediate_size_mlp")}, shape])
    found["intermediate_size"] = count(dense, "intermediate_size")
    found |= {name: keys.flag(name) for name in _FLAGS}
    found |= {name: shape[name] for name in _PASSED_ON if _is_token(shape.get(name))}
    found["rms_norm_eps"] = _epsilon(keys)
    found["max_window_layers"] = keys.integer("max_window_layers")
    declared = made.__dataclass_fields__.keys()
    said = {name: value for name, value in found.items() if value is not None and name in declared}
    if shape.get("layer_types") is not None:
        said["layer_types"] = shape["layer_types"]
    # With these a null does say something: that there is no window, no compression of queries.
    if "sliding_window" in shape:
        said["sliding_window"] = shape["sliding_window"]
    if made is DeepseekV3Config and "q_lora_rank" in shape:
        said["q_lora_rank"] = found["q_lora_rank"]
    return said


def _epsilon(keys: Keys) -> float | None:
    value = keys.number("rms_norm_eps")
    valid = value is None or 0 < value <= 1
    require(valid, f"rms_norm_eps is {value}; it must be above 0, and at most 1")
    return value


def _is_token(value: object) -> bool:
    return type(value) is int or (
        isinstance(value, list) and all(type(one) is int for one in value)
    )


def _check_heads(layers: Layers, *, stated: bool) -> None:
    """Refuses heads that do not divide, and those without a `stated` size that divide no width."""
    heads, width = layers.num_attention_heads, layers.hidden_size
    require(
        stated or not isinstance(layers, LlamaConfig) or width % heads == 0,
        f"hidden_size {width} is no multiple of num_attention_heads {heads}, and config.json lacks"
        " head_dim; add it",
    )
    kv_heads = layers.num_key_value_heads
    head_dim = layers.head_dim
    require(
        heads % kv_heads == 0 and head_dim % 2 == 0 and head_dim > 0,
        f"{heads} query heads on {kv_heads} key heads of {head_dim}: the first must be a multiple"
        f" of the second, the third even",
    )
    biased = isinstance(layers, DeepseekV3Config) and layers.attention_bias
    require(
        not biased,
        "attention_bias is true, which latent attention is not supported with; it must be false",
    )
