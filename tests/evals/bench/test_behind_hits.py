"""Prompts that `bench` asks once more from the prefix cache."""

import json
from typing import Any

import pytest

from evals.bench import bench
from evals.bench.bench import Bench
from evals.bench.config import BenchConfig
from evals.report.table import format_report
from evals.runner import Answer, Generate
from specdec.session.decoder import SpecDecoder
from tests.evals.tiny import PROMPTS, PROVENANCE, tiny_decoder
from tests.helpers.tiny_models import random_dflash


@pytest.fixture
def settings() -> dict[str, Any]:
    return {
        "sets": (PROMPTS,),
        "num_draft_tokens": (4,),
        "concurrencies": (2,),
        "repeats": 1,
        "warmup": 0,
        "max_tokens": 24,
        "behind_hits": True,
    }


def measured(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A report of sides that draft with random weights."""
    decoder = tiny_decoder()
    monkeypatch.setattr(bench, "find_drafter", lambda name: random_dflash)
    *_, report = Bench(decoder, BenchConfig(**settings)).run(PROVENANCE)
    return report


def test_tau_behind_hits(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """As computed: tokens, tau and its parts; the passes before find nothing in the cache."""
    report = measured(settings, monkeypatch)
    for row in report["rows"]:
        hits = row["behind_hits"]
        assert 0 < hits["num_cached_tokens"] < hits["num_prompt_tokens"]
        assert hits["differing_answers"] == []
        for name in ("tau", "mean_tau", "by_context"):
            assert hits[name] == row["acceptance"][name]
    row = report["rows"][1]
    text = format_report(json.loads(json.dumps(report)))
    line = text.partition("from the prefix cache:")[2].splitlines()[2].split()
    tau, count = f"{row['acceptance']['tau']:.2f}", row["num_answers"]
    assert f"{count}/{count}" in line and line.count(tau) >= 2


def test_what_hits_spoil_is_told(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tokens behind hits are counted, answer by answer."""
    whole = bench.behind_hits

    def spoiled(decoder: SpecDecoder, concurrency: int) -> Generate:
        def generate(*asked: Any) -> list[Answer]:
            found = whole(decoder, concurrency)(*asked)
            found[0].token_ids[-1] += 1
            return found

        return generate

    monkeypatch.setattr(bench, "behind_hits", spoiled)
    report = measured(settings, monkeypatch)
    assert all(0 in row["behind_hits"]["differing_answers"] for row in report["rows"])
