"""The sweep, its report on disk, and two reports side by side."""

import copy
import gc
import json
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from drafters.suffix.drafter import BoundSuffix
from evals.bench import bench
from evals.bench import command as bench_command
from evals.bench.bench import Bench
from evals.bench.config import BenchConfig
from evals.prompt_sets import PromptSet
from evals.report.compare import compare_reports
from evals.report.html import html_report
from evals.report.report import read_report, write_report
from evals.report.table import format_report
from evals.runner import Answer, Pass, run_set
from specdec.base.blocks import BlockShape
from specdec.base.config import EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import AcceptanceStats
from specdec.cli.main import main
from specdec.engine.engine import SpecEngine
from specdec.engine.policy.block_choice import BlockChoice
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.evals.tiny import PROMPTS, PROVENANCE, tiny_decoder, tiny_report
from tests.helpers.tiny_models import random_dflash

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return tiny_report()


@pytest.fixture
def loads_tiny(monkeypatch: Patch) -> None:
    """Makes the command line load the tiny target, and leaves the host alone."""
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *args, **options: tiny_decoder())
    monkeypatch.setattr("evals.report.provenance.provenance", lambda *args: PROVENANCE)


def measure(folder: Path, *arguments: str) -> list[str]:
    """Arguments of a sweep that takes a moment."""
    return [
        "bench", "--limit", "2", "--max-tokens", "4", "--repeats", "1", "--out",
        str(folder / "report.json"), *arguments,
    ]  # fmt: skip


def test_every_side_of_every_part_is_measured_beside_plain_decoding(report: dict[str, Any]) -> None:
    """Catches a part of the sweep that is skipped, or a ratio against the wrong baseline."""
    rows = report["rows"]
    assert report["complete"]
    keys = [(row["temperature"], row["concurrency"], row["drafter"], row["k"]) for row in rows]
    sides = [("none", 0), ("ngram", 2), ("ngram", 4)]
    assert keys == [(t, c, *side) for t in (0.0, 1.0) for c in (1, 2) for side in sides]
    for start in range(0, len(rows), 3):
        plain = rows[start]
        assert plain["ratio"] == 1.0
        assert plain["acceptance"]["tau"] == 1.0
        for row in rows[start : start + 3]:
            assert row["num_answers"] == 4  # three conversations, one of two turns
            assert len(row["speed"]["seconds"]) == 2
            speed, base = (one["speed"]["tokens_per_second"]["median"] for one in (row, plain))
            assert row["ratio"] == pytest.approx(speed / base)


def test_outputs_equal_plain_decoding_at_every_temperature(report: dict[str, Any]) -> None:
    """Catches seeds that differ between the sides, and drafts that change the output."""
    assert [row["differing_answers"] for row in report["rows"]] == [[]] * len(report["rows"])


def test_figures_of_a_row_agree_with_each_other(report: dict[str, Any]) -> None:
    """Catches tau taken from another pass than the histogram, and shares that lose time."""
    for row in report["rows"]:
        acceptance = row["acceptance"]
        assert sum(acceptance["histogram"]) == acceptance["num_steps"]
        assert acceptance["tau"] == pytest.approx(
            acceptance["num_emitted"] / acceptance["num_steps"]
        )
        # The first token of every answer comes from the prefill.
        assert acceptance["num_emitted"] == row["speed"]["num_tokens"][0] - row["num_answers"]
        assert sum(row["time_split"].values()) == pytest.approx(1)
        assert (row["time_split"]["draft"] > 0) == (row["drafter"] != "none")


def test_what_was_there_before_a_pass_is_not_collected_within_it() -> None:
    """Catches passes in which Python looks through every object that there is."""
    decoder, frozen = tiny_decoder(), list[int]()

    def generate(*asked: Any) -> list[Answer]:
        frozen.append(gc.get_freeze_count())
        return [Answer([5], [6], AcceptanceStats()) for _ in asked[0]]

    before = gc.get_freeze_count()
    run_set(decoder, PROMPTS, SamplingParams(max_tokens=5, seed=0), raw=True, generate=generate)
    assert frozen[0] > 10_000 + before and gc.get_freeze_count() == 0


