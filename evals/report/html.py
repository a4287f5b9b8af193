"""A report as one HTML page: no script, nothing from the network, plots as SVG within it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from evals.report import bench_grids as grids
from evals.report.charts import Charts
from evals.report.grid import Grid, cell
from evals.report.palette import COLORS, Palette
from evals.report.report import Report
from evals.report.sides import PLAIN, side_name, side_of
from evals.report.table import eval_table, shapes_and_ranks
from evals.report.tasks import TaskTable, task_tables
from evals.report.tree import FONT, draw_tree
from specdec.base.errors import InvalidInputError
from specdec.base.packages import install_command
from specdec.base.writing import check_writable

Row = dict[str, Any]

Plot = tuple[str, str, Grid]
"""Caption, drawing, and the same numbers."""


class Section(NamedTuple):
    """A part of the page.

    Attributes:
        title: above it.
        plots: those without a drawing are left out.
        cards: what each side reached.
        trees: side, step and drawing of a tree.
    """

    title: str
    plots: Sequence[Plot]
    cards: Sequence[Mapping[str, str]] = ()
    trees: Sequence[tuple[str, Mapping[str, Any], str]] = ()


def check_page(path: str | None) -> None:
    """Refuses to promise a page, if one is asked for, that could not be drawn or written.

    Raises:
        InvalidInputError: matplotlib is not installed, or see `check_writable`.
    """
    check_writable(path)
    if path and find_spec("matplotlib") is None:
        what = "--html draws with matplotlib, which is not installed"
        raise InvalidInputError(f"{what}; run: {install_command('eval')}")


def html_report(report: Report) -> str:
    """The page of a report, the same whether the report was just measured or read from a file.

    Raises:
        InvalidInputError: a report that has no plots.
    """
    if report["schema"] == "specdec-dummy-bench":
        raise InvalidInputError("a report of --dummy-weights has no plots; leave out --html")
    bench = report["schema"] == "specdec-bench"
    text = shapes_and_ranks(report["rows"]) if bench else eval_table(report)
    return _page().render(
        title="specdec bench" if bench else "specdec eval",
        colors=COLORS,
        tree_font=FONT,
        origin=report["provenance"],
        complete=report["complete"],
        sections=list(_bench(report) if bench else _eval(report)),
        sides=grids.sides_grid(report) if bench else None,
        text="\n".join(text).strip("\n"),
        provenance=_provenance(report),
    )


@cache
def _page() -> Template:
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.keep_trailing_newline = True
    return environment.get_template("page.html")


def _bench(report: Report) -> Iterator[Section]:
    """One for each prompt set and temperature, and before them one of several sets. Plots are those
    of the first concurrency, but for what is over all of them.
    """
    rows = report["rows"]
    palette = Palette(rows)
    charts = Charts(palette)
    first = [row for row in rows if row["concurrency"] == rows[0]["concurrency"]]
    tables = [*task_tables(report | {"rows": first})]
    several = {row["prompt_set"] for row in rows}
    for table in tables:
        if table.name not in several:
            yield Section(table.title, _by_task(charts, table))
    for (name, temperature), group in groupby(rows, key=itemgetter("prompt_set", "temperature")):
        own = list(group)
        some = [row for row in own if row["concurrency"] == own[0]["concurrency"]]
        mine = [one for one in tables if (one.name, one.temperature) == (name, temperature)]
        plots = [
            *(plot for table in mine for plot in _by_task(charts, table)),
            ("Serving curve, by concurrency", charts.serving_curve(own), grids.serving_grid(own)),
            ("Speed by concurrency", charts.speed_by_concurrency(own), grids.speed_grid(own)),
            *_steps(charts, some),
            _by_length(charts, some, "context", "tokens before a step, prompt included"),
            _by_length(charts, some, "output", "output tokens before a step"),
            ("Where the time goes", charts.time_by_part(some), grids.time_grid(some)),
        ]
        trees = [
            (side_name(row["drafter"], row["k"]), step, draw_tree(step))
            for row in some
            if (step := row.get("tree_step"))  # reports of before trees have none
        ]
        title = f"{name}, temperature {temperature:g}"
        cards = [_card(row, palette) for row in some if row["drafter"] != PLAIN]
        yield Section(title, plots, cards, trees)


def _by_task(charts: Charts, table: TaskTable) -> list[Plot]:
    grid = grids.task_grid(table)
    taus, ratios = charts.tau_by_task(table), charts.ratio_by_task(table)
    return [("Tau, with 95 % intervals", taus, grid), ("Speed to plain decoding", ratios, grid)]


def _steps(charts: Charts, rows: Sequence[Row]) -> list[Plot]:
    """What became of drafts."""
    by_position, where = charts.acceptance_by_position(rows), grids.position_grid(rows)
    return [
        ("Drafts accepted by position, where offered", by_position, where),
        ("Tokens per verify step", charts.tokens_per_step(rows), grids.step_grid(rows)),
        ("Accepted drafts of trees by rank", charts.accepted_by_rank(rows), grids.rank_grid(rows)),
    ]


def _by_length(charts: Charts, rows: Sequence[Row], what: str, counted: str) -> Plot:
    of = "length of context" if what == "context" else "position in the output"
    grid = grids.length_grid(rows, f"by_{what}", f"tau by {counted}")
    return f"Tau by {of}", charts.tau_by_length(rows, f"by_{what}", counted), grid


def _card(row: Row, palette: Palette) -> dict[str, str]:
    """What a side reached, in its color, which the plots give it too."""
    side, acceptance = side_of(row), row["acceptance"] or {"tau": row.get("peer_tau")}
    tau = cell(acceptance["tau"], ".2f")
    tau = tau and f"tau {tau}"
    bounds = grids.span(acceptance.get("tau_interval"))
    return {
        "color": palette.name(side),
        "side": side.title,
        "ratio": cell(row["ratio"], ".2f", "x") or "no speed",
        "speed": f"{row['speed']['tokens_per_second']['median']:.1f}",
        "tau": f"{tau} ({bounds})" if bounds else tau,
    }


def _eval(report: Report) -> Iterator[Section]:
    for task in report["tasks"]:
        row = {name: report["settings"][name] for name in ("drafter", "k")}
        row["acceptance"] = task["speculative"]["acceptance"]
        yield Section(task["task"], _steps(Charts(Palette([row])), [row]))


def _provenance(report: Report) -> list[tuple[str, str]]:
    origin, settings = report["provenance"], dict(report["settings"])
    sets = settings.pop("prompt_sets", ())
    device = f"{origin['device']}, {origin['dtype']}, attention {origin['attention']}"
    return [
        ("command", origin["command"]),
        ("started", origin["started"]),
        ("commit", origin["commit"] or "installed package"),
        ("target", _checkpoint(origin["target"])),
        *((f"drafter {name}", _checkpoint(entry)) for name, entry in origin["drafters"].items()),
        ("device", f"{device}, {origin['num_threads']} threads"),
        ("versions", ", ".join(f"{name} {one}" for name, one in origin["versions"].items())),
        *((f"prompts {one['name']}", _prompts(one)) for one in sets),
        ("settings", ", ".join(f"{name} {one}" for name, one in settings.items())),
    ]


def _prompts(one: dict[str, Any]) -> str:
    return f"{one['num_items']} of {one['source']}, {one['sha256'][:16]}"


def _checkpoint(entry: dict[str, Any]) -> str:
    revision = f", revision {entry['revision']}" if entry["revision"] else ""
    files = "".join(f", {name} {digest[:16]}" for name, digest in entry["sha256"].items())
    return f"{entry['name']}{revision}{files}"
