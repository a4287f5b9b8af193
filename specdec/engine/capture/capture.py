"""Device work that can be repeated with one launch: CUDA graphs, HIP graphs, or what stands in for
them.
"""

from collections.abc import Callable, Hashable
from functools import partial
from typing import Protocol

import torch

from specdec.base.errors import BackendError
from specdec.device.self_check import Check, passes


class Capture(Protocol):
    """Turns device work into something that can be repeated."""

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        """Runs `launch` as often as it takes, and returns what repeats its device work on the same
        tensors, which it keeps.

        Work of one `kind` consists of the same operations, on tensors of any sizes.
        """


class LaunchAlone:
    """What launches as a capture does, and repeats nothing."""

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        """See `Capture.capture`."""
        launch()
        return _nothing


def _nothing() -> None:
    return


class CudaCapture:
    """CUDA graphs, or HIP graphs where torch is built for ROCm.

    All graphs share one memory pool: they are replayed one after another on one stream, and no
    result stays in the pool.

    Args:
        device: an accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)
        self._kinds: set[Hashable] = set()

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        """See `Capture.capture`.

        Raises:
            BackendError: the device refuses to capture what `launch` does.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        graph = torch.cuda.CUDAGraph()
        cause: Exception | None = None
        try:
            with torch.cuda.stream(self._stream):
                if kind not in self._kinds or torch.version.hip:
                    launch()  # libraries take workspaces and make sure of themselves at first use
                # Not torch.cuda.graph, which gives all cached memory back first and makes the next
                # steps fetch it anew. Relaxed, for a kernel that is new for its sizes alone is
                # loaded meanwhile; whether HIP lets that pass is not known, so there every capture
                # comes second.
                graph.capture_begin(pool=self._pool, capture_error_mode="relaxed")
                try:
                    launch()
                except Exception as error:
                    # after it the end of the capture fails, too, and its error says only that
                    cause = error
                    raise
                finally:
                    graph.capture_end()
            current.wait_stream(self._stream)
            self._kinds.add(kind)
        except RuntimeError as error:
            reason = str(cause or error).partition("\n")[0]
            raise BackendError(
                f"{self._device} cannot capture this model's step: {reason}; turn graphs off"
            ) from error
        return partial(_replay, graph, launch)


def _replay(graph: torch.cuda.CUDAGraph, launch: Callable[[], None]) -> None:
    """Replays; `launch` is only held, for a graph knows the addresses of the tensors that it refers
    to and does not own them.
    """
    graph.replay()


def captures_graphs(
    device: torch.device, wanted: bool | None, check: Check, attention: str
) -> bool:
    """Whether steps on `device` are captured: where there are graphs, if `wanted`, or when left
    open where a captured step passes.

    Args:
        device: of the target.
        wanted: None leaves it open.
        check: compares a captured step with an eager one; see `specdec.device.self_check`.
        attention: name of the target's backend, whose kernels would be captured.
    """
    return has_graphs(device) and (
        passes("captured_step", device, check, attention) if wanted is None else wanted
    )


def has_graphs(device: torch.device) -> bool:
    """Whether torch has graphs of work on `device`."""
    return device.type == "cuda"
