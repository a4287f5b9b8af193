"""Plots of a report as SVG, drawn by matplotlib from the stored figures alone."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from evals.report.bench_grids import length_ranges
from evals.report.palette import Palette, drawn, named
from evals.report.sides import PLAIN, Side, drafting, side_of
from evals.report.tasks import MEAN, TaskTable
from evals.speed import TIME_PARTS

SIZE = (4.6, 3.2)
"""Inches; on a phone (331 points) the text shows in about the size that it is set in."""

FONT_SIZE = 10

WIDTH = 18
"""Characters of a side's name."""

_NOTE: dict[str, Any] = {"textcoords": "offset points", "fontsize": FONT_SIZE - 1}

Row = dict[str, Any]
Draw = Callable[[Any], None]


class Charts:
    """Draws plots; an empty text where there is nothing to show."""

    def __init__(self, palette: Palette) -> None:
        self._palette = palette

    def tau_by_task(self, table: TaskTable) -> str:
        """Bars with 95 % intervals."""
        return self._bars(table, "tau", "tau: tokens per verify step")

    def ratio_by_task(self, table: TaskTable) -> str:
        """Bars of the speed to plain decoding."""
        return self._bars(table, "ratio", "times the speed of plain decoding")

    def _bars(self, table: TaskTable, field: str, title: str) -> str:
        found = {key for key, figures in table.of.items() if figures.get(field)}
        known = {side for side, task in found if task in table.tasks and side.drafter != PLAIN}
        sides = [side for side in table.sides if side in known]
        tasks = [*table.tasks, *([MEAN] if len(table.tasks) > 1 else [])]
        if not sides:
            return ""
        height = 0.8 / len(sides)

        def draw(axes: Any) -> None:
            for number, side in enumerate(sides):
                for place, task in enumerate(tasks):
                    figures = table.of.get((side, task), {})
                    value = figures.get(field)
                    if value is None:
                        continue
                    at = place + (number - (len(sides) - 1) / 2) * height
                    low, high = figures.get(f"{field}_interval") or (value, value)
                    label = None if place else side.name(WIDTH)
                    axes.barh(at, value, 0.92 * height, label=label, **self._fill(side))
                    if high > low:
                        axes.plot([low, high], [at, at], color=drawn("ink"), linewidth=1.4)
                    box = {"facecolor": drawn("card"), "edgecolor": "none", "pad": 0.8}
                    end = max(value, high), at
                    axes.annotate(f"{value:.2f}", end, (4, 0), **_NOTE, va="center", bbox=box)
            axes.axvline(1, color=drawn("plain"), linestyle="--", linewidth=1, label="plain")
            axes.set_yticks(range(len(tasks)), [_short(task) for task in tasks])
            axes.set(xlabel=title)
            axes.margins(x=0.12)
            axes.set_xlim(left=0)
            axes.set_ylim(len(tasks) - 0.5, -0.5)
            axes.grid(axis="y", visible=False)

        lines = len(sides) * len(tasks)
        inches = 1.2 + 0.2 * lines + 0.1 * len(tasks)
        return _svg(f"{title}, {table.title}", draw, height=inches)

    def serving_curve(self, rows: Sequence[Row]) -> str:
        """Speed of all requests against that of one, a point for each concurrency."""
        own = [row for row in rows if row.get("latency")]
        if len({row["concurrency"] for row in own}) < 2:
            return ""

        def draw(axes: Any) -> None:
            for side, some in _by_side(own):
                speeds = [row["latency"]["request_tokens_per_second"]["median"] for row in some]
                totals = [row["speed"]["tokens_per_second"]["median"] for row in some]
                axes.plot(speeds, totals, **self._line(side))
                for row, at in zip(some, zip(speeds, totals, strict=True), strict=True):
                    color = self._palette.color(side)
                    axes.annotate(str(row["concurrency"]), at, (5, 5), **_NOTE, color=color)
            axes.set(xlabel="tokens/s of one request", ylabel="tokens/s of all")
            axes.margins(0.12)
            axes.set_xlim(left=0)
            axes.set_ylim(bottom=0)

        return _svg("serving curve: tokens/s of all against tokens/s of one request", draw)

    def speed_by_concurrency(self, rows: Sequence[Row]) -> str:
        """Median speed and its range, one line per side."""
        concurrencies = sorted({row["concurrency"] for row in rows})
        if len(concurrencies) < 2:
            return ""

        def draw(axes: Any) -> None:
            for side, own in _by_side(rows):
                speeds = [row["speed"]["tokens_per_second"] for row in own]
                low = [one["median"] - one["min"] for one in speeds]
                spread = [low, [one["max"] - one["median"] for one in speeds]]
                places = [row["concurrency"] for row in own]
                medians = [one["median"] for one in speeds]
                axes.errorbar(places, medians, yerr=spread, capsize=3, **self._line(side))
            axes.set_xscale("log", base=2)
            axes.set_xticks(concurrencies, [str(one) for one in concurrencies])
            axes.minorticks_off()
            axes.set(xlabel="conversations at once", ylabel="tokens/s of all")
            axes.set_ylim(bottom=0)

        return _svg("speed against concurrency", draw)

    def acceptance_by_position(self, rows: Sequence[Row]) -> str:
        """Share of drafts accepted at each position, one line per side with drafts."""
        return self._shares(rows, "acceptance_rate", "draft position", "accepted")

    def accepted_by_rank(self, rows: Sequence[Row]) -> str:
        """The share of every rank among accepted drafts of trees, a line per side that has any."""
        name = "rank among the candidates of a position"
        return self._shares(rows, "share_by_rank", name, "share of accepted drafts")

    def _shares(self, rows: Sequence[Row], field: str, counted: str, share: str) -> str:
        """Shares by what is counted from 1, one line per side."""
        own = [row for row in drafting(rows) if row["acceptance"].get(field)]

        def draw(axes: Any) -> None:
            for row in own:
                shares, side = row["acceptance"][field], side_of(row)
                axes.plot(range(1, len(shares) + 1), shares, **self._line(side))
            axes.set(xlabel=counted, ylabel=share, ylim=(0, 1.02))
            _whole_ticks(axes)

        return _svg(f"{share} by {counted}", draw) if own else ""

    def tau_by_length(self, rows: Sequence[Row], field: str, counted: str) -> str:
        """Tau by ranges of a length, one line per side; see `evals.bench.answers.by_length`."""
        own = [row for row in drafting(rows) if row["acceptance"].get(field)]
        ranges = length_ranges(row["acceptance"][field] for row in own)
        if len(ranges) < 2:
            return ""
        places = {end: place for place, end in enumerate(ranges)}

        def draw(axes: Any) -> None:
            for row in own:
                some, side = row["acceptance"][field], side_of(row)
                at = [places[one["end"]] for one in some]
                axes.plot(at, [one["tau"] for one in some], **self._line(side))
            tilted = {"rotation": 30, "ha": "right"} if len(ranges) > 4 else {}
            axes.set_xticks(range(len(ranges)), [*ranges.values()], **tilted)
            axes.set(xlabel=counted, ylabel="tau")
            axes.set_ylim(bottom=0)

        return _svg(f"tau by {counted}", draw)

    def tokens_per_step(self, rows: Sequence[Row]) -> str:
        """How often a verify step put out each number of tokens."""
        own = drafting(rows)
        width = 0.8 / max(len(own), 1)

        def draw(axes: Any) -> None:
            for number, row in enumerate(own):
                side = side_of(row)
                counts, steps = row["acceptance"]["histogram"][1:], row["acceptance"]["num_steps"]
                first = (number - (len(own) - 1) / 2) * width
                places = [tokens + first for tokens in range(1, len(counts) + 1)]
                shares = [count / steps for count in counts]
                axes.bar(places, shares, width, label=side.name(WIDTH), **self._fill(side))
            axes.set(xlabel="tokens per verify step", ylabel="share of steps")
            _whole_ticks(axes)

        return _svg("tokens per verify step", draw) if own else ""

    def time_by_part(self, rows: Sequence[Row]) -> str:
        """Where the time goes, one bar per side; parts are gray, for colors are those of sides."""
        own = [row for row in rows if row.get("time_split")]

        def draw(axes: Any) -> None:
            left = [0.0] * len(own)
            for number, part in enumerate(TIME_PARTS):
                shares = [row["time_split"][part] for row in own]
                color = drawn(f"part-{number}")
                axes.barh(range(len(own)), shares, 0.7, left, label=part, color=color)
                left = [before + share for before, share in zip(left, shares, strict=True)]
            axes.set_yticks(range(len(own)), [side_of(row).name(WIDTH) for row in own])
            axes.invert_yaxis()
            axes.set(xlabel="share of the time", xlim=(0, 1))

        return _svg("where the time goes", draw, legend_columns=3) if own else ""

    def _line(self, side: Side) -> dict[str, Any]:
        """How the line of a side is drawn, and what it is called."""
        return {
            "label": side.name(WIDTH),
            "color": self._palette.color(side),
            "linestyle": "--" if side.drafter == PLAIN else "-",
            "marker": self._palette.marker(side),
            "markersize": 5,
        }

    def _fill(self, side: Side) -> dict[str, Any]:
        """How the bars of a side are drawn."""
        return {"color": self._palette.color(side), "hatch": self._palette.hatch(side)}


