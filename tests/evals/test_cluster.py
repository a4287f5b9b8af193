"""`bench` and `eval` through the engines of a cluster, here in this process: they report what one
engine reports.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evals.bench.bench import Bench
from evals.bench.cluster import ClusterBench
from evals.bench.config import BenchConfig
from evals.report.report import read_report
from specdec.base.config import EngineConfig, LoadConfig
from specdec.cli import options
from specdec.cli.main import main
from specdec.cluster.config import ClusterConfig, EngineSpec
from specdec.cluster.engine import Engine, load
from specdec.cluster.ledger import Ledger
from specdec.cluster.origin import check_same
from specdec.cluster.pool import Pool
from specdec.cluster.rows import Answer, Row
from tests.evals.tiny import PROMPTS, PROVENANCE, save_tiny

MEMORY = 2**22


class _Remote:
    """A method as Ray offers an actor's."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def remote(self, *args: Any, **options: Any) -> Awaitable[Any]:
        """What awaiting the call gives."""

        async def call() -> Any:
            return self._method(*args, **options)

        return call()


class _Actor:
    """An object as Ray offers an actor."""

    def __init__(self, behind: Any) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> _Remote:
        return _Remote(getattr(self._behind, name))


@dataclass(frozen=True, slots=True)
class PoolHere(Pool):
    """The engines' own code, one engine for all rows, without Ray."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """See `Pool`."""
        return function(load(self.spec), *args)

    def answers(
        self, rows: Sequence[Row], expected: dict[str, Any] | None = None
    ) -> Iterator[Answer]:
        """See `Pool`."""

        async def every() -> list[str]:
            engine = Engine(self.spec, _Actor(Ledger()))
            found = await asyncio.gather(*(engine({"row": [row.to_json()]}) for row in rows))
            return [one["answer"][0] for one in found]

        for text in reversed(asyncio.run(every())):  # in another order than that of the rows
            answer = Answer.from_json(text)
            check_same(expected or {}, answer.origin, answer.node)
            yield answer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The target; no machine has an address, because there is no cluster."""
    monkeypatch.setattr("specdec.cluster.engine._address", lambda: "here")
    return save_tiny(tmp_path / "target")


def test_a_bench_reports_what_one_engine_reports(folder: Path, tmp_path: Path) -> None:
    """Conversations of two turns among them, sampled; and a second run reads all of them from its
    journal.
    """
    config = BenchConfig(
        (PROMPTS,),
        ("ngram",),
        (2,),
        temperatures=(0.7,),
        concurrencies=(2,),
        max_tokens=12,
        repeats=1,
        warmup=0,
        memory_bytes=MEMORY,
    )
    loading = LoadConfig(device="cpu", dtype="float32")
    spec = EngineSpec(str(folder), None, loading, EngineConfig(max_num_seqs=1, max_model_len=2))
    (report,) = ClusterBench(
        PoolHere(ClusterConfig(engines=2), spec), config, path=tmp_path / "kept.jsonl"
    ).run()
    (expected,) = Bench(load(spec), config).run(PROVENANCE)
    assert report["complete"]
    assert report["settings"] == expected["settings"] | {"num_engines": 2}
    for row, other in zip(report["rows"], expected["rows"], strict=True):
        for name in ("drafter", "k", "num_answers", "tau_per_answer", "differing_answers"):
            assert row[name] == other[name]
        for name in ("num_steps", "num_accepted", "num_emitted", "tau", "mean_tau", "histogram"):
            assert row["acceptance"][name] == other["acceptance"][name]
        assert row["speed"]["num_tokens"] == other["speed"]["num_tokens"]
    assert report["rows"][1]["num_answers"] == 4, "one of three conversations has two turns"

    class Nobody(PoolHere):
        def answers(
            self, rows: Sequence[Row], expected: dict[str, Any] | None = None
        ) -> Iterator[Answer]:
            assert not rows, "everything is finished"
            return iter(())

    (again,) = ClusterBench(
        Nobody(ClusterConfig(engines=2), spec), config, path=tmp_path / "kept.jsonl"
    ).run()
    assert again["rows"] == report["rows"]


def test_an_eval_reports_what_one_engine_reports(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """lm-eval asks on the driver, answers come in another order, and scores, tau and differences
    are the same.
    """

    def pool(args: Any, drafter: str | None, engine: EngineConfig) -> Pool:
        return PoolHere(
            ClusterConfig(engines=2),
            EngineSpec(args.model, drafter, LoadConfig("cpu", "float32"), engine),
        )

    monkeypatch.setattr(options, "load_pool", pool)
    asked = "eval --tasks bundled --limit 3 --device cpu --dtype float32 --model"
    arguments = [*asked.split(), str(folder)]
    sizes = "-k 2 --max-num-seqs 2 --max-tokens 8 --max-model-len 512 --kv-memory 4M"
    arguments += sizes.split()
    assert main([*arguments, "--out", str(tmp_path / "here")]) == 0
    assert main([*arguments, "--out", str(tmp_path / "there"), "--ray"]) == 0
    (expected,), (found,) = (
        read_report(tmp_path / name / "report.json")["tasks"] for name in ("here", "there")
    )
    for side in ("plain", "speculative"):
        assert found[side]["metrics"] == expected[side]["metrics"]
        assert found[side]["num_tokens"] == expected[side]["num_tokens"]
    assert (
        found["speculative"]["acceptance"]["tau_per_request"]
        == expected["speculative"]["acceptance"]["tau_per_request"]
    )
    assert found["differences"] == expected["differences"]
    # Where one machine began, another goes on, as the settings are the same.
    heads = [
        (tmp_path / name / "speculative.jsonl").read_text().splitlines()[0]
        for name in ("here", "there")
    ]
    assert heads[0] == heads[1]
