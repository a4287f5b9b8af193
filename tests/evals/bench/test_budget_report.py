"""What `bench` says of sides with a verify budget."""

import copy
import json

from evals.report.table import format_report
from tests.evals.tiny import tiny_report


def test_how_a_budget_was_spent() -> None:
    """By request and slot, of sides with a budget alone."""
    report = tiny_report(
        num_draft_tokens=(4,),
        budgets=(1.5,),
        temperatures=(0.0,),
        concurrencies=(2,),
        repeats=1,
        warmup=0,
        max_tokens=24,
    )
    text = format_report(json.loads(json.dumps(report)))
    grid = text.partition("drafts verified of a request in a step:")[2].partition("a request:")[0]
    head, *lines = [line.split() for line in grid.splitlines() if line]
    assert head == ["part", "side", "mean", "a", "request", "1", "2", "3"]  # of 3 for both
    (line,) = lines
    row = next(row for row in report["rows"] if row["k"] == "1.5 of 4")
    acceptance, answers = row["acceptance"], row["answers"]
    steps = acceptance["num_steps"]
    means = [
        verified / count
        for verified, count in zip(answers["num_verified"], answers["num_steps"], strict=True)
    ]
    assert line[-5:] == [
        f"{sum(answers['num_verified']) / steps:.2f}",
        f"{min(means):.2f}-{max(means):.2f}",
        *(f"{count / steps:.2f}" for count in acceptance["verified_by_slot"]),
    ]
    assert sum(acceptance["verified_by_slot"]) == acceptance["num_verified"] > 0
    assert acceptance["verified_by_slot"][0] < steps, "some steps of a request have no draft"
    old = copy.deepcopy(report)
    for row in old["rows"]:
        del row["acceptance"]["verified_by_slot"]
    assert "drafts verified of" not in format_report(old)
