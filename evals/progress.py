"""A progress bar on standard error while a measurement runs."""

import sys
import time
from typing import TextIO

WIDTH = 24
INTERVAL = 0.2
"""Seconds between redraws; more often would cost time that is being measured."""


class ProgressBar:
    """One line that is redrawn on a terminal, and printed once per task elsewhere.

    Args:
        title: what is running.
        total: units of work.
        stream: where to draw; None takes standard error.
    """

    def __init__(self, title: str, total: int, *, stream: TextIO | None = None) -> None:
        self._title, self._total = title, total
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._next_draw = 0.0
        self._drawn = 0

    @property
    def due(self) -> bool:
        """Whether it is time to draw again; never where the line cannot be redrawn."""
        return self._live and time.perf_counter() >= self._next_draw

    def show(self, done: int, note: str) -> None:
        """Draws the bar with `done` units and a note at its end."""
        if self._live:
            self._draw(done, note)
            self._next_draw = time.perf_counter() + INTERVAL

    def close(self, done: int, note: str) -> None:
        """Draws the last state and leaves it there."""
        self._draw(done, note)
        print(file=self._stream, flush=True)

    def _draw(self, done: int, note: str) -> None:
        filled = round(WIDTH * done / self._total) if self._total else WIDTH
        line = f"{self._title}  [{'#' * filled}{'.' * (WIDTH - filled)}] {done}/{self._total}  {note}"
        start = "\r" if self._live else ""
        print(start + line.ljust(self._drawn), end="", file=self._stream, flush=True)
        self._drawn = len(line)
