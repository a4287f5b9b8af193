"""Where the time of a step goes, and how long a step takes."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from specdec.base.blocks import BlockShape

PHASES = ("schedule", "prefill", "draft", "verify", "grammar", "accept", "context", "collect")
"""In the order of a step."""

MODEL_PHASES = ("prefill", "draft", "verify", "context")
"""Phases that are forwards of the target or the drafter; the rest is the engine's own share."""


class StepTimer:
    """Adds up seconds per phase of the engine's step.

    Args:
        device: synchronized at both ends of a phase, so that the phase pays for its own kernels.
        enabled: otherwise `phase` does nothing and costs nothing.

    Attributes:
        totals: seconds by phase, in the order first seen.
        num_steps: decode steps, timed or not.
        steps_by_shape: how many of them had blocks of which shape.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.totals: dict[str, float] = {}
        self.num_steps = 0
        self.steps_by_shape: Counter[BlockShape] = Counter()
        self._device = device

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times the body of a `with` statement as phase `name`."""
        return self._timed(name) if self.enabled else nullcontext()

    def count_step(self, shape: BlockShape) -> None:
        """Notes a decode step of blocks of one shape."""
        self.num_steps += 1
        self.steps_by_shape[shape] += 1

    def reset(self) -> None:
        """Forgets everything measured."""
        self.totals.clear()
        self.steps_by_shape.clear()
        self.num_steps = 0

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.totals[name] = self.totals.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class StepClock:
    """Takes the time of steps where they run, so that nobody waits: stamps are events on an
    accelerator, else the host's clock.

    Args:
        device: runs the steps.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_device = device.type == "cuda"

    def stamp(self) -> Any:
        """Marks this place in the stream of work."""
        if not self._on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        # by default it would be the current device's, maybe another one
        event.record(torch.cuda.current_stream(self._device))
        return event

    def wait(self, stamp: Any) -> None:
        """Waits until the device has come past `stamp`."""
        if self._on_device:
            stamp.synchronize()

    def seconds(self, start: Any, end: Any) -> float:
        """Time between two stamps that the device has come past."""
        if self._on_device:
            milliseconds: float = start.elapsed_time(end)
            return milliseconds / 1e3
        seconds: float = end - start
        return seconds
