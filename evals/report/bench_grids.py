"""What a bench report says beside its sides: by task, position and length, and of latency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from evals.certainty import DRAWS, FEW, LEAST
from evals.report.grid import Grid, cell
from evals.report.report import Report
from evals.report.sides import PLAIN, drafting, short_name, side_of
from evals.report.tasks import ALL, MEAN, TaskTable, task_tables
from evals.speed import TIME_PARTS

Row = dict[str, Any]

MAX_POSITIONS = 16
"""Columns that a terminal has room for."""

OF_TASK = (
    "tau: pooled over a task's steps; mean: of its answers' own tau. Task mean: tasks weigh alike."
)
OF_REQUEST = (
    "tokens/s and ratio of a task: of one request, from its place among those at once to its last"
    " token; of all: of all requests together."
)


def bench_grids(report: Report) -> Iterator[Grid]:
    """Grids that the report has figures for."""
    for table in task_tables(report):
        if len(table.tasks) > 1:
            yield task_grid(table)
    rows = report["rows"]
    first = [row for row in rows if row["concurrency"] == rows[0]["concurrency"]]
    for grid in (
        position_grid(first, MAX_POSITIONS),
        budget_grid(first, MAX_POSITIONS),
        length_grid(first, "by_context", "tau by the tokens before a step, prompt included"),
        length_grid(first, "by_output", "tau by the output tokens before a step"),
        hits_grid(first),
        serving_grid(rows),
    ):
        if grid.rows:
            yield grid


def sides_grid(report: Report) -> Grid:
    """A line for every side of every part; plain decoding first, which ratios refer to."""
    rows = []
    for row in report["rows"]:
        speed, acceptance = row["speed"]["tokens_per_second"], row["acceptance"]
        plain, limit, asked = row["drafter"] == PLAIN, row["roofline"], row["num_answers"]
        part = row["prompt_set"], f"{row['temperature']:g}", str(row["concurrency"])
        drafts = "" if plain or row["peer"] else str(row["k"])
        side = "plain" if plain else short_name(row["drafter"]), drafts
        ratio = cell(row["ratio"], ".2f", "x") or "none"
        bound = cell(limit and speed["median"] / limit["tokens_per_second"], ".0%")
        fast = cell(speed["median"], ".1f"), f"{speed['min']:.1f}-{speed['max']:.1f}", ratio, bound
        accepted = figures({"tau": row.get("peer_tau")} if acceptance is None else acceptance)[:4]
        same = "" if plain else f"{asked - len(row['differing_answers'])}/{asked}"
        rows.append((*part, *side, *fast, *accepted, same))
    head = ("set", "T", "conc", "drafter", "k", "tokens/s", "range", "ratio", "of bound")
    tail = ("tau", "95 %", "mean", "95 %", "same output")
    notes = [
        f"tokens/s: median of {report['settings']['repeats']} timed passes, prefill included;"
        f" ratio: to plain decoding of the same part of the sweep.",
        f"of bound: to what reading weights and cache alone would allow, at"
        f" {report['bandwidth'] / 1e9:.0f} GB/s measured here.",
        "tau: tokens output per verify step, pooled over all steps; mean: the mean of the answers'"
        " own tau.",
        *certainty_note(report),
    ]
    if engines := report["settings"].get("num_engines"):
        text = f"tokens/s are those of one engine, of {engines}: all tokens by the time of all."
        notes.append(text)
    return Grid("all sides", (*head, *tail), rows, (0, 3), tuple(notes))


def task_grid(table: TaskTable) -> Grid:
    """A line for every side of every task, and for the mean of the tasks."""
    rows = []
    for task in (*table.tasks, MEAN, ALL):
        for side in table.sides:
            if (side, task) in table.of:
                rows.append((task, side.name(), *figures(table.of[side, task])))
    head = ("task", "side", "tau", "95 %", "mean", "95 %", "tokens/s", "ratio")
    notes = (OF_TASK, OF_REQUEST) if table.by_request else (OF_TASK,)
    return Grid(f"by task ({table.title})", head, rows, (0, 1), notes)


def figures(of: Mapping[str, Any]) -> tuple[str, ...]:
    """Six cells: tau, the mean of the answers' own, each with its interval; speed and ratio."""
    cells: list[str] = []
    for name in ("tau", "mean_tau"):
        cells += cell(of.get(name), ".2f"), span(of.get(f"{name}_interval"))
    return *cells, cell(of.get("tokens_per_second"), ".1f"), cell(of.get("ratio"), ".2f", "x")


