"""What training reports: a CSV file, a plot, a progress bar or lines."""

import csv
import io
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdec.base.errors import CheckpointError, one_line
from specdec.base.packages import install_command
from specdec.base.writing import append, check_writable, write_atomically, write_text

COLUMNS = (
    "step", "minutes", "epoch", "loss", "train_tau", "row1", "lr", "grad_norm",
    "sequences_per_second", "tau", "tree", "sampled",
)  # fmt: skip
"""`train_tau` is of training answers; `row1` and the last three of held-out ones."""


class TrainLog:
    """Rows of figures in `log.csv` and on the screen.

    Args:
        folder: where `log.csv` and `curves.png` go.
        last_step: rows after it belong to a run that was killed unsaved, and are dropped.
        quiet: no file and no screen, for all processes but the first.
    """

    def __init__(self, folder: Path, *, last_step: int, quiet: bool = False) -> None:
        self._path, self._quiet, self._closed = folder / "log.csv", quiet, False
        self.rows: list[dict[str, str]] = []
        self._bar: Any = None
        check_writable(*([] if quiet else [self._path]))
        if self._path.is_file():
            self.rows = [
                row
                for row in _read(self._path)
                if row["step"].isdigit() and int(row["step"]) <= last_step
            ]
        if not quiet:
            text = "".join(map(_line, [dict(zip(COLUMNS, COLUMNS, strict=True)), *self.rows]))
            write_text(self._path, text)
            self._bar = _progress_bar()

    def write(self, row: dict[str, Any], progress: float) -> None:
        """Adds a row; `progress` in [0, 1] is that of the whole run."""
        if self._quiet:
            return
        texts = {name: _text(row.get(name)) for name in COLUMNS}
        self.rows.append(texts)
        append(self._path, _line(texts))
        shown = ("step", "loss", "train_tau", "tau")
        words = " ".join(f"{name} {texts[name]}" for name in shown if texts[name])
        if self._bar is not None:
            self._bar.n = round(100 * progress, 1)
            self._bar.set_postfix_str(words)
        else:
            speed = texts["sequences_per_second"]
            left = row.get("minutes", 0.0) * (1 - progress) / max(progress, 1e-9)
            ahead = f" ({speed} sequences/s, {left:.1f} minutes left)" if speed else ""
            self.say(f"{100 * progress:5.1f}% {words}{ahead}")

    def say(self, text: str) -> None:
        """A line for the user."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Ends the progress bar and draws the curves, once."""
        if self._quiet or self._closed:
            return
        self._closed = True
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        self._plot()

    def _plot(self) -> None:
        try:
            from matplotlib.backends.backend_agg import FigureCanvasAgg
            from matplotlib.figure import Figure
        except ImportError:
            self.say(f"no curves.png: matplotlib is not installed; run: {install_command('train')}")
            return
        figure = Figure(figsize=(9, 4), layout="constrained")
        loss_axes, tau_axes = figure.subplots(1, 2)
        _draw(loss_axes, self.rows, "loss", "training loss")
        _draw(tau_axes, self.rows, "train_tau", "training, random anchors")
        _draw(tau_axes, self.rows, "tau", "held out, replayed", marker="o")
        loss_axes.set_ylabel("loss")
        tau_axes.set_ylabel("tokens per verify step")
        for axes in (loss_axes, tau_axes):
            axes.set_xlabel("step")
            if axes.get_legend_handles_labels()[1]:
                axes.legend()
        canvas = FigureCanvasAgg(figure)
        picture = self._path.with_name("curves.png")
        write_atomically(picture, lambda path: canvas.print_png(str(path)))


def _read(path: Path) -> list[dict[str, str]]:
    """Rows of a file, of whichever columns it has; CheckpointError: it cannot be read."""
    try:
        with path.open(newline="") as file:
            return [{name: row.get(name) or "" for name in COLUMNS} for row in csv.DictReader(file)]
    except (OSError, ValueError, csv.Error) as error:
        what = f"{path} cannot be read ({one_line(error)})"
        raise CheckpointError(f"{what}; move it away to begin another") from error


def _line(row: dict[str, str]) -> str:
    """A row of the file."""
    text = io.StringIO(newline="")
    csv.DictWriter(text, COLUMNS).writerow(row)
    return text.getvalue()


def _draw(axes: Any, rows: list[dict[str, str]], name: str, label: str, **style: Any) -> None:
    points = [(int(row["step"]), float(row[name])) for row in rows if row.get(name)]
    if points:
        axes.plot(*zip(*points, strict=True), label=label, **style)


def _progress_bar() -> Any:
    """A bar in percent on a terminal, else None: lines then."""
    if not sys.stderr.isatty():
        return None
    return tqdm(
        total=100, bar_format="{percentage:5.1f}% |{bar:24}| {elapsed}{postfix}", file=sys.stderr
    )


def _text(value: Any) -> str:
    return "" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
