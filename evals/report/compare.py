"""Two reports of the same kind, side by side."""

from typing import Any

from evals.report.grid import align
from evals.report.paired import difference, paired_lines
from evals.report.report import Report
from evals.report.sides import part_title
from evals.report.table import judged
from specdec.base.errors import InvalidInputError

Key = tuple[Any, ...]


def compare_reports(one: Report, other: Report | None = None) -> str:
    """Table of what both reports measured, after whatever makes them hard to compare.

    Args:
        other: the newer one; ratios are to `one`. None compares the first one's own sides.

    Raises:
        InvalidInputError: the reports have nothing in common, or a kind that is not compared.
    """
    if one["schema"] == "specdec-dummy-bench":
        what = "reports of --dummy-weights hold both sides themselves"
        raise InvalidInputError(f"{what}; print each with specdec bench show")
    bench = one["schema"] == "specdec-bench"
    tests = paired_lines(one, other) if bench else []
    if other is None:
        if not tests:
            what = "the report has no two drafters that answered the same prompts"
            raise InvalidInputError(f"{what}; give a second one, or measure with --drafter A B")
        return "\n".join(tests)
    parts_of = _bench_parts if bench else _eval_parts
    parts, others = parts_of(one), parts_of(other)
    common = [key for key in parts if key in others]
    if not common:
        first, second = (_title(next(iter(some), ())) for some in (parts, others))
        what = f"the reports have no part in common (the first has {first}, the second {second})"
        way_out = "measure both with the same sets, temperatures, concurrencies, drafters and k"
        raise InvalidInputError(f"{what}; {way_out}")
    rows = [("", *("first", "second", "ratio") * 2)]
    rows.append(("part", "tokens/s", "tokens/s", "", "tau", "tau", ""))
    for key in common:
        (speed, tau), (other_speed, other_tau) = parts[key], others[key]
        speeds = f"{speed:.1f}", f"{other_speed:.1f}", _ratio(other_speed, speed)
        taus = f"{tau:.3f}", f"{other_tau:.3f}", _ratio(other_tau, tau)
        rows.append((_title(key), *speeds, *taus))
    only = [
        f"only in the {name}: {_title(key)}"
        for name, mine, theirs in (("first", parts, others), ("second", others, parts))
        for key in mine
        if key not in theirs
    ]
    notes = differences(one, other)
    only += [] if bench else _judged_differently(one, other)
    parts_of_text = (notes, align(rows, left=(0,)), only, tests)
    return "\n\n".join("\n".join(lines) for lines in parts_of_text if lines)


def _judged_differently(one: Report, other: Report) -> list[str]:
    """Answers that one side alone has right, of both reports."""
    others = {task["task"]: task for task in other["tasks"]}
    lines = []
    for task in one["tasks"]:
        if (their := others.get(task["task"])) is None:
            continue
        asked = task.get("sha256"), their.get("sha256")
        if None in asked or asked[0] != asked[1]:
            why = "the reports asked other questions"
            if None in asked:
                why = "an older report does not say which questions it asked"
            what = f"{task['task']}: {why}, so no answers are paired"
            lines.append(f"{what}; measure both with the same data and limit")
            continue
        for side in ("plain", "speculative"):
            metrics = their.get(side, {}).get("metrics", {})
            for name, metric in task[side]["metrics"].items():
                mine, theirs = (some.get("right") for some in (metric, metrics.get(name, {})))
                if mine and theirs and len(mine) == len(theirs):
                    title = f"{task['task']} {side}, {name}"
                    lines.append(f"{title}: {judged(mine, theirs, 'the first', 'the second')}")
    return lines


def differences(one: Report, other: Report) -> list[str]:
    """One line for everything that differs between two reports beside their figures."""
    found = []
    ours, theirs = one["provenance"], other["provenance"]
    machine = ("device", "dtype", "weights", "attention", "kv_dtype", "prefill_dtype")
    for field in (*machine, "num_threads", "commit"):
        if why := difference(field, ours, theirs):
            found.append(why)
    for package in sorted(ours["versions"].keys() | theirs["versions"].keys()):
        left, right = ours["versions"].get(package), theirs["versions"].get(package)
        if left != right:
            found.append(f"{package} differs: {left} / {right}")
    if ours["target"] != theirs["target"]:
        checkpoints = _checkpoint(ours["target"]), _checkpoint(theirs["target"])
        found.append("target differs: " + " / ".join(checkpoints))
    for name in ours["drafters"].keys() & theirs["drafters"].keys():
        if ours["drafters"][name] != theirs["drafters"][name]:
            found.append(f"drafter {name} has other files in the second report")
    sets = [report["settings"].get("prompt_sets", []) for report in (one, other)]
    hashes = [{entry["name"]: entry["sha256"] for entry in some} for some in sets]
    for name in hashes[0].keys() & hashes[1].keys():
        if hashes[0][name] != hashes[1][name]:
            found.append(f"prompt set {name} holds other prompts in the second report")
    for field in sorted(one["settings"].keys() & other["settings"].keys() - {"prompt_sets"}):
        if one["settings"][field] != other["settings"][field]:
            found.append(f"{field} differs: {one['settings'][field]} / {other['settings'][field]}")
    found += [
        f"the {name} report is incomplete"
        for name, report in (("first", one), ("second", other))
        if not report["complete"]
    ]
    return found


def _bench_parts(report: Report) -> dict[Key, tuple[float, float]]:
    """Speed and tau by prompt set, temperature, concurrency, drafter and k."""
    parts: dict[Key, tuple[float, float]] = {}
    for row in report["rows"]:
        key = row["prompt_set"], row["temperature"], row["concurrency"], row["drafter"], row["k"]
        tau = row["acceptance"]["tau"] if row["acceptance"] else 0.0
        parts[key] = row["speed"]["tokens_per_second"]["median"], tau
    return parts


def _eval_parts(report: Report) -> dict[Key, tuple[float, float]]:
    """Speed and tau of both sides by task."""
    parts: dict[Key, tuple[float, float]] = {}
    for task in report["tasks"]:
        for side in ("plain", "speculative"):
            acceptance = task[side]["acceptance"]
            tau = acceptance["tau"] if acceptance else 0.0
            parts[task["task"], side] = task[side]["tokens_per_second"], tau
    return parts


def _title(key: Key) -> str:
    return part_title(*key) if len(key) == 5 else " ".join(map(str, key)) or "nothing"


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}x" if base else "none"


def _checkpoint(entry: dict[str, Any]) -> str:
    digests = "".join(entry["sha256"].values())
    return f"{entry['name']} {(entry['revision'] or digests)[:12]}".rstrip()
