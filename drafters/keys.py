"""Values of a drafter's `config.json`, checked as they are read."""

from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import CheckpointError


def require(ok: bool, message: str) -> None:
    """Raises a CheckpointError with `message` unless `ok`."""
    if not ok:
        raise CheckpointError(message)


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
        """A number, or None."""
        return self._typed(name, (int, float), "a number")

    def flag(self, name: str) -> bool | None:
        """True, false or None."""
        return self._typed(name, bool, "true or false")

    def _typed(self, name: str, kind: type | tuple[type, ...], noun: str) -> Any:
        value = self.find(name)
        # JSON's true is an int to Python, never to the person who wrote it.
        right = isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        require(value is None or right, f"{name} is {value!r}; it must be {noun}")
        return value
