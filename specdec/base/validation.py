"""Checks of the fields of configurations, each with one line that says what is wrong."""

import math
import operator
from collections.abc import Callable, Iterator
from contextlib import suppress
from numbers import Real
from typing import Any, get_args

from specdec.base.errors import InvalidInputError, shown

LARGEST = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""


def require(ok: bool, message: str) -> None:
    """Raises `InvalidInputError` with the message unless all is well."""
    if not ok:
        raise InvalidInputError(message)


def is_number(value: object) -> bool:
    """Whether a value is a number that float32 or int64 holds; a bool is none."""
    if isinstance(value, float):
        return -LARGEST <= value <= LARGEST
    return isinstance(value, int) and not isinstance(value, bool) and -(2**63) <= value < 2**63


def as_integer(name: str, value: Any) -> int:
    """An integer of any library as Python's own.

    Raises:
        InvalidInputError: another type; a bool as well, which to Python is an int.
    """
    if not isinstance(value, bool):
        with suppress(TypeError):
            found = operator.index(value)
            if found.bit_length() > 256:
                what = f"{name} has {found.bit_length():,} bits"
                raise InvalidInputError(f"{what}; it must be an integer of 256 bits at most")
            return found
    raise InvalidInputError(f"{name} is {shown(value)}; it must be an integer")


def as_float(value: Real | int) -> float:
    """A number of any kind, infinite where it is too large."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def integers(config: Any, *names: str) -> None:
    """Makes fields Python's own integers, those of None aside whose default that is."""
    for name in names:
        value = getattr(config, name)
        if value is not None or type(config).__dataclass_fields__[name].default is not None:
            object.__setattr__(config, name, as_integer(name, value))


def numbers(config: Any, *names: str) -> None:
    """Makes fields Python's own floats, those of None aside whose default that is."""
    for name in names:
        value = getattr(config, name)
        if value is None and type(config).__dataclass_fields__[name].default is None:
            continue
        if not isinstance(value, Real) or isinstance(value, bool):
            raise InvalidInputError(f"{name} is {shown(value)}; it must be a number")
        object.__setattr__(config, name, as_float(value))


def flags(config: Any, *names: str) -> None:
    """Checks that fields are True or False, or None where that is the default."""
    for name in names:
        value = getattr(config, name)
        if isinstance(value, bool):
            continue
        if value is not None or type(config).__dataclass_fields__[name].default is not None:
            raise InvalidInputError(f"{name} is {shown(value)}; it must be True or False")


def choices(config: Any, **literals: Any) -> None:
    """Checks that fields hold words of these `Literal`s."""
    for name, literal in literals.items():
        value, known = getattr(config, name), get_args(literal)
        if value not in known:
            *words, last = map(repr, known)
            way_out = f"choose {', '.join(words)} or {last}"
            raise InvalidInputError(f"{name} is {shown(value)}; {way_out}")


Range = tuple[str, Callable[[Any], bool], str]
"""A field, whether a value is right, and what is said where it is not."""


def ranges(config: Any, *rules: Range) -> None:
    """Checks fields, those of None aside."""
    for name, fits, says in rules:
        value = getattr(config, name)
        if value is not None and not fits(value):
            raise InvalidInputError(f"{name} is {value}; {says}")


def sequence(config: Any, name: str, noun: str) -> tuple[Any, ...]:
    """The entries of a field; none where it is None."""
    value = getattr(config, name)
    found = entries(value if value is not None else ())
    if found is None:
        raise InvalidInputError(f"{name} is {shown(value)}; it must be a list of {noun}")
    return tuple(found)


def entries(value: Any) -> Iterator[Any] | None:
    """What a list or the like holds; None of what only looks like one, as a text or a tensor.

    >>> entries("ab"), list(entries([1, 2]) or ())
    (None, [1, 2])
    """
    try:
        return None if isinstance(value, str | bytes) else iter(value)
    except TypeError:
        return None
