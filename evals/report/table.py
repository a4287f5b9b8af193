"""Reports as tables for a terminal, made from the stored JSON alone."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from evals.certainty import paired
from evals.report.bench_grids import bench_grids, sides_grid
from evals.report.grid import align, cell
from evals.report.report import Report
from evals.report.sides import part_title, short_name
from specdec.cli.summary import counted

MAX_SHOWN = 10
"""Differing samples that are listed one by one."""

FASTEST = 5
"""Shapes that are shown of what was chosen among."""


def format_report(report: Report) -> str:
    """The report as text."""
    head = _head(report)
    tables = {"specdec-bench": bench_table, "specdec-dummy-bench": dummy_table}
    tables["specdec-eval"] = eval_table
    body = tables[report["schema"]](report)
    incomplete = "incomplete: the run ended before everything was measured"
    note = [] if report["complete"] else ["", incomplete]
    return "\n".join([*head, "", *body, *note])


def bench_table(report: Report) -> list[str]:
    """One line per side of every part of the sweep; the plain side first, which ratios refer to."""
    grid = sides_grid(report)
    return [
        *align([grid.head, *grid.rows], left=grid.left),
        "",
        *grid.notes,
        *shapes_and_ranks(report["rows"]),
        *(line for grid in bench_grids(report) for line in ("", *grid.lines())),
    ]


def shapes_and_ranks(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Shapes of sides with trees or chosen shapes, and which drafts of a tree were accepted."""
    shapes, choices, ranks, parts = [], [], [], []
    for row in rows:
        title = part_title(
            row["prompt_set"], row["temperature"], row["concurrency"], row["drafter"], row["k"]
        )
        # reports of before trees have none
        if str(row["k"]).startswith("auto") and "steps_by_shape" in row["acceptance"]:
            shapes.append((f"  {title}:", steps_of_shapes(row["acceptance"]["steps_by_shape"])))
            choices += [(f"  {title}:", line) for line in _choice(row.get("choice") or [])]
        if row["acceptance"] and row["acceptance"].get("share_by_rank"):
            ranks.append((f"  {title}:", _shares(row["acceptance"]["share_by_rank"])))
        if row["acceptance"] and len(by_part := row["acceptance"].get("by_part", [])) > 1:
            parts.append((f"  {title}:", _by_part(row["drafter"], by_part)))
    blocks = {
        "drafts chosen step by step:": shapes,
        "what they were chosen by, the fastest first: milliseconds of a step (~ is an estimate) and"
        " its tokens of a request:": choices,
        "accepted drafts of trees, by rank among the candidates of their position, the likeliest"
        " first:": ranks,
        "drafters by turns, and how many drafts of a step of each were accepted:": parts,
    }
    shown = [["", title, *align(block, left=(0, 1))] for title, block in blocks.items() if block]
    return [line for block in shown for line in block]


def dummy_table(report: Report) -> list[str]:
    """One line per kind of work of every part of the sweep: ours, the peer's, the ratio."""
    peer = report["peer"]
    theirs = ("vLLM", "range", "ratio") if peer else ()
    rows = [("prompts", "work", "ours", "range", *theirs, "", "of bound")]
    for row in report["rows"]:
        other, limit, ratio = row["theirs"], row["roofline"], row["ratio"]
        prompts = f"{row['num_reqs']} x {row['prompt_tokens']:,}"
        beside = (*(_figure(other) if other else ("", "")), cell(ratio, ".3f")) if peer else ()
        share = cell(limit and limit["share"], ".0%")
        rows.append((prompts, row["work"], *_figure(row["ours"]), *beside, row["unit"], share))
    settings = report["settings"]
    return [
        *align(rows, left=(0, 1, len(rows[0]) - 2)),
        "",
        f"random weights{_quantized(settings)}, {report['weight_bytes'] / 1e9:.1f} GB of them;"
        f" medians of {settings['repeats']} passes of {settings['steps']} steps, prefill apart; of"
        f" bound: to reading weights and cache at {report['bandwidth'] / 1e9:,.0f} GB/s, as"
        " measured here.",
        *([f"ratio: ours to vLLM {peer}'s; below 1 is faster in ms, above 1 else."] * bool(peer)),
        *_given_acceptance(report),
        *_experts_met(report["experts"], report["rows"]),
    ]


