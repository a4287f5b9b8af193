"""Where the time of a step goes."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

MODEL_PHASES = ("prefill", "draft", "verify", "context")
"""Phases that are forwards of the target or the drafter; the rest is the engine's own share."""


class StepTimer:
    """Adds up seconds per phase of the engine's step.

    Args:
        device: synchronised at both ends of a phase, so that the phase pays for its own kernels.
        enabled: otherwise `phase` does nothing and costs nothing.

    Attributes:
        totals: seconds by phase, in the order first seen.
        num_steps: decode steps timed.
    """

    def __init__(self, device: torch.device, *, enabled: bool) -> None:
        self.enabled = enabled
        self.totals: dict[str, float] = {}
        self.num_steps = 0
        self._sync = device.type == "cuda"

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Times the body of a `with` statement as phase `name`."""
        return self._timed(name) if self.enabled else nullcontext()

    def reset(self) -> None:
        """Forgets everything measured."""
        self.totals.clear()
        self.num_steps = 0

    @property
    def own_share(self) -> float:
        """Fraction of the time spent outside the model forwards; 0 when nothing was timed."""
        total = sum(self.totals.values())
        return 1 - sum(self.totals.get(name, 0.0) for name in MODEL_PHASES) / total if total else 0.0

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = self._now()
        yield
        self.totals[name] = self.totals.get(name, 0.0) + self._now() - start

    def _now(self) -> float:
        if self._sync:
            torch.cuda.synchronize()
        return time.perf_counter()