def test_a_later_turn_sees_the_own_answer_and_raw_leaves_it_out() -> None:
    """Catches two-turn prompts that are asked as two conversations."""
    decoder = tiny_decoder()
    answers = run_set(
        decoder, PROMPTS, SamplingParams(max_tokens=5, seed=0, ignore_eos=True)
    ).answers
    first, second = answers[1], answers[3]
    text = decoder.tokenizer.decode(second.prompt_token_ids)
    assert decoder.tokenizer.decode(first.token_ids, skip_special_tokens=True) in text
    assert text.endswith("[user] And 3 + 3? [assistant] ")
    assert (
        len(run_set(decoder, PROMPTS, SamplingParams(max_tokens=5, seed=0), raw=True).answers) == 3
    )


def test_a_stored_report_shows_the_same_as_the_live_one(
    report: dict[str, Any], tmp_path: Path
) -> None:
    """Catches figures that only exist while the run goes on, and numbers that JSON rounds."""
    write_report(report, tmp_path / "report.json")
    stored = read_report(tmp_path / "report.json")
    assert stored == json.loads(json.dumps(report))
    assert format_report(stored) == format_report(report)


def test_an_identical_report_compares_as_equal_and_names_what_differs(
    report: dict[str, Any],
) -> None:
    text = compare_reports(report, report)
    assert "differs" not in text
    assert text.count("1.00x") == 2 * len(report["rows"])
    other = copy.deepcopy(report)
    other["provenance"]["device"] = "another device"
    other["settings"]["prompt_sets"][0]["sha256"] = "1"
    other["settings"]["max_tokens"] = 99
    other["rows"][1]["acceptance"]["tau"] *= 2
    del other["rows"][2:]
    text = compare_reports(report, other)
    assert "device differs: a device / another device" in text
    assert "prompt set tiny holds other prompts" in text
    assert "max_tokens differs: 12 / 99" in text
    assert "2.00x" in text
    assert text.count("only in the first:") == len(report["rows"]) - 2
    other["rows"] = []
    with pytest.raises(InvalidInputError, match="no part in common"):
        compare_reports(report, other)


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"schema_version": 99}, ["version 99", "reads version 2"]),
        ({"schema": "specdec-eval"}, ["'specdec-eval'", "'specdec-bench'"]),
        ({"schema": "other"}, ["was not written by specdec"]),
        ({"rows": None}, ["lacks rows"]),
        ("{", ["not JSON"]),
        (None, ["cannot read", "no such file"]),
    ],
)
def test_reports_of_another_schema_are_refused(
    change: Any, fragments: list[str], report: dict[str, Any], tmp_path: Path, capsys: Capture
) -> None:
    """Catches a traceback, or a comparison of things that do not compare."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    write_report(report, first)
    if isinstance(change, dict):
        changed = {name: value for name, value in (report | change).items() if value is not None}
        second.write_text(json.dumps(changed), encoding="utf-8")
    elif change is not None:
        second.write_text(change, encoding="utf-8")
    assert main(["bench", "compare", str(first), str(second)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert all(fragment in error for fragment in fragments), error


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["bench", "compar"], ["unknown action 'compar'", "compare"]),
        (["bench", "compare", *"abc"], ["compare takes 1 or 2 report files, not 3"]),
        (["bench", "--sets", "bundle"], ["did you mean 'bundled'"]),
        (["bench", "--limit", "1000"], ["limit is 1000", "choose 1 to"]),
        (["bench", "--data", "gsm8k"], ["NAME=FILE"]),
        (["bench", "--data", "gsm8k=x.jsonl"], ["not among --sets bundled"]),
        (
            ["bench", "--sets", "own", "--data", "own=a.jsonl", "own=b.jsonl"],
            ["names 'own' twice, 'a.jsonl' and 'b.jsonl'"],
        ),
        (
            ["bench", "--sets", "gsm8k", "--data", "gsm8k=missing.jsonl"],
            ["'missing.jsonl'", "no such file"],
        ),
        (["bench", "--repeats", "0"], ["repeats is 0"]),
        (["bench", "--drafter", "none"], ["plain decoding is always measured"]),
        (["bench", "--max-num-seqs", "0"], ["max_num_seqs is 0"]),
        (["bench", "--max-model-len", "1"], ["max_model_len is 1"]),
        (
            ["bench", "--dummy-weights", "qwen3-8b", "--max-model-len", "64"],
            ["--max-model-len says nothing beside --dummy-weights"],
        ),
        (["bench", "--synthetic-spread", "1"], ["without --dummy-weights; add that"]),
        (["bench", "show", "a.json", "--out", "b.json"], ["--out says nothing beside bench show"]),
        (["bench", "show", "a.json", "--concurrency", "2"], ["--max-num-seqs says nothing"]),
        (["bench", "compare", "a.json", "--format", "latex"], ["beside bench compare; leave it"]),
        (["bench", "compare", "a.json", "--ray"], ["--ray says nothing"]),
        (["bench", "--temperature", "-1"], ["temperature is -1"]),
        (["bench", "--out", "missing/report.json"], ["folder 'missing'"]),
        (["bench", "--html", "."], ["it is a folder"]),
    ],
)
def test_mistakes_are_one_line_before_anything_is_loaded(
    arguments: list[str], fragments: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    def refuse(*args: Any, **options: Any) -> None:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(SpecDecoder, "from_pretrained", refuse)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    assert all(fragment in error for fragment in fragments), error


def test_a_k_that_a_drafter_cannot_give_is_refused_before_measuring() -> None:
    with pytest.raises(InvalidInputError, match="k is 99 and drafter 'ngram' gives 1 to 8"):
        Bench(tiny_decoder(), BenchConfig(sets=(PROMPTS,), num_draft_tokens=(4, 99)))


@pytest.mark.usefixtures("loads_tiny")
@pytest.mark.slow
def test_a_k_chosen_step_by_step_is_a_side_of_its_own(
    tmp_path: Path, loads_tiny: None, monkeypatch: Patch, capsys: Capture
) -> None:
    """Catches a side called auto whose k is fixed, and a report that nothing can show."""
    choices = cycle((0, 7, 3))
    monkeypatch.setattr(
        BlockChoice, "choose", lambda self, num_reqs, **_: BlockShape(next(choices))
    )
    file = tmp_path / "report.json"
    sweep = "bench --limit 3 --max-tokens 24 --repeats 1 --drafter ngram -k 2 "
    assert main(f"{sweep} auto --out {file}".split()) == 0
    report = read_report(file)
    _, fixed, chosen = report["rows"]
    assert [row["k"] for row in report["rows"]] == [0, 2, "auto"]
    offered = [
        {k for k, count in enumerate(row["acceptance"]["drafted_histogram"]) if count}
        for row in (fixed, chosen)
    ]
    assert offered[0] <= {0, 1, 2} and offered[1] >= {0, 3, 7}
    assert chosen["differing_answers"] == [] and chosen["roofline"] is None and fixed["roofline"]
    assert " auto " in capsys.readouterr().out and "ngram k=auto" in compare_reports(report, report)
    assert html_report(report).count("<svg") == 6
    assert main(f"{sweep} all".split()) == 2
    assert "'all' is neither a whole number nor auto" in capsys.readouterr().err


@pytest.mark.usefixtures("loads_tiny")
def test_answers_without_a_step(tmp_path: Path, capsys: Capture) -> None:
    """One token each, which the prefill gives: there is nothing to bound, and a table."""
    file = tmp_path / "report.json"
    fast = "bench --limit 2 --max-tokens 1 --repeats 1 --drafter ngram -k 2 auto"
    assert main([*fast.split(), "--out", str(file)]) == 0
    assert {row["roofline"] for row in read_report(file)["rows"]} == {None}
    assert "ngram" in capsys.readouterr().out


def test_phases_are_timed_over_few_tokens(monkeypatch: Patch) -> None:
    """A timed step waits for the device at every phase: on a GPU whole answers took longer than all
    the rest.
    """
    passes: list[tuple[bool, int]] = []

    def listen(
        decoder: SpecDecoder, prompts: PromptSet, sampling: SamplingParams, **options: Any
    ) -> Pass:
        passes.append((decoder.engine.timer.enabled, sampling.max_tokens))
        return run_set(decoder, prompts, sampling, **options)

    monkeypatch.setattr("evals.bench.bench.run_set", listen)
    monkeypatch.setattr("evals.bench.bench.SPLIT_TOKENS", 3)
    list(
        Bench(tiny_decoder(), BenchConfig(sets=(PROMPTS,), repeats=1, warmup=0, max_tokens=6)).run(
            PROVENANCE
        )
    )
    assert passes == [(False, 6)] * 2 + [(True, 3)] * 2


def test_no_pass_copies_from_one_before(monkeypatch: Patch) -> None:
    """Catches phases timed with drafts that have seen their own output."""
    done: list[str] = []

    def listen(decoder: SpecDecoder, *args: Any, **options: Any) -> Pass:
        if decoder.engine.runner.drafter:
            done.append("decode")
        return run_set(decoder, *args, **options)

    monkeypatch.setattr("evals.bench.bench.run_set", listen)
    monkeypatch.setattr(BoundSuffix, "forget", lambda drafter: done.append("forget"))
    config = BenchConfig(
        (PROMPTS,), ("suffix",), repeats=2, warmup=0, max_tokens=6, behind_hits=True
    )
    list(Bench(tiny_decoder(), config).run(PROVENANCE))
    assert done == ["forget", "decode"] * 4  # the repeats, behind hits, the phases


@pytest.mark.parametrize(
    ("captures", "passes"), [([1, 2, 2], 3), ([0, 0, 0], 2), (list(range(1, 40)), 10)]
)
def test_a_side_warms_up_until_nothing_is_captured(
    captures: list[int], passes: int, monkeypatch: Patch
) -> None:
    """Catches captures in timed passes, and a warm-up that never ends; two passes are asked for."""
    done: list[str] = []

    def listen(
        decoder: SpecDecoder, prompts: PromptSet, sampling: SamplingParams, **options: Any
    ) -> Pass:
        done.append("pass")
        return run_set(decoder, prompts, sampling, **options)

    monkeypatch.setattr("evals.bench.bench.run_set", listen)
    monkeypatch.setattr(
        bench._Side, "num_captured", property(lambda side: [0, *captures][len(done)])
    )
    monkeypatch.setattr(
        Bench, "_sides", lambda self, *where: [bench._Side(drafter="plain", decoder=self._base)]
    )
    list(
        Bench(tiny_decoder(), BenchConfig(sets=(PROMPTS,), repeats=1, warmup=2, max_tokens=6)).run(
            PROVENANCE
        )
    )
    assert len(done) == passes + 2  # one is timed, one is for the phases


@pytest.mark.usefixtures("loads_tiny")
def test_filters_reach_the_requests(tmp_path: Path, monkeypatch: Patch) -> None:
    """Catches an option that is written into the report and not decoded with."""
    asked: set[tuple[float, int, float]] = set()
    add = SpecEngine.new_request

    def watched(self: SpecEngine, prompt: Any, sampling: SamplingParams, **options: Any) -> Any:
        asked.add((sampling.temperature, sampling.top_k, sampling.top_p))
        return add(self, prompt, sampling, **options)

    monkeypatch.setattr(SpecEngine, "new_request", watched)
    assert (
        main(
            measure(
                tmp_path, "--limit", "1", "--temperature", "0.7", "--top-k", "5", "--top-p", "0.9"
            )
        )
        == 0
    )
    assert asked == {(0.7, 5, 0.9)}
    settings = read_report(tmp_path / "report.json")["settings"]
    assert (settings["top_k"], settings["top_p"]) == (5, 0.9)


@pytest.mark.usefixtures("loads_tiny")
def test_limits_reach_the_engines(tmp_path: Path, monkeypatch: Patch) -> None:
    """And `--data` takes several sets at once."""
    made: list[EngineConfig] = []
    variant = SpecDecoder.variant

    def watched(self: SpecDecoder, drafter: Any, engine: EngineConfig) -> SpecDecoder:
        made.append(engine)
        return variant(self, drafter, engine)

    monkeypatch.setattr(SpecDecoder, "variant", watched)
    files = []
    for name in ("one", "two"):
        (tmp_path / name).write_text('{"prompt": "ab"}\n' * 2)
        files.append(f"{name}={tmp_path / name}")
    limits = ["--max-model-len", "40", "--max-prefill-tokens", "32", "--draft-sampling", "greedy"]
    limits += ["--max-tokens", "64", "--drafter", "ngram"]
    assert main(measure(tmp_path, "--sets", "one", "two", "--data", *files, *limits)) == 0
    sides = [one for one in made if one.pipeline_depth is None]  # one draws a tree
    asked = {(one.max_model_len, one.max_prefill_tokens, one.draft_sampling) for one in sides}
    assert asked == {(40, 32, "greedy")} and len(sides) >= 4
    settings = read_report(tmp_path / "report.json")["settings"]
    assert [one["name"] for one in settings["prompt_sets"]] == ["one", "two"]
    assert settings["max_model_len"] == 40 and settings["draft_sampling"] == "greedy"


@pytest.mark.usefixtures("loads_tiny")
def test_the_command_measures_writes_and_shows(tmp_path: Path, capsys: Capture) -> None:
    assert main(measure(tmp_path)) == 0
    live = capsys.readouterr()
    assert "tau" in live.err
    assert "2/2" in live.err
    assert main(["bench", "show", str(tmp_path / "report.json")]) == 0
    assert capsys.readouterr().out == live.out
    assert read_report(tmp_path / "report.json")["settings"]["prompt_sets"][0]["name"] == "bundled"


@pytest.mark.usefixtures("loads_tiny")
def test_an_interrupted_sweep_keeps_what_it_measured(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    """Catches finished parts that are lost, or a report that claims to be complete."""
    whole = Bench.run

    def interrupted(self: Bench, provenance: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield next(whole(self, provenance))
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "run", interrupted)
    assert main(measure(tmp_path, "--max-num-seqs", "1", "2")) == 130
    captured = capsys.readouterr()
    assert "interrupted" in captured.err
    assert "incomplete" in captured.out
    stored = read_report(tmp_path / "report.json")
    assert not stored["complete"]
    assert {row["concurrency"] for row in stored["rows"]} == {1}


def test_progress_shows_tau_while_it_runs(monkeypatch: Patch, capsys: Capture) -> None:
    """Catches a bar that only appears at the end on a terminal."""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr("specdec.cli.progress.INTERVAL", 0.0)
    run_set(
        tiny_decoder(),
        PROMPTS,
        SamplingParams(max_tokens=6, seed=0, ignore_eos=True),
        on_turn=lambda turn, count: bench_command._progress(f"turn {turn}", count),
    )
    error = capsys.readouterr().err
    assert error.count("\r") > 4
    assert "turn 0  [........................] 0/3, tau 1.00" in error
    assert "turn 1  [########################] 1/1" in error


@pytest.mark.slow
def test_sides_of_one_checkpoint_do_not_disturb_each_other(monkeypatch: Patch) -> None:
    """A drafter with weights; catches figures of a side that depend on which others are measured
    beside it.
    """
    monkeypatch.setattr("evals.bench.bench.find_drafter", lambda name: random_dflash)
    alone = tiny_report(
        drafters=("checkpoint",),
        num_draft_tokens=(4,),
        temperatures=(0.0,),
        concurrencies=(2,),
        repeats=1,
    )
    both = tiny_report(
        drafters=("checkpoint",),
        num_draft_tokens=(2, 4),
        temperatures=(0.0,),
        concurrencies=(2,),
        repeats=1,
    )
    assert both["rows"][2]["acceptance"] == alone["rows"][1]["acceptance"]
    assert both["rows"][2]["acceptance"]["num_drafted"] > 0
    assert all(row["differing_answers"] == [] for row in both["rows"])


def test_the_models_are_shared_by_all_sides() -> None:
    """Catches a target or a drafter per side, which large models have no room for."""
    bench = Bench(
        tiny_decoder(), BenchConfig(sets=(PROMPTS,), num_draft_tokens=(1, 2), max_tokens=4)
    )
    sides = bench._sides(PROMPTS, 2)
    verifiers = [side.decoder.verifier for side in sides]
    assert all(verifier is verifiers[0] for verifier in verifiers)
    drafters = [side.decoder.engine.drafter for side in sides[1:]]
    assert drafters[0] is drafters[1]


def test_the_kind_of_cache_reaches_the_target(monkeypatch: Patch, capsys: Capture) -> None:
    """Catches an option that is read and dropped: torch_ref has no 8-bit cache and must say so."""
    asked: list[str] = []

    def load(*args: Any, **options: Any) -> SpecDecoder:
        asked.append(options["kv_dtype"])
        raise InvalidInputError("enough")

    monkeypatch.setattr(SpecDecoder, "from_pretrained", load)
    for verb in (["bench"], ["eval", "--tasks", "bundled"]):
        assert main([*verb, "--kv-dtype", "fp8"]) == 2
    assert asked == ["fp8", "fp8"]
    assert main(["bench", "--kv-dtype", "int4"]) == 2
    assert "int4" in capsys.readouterr().err
