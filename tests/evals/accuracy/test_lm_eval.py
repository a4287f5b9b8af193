"""The model `specdec` of lm-eval against lm-eval's own `hf` model, and `specdec eval` around it."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from evals.prompt_sets import load_prompt_set
from evals.report.report import read_report
from evals.system import Timed
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import InvalidInputError
from specdec.base.metrics import AcceptanceStats
from specdec.cli.main import main
from specdec.engine.requests.request import Request
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from tests.evals.accuracy.test_humaneval import PROBLEM
from tests.evals.tiny import save_tiny, write_jsonl

pytest.importorskip("lm_eval", reason="lm-eval comes with the extra eval")

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from evals.accuracy import lm_eval_peers
from evals.accuracy.lm_eval_model import SpecdecLM
from evals.accuracy.lm_eval_sample import record_of, sample_of

pytestmark = pytest.mark.slow

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

TEXTS = (
    "abcabcabcabc",
    "What is 2 + 2?",
    "x",
    "one two one two one two one",
    "A longer text, with commas, and a full stop.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def models(folder: Path) -> tuple[HFLM, SpecdecLM]:
    """The same weights twice."""
    # Its cache of logits mixes up the requests of one text that differ in where the context ends.
    hf = HFLM(
        pretrained=str(folder), dtype="float32", device="cpu", batch_size=1, logits_cache=False
    )
    return hf, SpecdecLM(pretrained=str(folder), dtype="float32", device="cpu", batch_size=4)


def instances(kind: Any, *arguments: tuple[Any, ...]) -> list[Instance]:
    return [
        Instance(kind, {}, one, index, metadata=("task", index, 1))
        for index, one in enumerate(arguments)
    ]


def prompts_of_gsm8k(count: int) -> list[str]:
    """From `$SPECDEC_DATA/gsm8k/test.jsonl` where that is there, else from the bundled problems."""
    data = Path(os.environ.get("SPECDEC_DATA", ".")) / "gsm8k" / "test.jsonl"
    name, files = ("gsm8k", {"gsm8k": str(data)}) if data.is_file() else ("bundled", {})
    return [
        f"Question: {item.turns[0]}\nAnswer:"
        for item in load_prompt_set(name, files=files, limit=count).items
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        {"until": ["ab", "?"], "max_gen_toks": 24},
        {"until": "e", "do_sample": False},
        {"until": [], "max_gen_toks": 7},
        {"until": ["</s>"], "max_gen_toks": 40, "temperature": 0.0},
    ],
)
def test_greedy_generations_equal_those_of_hf(
    arguments: dict[str, Any], models: tuple[HFLM, SpecdecLM]
) -> None:
    """Catches stop strings left in or matched late, a wrong token limit, and special tokens in the
    text.
    """
    requests = [(text, arguments) for text in TEXTS]
    expected, found = (
        model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for model in models
    )
    assert found == expected
    assert any(found)


def test_fifty_greedy_generations_equal_those_of_hf(models: tuple[HFLM, SpecdecLM]) -> None:
    """50 GSM8K prompts, few-shot length left out; long outputs of a random model pass through every
    kind of step.
    """
    requests = [
        (text, {"until": ["Question:"], "max_gen_toks": 24}) for text in prompts_of_gsm8k(50)
    ]
    expected, found = (
        model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for model in models
    )
    assert found == expected
    assert len(set(found)) > 25
    assert any(sum(sample.stats.num_accepted) for sample in models[1].samples)


def test_greedy_generations_of_the_embedded_model_equal_those_of_hf() -> None:
    """The same with a real model in float32."""
    from verifiers.weights.embedded import embedded_model_path

    engine = EngineConfig(
        num_draft_tokens=None,
        max_num_seqs=4,
        max_model_len=512,
        cache=CacheConfig(memory_bytes=2**29),
    )
    decoder = SpecDecoder.from_pretrained(
        "embedded", drafter="ngram", device="cpu", dtype="float32", engine=engine
    )
    hf = HFLM(pretrained=str(embedded_model_path()), dtype="float32", device="cpu", batch_size=4)
    requests = [
        (text, {"until": ["Question:"], "max_gen_toks": 12}) for text in prompts_of_gsm8k(6)
    ]
    models = (hf, SpecdecLM(decoder=decoder))
    expected, found = (
        model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for model in models
    )
    assert found == expected


def test_accuracy_of_the_embedded_model_is_the_same_with_drafts(
    tmp_path: Path, capsys: Capture
) -> None:
    """40 samples of GSM8K from `$SPECDEC_DATA/gsm8k` where that is there, else a few bundled
    problems, in float32.
    """
    data = Path(os.environ.get("SPECDEC_DATA", ".")) / "gsm8k"
    local = (data / "test.jsonl").is_file()
    source = (
        ["--tasks", "gsm8k", "--data", f"gsm8k={data}", "--limit", "40"]
        if local
        else ["--tasks", "bundled", "--limit", "2"]
    )
    limits = [
        "--max-tokens",
        "128" if local else "24",
        "--max-model-len",
        "2048",
        "--max-num-seqs",
        "4",
    ]
    assert (
        main(
            [
                "eval",
                *source,
                *limits,
                "--device",
                "cpu",
                "--dtype",
                "float32",
                "--out",
                str(tmp_path / "run"),
            ]
        )
        == 0
    )
    (task,) = read_report(tmp_path / "run" / "report.json")["tasks"]
    assert task["differences"] == []
    assert task["plain"]["metrics"] == task["speculative"]["metrics"]
    assert task["speculative"]["acceptance"]["tau"] > 1
    assert "(Wilson)" in capsys.readouterr().out


def test_loglikelihoods_equal_those_of_hf(
    models: tuple[HFLM, SpecdecLM], monkeypatch: Patch
) -> None:
    """Catches scores of the wrong rows; also with forwards so small that a text takes several, and
    an empty context.
    """
    pairs = [(text[:cut], text[cut:]) for text in TEXTS for cut in (0, 1, 4) if len(text) > cut]
    expected = models[0].loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for rows in (1024, 40, 5):
        monkeypatch.setattr("evals.accuracy.scoring.MAX_ROWS", rows)
        found = models[1].loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
        assert [one for one, _ in found] == pytest.approx([one for one, _ in expected], abs=1e-3)
        assert [greedy for _, greedy in found] == [bool(greedy) for _, greedy in expected]


def test_greedy_continuations_are_recognized(models: tuple[HFLM, SpecdecLM]) -> None:
    """Catches a flag that is always false, which random continuations would not show."""
    lm = models[1]
    (text,) = lm.generate_until(
        instances("generate_until", ("abcabc", {"max_gen_toks": 5})), disable_tqdm=True
    )
    pairs = [("abcabc", text), ("abcabc", "zz")]
    assert [
        greedy
        for _, greedy in lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    ] == [True, False]


def test_rolling_loglikelihoods_equal_those_of_hf(models: tuple[HFLM, SpecdecLM]) -> None:
    """Catches windows that overlap or leave tokens out; the last text is longer than the model's
    512 tokens.
    """
    texts = [(text,) for text in (*TEXTS, "The quick brown fox jumps over the lazy dog. " * 25)]
    expected, found = (
        model.loglikelihood_rolling(instances("loglikelihood_rolling", *texts)) for model in models
    )
    assert found == pytest.approx(expected, abs=1e-3)


def test_prompts_lose_their_beginning_where_the_answer_needs_room(
    models: tuple[HFLM, SpecdecLM],
) -> None:
    """Catches a prompt longer than the model being refused or cut at its end, unlike lm-eval's own
    models.
    """
    requests = [
        ("The quick brown fox jumps over the lazy dog. " * 25, {"until": [], "max_gen_toks": 30})
    ]
    expected, found = (
        model.generate_until(instances("generate_until", *requests), disable_tqdm=True)
        for model in models
    )
    assert found == expected
    assert len(models[1].samples[-1].prompt_token_ids) == 512 - 30


def test_sampled_answers_depend_on_the_seed_alone(folder: Path) -> None:
    """Catches a shared seed for all requests, and answers that depend on the batch."""

    def answers(seed: int, batch_size: int, texts: Sequence[str]) -> list[str]:
        lm = SpecdecLM(
            pretrained=str(folder), dtype="float32", device="cpu", batch_size=batch_size, seed=seed
        )
        requests = [
            (text, {"max_gen_toks": 16, "do_sample": True, "temperature": 1.0}) for text in texts
        ]
        return lm.generate_until(instances("generate_until", *requests), disable_tqdm=True)

    texts = ("same", "same", "same", "other")
    one = answers(1, 4, texts)
    assert one == answers(1, 1, texts)
    assert one != answers(2, 4, texts)
    assert len(set(one[:3])) == 3


def test_unknown_arguments_are_refused(models: tuple[HFLM, SpecdecLM]) -> None:
    """In one line; those that ask for nothing pass."""
    wrong = {"num_beams": 4, "early_stopping": True, "typical_p": 0.9, "colour": 1}
    for name, value in wrong.items():
        with pytest.raises(InvalidInputError, match=f"generation argument '{name}'.* is not known"):
            models[1].generate_until(
                instances("generate_until", ("x", {name: value})), disable_tqdm=True
            )
    with pytest.raises(
        InvalidInputError, match="max_gen_toks is 600 and the model holds 512 tokens"
    ):
        models[1].generate_until(
            instances("generate_until", ("x", {"max_gen_toks": 600})), disable_tqdm=True
        )
    with pytest.raises(InvalidInputError, match="batch_size is 'many'"):
        SpecdecLM(batch_size="many")
    for argument in (
        {"colour": 1},
        {"parallelize": True},
        {"tensor_parallel_size": 2},
        {"max_model_len": 5},
    ):
        with pytest.raises(InvalidInputError, match=r"^model argument .* is not offered: [^\n]+$"):
            SpecdecLM(**argument)


def test_arguments_that_ask_for_nothing_change_nothing(models: tuple[HFLM, SpecdecLM]) -> None:
    lm = models[1]
    plain, other = (
        lm.generate_until(
            instances("generate_until", ("same", {"max_gen_toks": 8, **more})), disable_tqdm=True
        )
        for more in (
            {},
            {
                "num_beams": 1,
                "use_cache": False,
                "pad_token_id": 3,
                "top_k": -1,
                "length_penalty": 1,
                "top_p": None,
            },
        )
    )
    assert plain == other
    kept = {
        "presence_penalty": 1.5,
        "frequency_penalty": 0.5,
        "min_new_tokens": 3,
        "stop_token_ids": [9],
        "skip_special_tokens": False,
    }
    sampling = lm._sampling({"max_gen_toks": 8, **kept}, seed=0)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.min_tokens) == (
        1.5,
        0.5,
        3,
    )
    assert sampling.stop_token_ids == (lm.eot_token_id, 9) and not sampling.skip_special_tokens


def test_texts_at_the_edge(models: tuple[HFLM, SpecdecLM]) -> None:
    assert models[1].loglikelihood(instances("loglikelihood", ("a", ""), ("a", "b")))[0] == (
        0.0,
        True,
    )
    with pytest.raises(InvalidInputError, match="half of a surrogate pair"):
        models[1].generate_until(instances("generate_until", ("a\ud800", {})), disable_tqdm=True)


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

    from evals.accuracy.bundled_task import bundled_task

    task = tmp_path / "task.yaml"
    task.write_text(json.dumps(bundled_task(tmp_path)), encoding="utf-8")
    model = (
        f"pretrained={folder},drafter=ngram,max_length=4096,max_gen_toks=4,trust_remote_code=True"
    )
    words = [
        "run",
        "--model",
        "specdec",
        "--model_args",
        model,
        "--tasks",
        str(task),
        "--limit",
        "1",
    ]
    monkeypatch.setattr("sys.argv", ["lm-eval", *words, "--gen_kwargs", "max_gen_toks=4"])
    cli_evaluate()
    assert "exact_match" in capsys.readouterr().out
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "evals.accuracy.lm_eval_arguments"
    ]
    assert [line.partition(" ")[0] for line in said] == ["trust_remote_code", "device"]


def test_a_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As lm-eval's own models take it."""

    def load(target: str, **options: Any) -> None:
        raise InvalidInputError(f"asked for {target}")

    monkeypatch.setattr(SpecDecoder, "from_pretrained", load)
    with pytest.raises(InvalidInputError, match="asked for owner/name@v1"):
        SpecdecLM.create_from_arg_string("pretrained=owner/name,revision=v1")


