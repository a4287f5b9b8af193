"""Other weights in the place of a drafter's, which goes on with them.

Captured steps know where weights lie, and layers keep them joined, packed or in another order. So a
second drafter is made as the first one was, both are walked side by side, and every tensor of the
first takes over the numbers of the second. All else has to be equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cached_property, partial
from pathlib import PurePath
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend
from specdec.attention.mla import MlaBackend
from specdec.base.errors import CheckpointError, InvalidInputError
from specdec.model.core import Drafter

FITTED = "fitted"
"""In the metadata of a dataclass' field: it holds numbers that training fits, which a tensor holds
as well."""

_PLAIN = (bool, int, float, str, bytes, type(None), range, frozenset, Enum)
_TORCH = (torch.dtype, torch.device)
_NAMES = {"name", "_name_or_path"}  # of a checkpoint, which may be another one


class Exchange:
    """What a drafter takes over of another one.

    Args:
        kept: in use. Of a composition the part that is alike takes over.
        fresh: made of another checkpoint, for the same target.
        name: of that checkpoint.

    Raises:
        InvalidInputError: `kept` has no weights.
        CheckpointError: they differ in more than their weights.
    """

    def __init__(self, kept: Drafter, fresh: Drafter, name: str) -> None:
        self._tensors: list[tuple[Tensor, Tensor]] = []
        self._objects: list[tuple[Any, str, Any]] = []  # which cannot be written to
        wrong = ""
        parts = [] if hasattr(fresh, "parts") else getattr(kept, "parts", [])
        for part in parts or [kept]:
            # by their ids, which nothing else may have meanwhile
            self._seen: dict[tuple[int, int], tuple[Any, Any]] = {}
            self._tensors, self._objects = [], []
            wrong = next(self._walk(part, fresh, ""), "")
            if not wrong:
                break
        if wrong:
            what = f"drafter {name!r} is not made as the one in use: {wrong}"
            raise CheckpointError(f"{what}; give one of the same config.json")
        if not (self._tensors or self._objects):
            raise InvalidInputError("the drafter in use has no weights, so none can replace them")

    @torch.inference_mode()
    def apply(self) -> None:
        """Writes the numbers, behind what was launched before."""
        for kept, fresh in self._tensors:
            kept.copy_(fresh)
        for owner, name, fresh in self._objects:
            object.__setattr__(owner, name, fresh)

    def _walk(self, kept: Any, fresh: Any, path: str) -> Iterator[str]:
        """What differs, in words."""
        if kept is fresh or isinstance(kept, AttentionBackend | MlaBackend | PurePath):
            return  # of the target, without weights, or where they lie
        if type(kept) is not type(fresh) and not (_is_config(kept) and _is_config(fresh)):
            yield f"{path or 'it'} is a {type(fresh).__name__}, not a {type(kept).__name__}"
        elif isinstance(kept, Tensor):
            old, new = _described(kept), _described(fresh)
            if old != new:
                yield f"{path} is {new}, not {old}"
            self._tensors.append((kept, fresh))
        elif isinstance(kept, (*_PLAIN, *_TORCH)):
            if kept != fresh:
                yield f"{path} is {fresh!r}, not {kept!r}"
        elif (id(kept), id(fresh)) not in self._seen:
            self._seen[id(kept), id(fresh)] = kept, fresh
            yield from self._walk_parts(kept, fresh, path)

    def _walk_parts(self, kept: Any, fresh: Any, path: str) -> Iterator[str]:
        old, new = _parts(kept), _parts(fresh)
        for name in old.keys() - new.keys():  # made when it was needed first
            if isinstance(getattr(type(kept), name, None), cached_property):
                new[name] = getattr(fresh, name)
        missing = old.keys() ^ new.keys()
        if missing:
            yield f"{path or 'it'} differs in {', '.join(sorted(missing))}"
            return
        for name, one in old.items():
            other = new[name]
            if isinstance(one, Tensor) and one.is_mkldnn:
                self._objects.append((kept, name, other))
            elif name not in _NAMES:
                yield from self._walk(one, other, f"{path}.{name}".lstrip("."))


def _described(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"


def _is_config(one: Any) -> bool:
    """Whether it is the config of a model, of transformers' class or as an earlier start left it:
    what these say is compared.
    """
    return hasattr(one, "to_dict") and not isinstance(one, type)


def _parts(one: Any) -> dict[str, Any]:
    """What an object holds, by name."""
    if _is_config(one):
        return dict(one.to_dict())
    if isinstance(one, Mapping):
        return {str(key): value for key, value in one.items()}
    if isinstance(one, list | tuple):
        return {str(index): value for index, value in enumerate(one)}
    if isinstance(one, partial):
        return {"func": one.func, "args": one.args, "keywords": one.keywords}
    if isinstance(one, MethodType):
        return {"self": one.__self__}
    if isinstance(one, FunctionType):
        cells = one.__closure__ or ()
        return {str(index): cell.cell_contents for index, cell in enumerate(cells)}
    if isinstance(one, type):
        return {}
    if is_dataclass(one):
        names = [field.name for field in fields(one) if FITTED not in field.metadata]
        late = getattr(one, "__dict__", {}).keys() - {field.name for field in fields(one)}
        return {name: getattr(one, name) for name in (*names, *sorted(late))}
    slots = (name for kind in type(one).__mro__ for name in getattr(kind, "__slots__", ()))
    held = {name: getattr(one, name) for name in slots if hasattr(one, name)}
    return held | dict(getattr(one, "__dict__", {}))
