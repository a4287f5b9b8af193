"""A guard under which anything that makes the host wait for the device raises."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.engine.engine import SpecEngine
from specdec.sampling import noise

_SYNCING_METHODS = (
    "item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__",
)  # fmt: skip
_SYNCING_OPS = (
    "_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "is_nonzero", "equal",
)  # fmt: skip


class HostSyncError(AssertionError):
    """Raised by the guard."""


class OperationMode(TorchDispatchMode):
    """Sees every operation, without the detour by which torch keeps its compiler away from those
    that do: it takes longer than most operations of a tiny model.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class _NoSyncOps(OperationMode):
    """Refuses operations whose result the host needs, also when they hide in an index or in C++."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        waits, indexes = _traits(func)
        if waits or (indexes and any(map(_holds_mask, args[1:]))):
            raise HostSyncError(f"{func.overloadpacket.__name__} makes the host wait")
        return func(*args, **(kwargs or {}))


@cache
def _traits(func: Any) -> tuple[bool, bool]:
    """Whether an operation always makes the host wait, and whether a mask has it do so."""
    name = func.overloadpacket.__name__
    return name in _SYNCING_OPS, name.startswith("index")


def _holds_mask(arg: Any) -> bool:
    return isinstance(arg, list | tuple) and any(
        isinstance(a, torch.Tensor) and a.dtype == torch.bool for a in arg
    )


@contextmanager
def no_host_sync() -> Iterator[None]:
    """Within it `.item()`, `.cpu()`, `.tolist()`, `bool(tensor)`, boolean indexing and tensors from
    host lists raise.
    """

    def refuse(name: str) -> Any:
        def method(*args: Any, **kwargs: Any) -> Any:
            raise HostSyncError(f"{name} makes the host wait")

        return method

    assign = torch.Tensor.__setitem__

    def set_item(self: torch.Tensor, index: Any, value: Any) -> None:
        parts = index if isinstance(index, tuple) else (index,)
        if not isinstance(value, torch.Tensor) and any(
            isinstance(part, torch.Tensor) for part in parts
        ):
            raise HostSyncError("a number assigned through an index tensor makes the host wait")
        assign(self, index, value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(noise, "REMEMBERED", 0)  # a CPU alone looks up what it remembers
        patch.setattr(torch.Tensor, "__setitem__", set_item)
        for name in _SYNCING_METHODS:
            patch.setattr(torch.Tensor, name, refuse(name))
        for name in ("tensor", "as_tensor", "from_numpy"):
            patch.setattr(torch, name, refuse(f"torch.{name}"))
        with _NoSyncOps():
            yield


def guard_steps(engine: SpecEngine) -> None:
    """Has the guard hold in every decoding step."""
    engine.runner.step = no_host_sync()(engine.runner.step)  # type: ignore[method-assign]
