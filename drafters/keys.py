"""Values of a drafter's `config.json`, checked as they are read."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from drafters.copied_keys import is_copied
from specdec.base.errors import CheckpointError, shown
from specdec.base.validation import is_number


def require(ok: bool, message: str) -> None:
    """Raises a CheckpointError with `message` unless `ok`."""
    if not ok:
        raise CheckpointError(message)


_OF_SPECULATORS = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "has_no_defaults_at_init", "id2label", "is_encoder_decoder",
    "label2id", "model_type", "output_attentions", "output_hidden_states", "pad_token_id",
    "problem_type", "return_dict", "speculators_config", "speculators_model_type",
    "speculators_version", "tie_word_embeddings", "torch_dtype", "transformer_layer_config",
    "transformers_version", "use_cache",
}  # fmt: skip
"""What every config.json in the layout of speculators may say."""


PLAIN_VALUES: dict[str, tuple[Any, ...]] = {
    "enable_qwen35_gated_q_proj": (False,),
    "hidden_act": ("silu", "swish"),
    "use_aux_norm": (False,),
    "use_gemma_norm": (False,),
}
"""Keys of drafters' relatives with the values under which they do not change the maths."""

_ROPE = {
    "attention_factor", "beta_fast", "beta_slow", "factor", "finetuned", "high_freq_factor",
    "llama_4_scaling_beta", "long_factor", "low_freq_factor", "max_position_embeddings",
    "mrope_interleaved", "mrope_section", "mscale", "mscale_all_dim",
    "original_max_position_embeddings", "partial_rotary_factor", "rope_dim", "rope_theta",
    "rope_type", "short_factor", "truncate", "type",
}  # fmt: skip
"""Transformers' RoPE parameters, and those of images and queries in a target's layers."""

_PLAIN_ROPE = {"apply_yarn_scaling": (True,), "attn_factor": (1,), "extrapolation_factor": (1,)}
"""What engines read there besides, with the values under which it changes nothing."""


def check_known(
    place: Mapping[str, Any], known: Iterable[str], name: str, *, copies: bool = False
) -> None:
    """Refuses a key that nobody reads: it might change the maths, and lower acceptance.

    Args:
        place: an object of config.json; null says nothing.
        known: keys that it may have, besides those of all files of speculators.
        name: of the object, for messages.
        copies: it may carry whatever a language model's config says, see `drafters.copied_keys`.

    Raises:
        CheckpointError: another key.
    """
    allowed = {*known, *(_OF_SPECULATORS if "speculators_model_type" in place else ())}
    unknown = [key for key, value in place.items() if value is not None and key not in allowed]
    if copies and unknown:
        unknown = [key for key in unknown if not is_copied(key)]
    for key in unknown:
        others = ", ".join(get_close_matches(key, allowed, 5, 0.5))
        if copies:
            others = "its own keys and those of language models"
        raise CheckpointError(
            f"{name} says {key[:100]}, which this loader does not know (known:"
            f" {others or 'none like it'});"
            " take it out of config.json if the drafter is the same without it"
        )


def check_plain(keys: "Keys", plain_values: Mapping[str, tuple[Any, ...]], kind: str) -> None:
    """Refuses values of relatives that change the maths.

    Args:
        keys: where they may stand.
        plain_values: by key, the values that ask for nothing.
        kind: of drafter, for messages.

    Raises:
        CheckpointError: another value.
    """
    for key, plain in plain_values.items():
        value = keys.find(key)
        known = value is None or value in plain
        what = f"{kind} with {key} {shown(value)} is not supported yet; supported: {plain[0]!r}"
        require(known, what)


