"""`specdec eval`: both sides, peers, resuming, local files, and what it refuses."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lm_eval.api.instance import Instance

from evals.accuracy import lm_eval_peers
from evals.accuracy.lm_eval_sample import record_of, sample_of
from evals.report.report import read_report
from evals.system import Timed
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import AcceptanceStats
from specdec.cli.main import main
from specdec.engine.requests.request import Request
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import GenerationResult
from tests.evals.accuracy.test_humaneval import PROBLEM
from tests.evals.tiny import write_jsonl

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

pytest.importorskip("lm_eval", reason="lm-eval comes with the extra eval")

pytestmark = pytest.mark.slow


@pytest.mark.skipif(torch.cuda.is_available(), reason="lm-eval's default device is there")
def test_the_documented_command_runs_without_a_gpu(
    folder: Path,
    tmp_path: Path,
    monkeypatch: Patch,
    capsys: Capture,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """lm-eval's command hands over the device cuda:0 where nobody names one."""
    from lm_eval.__main__ import cli_evaluate

    import evals.accuracy.lm_eval_model  # noqa: F401  # makes itself known
    from evals.accuracy.bundled_task import bundled_task

    task = tmp_path / "task.yaml"
    task.write_text(json.dumps(bundled_task(tmp_path)), encoding="utf-8")
    model = (
        f"pretrained={folder},drafter=ngram,max_length=4096,max_gen_toks=4,trust_remote_code=True"
    )
    words = f"run --model specdec --model_args {model} --tasks {task} --limit 1"
    words += " --gen_kwargs max_gen_toks=4"
    monkeypatch.setattr("sys.argv", ["lm-eval", *words.split()])
    cli_evaluate()
    assert "exact_match" in capsys.readouterr().out
    said = [
        record.getMessage().partition(" ")[0]
        for record in caplog.records
        if record.name == "evals.accuracy.lm_eval_arguments"
    ]
    assert said == ["trust_remote_code", "device"]


def evaluate(folder: Path, out: Path, *arguments: str) -> int:
    """`specdec eval` on the tiny model."""
    model = ["--model", str(folder), "--dtype", "float32", "--device", "cpu", "--max-num-seqs", "2"]
    tasks = [] if "--tasks" in arguments else ["--tasks", "bundled"]
    return main(["eval", *tasks, *model, "--max-tokens", "8", "--out", str(out), *arguments])


