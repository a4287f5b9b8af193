"""What the decoder layers of an EAGLE-3 head are like, read from `config.json`."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from transformers import DeepseekV3Config, LlamaConfig, Qwen3Config

from drafters.keys import Keys, is_number, require, section
from specdec.errors import one_line
from specdec.layers.rotary import STATIC_ROPE_TYPES, Rope

Layers: TypeAlias = LlamaConfig | Qwen3Config | DeepseekV3Config
"""What a head's layers may be like."""

_KINDS: dict[str, type[Layers]] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "deepseek_v3": DeepseekV3Config,
    "kimi_k2": DeepseekV3Config,
}
_NEEDED = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
_LIMITS = {
    **dict.fromkeys((*_NEEDED, "num_key_value_heads", "max_position_embeddings"), 2**31 - 1),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank", "v_head_dim"), 2**31 - 1),
    **dict.fromkeys(("head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 2**16),
    "num_hidden_layers": 1024,
}
"""Counts and sizes, all of which are at least 1, and the most that each may be."""

_FLAGS = ("attention_bias", "mlp_bias", "rope_interleave", "tie_word_embeddings", "use_sliding_window")
_PASSED_ON = ("bos_token_id", "eos_token_id", "pad_token_id")
"""What no head looks at, and what converted checkpoints keep."""

_NUMBERS_OF_ROPE = (
    "attention_factor", "beta_fast", "beta_slow", "factor", "high_freq_factor", "low_freq_factor", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_theta",
)  # fmt: skip


def read_layers(shape: Mapping[str, Any]) -> Layers:
    """What the layers are like, with Transformers' defaults for what is not said, as by a null.

    Args:
        shape: the object of `config.json` that describes them.

    Raises:
        CheckpointError: another kind of layers, or a missing, malformed or contradictory value.
    """
    kind, keys = shape.get("model_type"), Keys([shape])
    known = isinstance(kind, str) and kind in _KINDS
    require(known, f"layers of type {kind!r} are not supported in an EAGLE-3 head; supported: {', '.join(_KINDS)}")
    made = _KINDS[str(kind)]
    for name in _NEEDED:
        keys.required(name)
    found: dict[str, Any] = {name: _count(keys, name, most) for name, most in _LIMITS.items()}
    found |= {name: keys.flag(name) for name in _FLAGS}
    found |= {"rms_norm_eps": _epsilon(keys), "max_window_layers": keys.integer("max_window_layers")}
    found |= {name: shape[name] for name in _PASSED_ON if _is_token(shape.get(name))}
    found |= {name: value for name in ("layer_types", "sliding_window") if (value := shape.get(name)) is not None}
    declared = made.__dataclass_fields__.keys() | {"layer_types", "sliding_window"}
    said = {name: value for name, value in found.items() if value is not None and name in declared}
    if "q_lora_rank" in shape and made is DeepseekV3Config:
        said["q_lora_rank"] = found["q_lora_rank"]  # here null says that queries are not compressed
    if "sliding_window" in shape:
        said["sliding_window"] = shape["sliding_window"]  # and here, that there is no window
    try:
        layers = made(**said, rope_parameters=_rope_parameters(keys, made))
    except Exception as error:  # whatever Transformers makes of values that passed
        require(False, f"the layers' part of config.json is not valid ({one_line(error)}); correct it")
    _check(layers)
    return layers


def windows(layers: Layers) -> tuple[int | None, ...]:
    """Per layer, the sliding window or None for full attention.

    Raises:
        CheckpointError: types of layers that are not known, or a window that is not stated.
    """
    kinds: Sequence[str] = getattr(layers, "layer_types", None) or ["full_attention"] * layers.num_hidden_layers
    known = isinstance(kinds, list) and len(kinds) == layers.num_hidden_layers
    known = known and all(kind in ("full_attention", "sliding_attention") for kind in kinds)
    require(known, f"layer_types is {kinds!r}; it must name full_attention or sliding_attention for each layer")
    window = getattr(layers, "sliding_window", None)
    stated = "sliding_attention" not in kinds or (type(window) is int and window >= 1)
    require(stated, "a layer is sliding_attention but config.json enables no window; set sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _count(keys: Keys, name: str, most: int) -> int | None:
    value = keys.integer(name)
    require(value is None or 1 <= value <= most, f"{name} is {value}; it must lie in [1, {most:,}]")
    return value


def _epsilon(keys: Keys) -> float | None:
    value = keys.number("rms_norm_eps")
    require(value is None or 0 < value <= 1, f"rms_norm_eps is {value}; it must be above 0, and at most 1")
    return value


def _is_token(value: object) -> bool:
    return type(value) is int or (isinstance(value, list) and all(type(one) is int for one in value))


def _rope_parameters(keys: Keys, made: type[Layers]) -> dict[str, Any]:
    """RoPE in the form of Transformers 5, from that form or from `rope_theta` and `rope_scaling`.

    A `partial_rotary_factor`, which trainers copy from a target's config, says something in type
    "proportional" alone: the modules of Llama, Qwen3 and DeepSeek-V3 turn whole heads.
    """
    place = next((name for name in ("rope_parameters", "rope_scaling") if keys.find(name)), "rope_parameters")
    stated = section(keys.places[0], place)
    parameters = {name: value for name, value in stated.items() if value is not None and name != "type"}
    parameters.setdefault("rope_type", stated.get("type") or "default")
    if parameters["rope_type"] == "mrope":  # positions of text are the same on all its axes
        parameters["rope_type"] = "default"
    kind, supported = parameters["rope_type"], ", ".join(STATIC_ROPE_TYPES)
    require(
        isinstance(kind, str) and kind in STATIC_ROPE_TYPES,
        f"RoPE type {kind!r} is not supported in a drafter; supported: {supported}",
    )
    theta = keys.find("rope_theta")
    parameters.setdefault("rope_theta", made.default_theta if theta is None else theta)
    for name in _NUMBERS_OF_ROPE:
        value = parameters.get(name)
        right = value is None or (is_number(value) and (value > 0 or name.startswith("mscale")))
        require(right, f"RoPE's {name} is {value!r}; it must be a positive number")
    if kind != "proportional":
        parameters.pop("partial_rotary_factor", None)
    return parameters


def _check(layers: Layers) -> None:
    """Refuses heads that do not divide, and angles that no float32 holds."""
    heads, kv_heads, head_dim = layers.num_attention_heads, layers.num_key_value_heads, layers.head_dim
    require(
        heads % kv_heads == 0 and head_dim % 2 == 0 and head_dim > 0,
        f"{heads} query heads on {kv_heads} key heads of {head_dim}: the first must be a multiple of the second, the third even",
    )
    biased = isinstance(layers, DeepseekV3Config) and layers.attention_bias
    require(not biased, "attention_bias is true, which latent attention is not supported with; it must be false")
    rope = Rope.of(layers.rope_parameters, head_dim, layers.max_position_embeddings)
    finite = torch.as_tensor(rope.amplitude).isfinite().all() and rope.frequencies.isfinite().all()
    require(bool(finite), f"RoPE parameters {layers.rope_parameters} give no finite angles; correct them in config.json")
