"""Waiting for what others do: a test is decided by events, and no machine is too fast or too slow
for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from specdec.engine.engine import SpecEngine

T = TypeVar("T")

HANG = 600.0
"""Seconds after which something hangs: far more than any machine needs."""

PAUSE = 0.05
"""Seconds that who asks again and again leaves to others; nothing is decided by it."""


def wait_until(done: Callable[[], object], what: str = "nothing") -> None:
    """Waits until `done` is true, which another thread or process brings about."""
    until = time.monotonic() + HANG
    while not done():
        assert time.monotonic() < until, f"{what} after {HANG:g} seconds"
        time.sleep(0.005)


def in_time(work: Callable[[], T]) -> T:
    """What `work` returns or raises, in a thread of its own: a hang is a failure, not the end."""
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(HANG)
    assert not thread.is_alive(), f"still waiting after {HANG:g} seconds"
    if errors:
        raise errors[0]
    return results[0]


class Gate:
    """Lets an engine take only as many steps as it is told, so that what is unfinished stays so.

    Args:
        engine: stepped by other threads than the one that tells.
    """

    def __init__(self, engine: SpecEngine) -> None:
        self._engine, self._step = engine, engine.step
        self._told = threading.Condition()
        self._left, self._open, self._stands = 0, False, False
        engine.step = self._wait  # type: ignore[method-assign]

    @property
    def stands(self) -> bool:
        """Whether the engine has work and waits here."""
        return self._stands

    def allow(self, steps: int) -> None:
        """Lets the engine take so many more steps, and waits until it wants another one."""
        with self._told:
            self._left += steps
            self._told.notify_all()
            assert self._told.wait_for(lambda: self._stands and not self._left, HANG), (
                "no more work"
            )

    def open(self) -> None:
        """Lets the engine go on for good."""
        vars(self._engine).pop("step", None)
        with self._told:
            self._open = True
            self._told.notify_all()

    def _wait(self) -> Any:
        with self._told:
            self._stands = not self._left
            self._told.notify_all()
            self._told.wait_for(lambda: self._open or self._left)
            self._stands, self._left = False, max(0, self._left - 1)
        return self._step()


@contextmanager
def gated(engine: SpecEngine, steps: int = 0) -> Iterator[Gate]:
    """A gate that lets `steps` through at first, and is open afterwards."""
    gate = Gate(engine)
    gate._left = steps
    try:
        yield gate
    finally:
        gate.open()