def span(interval: Sequence[float] | None) -> str:
    """An interval.

    >>> span((1.0, 2.345)), span(None)
    ('1.00-2.35', '')
    """
    return "" if interval is None else f"{interval[0]:.2f}-{interval[1]:.2f}"


def certainty_note(report: Report) -> list[str]:
    """What intervals are, where there are any."""
    rows = [row for row in report["rows"] if row.get("answers")]
    if not rows:
        return []
    sizes = [len({*row["answers"]["item"]}) for row in rows]
    least = min(sizes + [task["num_items"] for row in rows for task in row["tasks"]])
    return [
        f"95 %: interval by bootstrap over conversations, {DRAWS:,} draws"
        + (f"; too narrow below {FEW} of them, none below {LEAST}." if least < FEW else ".")
    ]


def _shares_grid(rows: Iterable[Row], field: str, title: str, widest: int | None = None) -> Grid:
    """Shares of an acceptance that are counted from 1, of all or the first so many places."""
    own = [row for row in drafting(rows) if row["acceptance"].get(field)]
    most = max((len(row["acceptance"][field]) for row in own), default=0)
    head = [str(number) for number in range(1, min(most, widest or most) + 1)]
    return _columns(title, own, head, lambda row, place: _at(row["acceptance"][field], place))


def position_grid(rows: Iterable[Row], widest: int | None = None) -> Grid:
    """Acceptance by the position of a draft."""
    title = "drafts accepted by position, of the steps that offered one there"
    return _shares_grid(rows, "acceptance_rate", title, widest)


def rank_grid(rows: Iterable[Row]) -> Grid:
    """The share of every rank among the accepted drafts of trees."""
    return _shares_grid(rows, "share_by_rank", "accepted drafts of trees by rank")


def budget_grid(rows: Iterable[Row], widest: int) -> Grid:
    """How sides with a budget have spent it: on which requests and slots, the first so many."""
    own = [row for row in rows if has_budget(row["k"])]
    own = [row for row in own if "verified_by_slot" in (row["acceptance"] or ())]
    most = max((len(row["acceptance"]["verified_by_slot"]) for row in own), default=0)

    def found(row: Row, place: int) -> str:
        acceptance, steps = row["acceptance"], row["acceptance"]["num_steps"] or 1
        if place == 0:
            return f"{acceptance['num_verified'] / steps:.2f}"
        if place == 1:
            pairs = zip(row["answers"]["num_verified"], row["answers"]["num_steps"], strict=True)
            means = [verified / count for verified, count in pairs if count]
            return f"{min(means):.2f}-{max(means):.2f}" if means else ""
        return _at([count / steps for count in acceptance["verified_by_slot"]], place - 2)

    head = ("mean", "a request", *map(str, range(1, min(most, widest) + 1)))
    grid = _columns("drafts verified of a request in a step", own, head, found)
    note = "a request: the least and the largest mean of one; 1, 2, ...: the share of steps in"
    return replace(grid, notes=(f"{note} which that draft was verified, the likeliest first.",))


def has_budget(k: int | str) -> bool:
    """Whether steps of a side share out rows.

    >>> has_budget("2.5 of tree 15"), has_budget("auto with budgets"), has_budget(7)
    (True, True, False)
    """
    return " of " in str(k) or str(k).endswith("budgets")


def length_grid(rows: Iterable[Row], field: str, title: str) -> Grid:
    """Tau by a length, see `evals.bench.answers.by_length`."""
    own = [row for row in drafting(rows) if row["acceptance"].get(field)]
    ranges = length_ranges(row["acceptance"][field] for row in own)
    if len(ranges) < 2:
        return Grid(title, (), ())

    def tau(row: Row, place: int) -> str:
        found = {one["end"]: one["tau"] for one in row["acceptance"][field]}
        return cell(found.get([*ranges][place]), ".2f")

    return _columns(title, own, [*ranges.values()], tau)


def hits_grid(rows: Iterable[Row]) -> Grid:
    """Tau behind prefix-cache hits, beside that of the same prompts computed."""
    own = [row for row in drafting(rows) if row.get("behind_hits")]
    every = [of for row in own for of in (row["acceptance"], row["behind_hits"])]
    ranges = length_ranges(of["by_context"] for of in every)

    def both(row: Row, place: int) -> str:
        hits, cold = row["behind_hits"], row["acceptance"]
        if place == 0:
            return f"{hits['num_cached_tokens'] / hits['num_prompt_tokens']:.2f}"
        if place == 1:
            asked = row["num_answers"]
            return f"{asked - len(hits['differing_answers'])}/{asked}"
        if place == 2:
            return f"{cold['tau']:.2f} {hits['tau']:.2f}"
        found = [{one["end"]: f"{one['tau']:.2f}" for one in x["by_context"]} for x in (cold, hits)]
        end = [*ranges][place - 3]
        return " ".join(of.get(end, "-") for of in found if end in found[0] or end in found[1])

    head = ("from cache", "same output", "all", *ranges.values())
    title = "tau of prompts computed, and of the same from the prefix cache"
    grid = _columns(title, own, head, both)
    note = "all, then by the tokens before a step; from cache: share of the prompts' tokens."
    return replace(grid, notes=(note,))


