"""`specdec bench --dummy-weights` as a command: its options, its report, and what a peer gets."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evals import roofline
from evals.bench import dummy
from evals.peers import vllm_steps
from evals.report.compare import compare_reports
from evals.report.report import read_report
from evals.report.table import format_report
from specdec.base.errors import InvalidInputError
from specdec.cli.main import main
from tests.evals.bench.fake_vllm import FakeVllm
from tests.helpers.tiny_configs import CONFIGS
from verifiers.dummy import dummy_verifier

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


SHORT = "--prompt-tokens 9 --verify-rows 1 --max-tokens 2 --repeats 1 --warmup 0"


def measure(folder: Path, options: str) -> list[str]:
    """A command line for the config in a folder."""
    about = ["bench", "--dummy-weights", str(folder), "--device", "cpu", "--dtype", "float32"]
    return [*about, *options.split()]


def test_from_a_config_to_a_report(tmp_path: Path, monkeypatch: Patch, capsys: Capture) -> None:
    """Catches an option that does not arrive, and a stored report that shows something else."""
    monkeypatch.setitem(roofline.MEASURED_BYTES, "cpu", 2**22)
    CONFIGS["gpt_oss"]().to_json_file(tmp_path / "config.json")
    file = tmp_path / "report.json"
    options = "--max-num-seqs 1 2 --prompt-tokens 9 30 --verify-rows 4 --max-tokens 3 --repeats 2"
    assert main([*measure(tmp_path, options), "--out", str(file)]) == 0
    printed = capsys.readouterr().out
    report = read_report(file, "specdec-dummy-bench")
    cells = [(1, 9), (2, 9), (1, 30)]
    assert [(row["num_reqs"], row["prompt_tokens"], row["work"]) for row in report["rows"]] == [
        (*cell, work) for cell in cells for work in ("prefill", "plain step", "verify 4")
    ]
    assert [len(row["ours"]["values"]) for row in report["rows"]] == [2] * 9
    assert report["peer"] is None
    assert report["settings"]["steps"] == 3
    assert report["settings"]["config"]["model_type"] == "gpt_oss"
    assert [one["rows"] for one in report["experts"]["met"]] == [1, 2, 4, 8]
    assert report["experts"]["met"][0]["measured"] == 2
    assert format_report(report) in printed
    assert main(["bench", "show", str(file)]) == 0
    assert capsys.readouterr().out == printed
    with pytest.raises(InvalidInputError, match="print each with specdec bench show"):
        compare_reports(report, report)
    assert main(["bench", "show", str(file), "--html", str(tmp_path / "page.html")]) == 2
    assert "no plots" in capsys.readouterr().err


def on_cpu(monkeypatch: Patch) -> None:
    """The peer takes a target on a CPU, and reading memory takes no time."""
    monkeypatch.setattr(vllm_steps, "library_for", lambda device: vllm_steps.import_vllm("vllm"))
    monkeypatch.setattr(dummy, "measured_bandwidth", lambda device: 1e9)


def test_a_peer_gets_the_weights_where_experts_are_chosen(
    tmp_path: Path, vllm: FakeVllm, monkeypatch: Patch
) -> None:
    """Catches weights of its own, with which rows would meet other experts, and weights that stay
    on the disk.
    """
    on_cpu(monkeypatch)
    found: list[set[str]] = []
    start = vllm.start

    def noted(**options: Any) -> SimpleNamespace:
        found.append({file.name for file in Path(options["model"]).iterdir()})
        return start(**options)

    monkeypatch.setattr(sys.modules["vllm"], "LLM", noted)
    for name in ("qwen3_moe", "llama"):
        CONFIGS[name]().to_json_file(tmp_path / "config.json")
        assert main(measure(tmp_path, f"{SHORT} --peer vllm")) == 0
        assert vllm.started["load_format"] == ("auto" if name == "qwen3_moe" else "dummy")
        assert not Path(vllm.started["model"]).exists()
    weights, none = found
    assert weights > none == {"config.json"}


def test_ranks_and_experts_leave_no_peer(
    tmp_path: Path, vllm: FakeVllm, monkeypatch: Patch, capsys: Capture
) -> None:
    on_cpu(monkeypatch)
    monkeypatch.setattr(
        "specdec.parallel.group.join_group", lambda device: SimpleNamespace(rank=0, size=2)
    )
    CONFIGS["qwen3_moe"]().to_json_file(tmp_path / "config.json")
    assert (
        main(["bench", "--dummy-weights", str(tmp_path), "--device", "cpu", "--peer", "vllm"]) == 2
    )
    assert "leave out --peer" in capsys.readouterr().err
    assert not vllm.started


@pytest.mark.parametrize("weights", ["bfloat16", "fp8"])
def test_the_way_to_quantize_arrives(weights: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """At the target, and in the report."""
    monkeypatch.setitem(roofline.MEASURED_BYTES, "cpu", 2**22)
    made: list[str | None] = []

    def noted(*args: Any, **options: Any) -> Any:
        made.append(options["quantize"])
        return dummy_verifier(*args, **options)

    monkeypatch.setattr("verifiers.dummy.dummy_verifier", noted)
    CONFIGS["llama"]().to_json_file(tmp_path / "config.json")
    file = tmp_path / "report.json"
    assert main([*measure(tmp_path, SHORT), "--weights", weights, "--out", str(file)]) == 0
    report = read_report(file, "specdec-dummy-bench")
    way = None if weights == "bfloat16" else weights
    assert (made, report["settings"]["quantize"], report["provenance"]["weights"]) == (
        [way],
        way,
        "float32",
    )
    assert ("random weights, quantized to fp8, " in format_report(report)) == (way == "fp8")


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["qwen3-9b"], ["no config 'qwen3-9b'", "qwen3-8b"]),
        (["qwen3-8b", "--peer", "transformers"], ["'transformers'", "only vllm"]),
        (["qwen3-8b", "--verify-rows", "0"], ["verify_rows is (0,)"]),
        (["qwen3-8b", "--prompt-tokens", "0"], ["prompt_tokens is (0,)"]),
        (["qwen3-8b", "--max-num-seqs", "0"], ["concurrencies is (0,)"]),
        *(
            (["qwen3-8b", *option.split()], [f"{option.split()[0]} says nothing beside --dummy"])
            for option in (
                "--html page.html", "--format latex", "--sets gsm8k", "--limit 3",
                "--temperature 0 1", "--draft-sampling greedy", "--behind-hits", "--budget 2",
                "--kv-memory 1G", "--ray",
            )
        ),
        *(
            (["qwen3-8b", *option.split()], ["without --synthetic-acceptance; add that"])
            for option in ("-k 3", "--drafter ngram", "--synthetic-spread 1")
        ),
        (["qwen3-8b", "--weights", "fp4"], ["'fp4'", "choose fp8, int4"]),
        (
            ["qwen3-8b", "--weights", "fp8", "--peer", "vllm"],
            ["plain numbers, not fp8", "leave out --weights or --peer"],
        ),
        (
            ["qwen3-8b", "--peer", "vllm", "--device", "cpu"],
            ["runs on a GPU and the target is on cpu"],
        ),
    ],
)  # fmt: skip
def test_mistakes_are_one_line_before_any_weight_is_made(
    arguments: list[str], fragments: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("weights were made")

    monkeypatch.setattr("verifiers.dummy.random_model", refuse)
    assert main(["bench", "--dummy-weights", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert all(fragment in error for fragment in fragments), error
