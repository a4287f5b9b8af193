"""Modules without memory, which have shapes and no values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _NothingDrawn(TorchFunctionMode):
    """Leaves the functions of `torch.nn.init` out."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """The tensor as it is, of a function that would fill it."""
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return func(*args, **kwargs)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Modules that are made within are on the device "meta". No initial values are drawn: there is
    no place for them, and to draw normal ones there torch would load its compiler, a third of a
    start.
    """
    with torch.device("meta"), _NothingDrawn():
        yield
