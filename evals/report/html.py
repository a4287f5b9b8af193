"""A report as one HTML page: no script, nothing from the network, plots as SVG within it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from evals.report.bench_grids import (
    length_grid,
    position_grid,
    rank_grid,
    serving_grid,
    sides_grid,
    span,
    speed_grid,
    step_grid,
    task_grid,
    time_grid,
)
from evals.report.charts import Charts
from evals.report.grid import Grid
from evals.report.palette import Palette, style
from evals.report.report import Report
from evals.report.sides import PLAIN, side_name, side_of
from evals.report.table import eval_table, shapes_and_ranks
from evals.report.tasks import TaskTable, task_tables
from evals.report.tree import STYLE, draw_tree
from specdec.base.errors import InvalidInputError
from specdec.base.packages import install_command

_STYLE = (
    style()
    + """
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); }
body { margin: 0 auto; padding: 16px; max-width: 1180px; }
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1rem 0 0; }
p { margin: 0 0 .5rem; overflow-wrap: anywhere; }
.about { color: var(--soft); }
.cards { display: grid; gap: 12px; margin: 0 0 16px; padding: 0; list-style: none; }
.cards { grid-template-columns: repeat(auto-fill, minmax(min(100%, 270px), 1fr)); }
.cards li { background: var(--card); border-radius: 8px; padding: 12px 14px; }
.cards li { border-left: 6px solid var(--plain); overflow-wrap: anywhere; }
.cards strong { display: block; font-size: 1.75rem; line-height: 1.25; }
.cards span { display: block; color: var(--soft); font-size: .875rem; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; margin: 0; }
dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 500px) { dl { grid-template-columns: minmax(0, 1fr); } }
pre { font-size: 13px; line-height: 1.45; overflow-x: auto; }
pre { background: var(--card); padding: 12px; }
.plots { display: grid; gap: 16px; align-items: start; }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; background: var(--card); border-radius: 8px; padding: 12px; min-width: 0; }
figcaption { font-weight: 600; font-size: .95rem; }
figure svg { display: block; width: 100%; height: auto; }
.grid { overflow-x: auto; }
table { border-collapse: collapse; font-size: .875rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; color: var(--soft); }
th, td { padding: 2px 10px 2px 0; white-space: nowrap; border-bottom: 1px solid var(--rule); }
.left { text-align: left; }
.right { text-align: right; }
.grid + p, .grid ~ p { color: var(--soft); font-size: .875rem; margin: .25rem 0 0; }
summary { cursor: pointer; color: var(--soft); font-size: .875rem; }
:focus-visible { outline: 3px solid var(--own); outline-offset: 2px; }
.warning { background: var(--warning); padding: 8px 12px; }
"""
    + STYLE
)


def check_plotting() -> None:
    """Refuses to promise a page that could not be drawn.

    Raises:
        InvalidInputError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise InvalidInputError(
            f"--html draws with matplotlib, which is not installed; run: {install_command('eval')}"
        )


def html_report(report: Report) -> str:
    """The page of a report, the same whether the report was just measured or read from a file.

    Raises:
        InvalidInputError: a report that has no plots.
    """
    if report["schema"] == "specdec-dummy-bench":
        raise InvalidInputError("a report of --dummy-weights has no plots; leave out --html")
    bench = report["schema"] == "specdec-bench"
    title = "specdec bench" if bench else "specdec eval"
    origin = report["provenance"]
    parts = [
        f"<h1>{title}</h1>",
        f'<p class="about">{escape(origin["target"]["name"])} on {escape(origin["device"])},'
        f" {origin['dtype']}, {escape(origin['started'])}</p>",
        ""
        if report["complete"]
        else '<p class="warning">Incomplete: the run ended before everything was measured.</p>',
        *(_bench(report) if bench else _eval(report)),
        "<h2>How it was measured</h2>",
        _provenance(report),
    ]
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; style-src'
            " 'unsafe-inline'\">",
            f"<title>{title}: {escape(report['provenance']['target']['name'])}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            *filter(None, parts),
            "</body>",
            "</html>",
            "",
        ]
    )


def _bench(report: Report) -> list[str]:
    """A section for each prompt set and temperature, one before them where there are several sets;
    then all figures. Plots are those of the first concurrency, but for what is over all of them.
    """
    lines, rows = list[str](), report["rows"]
    palette = Palette(rows)
    charts = Charts(palette)
    first = [row for row in rows if row["concurrency"] == rows[0]["concurrency"]]
    tables = [*task_tables(report | {"rows": first})]
    several = {row["prompt_set"] for row in rows}
    for table in tables:
        if table.name not in several:
            lines.append(f"<h2>{escape(table.title)}</h2>")
            lines += _plots(_by_task(charts, table))
    for (name, temperature), group in groupby(
        rows, key=lambda row: (row["prompt_set"], row["temperature"])
    ):
        own = list(group)
        some = [row for row in own if row["concurrency"] == own[0]["concurrency"]]
        lines.append(f"<h2>{escape(name)}, temperature {temperature:g}</h2>")
        lines.append(_cards(some, palette))
        mine = [one for one in tables if (one.name, one.temperature) == (name, temperature)]
        output, context = "output tokens before a step", "tokens before a step, prompt included"
        lines += _plots(
            [
                *(plot for table in mine for plot in _by_task(charts, table)),
                ("Serving curve, by concurrency", charts.serving_curve(own), serving_grid(own)),
                ("Speed by concurrency", charts.speed_by_concurrency(own), speed_grid(own)),
                *_steps(charts, some),
                (
                    "Tau by length of context",
                    charts.tau_by_length(some, "by_context", context),
                    length_grid(some, "by_context", f"tau by {context}"),
                ),
                (
                    "Tau by position in the output",
                    charts.tau_by_length(some, "by_output", output),
                    length_grid(some, "by_output", f"tau by {output}"),
                ),
                ("Where the time goes", charts.time_by_part(some), time_grid(some)),
            ]
        )
        lines += [
            _tree(row) for row in some if row.get("tree_step")
        ]  # reports of before trees have none
    more = chr(10).join(shapes_and_ranks(rows)).strip()
    lines += ["<h2>All figures</h2>", sides_grid(report).html()]
    return [*lines, f"<pre>{escape(more)}</pre>" if more else ""]


