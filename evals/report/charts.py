"""Plots of a report as SVG, drawn by matplotlib from the stored figures alone."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from evals.report.sides import PLAIN, short_name, side_name
from evals.speed import TIME_PARTS

SIZE = (4.6, 3.2)
"""Inches. At 72 points each this is 331 wide, so on a phone the text shows in about the size that
it is set in.
"""

FONT_SIZE = 10

Row = dict[str, Any]


def acceptance_by_position(rows: Sequence[Row]) -> str:
    """Share of drafts accepted at each position, one line per side with drafts."""
    return _curves("acceptance", _drafting(rows), "acceptance_rate", "draft position", "accepted")


def accepted_by_rank(rows: Sequence[Row]) -> str:
    """Of the accepted drafts of trees, the share of every rank, one line per side that has any;
    empty where none has.
    """
    own = [row for row in _drafting(rows) if row["acceptance"].get("share_by_rank")]
    name = "rank among the candidates of a position"
    return _curves("rank", own, "share_by_rank", name, "share of accepted drafts") if own else ""


def _curves(name: str, rows: Sequence[Row], field: str, counted: str, share: str) -> str:
    """Shares by what is counted from 1, one line per side."""

    def draw(axes: Any) -> None:
        for row in rows:
            shares = row["acceptance"][field]
            axes.plot(
                range(1, len(shares) + 1), shares, marker="o", markersize=4, label=_label(row)
            )
        axes.set(xlabel=counted, ylabel=share, ylim=(0, 1.02))
        _whole_ticks(axes)

    return _svg(name, draw)


def tokens_per_step(rows: Sequence[Row]) -> str:
    """How often a verify step put out each number of tokens."""

    def draw(axes: Any) -> None:
        sides = _drafting(rows)
        width = 0.8 / max(len(sides), 1)
        for number, row in enumerate(sides):
            counts, steps = row["acceptance"]["histogram"][1:], row["acceptance"]["num_steps"]
            places = [
                tokens + (number - (len(sides) - 1) / 2) * width
                for tokens in range(1, len(counts) + 1)
            ]
            axes.bar(places, [count / steps for count in counts], width, label=_label(row))
        axes.set(xlabel="tokens per verify step", ylabel="share of steps")
        _whole_ticks(axes)

    return _svg("histogram", draw)


def speed_by_concurrency(rows: Sequence[Row]) -> str:
    """Median speed and its range against concurrency, one line per side,
    plain decoding included.
    """

    def draw(axes: Any) -> None:
        concurrencies = sorted({row["concurrency"] for row in rows})
        for side in dict.fromkeys(_side(row) for row in rows):
            own = sorted(
                (row for row in rows if _side(row) == side), key=lambda row: row["concurrency"]
            )
            speeds = [row["speed"]["tokens_per_second"] for row in own]
            spread = [
                [s["median"] - s["min"] for s in speeds],
                [s["max"] - s["median"] for s in speeds],
            ]
            style = {"color": "0.35", "linestyle": "--"} if side[0] == PLAIN else {}
            axes.errorbar(
                [row["concurrency"] for row in own],
                [s["median"] for s in speeds],
                yerr=spread,
                marker="o",
                markersize=4,
                capsize=3,
                label=_label(own[0]),
                **style,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(concurrencies, [str(one) for one in concurrencies])
        axes.minorticks_off()
        axes.set(xlabel="conversations at once", ylabel="tokens/s")
        axes.set_ylim(bottom=0)

    return _svg("speed", draw)


def time_by_part(rows: Sequence[Row]) -> str:
    """Where the time goes, one bar per side."""

    def draw(axes: Any) -> None:
        own = [row for row in rows if row["time_split"]]
        labels = [_label(row) for row in own]
        left = [0.0] * len(own)
        for part in TIME_PARTS:
            shares = [row["time_split"][part] for row in own]
            axes.barh(range(len(own)), shares, left=left, label=part, height=0.7)
            left = [before + share for before, share in zip(left, shares, strict=True)]
        axes.set_yticks(range(len(own)), labels)
        axes.invert_yaxis()
        axes.set(xlabel="share of the time", xlim=(0, 1))

    return _svg("time", draw, legend_columns=3)


def _drafting(rows: Sequence[Row]) -> list[Row]:
    return [
        row
        for row in rows
        if row["drafter"] != PLAIN and row["acceptance"] and row["acceptance"]["num_steps"]
    ]


def _side(row: Row) -> tuple[str, int | str]:
    return row["drafter"], row["k"]


def _label(row: Row) -> str:
    if row.get("peer"):
        return short_name(row["drafter"])
    return side_name(row["drafter"], row["k"], 18)


def _whole_ticks(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=9))


def _svg(name: str, draw: Callable[[Any], None], *, legend_columns: int = 2) -> str:
    """One figure. The same report gives the same text: no date, and ids from a fixed salt."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings = {
        "font.size": FONT_SIZE,
        "font.family": "sans-serif",
        "svg.fonttype": "none",
        "svg.hashsalt": name,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.alpha": 0.3,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=SIZE, layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        handles, labels = axes.get_legend_handles_labels()
        if handles:
            figure.legend(
                handles,
                labels,
                loc="outside upper center",
                ncols=legend_columns,
                frameon=False,
                fontsize=FONT_SIZE - 1,
            )
        target = io.StringIO()
        FigureCanvasSVG(figure).print_svg(target, metadata={"Date": None, "Creator": None})
    text = target.getvalue()
    svg = text[text.index("<svg") :]
    # The page sets the width; without a height of its own the drawing keeps its proportions.
    return re.sub(
        r'(<svg[^>]*?) height="[^"]*"',
        r"\1",
        re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1),
        count=1,
    )
