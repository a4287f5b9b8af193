"""Tables of papers from reports, and two drafters of two reports."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evals.report.compare import compare_reports
from evals.report.paper import paper
from evals.report.report import write_report
from specdec.base.errors import InvalidInputError
from specdec.cli.main import main
from tests.evals.tiny import PROVENANCE

Report = dict[str, Any]
TASKS = ("code & text", "math")
NUM_ITEMS = 40


def made(drafter: str, tau: float, seed: int) -> Report:
    """A report of a drafter that emits `tau` tokens per step, give or take what differs between
    conversations, which is the same for every drafter, and a little noise of its own.
    """
    items, own = np.random.default_rng(1), np.random.default_rng(seed)
    steps = items.integers(30, 60, NUM_ITEMS)
    shares = tau * items.normal(1.0, 0.3, NUM_ITEMS) + own.normal(0.0, 0.05, NUM_ITEMS)
    emitted = [int(some) for some in steps * shares]
    whole = sum(emitted) / int(steps.sum())
    rows = []
    for name, k, ratio in (("none", 0, 1.0), (drafter, 7, tau / 2)):
        figures = {"tau": whole if k else 1.0, "tau_interval": [whole - 0.1, whole + 0.1]}
        figures["mean_tau"] = figures["tau"]
        speed = {"tokens_per_second": {"median": 100.0 * ratio, "min": 1.0, "max": 200.0}}
        task = {"num_items": 20, "num_answers": 20, "ratio": ratio, **speed, **figures}
        rows.append(
            {
                "prompt_set": "a set",
                "temperature": 0.0,
                "concurrency": 1,
                "drafter": name,
                "k": k,
                "peer": None,
                "num_answers": NUM_ITEMS,
                "speed": speed,
                "ratio": ratio,
                "acceptance": figures | {"num_steps": int(steps.sum()), "acceptance_rate": []},
                "answers": {
                    "item": list(range(NUM_ITEMS)),
                    "num_tokens": emitted,
                    "num_emitted": emitted,
                    "num_steps": [int(some) for some in steps],
                },
                "tasks": [task | {"task": one} for one in TASKS],
                "task_mean": figures | {"ratio": ratio},
            }
        )
    prompts = {"name": "a set", "source": "", "num_items": NUM_ITEMS, "sha256": "0" * 64}
    settings = {"max_tokens": 64, "seed": 0, "repeats": 1, "prompt_sets": [prompts]}
    prompts["tasks"] = [TASKS[item % 2] for item in range(NUM_ITEMS)]
    return {
        "schema": "specdec-bench", "schema_version": 2, "provenance": PROVENANCE,
        "settings": settings, "complete": True, "rows": rows,
    }  # fmt: skip


def cells_of(text: str) -> dict[str, list[str]]:
    """Cells of the paired lines, by the kind of tau."""
    kinds = ("all steps", "answers", "mean of tasks")
    lines = [line for line in text.splitlines() if "one k=7" in line and "a set T=0" in line]
    return {kind: line.split(kind)[1].split() for kind in kinds for line in lines if kind in line}


def test_a_difference_is_found_and_none_where_there_is_none() -> None:
    """Conversations differ far more than drafters do, so that only a paired test can tell; catches
    one that is not, a sign that is turned, and a difference seen in noise.
    """
    one = made("one", 3.0, 2)
    better = cells_of(compare_reports(one, made("two", 3.15, 3)))
    assert [*better] == ["all steps", "answers", "mean of tasks"]
    for first, second, difference, low, _, high, p in better.values():
        assert float(first) < float(second)
        assert (
            difference == f"{float(second) - float(first):+.3f}"
            or abs(float(difference) - float(second) + float(first)) < 0.0015
        )
        assert 0 < float(low) < float(difference) < float(high)
        assert p == "<0.001"
    same = cells_of(compare_reports(one, made("two", 3.0, 4)))
    for _, _, _, low, _, high, p in same.values():
        assert float(low) < 0 < float(high)
        assert float(p) > 0.05
    twin = cells_of(compare_reports(one, made("two", 3.0, 2)))
    assert all(cells[-1] == "1.000" for cells in twin.values())


def changed(change: str) -> Report:
    """A report of another drafter that does not fit."""
    report = copy.deepcopy(made("two", 3.0, 3))
    if change == "prompts":
        report["settings"]["prompt_sets"][0]["sha256"] = "1" * 64
    elif change == "target":
        report["provenance"]["target"] = PROVENANCE["target"] | {"sha256": {"a": "2" * 64}}
    else:
        report["settings"]["max_tokens"] = 128
    return report


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("prompts", "the reports asked other prompts"),
        ("target", "the target differs: tiny & small / tiny & small"),
        ("settings", "max_tokens differs: 64 / 128"),
    ],
)
def test_sides_that_do_not_compare_are_not_tested(change: str, why: str) -> None:
    """Catches a p for different prompts, and a table that mixes them."""
    one, other = made("one", 3.0, 2), changed(change)
    text = compare_reports(one, other)
    assert not cells_of(text)
    (line,) = [line for line in text.splitlines() if "is not tested" in line]
    assert why in line
    with pytest.raises(InvalidInputError, match="'a' and 'b' do not fit in one table"):
        paper([("a", one), ("b", other)], "markdown")


def test_few_conversations_are_not_tested() -> None:
    """Catches a p of three prompts; of five the least is 1 in 16."""
    one, two = made("one", 3.0, 2), made("two", 4.0, 3)
    for size in (3, 5):
        for report in (one, two):
            columns = report["rows"][1]["answers"]
            report["rows"][1]["answers"] = {name: made_[:size] for name, made_ in columns.items()}
        text = compare_reports(copy.deepcopy(one), copy.deepcopy(two))
        if size == 3:
            assert "tau of a set is not tested: a test takes 5 conversations" in text
            one, two = made("one", 3.0, 2), made("two", 4.0, 3)
        else:
            assert [cells[-1] for cells in cells_of(text).values()] == ["0.062"] * 2


def test_a_table_has_the_drafters_of_all_reports() -> None:
    """Catches a report that is left out, characters that LaTeX reads otherwise, and lines of
    unequal length.
    """
    one, two = made("one", 3.0, 2), made("a_b|c", 4.0, 3)
    markdown = paper([("a", one), ("b", two)], "markdown").splitlines()
    head, _, *lines = [line for line in markdown if line.startswith("|")]
    titles = ["drafter", "code & text", "math", "mean", "all, pooled", "all, by answer"]
    assert head == f"| {' | '.join(titles)} |"
    assert [line.split(" | ")[0] for line in lines] == ["| one k=7", "| a_b\\|c k=7"]
    tau = one["rows"][1]["acceptance"]["tau"]
    assert lines[0].split(" | ")[1] == f"{tau:.2f} ± 0.10, 1.50x"
    latex = paper([("a", one), ("b", two)], "latex")
    assert r"\multicolumn{2}{c}{code \& text}" in latex
    assert r"a\_b|c k=7" in latex
    body = latex.split(r"\midrule")[1].split(r"\bottomrule")[0].strip().splitlines()
    assert [line.count(" & ") for line in body] == [9, 9]
    assert r"\begin{tabular}{l" + "r" * 9 + "}" in latex


def test_the_same_side_twice_and_other_kinds_are_refused() -> None:
    one = made("one", 3.0, 2)
    with pytest.raises(InvalidInputError, match="'a' and 'b' both have one k=7"):
        paper([("a", one), ("b", made("one", 3.1, 3))], "latex")
    with pytest.raises(InvalidInputError, match="'b' follows schema 'specdec-eval'"):
        paper([("a", one), ("b", {"schema": "specdec-eval"})], "latex")


def test_the_command_compares_and_tabulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches options that are read and dropped."""
    files = [str(tmp_path / name) for name in ("one.json", "two.json")]
    for file, drafter, tau in zip(files, ("one", "two"), (3.0, 3.5), strict=True):
        write_report(made(drafter, tau, 2), Path(file))
    assert main(["bench", "show", *files, "--format", "markdown"]) == 0
    assert "| two k=7 | 3." in capsys.readouterr().out
    assert main(["bench", "compare", *files]) == 0
    assert "<0.001" in capsys.readouterr().out
    for arguments, fragment in (
        (["show", *files], "show takes 1 report files, not 2"),
        (["show", *files, "--format", "latex", "--html", str(tmp_path / "a.html")], "one report"),
        (["compare", files[0]], "no two drafters that answered the same prompts"),
    ):
        assert main(["bench", *arguments]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert fragment in error