def rope_sets(place: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Sets of RoPE parameters in an object of config.json, each with its name."""
    for name in ("rope_parameters", "rope_scaling", "swa_rope_parameters"):
        stated = place.get(name)
        if isinstance(stated, Mapping):
            kinds = {key: value for key, value in stated.items() if isinstance(value, Mapping)}
            yield name, {key: value for key, value in stated.items() if key not in kinds}
            yield from ((f"{name}.{kind}", parameters) for kind, parameters in kinds.items())


def check_rope(place: Mapping[str, Any]) -> None:
    """Refuses a RoPE parameter that nobody reads, in all sets of an object of config.json, and
    values that differ between two sets of which one is read; programs choose either.

    Raises:
        CheckpointError: such a key, a value of a relative, or such values.
    """
    sets = dict(rope_sets(place))
    for name, parameters in sets.items():
        check_known(parameters, _ROPE | _PLAIN_ROPE.keys(), name)
        check_plain(Keys([parameters]), _PLAIN_ROPE, f"RoPE in {name}")
    first, second = (
        _stated_rope(sets.get(f"rope_{name}", {})) for name in ("parameters", "scaling")
    )
    for name in filter(second.__contains__, first):
        require(
            first[name] == second[name],
            f"{name} is {shown(first[name])} in rope_parameters and {shown(second[name])} in"
            " rope_scaling; take the wrong one out of config.json",
        )


def _stated_rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What a set says, with one name for its type; text's positions are the same on all axes."""
    stated = {name: value for name, value in parameters.items() if value is not None}
    if stated:
        kind = stated.get("rope_type") or stated.pop("type", None)
        stated["rope_type"] = "default" if kind in (None, "mrope") else kind
    return stated


def rotary_factor(turned: int, head_dim: int) -> float:
    """`partial_rotary_factor` that turns exactly `turned` of a head's `head_dim` numbers.

    >>> int(30 / 44 * 44), int(rotary_factor(30, 44) * 44)
    (29, 30)
    """
    return math.nextafter(turned / head_dim, 1)  # for it is rounded down


def section(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object `name` of `parent`; empty where there is none.

    Raises:
        CheckpointError: another kind of value.
    """
    value = parent.get(name) or {}
    require(isinstance(value, Mapping), f"{name} is {value!r}; it must be an object")
    return value


class Keys:
    """Values found by name in several objects, the first of which wins."""

    def __init__(self, places: Sequence[Mapping[str, Any]]) -> None:
        self.places = places

    def find(self, name: str) -> Any:
        """The value, or None; a JSON null says nothing."""
        return next((place[name] for place in self.places if place.get(name) is not None), None)

    def integer(self, name: str) -> int | None:
        """An integer, or None."""
        return self._typed(name, int, "an integer")

    def required(self, name: str) -> int:
        """An integer that must be there."""
        value = self.integer(name)
        require(value is not None, f"config.json lacks {name}")
        assert value is not None
        return value

    def number(self, name: str) -> float | None:
        """A finite number, or None."""
        value = self.find(name)
        valid = value is None or is_number(value)
        require(valid, f"{name} is {shown(value)}; it must be a number")
        return None if value is None else float(value)

    def flag(self, name: str) -> bool | None:
        """True, false or None."""
        return self._typed(name, bool, "true or false")

    def _typed(self, name: str, kind: type, noun: str) -> Any:
        value = self.find(name)
        # JSON's true is an int to Python, never to the person who wrote it.
        right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        require(value is None or right, f"{name} is {value!r}; it must be {noun}")
        return value


_SIZES = (
    "hidden_size", "intermediate_size", "kv_lora_rank", "max_position_embeddings",
    "num_attention_heads", "num_key_value_heads", "q_lora_rank", "v_head_dim", "vocab_size",
)  # fmt: skip
MAX_LAYERS = 1024
"""More than any drafter has: a number beyond comes from a damaged file, or was mistyped."""

LIMITS = {
    **dict.fromkeys(_SIZES, 2**31 - 1),
    **dict.fromkeys(("global_head_dim", "head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 2**16),
    "num_hidden_layers": MAX_LAYERS,
}
"""Counts and sizes of layers, all at least 1, and the most that each may be."""


def count(keys: Keys, name: str) -> int | None:
    """A count or a size of `LIMITS`, or None; CheckpointError: it is outside them."""
    value, most = keys.integer(name), LIMITS[name]
    require(value is None or 1 <= value <= most, f"{name} is {value}; it must lie in [1, {most:,}]")
    return value
