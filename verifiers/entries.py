"""Reading single entries of a model's config."""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from transformers import PreTrainedConfig

from specdec.base.errors import CheckpointError


class PlainConfig(SimpleNamespace):
    """The config of a text model as `verifiers.config.recalled` knows it from an earlier start: its
    entries, without transformers' class.

    Attributes:
        undeclared: entries of the file that transformers does not have for models of this type.
        unkept: what its class has and no JSON file holds, which nothing here reads.
        shapes: see `verifiers.config.wrappers.shapes_of`.
        of_class: what is known of the model's class, see `verifiers.config.wrappers.ClassFacts`.
        tokenizer: module and name of the tokenizer's class, if it reads tokenizer.json alone.
        text_only: see `verifiers.config.wrappers.say_text_only`.
        media: see `verifiers.config.wrappers.media_token_ids`.
        read: reads the config again, with transformers' class.
    """

    undeclared: frozenset[str]
    shapes: dict[str, torch.Size]
    of_class: Any
    tokenizer: tuple[str, str] | None
    text_only: str
    media: dict[int, str]
    read: Callable[[], PreTrainedConfig]

    def __deepcopy__(self, memo: object) -> PreTrainedConfig:
        """A config with its class: a copy is made to be changed, and then has other shapes."""
        return self.read()

    def to_dict(self) -> dict[str, Any]:
        """What transformers' class makes of it."""
        return self.read().to_dict()

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("unkept", ()):
            raise RuntimeError(f"{name} of a config is read, and is none of what is kept of it")
        raise AttributeError(f"a {self.__dict__.get('model_type')!r} config has no {name!r}")


def layer_windows(config: PreTrainedConfig) -> list[int | None]:
    """Sliding window of each decoder layer in tokens, None for full attention: a row sees positions
    less than a window away.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        slides = declared(config, "use_sliding_window", True)
        kinds = ["sliding_attention" if slides else "full_attention"] * config.num_hidden_layers
    windows: list[int | None] = [None] * len(kinds)
    for layer, kind in enumerate(kinds):
        if kind == "sliding_attention":
            windows[layer] = tokens(own_entries(config, layer), "sliding_window")
    return windows


def declared(config: Any, name: str, default: Any = None) -> Any:
    """An entry that transformers has for models of this type; of others its models know nothing,
    whatever a file says.
    """
    kind: Any = type(config)
    if isinstance(config, PlainConfig):
        known = name not in config.undeclared
    else:
        known = not isinstance(config, PreTrainedConfig) or _has(kind, name)
    return getattr(config, name, default) if known else default


@cache
def _has(kind: Any, name: str) -> bool:
    """Whether configs of a type have an entry, be it that they work it out."""
    try:
        return hasattr(kind, name) or hasattr(kind(), name)
    except Exception:  # of whatever kind: one that is nothing without entries
        return True


def tokens(config: Any, name: str) -> int | None:
    """An entry that counts tokens, which may be null.

    Raises:
        CheckpointError: it does not count any.
    """
    value = declared(config, name)
    if value is not None and (
        isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**31
    ):
        what = f"{name} is {value!r} and must be a positive number of tokens below 2**31"
        raise CheckpointError(f"{what}; fetch config.json again")
    return value


def own_entries(config: PreTrainedConfig, layer: int) -> Any:
    """The entries of one decoder layer, where transformers lets layers differ in any."""
    differ = getattr(config, "per_layer_attributes", None)
    return config.per_layer_config[layer] if differ else config
