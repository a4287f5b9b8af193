"""What rank 0 tells the others, as plain fields: JSON, with a form for records of known kinds,
paths, and what every rank keeps.

What is received makes nothing else, and names no code but functions that are marked for it.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from specdec.base.config import CacheConfig, EngineConfig, LoadConfig
from specdec.base.errors import one_line
from specdec.base.packages import PACKAGES

Function = TypeVar("Function", bound=Callable[..., Any])

RECORDS: dict[str, type[Any]] = {
    kind.__name__: kind for kind in (CacheConfig, EngineConfig, LoadConfig)
}
"""Each checks its fields when it is made; `specdec.engine.lockstep` adds those of requests."""

_MODULES = (*PACKAGES, "tests")
_marked: dict[Callable[..., Any], str] = {}


def on_ranks(function: Function) -> Function:
    """Marks a function of a module as one that rank 0 may have the others call."""
    _marked[function] = f"{function.__module__}:{function.__qualname__}"
    return function


def pack(value: Any, numbers: Mapping[int, int]) -> bytes:
    """A value as bytes.

    Args:
        value: numbers, strings, None, paths, `RECORDS`, marked functions, what is kept, and lists
            of these.
        numbers: of what every rank keeps, by id.

    Raises:
        TypeError: it holds anything else.

    >>> unpack(pack((1, "a", None, Path("b"), CacheConfig(memory_bytes=2)), {}), {})[:4]
    [1, 'a', None, PosixPath('b')]
    """

    def form(one: Any) -> dict[str, Any]:
        if (number := numbers.get(id(one))) is not None:
            return {"kept": number}
        if isinstance(one, Path):
            return {"path": str(one)}
        if RECORDS.get(type(one).__name__) is type(one):
            defaults = _defaults(type(one).__name__)
            values = [
                [name, own] for name, default in defaults if (own := getattr(one, name)) != default
            ]
            return {"record": type(one).__name__, "fields": values}
        if callable(one) and one in _marked:
            return {"function": _marked[one]}
        raise TypeError(f"a {type(one).__name__} has no plain form")

    return json.dumps(value, default=form, separators=(",", ":")).encode()


def unpack(data: bytes, kept: Mapping[int, Any]) -> Any:
    """What was packed; tuples have become lists.

    Args:
        data: of `pack`.
        kept: what this rank keeps, by number.

    Raises:
        RuntimeError: it is nothing that `pack` makes.
    """

    def made(found: dict[str, Any]) -> Any:
        match found:
            case {"kept": int(number)}:
                return kept[number]
            case {"path": str(name)}:
                return Path(name)
            case {"record": str(name), "fields": list(values)}:
                return RECORDS[name](**dict(values))
            case {"function": str(name)}:
                return _function(name)
        raise TypeError("a mapping of no known form")

    try:
        return json.loads(data, object_hook=made)
    except (ValueError, TypeError, KeyError, RecursionError, ImportError, AttributeError) as error:
        what = f"a message between ranks is none of specdec's: {one_line(error)}"
        raise RuntimeError(what) from error


def _function(name: str) -> Callable[..., Any]:
    module, _, attribute = name.partition(":")
    if module.partition(".")[0] not in _MODULES:
        raise TypeError(f"{name!r} is no function of specdec")
    found: Callable[..., Any] = getattr(import_module(module), attribute)
    if _marked.get(found) != name:
        raise TypeError(f"{name!r} is not for ranks to call")
    return found


@cache
def _defaults(name: str) -> list[tuple[str, Any]]:
    return [(one.name, one.default) for one in fields(RECORDS[name])]
