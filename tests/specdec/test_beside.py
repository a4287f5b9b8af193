"""Branches of a captured step: what waits for what."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from specdec.beside import Beside


class Streams:
    """Stands in for torch's streams: a log of what is launched where, and of who waits for whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, capturing: bool) -> None:
        self.log: list[str] = []
        self.main, self.side = Stream("main", self.log), Stream("side", self.log)
        self.current = self.main
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: self.side)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        self.current = stream
        yield
        self.current = self.main

    def launch(self, work: str) -> None:
        self.log.append(f"{work} on {self.current.name}")


class Stream:
    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def step(beside: Beside, streams: Streams) -> list[str]:
    streams.log.clear()
    with beside.branch():
        streams.launch("a")
    streams.launch("b")
    beside.join()
    streams.launch("c")
    return list(streams.log)


def test_a_branch_begins_and_ends_with_the_others_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches work that starts before its inputs are there, or whose results are read too early."""
    monkeypatch.setattr(torch.version, "hip", None)
    streams = Streams(monkeypatch, capturing=True)
    beside = Beside(torch.device("cuda"))
    for _ in range(2):
        assert step(beside, streams) == ["side waits for main", "a on side", "b on main", "main waits for side", "c on main"]


@pytest.mark.parametrize(("device", "hip", "capturing"), [("cuda", None, False), ("cuda", "6.4", True), ("cpu", None, True)])
def test_elsewhere_all_is_done_in_turn(monkeypatch: pytest.MonkeyPatch, device: str, hip: str | None, capturing: bool) -> None:
    """Outside a capture, on AMD's devices, and on a CPU."""
    monkeypatch.setattr(torch.version, "hip", hip)
    streams = Streams(monkeypatch, capturing=capturing)
    assert step(Beside(torch.device(device)), streams) == ["a on main", "b on main", "c on main"]
