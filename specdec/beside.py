"""Two pieces of a step's work beside each other: branches of a captured graph."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Beside:
    """A second stream within captures, where many small kernels leave most of the device idle. Elsewhere all is done in turn.

    What both branches read has to outlive `join`, and neither may write what the other reads.

    Args:
        device: NVIDIA's; others do everything in turn. Nobody has captured branches on AMD's.
    """

    def __init__(self, device: torch.device) -> None:
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and not torch.version.hip else None

    @contextmanager
    def branch(self) -> Iterator[None]:
        """What is launched within goes on beside what follows, up to `join`."""
        if self._side is None or not torch.cuda.is_current_stream_capturing():
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """What follows is launched behind both."""
        if self._side is not None and torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream().wait_stream(self._side)
