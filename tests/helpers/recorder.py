"""What a graph does, without an accelerator: `Recorder` records the tensor operations of a launch,
with their arguments, and replays exactly those into exactly the same tensors; no Python of the
step runs again.
"""

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.helpers.guards import OperationMode, no_host_sync

Tape = list[tuple[Any, Any, Any, list[tuple[int, Tensor]]]]
"""Operation, arguments, and the tensors it made, with their places among its outputs."""


class Recorder(OperationMode):
    """Captures by recording operations; every launch is under the guard against waiting.

    Attributes:
        num_replays: replays of all captures.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_replays = 0
        self._tape: Tape = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = {
            x.untyped_storage().data_ptr()
            for x in _leaves((*args, *kwargs.values()))
            if isinstance(x, Tensor)
        }
        outputs = func(*args, **kwargs)
        # A view, or what was written in place, needs no copy at replay: its memory is that of an
        # input.
        fresh = [
            (index, x)
            for index, x in enumerate(_leaves(outputs))
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in inputs
        ]
        if fresh or not func.is_view:
            self._tape.append((func, args, kwargs, fresh))
        return outputs

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        with no_host_sync():
            launch()
            self._tape = []
            with self:
                launch()
        tape = self._tape

        def replay() -> None:
            self.num_replays += 1
            for func, args, kwargs, fresh in tape:
                results = _leaves(func(*args, **kwargs))
                for index, recorded in fresh:
                    recorded.copy_(results[index])

        return replay


def _leaves(values: Any) -> Any:
    """What is in them, however deep: one tensor, or those of a flat sequence, at once."""
    if isinstance(values, Tensor):
        return (values,)
    if isinstance(values, tuple) and not any(isinstance(x, list | tuple | dict) for x in values):
        return values
    return tree_leaves(values)


def refuse(*args: Any) -> Any:
    raise AssertionError("a step ran without its graph")
