"""Figures of the answers: by task, by length, latency."""

from dataclasses import replace
from typing import Any

import pytest

from evals.bench.answers import by_length, by_task, columns_of, latency, task_mean
from evals.bench.bench import Bench
from evals.bench.config import BenchConfig
from evals.prompt_sets import Item, PromptSet
from evals.report.table import format_report
from evals.report.tasks import MEAN, task_tables
from evals.runner import Answer, Latency, Pass, run_set
from specdec.base.metrics import AcceptanceStats
from specdec.sampling.params import SamplingParams
from tests.evals.tiny import PROMPTS, PROVENANCE, tiny_decoder

KINDS = PromptSet(
    "kinds",
    "made up",
    (
        Item("a", ("abcabcabcabc",), category="repeats"),
        Item("b", ("What is 2 + 2?", "And 3 + 3?"), category="sums"),
        Item("c", ("one two one two one two",), category="repeats"),
        Item("d", ("What is 4 + 5?",), category="sums"),
        *(Item(f"e{n}", ("aba" * n,), category="repeats") for n in range(2, 5)),
        *(Item(f"f{n}", (f"{n} + {n}",), category="sums") for n in range(2, 5)),
    ),
)
FOUR = replace(KINDS, items=KINDS.items[:4])


def answer(emitted: list[int], seconds: float) -> Answer:
    """Of a chain of drafts; its first token came after a tenth of the time."""
    stats = AcceptanceStats([3] * len(emitted), [one - 1 for one in emitted], emitted)
    tokens = [0] * (1 + sum(emitted))
    return Answer([0] * 10, tokens, stats, Latency(seconds / 10, seconds))


def a_pass(factor: float) -> Pass:
    """Both turns of `FOUR`: a, b, c, d, and b again."""
    answers = [
        answer([4, 4], 1.0 * factor),
        answer([1, 1], 2.0 * factor),
        answer([2, 2, 2], 1.0 * factor),
        answer([1, 2], 1.0 * factor),
        answer([3], 1.0 * factor),
    ]
    return Pass(answers, 6 * factor)


def test_figures_by_task_are_those_of_its_answers() -> None:
    """Catches a later turn that is lost or goes to another task, and means of ratios that are
    ratios of means.
    """
    passes, plain = [a_pass(1.0), a_pass(0.5), a_pass(2.0)], [a_pass(4.0)]
    repeats, sums = by_task(passes, plain, FOUR, raw=False)
    assert (repeats["task"], sums["task"]) == ("repeats", "sums")
    assert (repeats["num_items"], sums["num_items"]) == (2, 2)
    assert (repeats["num_answers"], sums["num_answers"]) == (2, 3)
    assert repeats["tau"] == 14 / 5
    assert repeats["mean_tau"] == (4 + 2) / 2
    assert repeats["tau_interval"] is None  # of two conversations
    assert sums["tau"] == 8 / 5
    assert sums["mean_tau"] == pytest.approx((1 + 1.5 + 3) / 3)
    # 16 tokens in 2 seconds; half and twice as fast in the other passes
    assert repeats["tokens_per_second"] == {"median": 8.0, "min": 4.0, "max": 16.0}
    assert repeats["ratio"] == 4.0
    columns = columns_of(passes[0].answers, FOUR.answered())
    mean = task_mean([repeats, sums], columns, FOUR)
    assert mean is not None
    assert mean["tau"] == pytest.approx((14 / 5 + 8 / 5) / 2)
    assert mean["ratio"] == 4.0
    assert mean["tau_interval"] is None


def test_latency_is_that_of_single_requests() -> None:
    """Catches the first token's time within the time of a token, and a wait that counts."""
    found = latency([Pass([answer([4, 4], 1.0), answer([4, 4], 1.0)], 2.0)])
    assert found is not None
    assert found["request_tokens_per_second"]["median"] == 9.0
    assert found["ms_per_token"]["median"] == pytest.approx(900 / 8)
    assert found["first_token_ms"]["worst_tenth"] == pytest.approx(100)
    assert latency([Pass([Answer([0], [0], AcceptanceStats())], 1.0)]) is None


