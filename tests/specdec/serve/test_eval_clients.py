"""Other people's programs against the server: lm-eval's models of HTTP servers, and the benchmark
of the public `dflash`.
"""

import re
import statistics
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi comes with the extra serve")
pytest.importorskip("lm_eval", reason="lm-eval comes with the extra eval")
pytest.importorskip("tenacity", reason="tenacity comes with lm-eval[api]")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from drafters.ngram import NGramDrafter
from evals.accuracy.bundled_task import bundled_task
from evals.accuracy.lm_eval_model import SpecdecLM
from evals.prompt_sets import read_bundled
from specdec.base.config import EngineConfig
from specdec.session.decoder import SpecDecoder
from tests.evals.tiny import save_tiny, tiny_decoder, write_jsonl
from tests.helpers.live_server import Live, live_server
from tests.helpers.waiting import HANG

MAX_TOKENS = 24
Task = dict[str, Any]


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    plain = tiny_decoder()
    config = EngineConfig(num_draft_tokens=4, max_num_seqs=4, max_model_len=512)
    return SpecDecoder(plain.verifier, plain.tokenizer, NGramDrafter(max_draft_tokens=4), config)


@pytest.fixture(scope="module")
def server(decoder: SpecDecoder) -> Iterator[Live]:
    with live_server(decoder, drafter="ngram") as running:
        yield running


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny")


def task(name: str, rows: list[Any], folder: Path, **options: Any) -> Task:
    """A task over local rows."""
    file = write_jsonl(folder / f"{name}.jsonl", rows)
    source = {"data_files": {"test": str(file)}, "cache_dir": str(folder / "datasets")}
    base = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": source,
        "test_split": "test",
        "metadata": {"version": 1},
    }
    return {**base, **options}


def problems(folder: Path) -> Task:
    """Short problems in GSM8K's form, with the prompt and the filters of its task."""
    rows = [row for row in read_bundled()["problems"] if len(row["question"]) < 150][:3]
    assert len(rows) == 3
    bundled = bundled_task(folder)
    wanted = ("output_type", "doc_to_text", "metric_list", "filter_list")
    same = {name: bundled[name] for name in wanted}
    generation = {"until": ["Question:", "e t"], "max_gen_toks": MAX_TOKENS, "do_sample": False}
    return task(
        "problems", rows, folder, **same, doc_to_target="{{answer}}", generation_kwargs=generation
    )


def endings(decoder: SpecDecoder, folder: Path) -> Task:
    """Texts to score, every other one with the target's own greedy ending."""
    rows = []
    for number, text in enumerate(("abcabcabc", "one two one two", "What is 2 + 2?", "x")):
        own = decoder.generate(text, max_tokens=5, ignore_eos=True).text
        rows.append({"text": text, "ending": own if number % 2 else own[:2] + "zq"})
    metrics = [
        {"metric": name, "aggregation": "mean", "higher_is_better": True}
        for name in ("perplexity", "acc")
    ]
    return task("endings", rows, folder, output_type="loglikelihood", doc_to_text="{{text}}",
                doc_to_target="{{ending}}",
                target_delimiter="", metric_list=metrics)  # fmt: skip


def evaluate(
    model: Any, one: Task, arguments: dict[str, Any] | None = None, **options: Any
) -> dict[str, Any]:
    """Results and samples, without names and times."""
    manager = TaskManager(include_defaults=False)
    found = simple_evaluate(
        model, model_args=arguments, tasks=[one], task_manager=manager, bootstrap_iters=0, **options
    )
    samples = found["samples"][one["task"]]
    keep = ("doc_id", "resps", "filtered_resps")
    results = {
        name: value
        for name, value in found["results"][one["task"]].items()
        if isinstance(value, float)
    }
    return {
        "results": results,
        "samples": [{name: sample[name] for name in keep} for sample in samples],
    }


def arguments(server: Live, route: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "base_url": server.url + route,
        "max_length": 512,
        "tokenizer": str(folder),
        **more,
    }


def test_completions_of_lm_eval(server: Live, decoder: SpecDecoder, folder: Path) -> None:
    """`local-completions` generates what the model does in this process, and scores the same."""
    one = problems(folder)
    given = arguments(
        server, "/v1/completions", folder, tokenizer_backend="huggingface", num_concurrent=4
    )
    found, expected = (
        evaluate("local-completions", one, given),
        evaluate(SpecdecLM(decoder=decoder), one),
    )
    assert found == expected
    texts = [sample["resps"][0][0] for sample in found["samples"]]
    assert len(set(texts)) == 3 and all(texts)  # each once per filter


def test_loglikelihoods_of_lm_eval(server: Live, decoder: SpecDecoder, folder: Path) -> None:
    """By `echo`, with the server's own tokenizer: log-probabilities as in this process, and greedy
    where they are.
    """
    one = endings(decoder, folder)
    given = {
        "model": "tiny",
        "base_url": server.url + "/v1/completions",
        "max_length": 512,
        "tokenizer_backend": "remote",
    }
    found, expected = (
        evaluate("local-completions", one, given),
        evaluate(SpecdecLM(decoder=decoder), one),
    )
    greedy = []
    for sample, own in zip(found["samples"], expected["samples"], strict=True):
        (value, is_greedy), (own_value, own_is_greedy) = (
            sample["filtered_resps"][0],
            own["filtered_resps"][0],
        )
        assert value == pytest.approx(own_value, abs=1e-3) and is_greedy == own_is_greedy
        greedy.append(is_greedy)
    assert greedy == [False, True, False, True]
    assert found["results"]["acc,none"] == expected["results"]["acc,none"] == 0.5


def test_chat_completions_of_lm_eval(server: Live, decoder: SpecDecoder, folder: Path) -> None:
    """`local-chat-completions`: the server applies the chat template."""
    one = problems(folder)
    given = {"model": "tiny", "base_url": server.url + "/v1/chat/completions", "max_length": 512}
    found = evaluate("local-chat-completions", one, given, apply_chat_template=True)
    assert found == evaluate(SpecdecLM(decoder=decoder), one, apply_chat_template=True)


def test_the_benchmark_of_dflash(
    server: Live,
    decoder: SpecDecoder,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its tokens and its acceptance length, the mean over requests, are those of the same requests
    in this process.
    """
    benchmark = pytest.importorskip(
        "dflash.benchmark", reason="the public dflash package is not installed"
    )
    questions = ["abcabcabcabc", "one two one two one two", "What is 2 + 2?"]
    dataset = [{"turns": [question]} for question in questions]
    # the real one asks a hub
    monkeypatch.setattr(benchmark, "load_and_process_dataset", lambda name: dataset)
    options = {
        "model": "tiny", "max_new_tokens": 40, "temperature": 0.0, "top_p": 1.0, "top_k": 0,
        "timeout_s": int(HANG),
    }  # fmt: skip
    benchmark.run(
        Namespace(
            backend="openai",
            base_url=server.url,
            dataset="made up",
            num_prompts=3,
            concurrency=2,
            reasoning=None,
            **options,
        )
    )
    printed = dict(re.findall(r"^(.+?):\s+([\d.,]+)", capsys.readouterr().out, re.MULTILINE))
    own = [
        decoder.generate([{"role": "user", "content": question}], max_tokens=40)
        for question in questions
    ]
    assert int(printed["Output tokens"]) == sum(len(result.token_ids) for result in own)
    assert int(printed["Spec verify ct"]) == sum(result.stats.num_steps for result in own)
    assert float(printed["Accept length"]) == pytest.approx(
        statistics.mean(result.stats.tau for result in own), abs=1e-3
    )
    assert any(sum(result.stats.num_accepted) for result in own)
