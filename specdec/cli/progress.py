"""A progress bar on standard error while a measurement runs."""

import math
import sys

from tqdm import tqdm

INTERVAL = 0.2
"""Seconds between redraws; more often would cost time that is being measured."""


class ProgressBar(tqdm):
    """tqdm's bar with a note at its end; off a terminal one line when it is closed."""

    monitor_interval = 0  # no thread beside a measurement

    def __init__(self, title: str, total: int) -> None:
        self._live = sys.stderr.isatty()
        super().__init__(
            desc=title,
            total=total,
            file=sys.stderr,
            ascii=".#",
            bar_format="{desc}  [{bar:24}] {n_fmt}/{total_fmt}{postfix}",
            miniters=0,
            mininterval=INTERVAL,
            delay=0 if self._live else math.inf,
        )

    @property
    def due(self) -> bool:
        """Whether it is time to draw again; never where the line cannot be redrawn."""
        return self._live and self._time() - self.last_print_t >= self.mininterval

    def show(self, done: int, note: str) -> None:
        """Draws the bar with `done` units and a note, if it is time to."""
        self.set_postfix_str(note, refresh=False)
        self.update(done - self.n)

    def say(self, line: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self._live:
            self.write(line, file=sys.stderr)
        else:
            print(line, file=sys.stderr, flush=True)

    def finish(self, done: int, note: str) -> None:
        """Draws the last state and leaves it there."""
        self.show(done, note)
        if not self._live:
            print(self, file=sys.stderr, flush=True)
        self.close()


class Phases:
    """A bar for each of several things in turn; called with a title, done and total."""

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None

    def __call__(self, title: str, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = ProgressBar(title, total)
        if done < total:
            self._bar.show(done, "")
            return
        self._bar.finish(total, f"  {self._bar.format_dict['elapsed']:.1f} s")
        self._bar = None