def test_steps_are_put_where_they_began() -> None:
    """Catches steps that are put where they end, and a first token that is forgotten."""
    stats = AcceptanceStats([3] * 4, [0, 1, 2, 3], [1, 2, 3, 4])
    # steps begin behind 3 + 1, 5, 7 and 10 tokens
    found = by_length([(stats, 3)], 4)
    assert [(one["start"], one["end"], one["num_steps"], one["tau"]) for one in found] == [
        (4, 8, 3, 2.0),
        (8, 16, 1, 4.0),
    ]
    assert by_length([(stats, 3)], 11)[0] == {"start": 0, "end": 11, "num_steps": 4, "tau": 2.5}


def test_every_answer_has_its_time_and_its_conversation() -> None:
    """Catches requests without a time where more are queued than decoded at once, and a wait for a
    place that counts as the request's.
    """
    sampling = SamplingParams(max_tokens=6, seed=0, ignore_eos=True)
    found = run_set(tiny_decoder(), PROMPTS, sampling)
    assert PROMPTS.answered() == [0, 1, 2, 1]
    assert PROMPTS.answered(raw=True) == [0, 1, 2]
    times = [one.latency for one in found.answers]
    for one in times:
        assert one is not None
        assert 0 < one.first < one.last <= found.seconds
    # Two at once: the third of the first turn waits for the first two, and its clock does not.
    assert sum(one.last for one in times[:3] if one) < 2 * found.seconds


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Two sets, one of which has categories."""
    config = BenchConfig(
        sets=(KINDS, PROMPTS), num_draft_tokens=(2,), max_tokens=8, repeats=1, warmup=0
    )
    *_, report = Bench(tiny_decoder(), config).run(PROVENANCE)
    return report


def test_a_report_has_tables_of_categories_and_of_sets(report: dict[str, Any]) -> None:
    """Catches categories that are dropped on the way, and a mean over the wrong tasks."""
    assert report["settings"]["prompt_sets"][0]["tasks"] == [item.category for item in KINDS.items]
    kinds, sets = task_tables(report)
    assert kinds.tasks == ("repeats", "sums")
    assert sets.tasks == ("kinds", "tiny")
    for table in (kinds, sets):
        plain, drafts = table.sides
        assert table.of[plain, MEAN]["tau"] == 1.0
        taus = [table.of[drafts, task]["tau"] for task in table.tasks]
        assert table.of[drafts, MEAN]["tau"] == pytest.approx(sum(taus) / 2)
    low, high = kinds.of[drafts, MEAN]["tau_interval"]
    assert low <= kinds.of[drafts, MEAN]["tau"] <= high
    assert sets.of[drafts, MEAN].get("tau_interval") is None  # one of them has three conversations
    text = format_report(report)
    assert "by task (kinds, T=0, 1 at once)" in text
    assert "by task (kinds + tiny, T=0, 1 at once)" in text
    assert (
        "95 %: interval by bootstrap over conversations, 10,000 draws; too narrow below 20 of"
        " them, none below 5." in text
    )


def test_more_places_than_conversations_are_told(report: dict[str, Any]) -> None:
    """Catches a serving curve over concurrencies that were never reached."""
    assert "at once are" not in format_report(report)
    rows = [row | {"concurrency": 16} for row in report["rows"]]
    text = format_report(report | {"rows": rows})
    assert text.count("16 at once are 10, as many as were asked.") == 1
    assert text.count("16 at once are 3, as many as were asked.") == 1


def test_a_report_of_before_is_still_shown(report: dict[str, Any]) -> None:
    """Catches fields that are taken for granted in files that lack them."""
    new = ("answers", "tasks", "task_mean", "latency")
    rows = [
        {name: value for name, value in row.items() if name not in new}
        | {
            "acceptance": {
                name: value
                for name, value in row["acceptance"].items()
                if not name.endswith("interval") and not name.startswith("by_")
            }
        }
        for row in report["rows"]
    ]
    text = format_report(report | {"rows": rows})
    assert "ngram" in text
    assert "bootstrap" not in text
    assert "speed against latency" not in text