@pytest.mark.parametrize("token", ["e", "70"])
def test_an_answer_begins_behind_its_thinking(folder: Path, token: str) -> None:
    """A text, or the id of a token. Stop strings end the answer, and no thinking."""
    own: dict[str, Any] = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    plain, cut = SpecdecLM(**own), SpecdecLM(**own, think_end_token=token)
    arguments = {"until": [], "max_gen_toks": 60}
    for text, whole in zip(
        TEXTS,
        plain.generate_until(instances("generate_until", *((text, arguments) for text in TEXTS))),
        strict=True,
    ):
        mark = plain.tokenizer.decode([int(token)]) if token.isdigit() else token
        behind = whole.split(mark)[-1].lstrip()
        stop = behind[2:3]
        (found,) = cut.generate_until(
            instances("generate_until", (text, arguments | {"until": [stop]}))
        )
        assert found == (behind.partition(stop)[0] if stop else behind)
        assert cut.samples[-1].text == whole


def test_thinking_is_turned_off_in_the_prompt(folder: Path) -> None:
    """By lm-eval's own names for it, also as text on a command line."""
    chat = [{"role": "user", "content": "x"}]
    template = "{{ messages[0].content }}{% if enable_thinking is false %}-{% endif %}{{ mood }}"
    own: dict[str, Any] = {"pretrained": str(folder), "dtype": "float32", "device": "cpu"}
    own |= {"enable_thinking": False, "chat_template_args": '{"mood": "u"}'}
    model = SpecdecLM(**own)
    model.tokenizer.chat_template = template
    assert model.apply_chat_template(chat) == "x-u"


