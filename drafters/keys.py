"""Values of a drafter's `config.json`, checked as they are read."""

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec.errors import CheckpointError


def require(ok: bool, message: str) -> None:
    """Raises a CheckpointError with `message` unless `ok`."""
    if not ok:
        raise CheckpointError(message)


_OF_SPECULATORS = {
    "_name_or_path", "architectures", "auto_map", "bos_token_id", "chunk_size_feed_forward", "dtype", "eos_token_id",
    "has_no_defaults_at_init", "id2label", "is_encoder_decoder", "label2id", "model_type", "output_attentions",
    "output_hidden_states", "pad_token_id", "problem_type", "return_dict", "speculators_config", "speculators_model_type",
    "speculators_version", "tie_word_embeddings", "torch_dtype", "transformer_layer_config", "transformers_version", "use_cache",
}  # fmt: skip
"""What every config.json in the layout of speculators may say."""


def check_known(place: Mapping[str, Any], known: Iterable[str], name: str) -> None:
    """Refuses a key that nobody reads: it might change the maths, and acceptance would drop without any error.

    Args:
        place: an object of config.json.
        known: keys that it may have; of the file in the layout of speculators, besides those that all such files have.
        name: of the object, for messages.

    Raises:
        CheckpointError: another key.
    """
    allowed = {*known, *(_OF_SPECULATORS if "speculators_model_type" in place else ())}
    unknown = [key for key in place if key not in allowed]
    require(
        not unknown,
        f"{name} says {unknown[0] if unknown else ''}, which this loader does not know (known: {', '.join(sorted(allowed))});"
        " take it out of config.json if the drafter is the same without it",
    )


def is_number(value: object) -> bool:
    """Whether a value is a finite number; JSON's true is an int to Python, and its numbers have no bounds."""
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        return False


def section(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """The object `name` of `parent`; empty where there is none.

    Raises:
        CheckpointError: another kind of value.
    """
    value = parent.get(name) or {}
    require(isinstance(value, Mapping), f"{name} is {value!r}; it must be an object")
    return value


class Keys:
    """Values found by name in several objects, the first of which wins.

    Args:
        places: the objects.
    """

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
        require(value is None or is_number(value), f"{name} is {reprlib.repr(value)}; it must be a number")
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