def length_ranges(tables: Iterable[Sequence[Mapping[str, Any]]]) -> dict[int, str]:
    """The tokens of all ranges of some tables, by the end of each.

    >>> length_ranges([[{"start": 128, "end": 256}], [{"start": 0, "end": 128}]])
    {128: '0-127', 256: '128-255'}
    """
    names = {one["end"]: f"{one['start']}-{one['end'] - 1}" for table in tables for one in table}
    return dict(sorted(names.items()))


def serving_grid(rows: Iterable[Row]) -> Grid:
    """Speed in all against that of one request, and latency, over concurrency."""
    cells, few = [], list[str]()
    for row in rows:
        latency = row.get("latency")
        if latency:
            asked = len({*row["answers"]["item"]})
            if row["concurrency"] > asked:
                few.append(f"{row['concurrency']} at once are {asked}, as many as were asked.")
            part = f"{row['prompt_set']} T={row['temperature']:g}"
            total = f"{row['speed']['tokens_per_second']['median']:.1f}"
            one, ms = latency["request_tokens_per_second"], latency["ms_per_token"] or {}
            speeds = total, f"{one['median']:.1f}", f"{one['worst_tenth']:.1f}"
            times = cell(ms.get("median"), ".2f"), cell(ms.get("worst_tenth"), ".2f")
            first = f"{latency['first_token_ms']['median']:.1f}"
            side = side_of(row).name(), str(row["concurrency"])
            cells.append((part, *side, *speeds, *times, first))
    head = ("part", "side", "conc", "tokens/s", "a request", "slow", "ms/token", "slow", "first ms")
    notes = (
        "tokens/s: of all requests; a request: tokens/s of the median request, from its place among"
        " those at once to its last token;",
        "ms/token: behind the first token; first ms: from its place to its first token; slow: where"
        " the slowest tenth of the requests begins.",
        *dict.fromkeys(few),
    )
    return Grid("speed against latency", head, cells, (0, 1), notes)


def step_grid(rows: Iterable[Row]) -> Grid:
    """Shares of the verify steps that put out so many tokens."""
    own = drafting(rows)
    most = max((len(row["acceptance"]["histogram"]) for row in own), default=1)

    def share(row: Row, place: int) -> str:
        counts, steps = row["acceptance"]["histogram"], row["acceptance"]["num_steps"]
        return _at([count / steps for count in counts], place + 1)

    return _columns("tokens per verify step", own, [str(n) for n in range(1, most)], share)


def time_grid(rows: Iterable[Row]) -> Grid:
    """Shares of the time."""
    own = [row for row in rows if row.get("time_split")]

    def share(row: Row, place: int) -> str:
        return f"{row['time_split'][TIME_PARTS[place]]:.2f}"

    return _columns("where the time goes", own, TIME_PARTS, share)


def speed_grid(rows: Iterable[Row]) -> Grid:
    """Tokens per second of all requests: the median of the passes, the slowest, the fastest."""
    names = ("median", "min", "max")

    def speed(row: Row, place: int) -> str:
        return f"{row['speed']['tokens_per_second'][names[place]]:.1f}"

    return _columns("tokens/s of all requests", [*rows], names, speed)


def _columns(title: str, rows: Sequence[Row], head: Sequence[str], found: Any) -> Grid:
    """A line for every side of every part, a column for each of `head`."""
    places = range(len(head))
    lines = [(_part(row), side_of(row).name(), *(found(row, n) for n in places)) for row in rows]
    return Grid(title, ("part", "side", *head), lines, (0, 1))


def _part(row: Row) -> str:
    """The part of a sweep; rows of an evaluation have none."""
    if "prompt_set" not in row:
        return ""
    return f"{row['prompt_set']} T={row['temperature']:g} c={row['concurrency']}"


def _at(shares: Sequence[float], place: int) -> str:
    return f"{shares[place]:.2f}" if place < len(shares) else ""