def _given_acceptance(report: Report) -> list[str]:
    """Where acceptance was given, how many tokens steps put out, and how long they take."""
    lines = []
    for row in report["rows"]:
        if row.get("tau") and row["work"] != "plain":
            step = row["num_reqs"] * row["tau"] / row["ours"]["median"] * 1e3
            peer = ""
            if row["theirs"]:
                spent = row["num_reqs"] * row["peer_tau"] / row["theirs"]["median"] * 1e3
                peer = f"; vLLM tau {row['peer_tau']:.2f}, {spent:.2f} ms"
            own = f"tau {row['tau']:.2f}, {step:.2f} ms a step{peer}"
            lines.append(f"  {row['num_reqs']} requests, {row['work']}: {own}")
    head = "acceptance is given; tokens that a step puts out for a request, and its time:"
    return [head, *lines] if lines else []


def _figure(side: dict[str, Any]) -> tuple[str, str]:
    """Median and range; times with three digits behind the point, large numbers without."""
    digits = 0 if side["median"] >= 1000 else 3
    return f"{side['median']:,.{digits}f}", f"{side['min']:,.{digits}f}-{side['max']:,.{digits}f}"


def _quantized(settings: dict[str, Any]) -> str:
    way = settings.get("quantize")
    return f", quantized to {way}" if way else ""


def _experts_met(experts: dict[str, Any] | None, rows: Sequence[dict[str, Any]]) -> list[str]:
    """How many experts rows met, and how many rows had a token of their own."""
    if experts is None:
        return []
    lines = [
        f"experts: {experts['num_experts']} a layer, {experts['top_k']} a row, chosen by the"
        f" router's random weights"
    ]
    for one in experts["met"]:
        measured = cell(one["measured"], ".1f", " met by as many random prompts")
        rows_of = f"{one['rows']:>5} {'row: ' if one['rows'] == 1 else 'rows:'}"
        lines.append(f"  {rows_of} {one['expected']:.1f} expected{measured and ', ' + measured}")
    for row in rows:
        if row["work"] == "plain step" and row["num_reqs"] > 1:
            count = f"{row['distinct_tokens']} different tokens"
            lines.append(f"  {row['num_reqs']} requests last decoded {count}")
    return lines


def eval_table(report: Report) -> list[str]:
    """Accuracy of both sides for every task, then agreement, acceptance and speed."""
    lines: list[str] = []
    for task in report["tasks"]:
        plain, speculative = task["plain"], task["speculative"]
        rows = [(f"{task['task']}, {task['num_samples']} samples", "plain", "", "speculative", "")]
        for name, value in plain["metrics"].items():
            other = speculative["metrics"][name]
            rows.append((name, *_accuracy(value), *_accuracy(other)))
            for peer, one in task.get("peers", {}).items():
                rows.append((f"  {peer}", *_accuracy(one["metrics"][name]), "", ""))
        speeds = [f"{side['tokens_per_second']:.1f}" for side in (plain, speculative)]
        rows.append(("tokens/s", speeds[0], "", speeds[1], ""))
        rows.append(("ratio", "", "", cell(task["ratio"], ".2f", "x") or "none", ""))
        acceptance = speculative["acceptance"]
        if acceptance is not None:
            rows.append(("tau, pooled", "", "", f"{acceptance['tau']:.2f}", ""))
            rows.append(("tau, mean of requests", "", "", f"{acceptance['mean_tau']:.2f}", ""))
        lines += align(rows, left=(0, 2, 4))
        if acceptance is not None and acceptance["acceptance_rate"]:
            lines.append("accepted by position: " + _shares(acceptance["acceptance_rate"]))
            if str(report["settings"]["k"]).startswith("auto") and "steps_by_shape" in acceptance:
                steps = steps_of_shapes(acceptance["steps_by_shape"])
                lines.append(f"drafts chosen step by step: {steps}")
            if acceptance.get("share_by_rank"):
                shares = _shares(acceptance["share_by_rank"])
                lines.append(f"accepted drafts of trees by rank: {shares}")
        lines += _judged_differently(task)
        lines += ["", *_differences(task), ""]
    return lines[:-1]


def steps_of_shapes(steps: Mapping[str, int]) -> str:
    """Verify steps by their drafts, see `AcceptanceStats.steps_by_shape`.

    >>> steps_of_shapes({"7": 1, "tree 15": 300})
    '7 in 1 step, tree 15 in 300 steps'
    """
    return ", ".join(f"{shape} in {counted(count, 'step')}" for shape, count in steps.items())