def _by_side(rows: Sequence[Row]) -> list[tuple[Side, list[Row]]]:
    """Rows of every side by concurrency."""
    found: dict[Side, list[Row]] = {}
    for row in rows:
        found.setdefault(side_of(row), []).append(row)
    return [(side, sorted(own, key=lambda row: row["concurrency"])) for side, own in found.items()]


def _short(task: str) -> str:
    return task if len(task) <= 16 else task[:15] + "…"


def _whole_ticks(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))


def _svg(name: str, draw: Draw, *, legend_columns: int = 2, height: float = SIZE[1]) -> str:
    """One figure. The same report gives the same text: no date, and ids from a fixed salt.

    Args:
        name: what it shows, for who cannot see it.
        height: inches, with two lines of the legend.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {
        "font.size": FONT_SIZE, "font.family": "sans-serif", "svg.fonttype": "none",
        "svg.hashsalt": name, "axes.grid": True, "axes.axisbelow": True, "axes.spines.top": False,
        "axes.spines.right": False, "axes.facecolor": "none", "figure.facecolor": "none",
        "axes.edgecolor": drawn("soft"), "grid.color": drawn("rule"), "hatch.color": drawn("page"),
    }  # fmt: skip
    texts = ("text.color", "axes.labelcolor", "xtick.color", "ytick.color")
    settings |= dict.fromkeys(texts, drawn("ink"))
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            more = max(0, -(-len(handles) // legend_columns) - 2)
            figure.set_size_inches(SIZE[0], height + 0.2 * more)
            place = {"loc": "outside upper center", "ncols": legend_columns, "frameon": False}
            figure.legend(handles, labels, **place, fontsize=FONT_SIZE - 1)
        target = io.StringIO()
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})
    text = named(target.getvalue())
    svg = text[text.index("<svg") :]
    # The page sets the width; without a height of its own the drawing keeps its proportions.
    for side in ("width", "height"):
        svg = re.sub(rf'(<svg[^>]*?) {side}="[^"]*"', r"\1", svg, count=1)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(name)}"', 1)