def test_one_import_makes_the_model_known_to_lm_eval(folder: Path, tmp_path: Path) -> None:
    """lm-eval's own Python API, with a chat template and few-shot examples as turns."""
    from evals.accuracy.bundled_task import bundled_task

    results = lm_eval.simple_evaluate(
        model="specdec",
        model_args=f"pretrained={folder},drafter=ngram,dtype=float32,num_draft_tokens=3"
        ",max_length=4096",
        tasks=[bundled_task(tmp_path)],
        limit=2,
        batch_size=2,
        device="cpu",
        apply_chat_template=True,
        fewshot_as_multiturn=True,
        gen_kwargs={"max_gen_toks": 4},
    )
    assert results is not None
    assert "exact_match,strict-match" in results["results"]["bundled"]
    prompt = results["samples"]["bundled"][0]["arguments"][0][0]
    assert prompt.count("[user]") == 5
    assert prompt.count("[assistant]") == 5


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
    assert "the same text for all 3 samples" in text
    samples = (
        (tmp_path / "run" / "samples_bundled_plain.jsonl").read_text(encoding="utf-8").splitlines()
    )
    assert len(samples) == 2 * 3  # one per filter


def test_humaneval_beside_hf(
    folder: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: Patch,
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
    peer: str,
    name: str,
    expected: dict[str, Any],
    monkeypatch: Patch,
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


def test_the_harness_does_not_make_git_complain(
    tmp_path: Path, monkeypatch: Patch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Outside of a checkout: "fatal: not a git repository", once per evaluation."""
    from evals.accuracy import lm_eval_tasks

    monkeypatch.chdir(tmp_path)
    lm_eval_tasks.evaluator.get_git_commit_hash()
    assert capfd.readouterr().err == ""


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
