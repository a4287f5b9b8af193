"""The table of a paper: drafters as lines, tasks as columns, as Markdown or LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from evals.report.grid import cell
from evals.report.paired import unlike
from evals.report.report import Report
from evals.report.sides import PLAIN, Side
from evals.report.tasks import ALL, MEAN, TaskTable, task_tables
from specdec.base.errors import InvalidInputError

FORMATS = ("markdown", "latex")

_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "…": r"\ldots{}",
}


def paper(reports: Sequence[tuple[str, Report]], style: str) -> str:
    """A table for each set with categories and one of sets, by temperature and concurrency.

    Args:
        reports: bench reports with the names of their files; all drafters stand in one table.
        style: one of `FORMATS`.

    Raises:
        InvalidInputError: a report of another kind, reports that are not of the same prompts,
            target and settings, or two that measured the same side.
    """
    name, first = reports[0]
    for file, report in reports:
        if report["schema"] != "specdec-bench":
            raise InvalidInputError(
                f"{file!r} follows schema {report['schema']!r}; tables of papers are made of"
                f" reports of prompt sets, which specdec bench --out writes"
            )
        sets = [some["settings"]["prompt_sets"] for some in (first, report)]
        hashes = [{one["name"]: one["sha256"] for one in some} for some in sets]
        why = unlike(first, report)
        if not why and hashes[0] != hashes[1]:
            why = "the prompts differ"
        if why:
            what = f"{name!r} and {file!r} do not fit in one table: {why}"
            raise InvalidInputError(f"{what}; measure both with the same sets, target and settings")
    seen: dict[tuple[Any, ...], str] = {}
    rows: list[dict[str, Any]] = []
    for file, report in reports:
        for row in report["rows"]:
            fields = ("prompt_set", "temperature", "concurrency", "drafter", "k")
            key = tuple(row[field] for field in fields)
            if key in seen and row["drafter"] != PLAIN:
                what = f"{seen[key]!r} and {file!r} both have {row['drafter']} k={row['k']}"
                way_out = "give reports of different drafters, or use bench compare"
                raise InvalidInputError(f"{what}; {way_out}")
            if key not in seen:
                rows.append(row)
            seen[key] = file
    tables = [*task_tables(first | {"rows": rows})]
    draw = {"markdown": _markdown, "latex": _latex}[style]
    return "\n\n".join(draw(table, _caption(table, first)) for table in tables)


def _columns(table: TaskTable) -> list[tuple[str, str, str]]:
    """Title, task, and kind of tau of each."""
    columns = [(task, task, "tau") for task in table.tasks]
    if any(table.of.get((side, MEAN)) for side in table.sides):
        columns.append(("mean", MEAN, "tau"))
    if any((side, ALL) in table.of for side in table.sides):
        columns += [("all, pooled", ALL, "tau"), ("all, by answer", ALL, "mean_tau")]
    return columns


def _sides(table: TaskTable) -> list[Side]:
    return [side for side in table.sides if side.drafter != PLAIN]


def _caption(table: TaskTable, report: Report) -> str:
    origin, settings = report["provenance"], report["settings"]
    sets = {one["name"]: one["num_items"] for one in settings["prompt_sets"]}
    asked = ", ".join(f"{n} of {one}" for one, n in sets.items() if one in table.name.split(" + "))
    whole = f"{table.name}, temperature {table.temperature:g}, {table.concurrency} at once"
    whose = " (of single tasks: that of one request)" if table.by_request else ""
    return (
        f"{whole}: tau (tokens per verify step) ± half of its 95 % interval, and speed to plain"
        f" decoding of the same run{whose}; {origin['target']['name']}, {origin['dtype']},"
        f" {origin['device']}; conversations: {asked}; at most {settings['max_tokens']} tokens"
    )


def _tau(figures: Mapping[str, Any], kind: str) -> tuple[str, str]:
    """The value, and half of its interval.

    >>> _tau({"tau": 2.5, "tau_interval": (2.25, 2.75)}, "tau"), _tau({"tau": 1.5}, "tau")
    (('2.50', '0.25'), ('1.50', ''))
    """
    bounds = figures.get(f"{kind}_interval")
    half = cell(bounds and (bounds[1] - bounds[0]) / 2, ".2f")
    return cell(figures.get(kind), ".2f"), half


def _markdown(table: TaskTable, caption: str) -> str:
    columns = _columns(table)

    def text(side: Side, task: str, kind: str) -> str:
        figures = table.of.get((side, task), {})
        value, half = _tau(figures, kind)
        ratio = cell(figures.get("ratio"), ".2f", "x") if kind == "tau" else ""
        return ", ".join(filter(None, (f"{value} ± {half}" if half else value, ratio)))

    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(one.replace("|", "\\|") for one in cells) + " |"

    lines = [f"{caption}.", "", line(["drafter", *(title for title, _, _ in columns)])]
    lines.append("|---|" + "--:|" * len(columns))
    for side in _sides(table):
        lines.append(line([side.name(), *(text(side, task, kind) for _, task, kind in columns)]))
    return "\n".join(lines)


def latex_text(text: str) -> str:
    """Text as LaTeX reads it.

    >>> print(latex_text("a_b & 50 % ± 1"))
    a\\_b \\& 50 \\% $\\pm$ 1
    """
    return "".join(_LATEX.get(char, char) for char in text).replace("±", r"$\pm$")


def _latex(table: TaskTable, caption: str) -> str:
    columns = _columns(table)
    spans, rules, heads = [], [], []
    at = 2
    for title, _, kind in columns:
        width = 2 if kind == "tau" else 1
        spans.append(rf"\multicolumn{{{width}}}{{c}}{{{latex_text(title)}}}")
        rules.append(rf"\cmidrule(lr){{{at}-{at + width - 1}}}")
        heads += [r"$\tau$", "speed"][:width]
        at += width

    def cells(side: Side) -> list[str]:
        found = [latex_text(side.name())]
        for _, task, kind in columns:
            figures = table.of.get((side, task), {})
            value, half = _tau(figures, kind)
            found.append(value + (rf" {{\scriptsize$\pm${half}}}" if half else ""))
            if kind == "tau":
                found.append(cell(figures.get("ratio"), ".2f", r"$\times$"))
        return found

    lines = [r"% needs \usepackage{booktabs}", r"\begin{table}", r"\centering"]
    lines.append(rf"\caption{{{latex_text(caption)}.}}")
    lines += [rf"\begin{{tabular}}{{l{'r' * (at - 2)}}}", r"\toprule"]
    lines += [" & " + " & ".join(spans) + r" \\", " ".join(rules)]
    lines += ["drafter & " + " & ".join(heads) + r" \\", r"\midrule"]
    lines += [" & ".join(cells(side)) + r" \\" for side in _sides(table)]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}", r"\end{table}"])
