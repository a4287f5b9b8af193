"""Settings of a quantization config, whose values may be anything: each is what it has to be, or is
refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from specdec.base.errors import CheckpointError

Settings = Mapping[str, Any]
"""A `quantization_config`, or a part of it. Null says no more than an absent key."""


class SettingError(CheckpointError):
    """A setting is none that any format has."""


def integer(settings: Settings, *keys: str, default: int) -> int:
    """The whole number under the first of the keys that is there."""
    key, value = _first(settings, keys, default)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong(key, value, "a whole number")
    return value


def group_size(settings: Settings, *keys: str, default: int = -1) -> int | None:
    """Inputs that share a scale, under one of the keys, "group_size" by default; None where all do,
    which -1 says.
    """
    keys = keys or ("group_size",)
    size = integer(settings, *keys, default=default)
    if size < 1 and size != -1:
        wrong(_first(settings, keys, default)[0], size, "positive, or -1 for all inputs")
    return None if size == -1 else size


def block_size(settings: Settings, key: str) -> tuple[int, int] | None:
    """Outputs and inputs of a block; None where the config states none."""
    stated = settings.get(key)
    if stated is None:
        return None
    sizes = list(stated) if isinstance(stated, Sequence) and not isinstance(stated, str) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        wrong(key, stated, "two positive whole numbers")
    return sizes[0], sizes[1]


def word(settings: Settings, *keys: str, default: str = "") -> str:
    """The text under the first of the keys that is there, in small letters."""
    key, value = _first(settings, keys, default)
    if not isinstance(value, str):
        wrong(key, value, "a word")
    return value.lower()


def names(settings: Settings, *keys: str) -> list[str]:
    """The names under all of the keys."""
    found = list[str]()
    for key in keys:
        stated = settings.get(key)
        if stated is None:
            continue
        if not isinstance(stated, list | tuple) or not all(isinstance(one, str) for one in stated):
            wrong(key, stated, "a list of names")
        found += stated
    return found


def section(settings: Settings, key: str) -> Settings:
    """The part of a config under the key, empty where there is none."""
    stated = settings.get(key)
    if stated is None:
        return {}
    if not isinstance(stated, Mapping):
        wrong(key, stated, "an object")
    return stated


def wrong(key: str, value: object, expected: str) -> NoReturn:
    """Refuses a setting.

    Raises:
        SettingError: always.
    """
    shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
    what = f"{key} of quantization_config is {shown}, which must be {expected}"
    raise SettingError(f"{what}; fetch config.json again")


def _first(settings: Settings, keys: Sequence[str], default: Any) -> tuple[str, Any]:
    """The first key that is there, and its value."""
    key = next((key for key in keys if settings.get(key) is not None), None)
    return (keys[0], default) if key is None else (key, settings[key])
