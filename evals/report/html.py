"""A report as one HTML page: no script, nothing from the network, plots as SVG within it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.util import find_spec
from itertools import groupby
from typing import Any

from evals.report import charts
from evals.report.report import Report
from evals.report.sides import side_name
from evals.report.table import bench_table, eval_table
from evals.report.tree import STYLE, draw_tree
from specdec.base.errors import InvalidInputError
from specdec.base.packages import install_command

_STYLE = (
    """
body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff; }
body { margin: 0 auto; padding: 16px; max-width: 1180px; }
h1 { font-size: 1.5rem; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: .95rem; margin: 1rem 0 0; }
p { margin: 0 0 .5rem; }
dl { display: grid; grid-template-columns: max-content minmax(0, 1fr); gap: .1rem 1rem; margin: 0; }
dt { color: #555; }
dd { margin: 0; overflow-wrap: anywhere; }
pre { font-size: 13px; line-height: 1.45; overflow-x: auto; background: #f6f6f6; padding: 12px; }
.plots { display: grid; gap: 16px; }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr)); }
figure { margin: 0; }
figcaption { font-weight: 600; font-size: .95rem; }
figure svg { display: block; width: 100%; height: auto; }
.warning { background: #fff3cd; padding: 8px 12px; }
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
    parts = [
        f"<h1>{title}</h1>",
        ""
        if report["complete"]
        else '<p class="warning">Incomplete: the run ended before everything was measured.</p>',
        _provenance(report),
        "<h2>Figures</h2>",
        f"<pre>{escape(chr(10).join(bench_table(report) if bench else eval_table(report)))}</pre>",
        *(_bench_plots(report) if bench else _eval_plots(report)),
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


def _bench_plots(report: Report) -> list[str]:
    """Plots per prompt set and temperature; all but the speed are those of the first
    concurrency.
    """
    lines = []
    for (name, temperature), group in groupby(
        report["rows"], key=lambda row: (row["prompt_set"], row["temperature"])
    ):
        rows = list(group)
        first = [row for row in rows if row["concurrency"] == rows[0]["concurrency"]]
        lines.append(f"<h2>{escape(name)}, temperature {temperature:g}</h2>")
        lines += _plots(
            [
                ("Acceptance by position", charts.acceptance_by_position(first)),
                ("Tokens per verify step", charts.tokens_per_step(first)),
                ("Accepted drafts of trees by rank", charts.accepted_by_rank(first)),
                ("Speed against concurrency", charts.speed_by_concurrency(rows)),
                ("Where the time goes", charts.time_by_part(first)),
            ]
        )
        # reports of before trees have none
        lines += [_tree(row) for row in first if row.get("tree_step")]
    return lines


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


def _eval_plots(report: Report) -> list[str]:
    lines = []
    for task in report["tasks"]:
        row = {
            "drafter": report["settings"]["drafter"],
            "k": report["settings"]["k"],
            "acceptance": task["speculative"]["acceptance"],
        }
        lines.append(f"<h2>{escape(task['task'])}</h2>")
        lines += _plots(
            [
                ("Acceptance by position", charts.acceptance_by_position([row])),
                ("Tokens per verify step", charts.tokens_per_step([row])),
                ("Accepted drafts of trees by rank", charts.accepted_by_rank([row])),
            ]
        )
    return lines


def _plots(plots: Sequence[tuple[str, str]]) -> list[str]:
    figures = [
        f"<figure><figcaption>{caption}</figcaption>\n{svg}</figure>"
        for caption, svg in plots
        if svg
    ]
    return ['<div class="plots">', *figures, "</div>"]


def _provenance(report: Report) -> str:
    origin = report["provenance"]
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
    ]
    return (
        "<dl>"
        + "".join(
            f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in entries
        )
        + "</dl>"
    )


def _checkpoint(entry: dict[str, Any]) -> str:
    revision = f", revision {entry['revision']}" if entry["revision"] else ""
    files = "".join(f", {name} {digest[:16]}" for name, digest in entry["sha256"].items())
    return f"{entry['name']}{revision}{files}"
