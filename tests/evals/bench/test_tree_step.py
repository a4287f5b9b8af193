"""The tree of one step, and what reports say of trees."""

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from evals.bench.tree_step import tree_step
from evals.report.compare import compare_reports
from evals.report.html import html_report
from evals.report.table import format_report
from specdec.base.metrics import AcceptanceStats
from specdec.engine.engine import SpecEngine
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult
from tests.evals.tiny import PROMPTS, tiny_decoder, tiny_report
from tests.helpers.engines import finish
from tests.helpers.scripted_trees import ScriptedTrees

PARENTS = [0, 0, 1, 2, 2, 5]
"""Two drafts behind the anchor; the second is continued twice, and its second continuation once
more.
"""


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return tiny_report(
        num_draft_tokens=(4,), trees=(6,), temperatures=(0.0,), repeats=1, warmup=0, max_tokens=24
    )


def test_the_step_is_one_of_the_answer() -> None:
    """Catches rows that are off by one, an answer that differs from plain decoding's, and a step
    cut from another request.
    """
    decoder = tiny_decoder()
    prompt = decoder.tokenize([{"role": "user", "content": PROMPTS.items[0].turns[0]}])
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, seed=0)
    plain = decoder.generate([prompt], sampling)
    assert isinstance(plain, list)
    # Of every three steps one ends at the anchor, one at row 4 (by way of 2), and one at row 6 (by
    # way of 2 and 5).
    drafter = ScriptedTrees({tuple(prompt): plain[0].token_ids}, [PARENTS], ends=[0, 4, 6])
    step = tree_step(decoder, drafter, PROMPTS, sampling, 6)
    assert step is not None
    assert (step["prompt"], step["step"], step["parents"], step["ranks"]) == (
        "a",
        3,
        PARENTS,
        [0, 1, 0, 0, 1, 0],
    )
    assert step["accepted"] == [2, 5, 6]
    assert step["num_steps"] > 3
    texts = [decoder.tokenizer.decode([token]) for token in plain[0].token_ids]
    # The prefill gave one token, the steps before 1 and 3; the anchor is the last of these.
    assert [
        step["tokens"][0],
        *(step["tokens"][row] for row in step["accepted"]),
        step["next_token"],
    ] == texts[4:9]


def test_an_answer_without_drafts_has_no_tree() -> None:
    decoder = tiny_decoder()
    prompt = decoder.tokenize([{"role": "user", "content": PROMPTS.items[0].turns[0]}])
    drafter = ScriptedTrees({tuple(prompt): [3]}, [PARENTS])
    assert tree_step(decoder, drafter, PROMPTS, SamplingParams(max_tokens=1), 6) is None


def test_a_bench_shows_one_tree_of_each_part_and_its_ranks(report: dict[str, Any]) -> None:
    """Catches a drawing of every side and concurrency, and one that only a live report has."""
    shown = [(row["concurrency"], row["k"]) for row in report["rows"] if row["tree_step"]]
    assert shown == [(1, "tree 6")]
    stored = json.loads(json.dumps(report))
    page, text = html_report(stored), format_report(stored)
    assert page.count('class="tree"') == 1
    assert page.count("<svg") == 7 + 1 + 1  # plots, that of ranks, the tree
    title = "tiny T=0 c=1 ngram tree 6"
    assert title in compare_reports(stored, stored)
    (line,) = (line for line in text.partition("by rank")[2].splitlines() if title in line)
    acceptance = next(row["acceptance"] for row in stored["rows"] if row["tree_step"])
    assert line.split(":")[1].split() == [f"{share:.2f}" for share in acceptance["share_by_rank"]]
    assert sum(acceptance["num_by_rank"]) == acceptance["num_accepted"] > 0
    assert acceptance["steps_by_shape"] == {"tree 6": acceptance["num_steps"]}


def test_shapes_of_sides_chosen_step_by_step_are_told(report: dict[str, Any]) -> None:
    """Only of these: a fixed k says it all."""
    assert "chosen step by step" not in format_report(report)
    chosen = copy.deepcopy(report)
    chosen["rows"][1] |= {"k": "auto"}
    chosen["rows"][1]["acceptance"]["steps_by_shape"] = {"0": 1, "7": 12, "tree 15": 300}
    text = format_report(chosen)
    assert "tiny T=0 c=1 ngram k=auto:  0 in 1 step, 7 in 12 steps, tree 15 in 300 steps" in text


def test_who_drafted_is_told(report: dict[str, Any]) -> None:
    """Of compositions alone."""
    assert "by turns" not in format_report(report)
    composed = copy.deepcopy(report)
    composed["rows"][1] |= {"drafter": "suffix+ngram"}
    composed["rows"][1]["acceptance"]["by_part"] = [[12, 3.5], [300, 1.25]]
    text = format_report(composed)
    assert "by turns" in text and "  suffix in 12 steps 3.50, ngram in 300 steps 1.25" in text


def test_reports_of_before_trees_are_still_shown(report: dict[str, Any]) -> None:
    """Catches a field that an older report of the same version lacks."""
    old = copy.deepcopy(report)
    old["rows"] = [row for row in old["rows"] if not str(row["k"]).startswith("tree")]
    for row in old["rows"]:
        row |= {"k": "auto"} if row["k"] else {}
        del row["tree_step"]
        for field in ("num_verified", "steps_by_shape", "num_by_rank", "share_by_rank", "by_part"):
            del row["acceptance"][field]
    assert "ngram" in format_report(old) and "by rank" not in format_report(old)
    assert html_report(old).count("<svg") == 7
    assert "only in the second: tiny T=0 c=1 ngram tree 6" in compare_reports(old, report)


def test_shapes_and_ranks_reach_the_statistics_of_a_request() -> None:
    """Catches a chain that is counted as a tree, ranks of drafts that were not kept, and sizes of
    another step.
    """
    decoder = tiny_decoder()
    prompt = decoder.tokenize("abcabcabcabc")
    plain = decoder.generate(prompt, SamplingParams(max_tokens=24, ignore_eos=True))
    assert isinstance(plain, GenerationResult)
    drafter = ScriptedTrees({tuple(prompt): plain.token_ids}, [PARENTS], ends=[6, 1])
    engine = SpecEngine(decoder.verifier, drafter, replace(decoder.engine.config, tree_nodes=6))
    request = engine.add_request(prompt, SamplingParams(max_tokens=14, ignore_eos=True))
    finish(engine)
    stats = GenerationResult.of(request, "").stats
    # 13 tokens behind the first: rows 2, 5, 6 and one more, row 1 and one more, and so on; the last
    # step has one token to give.
    assert stats == AcceptanceStats([3] * 5, [3, 1, 3, 1, 1], [4, 2, 4, 2, 1], [6] * 5, [4, 5])
    assert (stats.steps_by_shape, stats.num_verified) == ({"tree 6": 5}, [6] * 5)