def _choice(estimates: Sequence[Mapping[str, Any]]) -> list[str]:
    """The fastest shapes of each situation, see `BlockChoice.estimates`.

    >>> case = {"requests": 8, "sampled": True, "expected": 0, "milliseconds": 2.5, "tokens": 3.0}
    >>> _choice([case | {"shape": "tree 7", "measured": True}])
    ['8 sampled: tree 7 2.50 ms 3.00']
    """
    lines = dict[str, list[str]]()
    for one in estimates:
        where = f"{one['requests']}{' sampled' * one['sampled']}"
        where += f", {one['expected']} expected" * bool(one["expected"])
        took = f"{'' if one['measured'] else '~'}{one['milliseconds']:.2f} ms"
        lines.setdefault(where, []).append(f"{one['shape']} {took} {one['tokens']:.2f}")
    return [f"{where}: {', '.join(shapes[:FASTEST])}" for where, shapes in lines.items()]


def _by_part(drafter: str, by_part: Sequence[Sequence[float]]) -> str:
    """See `AcceptanceStats.by_part`.

    >>> _by_part("suffix+ngram", [(2, 1.25), (1, 0.0)])
    'suffix in 2 steps 1.25, ngram in 1 step 0.00'
    """
    names = drafter.split("+")
    pairs = [(short_name(name), one[0], one[1]) for name, one in zip(names, by_part, strict=False)]
    return ", ".join(f"{name} in {counted(int(n), 'step')} {mean:.2f}" for name, n, mean in pairs)


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{value:.2f}" for value in values)


def _head(report: Report) -> list[str]:
    origin = report["provenance"]
    versions = origin["versions"]
    return [
        f"{origin['target']['name']} on {origin['device']}, {origin['dtype']}, attention"
        f" {origin['attention']}",
        f"specdec {versions['specdec']} ({_short(origin['commit'])}), torch {versions['torch']},"
        f" transformers {versions['transformers']}, {origin['started']}",
    ]


def _short(commit: str | None) -> str:
    """The start of a commit, and whether files differed from it.

    >>> _short("0123456789abcdef+changes"), _short(None)
    ('0123456789ab+changes', 'installed package')
    """
    digest, plus, changes = (commit or "").partition("+")
    return digest[:12] + plus + changes or "installed package"


def _accuracy(metric: dict[str, Any]) -> tuple[str, str]:
    """Value, and its 95 % interval, or else its standard error."""
    stderr, interval = metric["stderr"], metric.get("interval")
    if interval:
        return f"{metric['value']:.4f}", f"{interval[0]:.4f} to {interval[1]:.4f}"
    return f"{metric['value']:.4f}", "" if stderr is None else f"± {stderr:.4f}"


def _judged_differently(task: dict[str, Any]) -> list[str]:
    """Answers that a side alone has right, or wrong, beside plain decoding."""
    lines = []
    peers = {name: one["metrics"] for name, one in task.get("peers", {}).items()}
    for side, metrics in ({"speculative": task["speculative"]["metrics"]} | peers).items():
        for name, metric in metrics.items():
            right = task["plain"]["metrics"][name].get("right")
            if right is not None and metric.get("right") is not None:
                lines.append(f"  {name}: {judged(right, metric['right'], 'plain', side)}")
    head = "intervals are of 95 % (Wilson); answers that two sides judge differently:"
    return [head, *lines] if lines else []


def judged(one: str, other: str, first: str, second: str) -> str:
    """What `paired` says of two sides.

    >>> judged("1100", "1010", "plain", "hf")
    '1 right with plain alone, 1 with hf alone (McNemar, p = 1)'
    """
    found = paired(one, other)
    ours = f"{found['first_only']} right with {first} alone"
    theirs = f"{found['second_only']} with {second} alone"
    return f"{ours}, {theirs} (McNemar, p = {found['p']:.2g})"


def _differences(task: dict[str, Any]) -> list[str]:
    differing = task["differences"]
    if not differing:
        return [f"output: the same text for all {task['num_samples']} samples"]
    lines = [f"output: differs for {len(differing)} of {task['num_samples']} samples"]
    known = [one for one in differing if one["margin"] is not None]
    steps = sorted(one["margin"] / one["resolution"] for one in known if one["resolution"])
    if len(known) > MAX_SHOWN and steps:
        lines.append(
            f"  where {len(known)} of them part, the two largest logits are {median(steps):.3g}"
            f" steps of the type apart in the median, and at most {steps[-1]:.3g}. The farthest:"
        )
        known.sort(key=lambda one: one["margin"] / (one["resolution"] or 1), reverse=True)
        differing = known[:MAX_SHOWN]
    for one in differing:
        where = f"  sample {one['doc_id']}"
        if one["margin"] is not None:
            where += (
                f", token {one['position'] + 1}: plain {one['plain_token']!r}, speculative"
                f" {one['speculative_token']!r}; the two largest logits are {one['margin']:.4g}"
                f" apart, where the type resolves {one['resolution']:.4g}"
            )
        lines.append(where)
    return lines