def test_both_sides_are_reported_and_agree(folder: Path, tmp_path: Path, capsys: Capture) -> None:
    """Catches accuracies that differ without the text differing,
    and a report that loses a figure.
    """
    assert evaluate(folder, tmp_path / "run", "--limit", "3", "--log-samples") == 0
    text = capsys.readouterr().out
    report = read_report(tmp_path / "run" / "report.json", "specdec-eval")
    assert report["settings"]["drafter"] == "ngram"  # the target is not the embedded model
    (task,) = report["tasks"]
    assert task["num_samples"] == 3
    assert task["plain"]["metrics"] == task["speculative"]["metrics"]
    assert set(task["plain"]["metrics"]) == {
        "exact_match,strict-match",
        "exact_match,flexible-extract",
    }
    assert task["differences"] == []
    assert task["speculative"]["acceptance"]["num_steps"] > 0
    assert len(task["speculative"]["acceptance"]["tau_per_request"]) == 3
    assert task["ratio"] == pytest.approx(
        task["speculative"]["tokens_per_second"] / task["plain"]["tokens_per_second"]
    )
    assert "the same text for all 3 samples" in text and "(Wilson)" in text
    samples = (
        (tmp_path / "run" / "samples_bundled_plain.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert len(samples) == 2 * 3  # one per filter


def test_humaneval_beside_hf(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Catches a peer that is asked otherwise, programs without their head, and a lost pair."""
    seen: list[str] = []

    def judge(program: str) -> bool:
        seen.append(program)
        return len(seen) == 2  # the second problem, plainly

    monkeypatch.setattr("evals.accuracy.humaneval_task.passes", judge)
    data = tmp_path / "problems.jsonl"
    write_jsonl(data, [PROBLEM, PROBLEM | {"task_id": "own/1", "entry_point": "other"}])
    for name in ("humaneval", "humaneval_instruct"):
        seen.clear()
        out = tmp_path / name
        asked = ["--tasks", name, "--data", f"{name}={data}", "--peer", "hf"]
        assert evaluate(folder, out, *asked, *(["--chat"] if name != "humaneval" else [])) == 0
        (task,) = read_report(out / "report.json", "specdec-eval")["tasks"]
        rights = [task["plain"], task["speculative"], task["peers"]["hf"]]
        assert [one["metrics"]["pass@1,none"]["right"] for one in rights] == ["01", "00", "00"]
        assert seen[:2] == seen[2:4] == seen[4:]  # the same answers, in float32
        assert seen[0].startswith(PROBLEM["prompt"])
        assert seen[1].endswith("\ncheck(other)\n")
        assert "1 right with plain alone, 0 with hf alone" in capsys.readouterr().out
    both = [str(tmp_path / name / "report.json") for name in ("humaneval", "humaneval")]
    assert main(["bench", "compare", *both]) == 0
    assert "0 right with the first alone, 0 with the second alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("peer", "name", "expected"),
    [
        ("hf", "/models/a.gguf", {"pretrained": "/models", "gguf_file": "a.gguf"}),
        ("hf", "owner/name", {"pretrained": "owner/name", "device": "cpu", "batch_size": 4}),
        ("vllm:/other", "owner/name", {"pretrained": "/other", "max_num_seqs": 4}),
    ],
)
def test_peers_get_our_weights(
    peer: str, name: str, expected: dict[str, Any], monkeypatch: Patch
) -> None:
    given: dict[str, Any] = {}

    def get_model(kind: str) -> Any:
        assert kind == peer[: len(kind)]

        def load(**options: Any) -> Any:
            given.update(options)
            return SimpleNamespace(tokenizer=loaded)

        return load

    loaded, ours = SimpleNamespace(chat_template="theirs"), SimpleNamespace(chat_template="ours")
    reader = SimpleNamespace(variables={"enable_thinking": False}, tokenizer=ours)
    monkeypatch.setattr(lm_eval_peers, "get_model", get_model)
    monkeypatch.setattr(lm_eval_peers, "import_vllm", lambda name: None)
    verifier = SimpleNamespace(name=name, dtype=torch.bfloat16, device=torch.device("cpu"))
    settings = {"max_num_seqs": 4, "max_model_len": 99}
    decoder = SimpleNamespace(verifier=verifier)
    system: Any = SimpleNamespace(decoder=decoder, settings=settings, reader=reader)
    lm_eval_peers.harness_peer(peer, system)
    assert given.items() >= (expected | {"dtype": "bfloat16", "max_length": 99}).items()
    assert given["chat_template_args"] == {"enable_thinking": False}
    assert loaded.chat_template == "ours"
    with pytest.raises(InvalidInputError, match="name hf or vllm"):
        lm_eval_peers.check_peers(("sglang",))


def test_differing_texts_are_counted_with_their_first_token(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Catches a comparison that sees nothing, and margins of the wrong position."""
    real = GenerationResult.of

    def changed(request: Request, text: str) -> GenerationResult:
        result = real(request, text)
        if result.stats.num_drafted and max(result.stats.num_drafted) > 0:  # the speculative side
            result.text, result.token_ids = text + "!", [*result.token_ids[:3], 5]
        return result

    monkeypatch.setattr(GenerationResult, "of", changed)
    assert evaluate(folder, tmp_path / "run", "--limit", "2", "-k", "8") == 0
    differences = read_report(tmp_path / "run" / "report.json")["tasks"][0]["differences"]
    assert [one["doc_id"] for one in differences] == [0, 1]
    assert all(one["position"] == 3 and one["margin"] > 0 for one in differences)
    assert "differs for 2 of 2 samples" in capsys.readouterr().out


def test_a_run_that_died_does_not_repeat_finished_samples(
    folder: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch
) -> None:
    """Catches lost samples, half a line at the end of the journal, and a resumed run that decodes
    everything again.
    """
    from evals.system import LocalSystem

    real = LocalSystem.answers
    decoded: list[Any] = []

    def dying(system: Any, prompts: Any, samplings: Any) -> Any:
        for answer in real(system, prompts, samplings):
            if len(decoded) == 4:  # all of the plain side, one of the speculative one
                raise KeyboardInterrupt
            decoded.append(answer.number)
            yield answer

    monkeypatch.setattr(LocalSystem, "answers", dying)
    out = tmp_path / "run"
    assert evaluate(folder, out, "--limit", "3", "-k", "8") == 130
    assert "finished samples are kept" in capsys.readouterr().err
    journal = out / "speculative.jsonl"
    assert len(journal.read_text(encoding="utf-8").splitlines()) == 1 + 1
    with journal.open("a", encoding="utf-8") as file:
        file.write('{"key": "cut in the mid')

    def counting(system: Any, prompts: Any, samplings: Any) -> Any:
        decoded.extend(prompts)
        return real(system, prompts, samplings)

    decoded.clear()
    monkeypatch.setattr(LocalSystem, "answers", counting)
    assert evaluate(folder, out, "--limit", "3", "-k", "8") == 0
    assert len(decoded) == 2
    resumed = read_report(out / "report.json")["tasks"][0]
    assert evaluate(folder, tmp_path / "whole", "--limit", "3", "-k", "8") == 0
    whole = read_report(tmp_path / "whole" / "report.json")["tasks"][0]
    assert resumed["plain"]["metrics"] == whole["plain"]["metrics"]
    assert resumed["speculative"]["acceptance"] == whole["speculative"]["acceptance"]
    assert resumed["differences"] == whole["differences"] == []
    capsys.readouterr()
    assert evaluate(folder, out, "--limit", "3", "-k", "2") == 2
    assert "was begun with k 8, not 2" in capsys.readouterr().err


def test_local_files_feed_a_task_of_lm_eval(folder: Path, tmp_path: Path) -> None:
    """Catches a local copy that changes the task's own prompt, few-shot source or filters."""
    data = tmp_path / "data"
    data.mkdir()
    write_jsonl(
        data / "train.jsonl",
        [{"question": f"shot {i}?", "answer": f"so\n#### {i}"} for i in range(9)],
    )
    write_jsonl(
        data / "test.jsonl",
        [{"question": f"asked {i}?", "answer": f"so\n#### {i}"} for i in range(3)],
    )
    arguments = ["--tasks", "gsm8k", "--data", f"gsm8k={data}", "--limit", "2", "--log-samples"]
    assert evaluate(folder, tmp_path / "run", *arguments) == 0
    record = json.loads(
        (tmp_path / "run" / "samples_gsm8k_plain.jsonl").read_text(encoding="utf-8").splitlines()[0]
    )
    prompt = record["arguments"][0][0]
    assert prompt.endswith("Question: asked 0?\nAnswer:")
    assert prompt.count("Question: shot") == 5
    assert {"strict-match", "flexible-extract"} == {
        name.partition(",")[2]
        for name in read_report(tmp_path / "run" / "report.json")["tasks"][0]["plain"]["metrics"]
    }


def test_answers_to_other_questions_are_not_paired(
    folder: Path, tmp_path: Path, capsys: Capture
) -> None:
    """As many, in a file of the same name; a chat asks the same as a text."""
    data = tmp_path / "code.jsonl"
    asked = ["--tasks", "humaneval", "--data", f"humaneval={data}"]
    reports = [str(tmp_path / name / "report.json") for name in ("one", "two", "three")]
    for name, number, more in (("one", 0, []), ("two", 1, []), ("three", 0, ["--chat"])):
        write_jsonl(data, [PROBLEM | {"canonical_solution": f"    return {number}\n"}])
        assert evaluate(folder, tmp_path / name, *asked, *more) == 0
    capsys.readouterr()
    for other, paired in ((reports[1], False), (reports[2], True)):
        assert main(["bench", "compare", reports[0], other]) == 0
        text = capsys.readouterr().out
        assert ("McNemar" in text) == paired
        assert ("humaneval: the reports asked other questions" in text) != paired
    older = read_report(Path(reports[2]))
    del older["tasks"][0]["sha256"]
    Path(reports[2]).write_text(json.dumps(older), encoding="utf-8")
    for first, second in (reports[::2], reports[::-2], [reports[2]] * 2):
        assert main(["bench", "compare", first, second]) == 0
        text = capsys.readouterr().out
        assert "humaneval: an older report does not say which questions it asked" in text
        assert "McNemar" not in text and "other questions" not in text


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["--tasks", "bundled,gsm8kk"], ["unknown task 'gsm8kk'"]),
        (["--tasks", "gsm8kk"], ["unknown task 'gsm8kk'", "near: gsm8k"]),
        (["--limit", "5000"], ["limit is 5000 and task 'bundled' has", "choose 1 to"]),
        (["--tasks", "gsm8k", "--data", "gsm8k=missing"], ["'missing'", "no such file"]),
        (["--tasks", "gsm8k", "--data", "gsm8k=bad.jsonl"], ["bad.jsonl:2", "not JSON"]),
        (
            ["--tasks", "gsm8k", "--data", "gsm8k=good.jsonl"],
            ["needs split 'train'", "one JSONL file per split"],
        ),
        (["--data", "gsm8k=good.jsonl"], ["not among --tasks bundled"]),
        (["--data", "bundled=good.jsonl"], ["task 'bundled' asks the package's own problems"]),
        (["--num-fewshot", "-1"], ["num_fewshot is -1; it must be at least 0"]),
        (["--num-fewshot", "9"], ["num_fewshot is 9", "exceeds the 4 that are", "give fewer"]),
        (
            ["--tasks", "gsm8k", "--data", "gsm8k=shots", "--num-fewshot", "9"],
            ["num_fewshot is 9", "Sample larger than population", "give fewer"],
        ),
        (
            ["--tasks", "humaneval", "--data", "humaneval=code.jsonl", "--num-fewshot", "1"],
            ["num_fewshot is 1 and task 'humaneval' takes no examples"],
        ),
        (["--drafter", "none"], ["plain decoding is always evaluated"]),
        (["--system", "Be brief."], ["--chat"]),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str],
    fragments: list[str],
    folder: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: Patch,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_jsonl(tmp_path / "good.jsonl", [{"question": "q", "answer": "#### 1"}])
    (tmp_path / "bad.jsonl").write_text(
        '{"question": "q", "answer": "#### 1"}\n{"question\n', encoding="utf-8"
    )
    (tmp_path / "shots").mkdir()
    for split in ("train", "test"):
        shutil.copy(tmp_path / "good.jsonl", tmp_path / "shots" / f"{split}.jsonl")
    write_jsonl(tmp_path / "code.jsonl", [{"prompt": "def f():", "canonical_solution": " return"}])
    assert evaluate(folder, tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("specdec: error: ")
    assert all(fragment in error for fragment in fragments), error


def test_a_package_that_a_task_needs_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    from lm_eval.tasks import TaskManager

    from evals.accuracy.lm_eval_tasks import Tasks

    def load(self: TaskManager, specs: Any) -> Any:
        raise ModuleNotFoundError("No module named 'langdetect.x'", name="langdetect.x")

    monkeypatch.setattr(TaskManager, "load", load)
    with pytest.raises(
        InvalidInputError,
        match=r"a task needs the module langdetect, which is not installed; the task's page",
    ):
        Tasks(["bundled"], data={}, limit=None, folder=tmp_path)


def test_the_harness_starts_no_program(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    """It asks git about the current folder, which complains outside of a checkout, and pip about
    all packages, which takes seconds: once per side.
    """

    def refuse(*words: Any, **options: Any) -> None:
        started.append(words)
        raise OSError

    started: list[Any] = []
    monkeypatch.setattr("subprocess.Popen", refuse)
    assert evaluate(folder, tmp_path / "run", "--limit", "1") == 0
    assert started in ([], [(["git", "rev-parse", "HEAD"],)])  # ours, of a checkout of ours


def test_tasks_that_score_given_texts_are_refused(tmp_path: Path, monkeypatch: Patch) -> None:
    """Catches an evaluation of drafts that never draft."""
    from evals.accuracy import lm_eval_tasks

    task = lm_eval_tasks.bundled_task(tmp_path) | {
        "output_type": "loglikelihood",
        "metric_list": [{"metric": "acc"}],
    }
    del task["filter_list"], task["generation_kwargs"]
    monkeypatch.setattr(lm_eval_tasks, "bundled_task", lambda folder: task)
    with pytest.raises(InvalidInputError, match="scores given texts"):
        lm_eval_tasks.Tasks(["bundled"], data={}, limit=None, folder=tmp_path)


def test_a_record_keeps_all_counts() -> None:
    """Through JSON, as the journal has it: trees by rank,
    and which part of a composition drafted.
    """
    stats = AcceptanceStats(
        [3, 5], [1, 2], [2, 3], tree_sizes=[0, 5], num_by_rank=[1, 1], parts=[1, 0]
    )
    result = GenerationResult([1, 2], "text", [7, 8], "length", stats=stats)
    request = Instance("generate_until", {}, ("prompt", {}), 0, metadata=("task", 4, 1))
    sample = sample_of(
        request,
        SamplingParams(temperature=0),
        json.loads(json.dumps(record_of(Timed(0, result, 1.5)))),
    )
    assert (
        sample.stats == stats
        and sample.token_ids == [7, 8]
        and (sample.task, sample.doc_id, sample.seconds) == ("task", 4, 1.5)
    )
