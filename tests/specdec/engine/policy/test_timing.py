"""Times of steps on an accelerator, with stand-ins for torch's events: nothing here needs one."""

from typing import Any

import pytest
import torch

from specdec.engine.policy.timing import StepClock, StepTimer


class Event:
    """Records where it was recorded."""

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing
        self.stream: Any = None

    def record(self, stream: Any = None) -> None:
        self.stream = stream


def test_times_are_those_of_the_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the current device's: an event on its idle stream is done at once, and results would be
    read before they arrive.
    """
    waited: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: waited.append(device))
    device = torch.device("cuda:1")
    assert StepClock(device).stamp().stream == ("stream of", device)
    with StepTimer(device, enabled=True).phase("verify"):
        pass
    assert waited == [device, device]


def test_a_cpu_has_the_clock_of_the_host() -> None:
    """Stamps in order, in seconds, and nothing to wait for."""
    clock = StepClock(torch.device("cpu"))
    start, end = clock.stamp(), clock.stamp()
    clock.wait(end)
    assert clock.seconds(start, end) >= 0