Plot = tuple[str, str, Grid]
"""Caption, drawing, and the same numbers."""


def _by_task(charts: Charts, table: TaskTable) -> list[Plot]:
    grid = task_grid(table)
    return [
        ("Tau, with 95 % intervals", charts.tau_by_task(table), grid),
        ("Speed to plain decoding", charts.ratio_by_task(table), grid),
    ]


def _steps(charts: Charts, rows: Sequence[dict[str, Any]]) -> list[Plot]:
    """What became of drafts."""
    return [
        (
            "Drafts accepted by position, where offered",
            charts.acceptance_by_position(rows),
            position_grid(rows),
        ),
        ("Tokens per verify step", charts.tokens_per_step(rows), step_grid(rows)),
        ("Accepted drafts of trees by rank", charts.accepted_by_rank(rows), rank_grid(rows)),
    ]


def _cards(rows: Sequence[dict[str, Any]], palette: Palette) -> str:
    """What each side reached, in its color, which the plots give it too."""
    cards = []
    for row in rows:
        side, speed = side_of(row), row["speed"]["tokens_per_second"]["median"]
        if side.drafter == PLAIN:
            continue
        acceptance = row["acceptance"] or {"tau": row.get("peer_tau")}
        tau = "" if acceptance["tau"] is None else f"tau {acceptance['tau']:.2f}"
        bounds = span(acceptance.get("tau_interval"))
        ratio = "no speed" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        cards.append(
            f'<li style="border-color: var(--{palette.name(side)})">{escape(side.title)}'
            f"<strong>{ratio}</strong><span>of plain decoding, {speed:.1f} tokens/s</span>"
            f"<span>{tau}{f' ({bounds})' if bounds else ''}</span></li>"
        )
    return f'<ul class="cards">{"".join(cards)}</ul>'


def _tree(row: dict[str, Any]) -> str:
    """The drafts of one step of a side."""
    step = row["tree_step"]
    return (
        f"<h3>A step of {escape(side_name(row['drafter'], row['k']))}: {len(step['parents'])}"
        f" drafts,"
        f" {len(step['accepted'])} accepted</h3>\n"
        f"<p>Step {step['step']} of {step['num_steps']} of {escape(step['prompt'])}, taken alone;"
        f" of the steps that accept another"
        " draft than the likeliest, if any does, it accepts most. All drafts were verified in one"
        " forward of the target."
        ' <mark class="accepted">Accepted</mark> ones become output, and <mark class="own">the'
        " target's own token</mark> comes"
        " behind them. A number is the place of a draft among the candidates of its position, where"
        " that is not the first.</p>\n"
        f'<div class="tree">{draw_tree(step)}</div>'
    )


def _eval(report: Report) -> list[str]:
    lines = []
    for task in report["tasks"]:
        row = {
            "drafter": report["settings"]["drafter"],
            "k": report["settings"]["k"],
            "acceptance": task["speculative"]["acceptance"],
        }
        lines.append(f"<h2>{escape(task['task'])}</h2>")
        lines += _plots(_steps(Charts(Palette([row])), [row]))
    figures = escape("\n".join(eval_table(report)))
    return [*lines, "<h2>All figures</h2>", f'<pre tabindex="0">{figures}</pre>']


def _plots(plots: Sequence[Plot]) -> list[str]:
    figures = [
        f"<figure><figcaption>{caption}</figcaption>\n{svg}"
        f"<details><summary>The same numbers</summary>{grid.html()}</details></figure>"
        for caption, svg, grid in plots
        if svg
    ]
    return ['<div class="plots">', *figures, "</div>"]


def _provenance(report: Report) -> str:
    origin, settings = report["provenance"], report["settings"]
    entries: list[tuple[str, Any]] = [
        ("command", origin["command"]),
        ("started", origin["started"]),
        ("commit", origin["commit"] or "installed package"),
        ("target", _checkpoint(origin["target"])),
        *((f"drafter {name}", _checkpoint(entry)) for name, entry in origin["drafters"].items()),
        (
            "device",
            f"{origin['device']}, {origin['dtype']}, attention {origin['attention']},"
            f" {origin['num_threads']} threads",
        ),
        (
            "versions",
            ", ".join(f"{package} {number}" for package, number in origin["versions"].items()),
        ),
        *((f"prompts {one['name']}", _prompts(one)) for one in settings.get("prompt_sets", ())),
        (
            "settings",
            ", ".join(f"{name} {one}" for name, one in settings.items() if name != "prompt_sets"),
        ),
    ]
    return (
        "<dl>"
        + "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in entries
        )
        + "</dl>"
    )


def _prompts(one: dict[str, Any]) -> str:
    return f"{one['num_items']} of {one['source']}, {one['sha256'][:16]}"


def _checkpoint(entry: dict[str, Any]) -> str:
    revision = f", revision {entry['revision']}" if entry["revision"] else ""
    files = "".join(f", {name} {digest[:16]}" for name, digest in entry["sha256"].items())
    return f"{entry['name']}{revision}{files}"
