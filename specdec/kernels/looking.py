"""Work that is only looked at, for the kernels that it launches: where these cannot tell it from
earlier work, it is left out.

A kernel is compiled for the types of its arguments, for some of their values, and for how tensors
lie in memory, never for the numbers in these. What launches it chooses by the same, so work that is
given the like launches the like.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import count
from types import FunctionType, MethodType, ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

Result = TypeVar("Result")
Known = dict[int, tuple[object, int]]
"""Numbers of forms by the id of what has them, which is kept, so that nothing else gets that id."""

_NUMBERS_AND_NAMES = (int, float, complex, str, bytes, type, type(None), ModuleType)
_OF_TORCH = (torch.dtype, torch.device, torch.Size)


class Looking:
    """What was looked at.

    Attributes:
        now: while launches are only looked at; None otherwise.
        num_left_out: pieces of work so far.
    """

    now: ClassVar[Looking | None] = None

    def __init__(self) -> None:
        self.num_left_out = 0
        self._count = count()
        self._numbers: dict[Hashable, int] = {}  # of forms, by what they consist of
        self._lasting: Known = {}
        self._results: dict[Hashable, Any] = {}

    def forward(self, work: Callable[..., Result]) -> Callable[..., Result]:
        """`work(lasting, *rest)` for all parts of one forward: what was given the like before is
        left out, and gives zeros in the form of what came out then.

        Args:
            work: changes nothing that matters here but what it is given, and returns the rest. Its
                first argument stays as it is from one forward to the next.
        """
        return partial(self._once, work, {}, {})

    def _once(
        self,
        work: Callable[..., Result],
        passing: Known,
        made: dict[Hashable, Any],
        lasting: object,
        *rest: object,
    ) -> Result:
        same = tuple(map([id(one) for one in rest].index, map(id, rest)))
        key = work, self._form(lasting, self._lasting), self._form(rest, passing), same
        if key in self._results:
            self.num_left_out += 1
            if key not in made:
                made[key] = _made(self._results[key])
            return made[key]
        result = work(lasting, *rest)
        like = _like(result)
        if self._form(_made(like), {}) == self._form(result, {}):
            self._results[key] = like
        return result

    def _form(self, one: Any, known: Known) -> int:
        """A number; what shares it is all the same to kernels. An object is looked into once."""
        parts: Hashable
        if isinstance(one, Tensor) and one.layout == torch.strided:
            parts = type(one), one.dtype, one.device, one.shape, one.stride(), one.data_ptr() % 16
        elif _is_value(one):
            parts = type(one), one
        elif isinstance(one, list | tuple):
            parts = type(one), *[self._form(part, known) for part in one]
        elif isinstance(one, set | frozenset):
            parts = type(one), frozenset(self._form(part, known) for part in one)
        elif isinstance(one, dict):
            parts = type(one), self._form(list(one), known), self._form(list(one.values()), known)
        elif id(one) in known:
            return known[id(one)][1]
        else:
            # like nothing else, as long as nothing is known of what is within
            known[id(one)] = one, next(self._count)
            if (within := _within(one)) is not None:
                known[id(one)] = one, self._number((type(one), self._form(within, known)))
            return known[id(one)][1]
        return self._number(parts)

    def _number(self, parts: Hashable) -> int:
        if parts not in self._numbers:
            self._numbers[parts] = next(self._count)
        return self._numbers[parts]


def _is_value(one: object) -> bool:
    if isinstance(one, FunctionType):
        return one.__closure__ is None
    return isinstance(one, _NUMBERS_AND_NAMES + _OF_TORCH)


def _within(one: Any) -> object:
    """What an object consists of; None where that does not show."""
    if isinstance(one, MethodType):
        return one.__func__, one.__self__
    if isinstance(one, partial):
        return one.func, one.args, one.keywords
    if isinstance(one, Tensor):
        return None
    slots = [name for kind in type(one).__mro__ for name in vars(kind).get("__slots__", ())]
    found = {name: getattr(one, name) for name in slots if hasattr(one, name)}
    found |= getattr(one, "__dict__", {})
    return found or None


def _like(result: Any) -> Any:
    """What makes tensors in the form of those in `result`, one for each of them."""
    makers: dict[int, Callable[[], Tensor]] = {}

    def maker(one: Any) -> Any:
        if not isinstance(one, Tensor):
            return one
        make = partial(
            torch.empty_strided, one.shape, one.stride(), dtype=one.dtype, device=one.device
        )
        return makers.setdefault(id(one), make)

    return tree_map(maker, result)


def _made(like: Any) -> Any:
    made: dict[int, Tensor] = {}

    def tensor(make: Any) -> Any:
        if not isinstance(make, partial):
            return make
        if id(make) not in made:
            made[id(make)] = make()
        return made[id(make)]

    return tree_map(tensor, like)
