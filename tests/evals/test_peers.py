"""Other systems beside ours in one bench run."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from evals.bench import Bench, BenchConfig
from evals.html_report import html_report
from evals.peers import load_peer
from evals.report_compare import compare_reports
from evals.report_table import format_report
from specdec.config import SamplingParams
from specdec.errors import InvalidInputError
from tests.evals.tiny import PROMPTS, PROVENANCE, save_tiny, tiny_decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder's own weights as a folder."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def decoder_of(folder: Path) -> Any:
    """The tiny decoder under the name of its folder, as the command line would have loaded it."""
    decoder = tiny_decoder()
    decoder.verifier.name = str(folder)
    return decoder


def test_transformers_gives_the_same_tokens_side_by_side(folder: Path) -> None:
    """Padded batches, an end token inside a batch, and prompt lookup; in float32 nothing may differ from plain decoding."""
    config = BenchConfig(
        sets=(PROMPTS,),
        num_draft_tokens=(2,),
        max_tokens=12,
        repeats=1,
        warmup=0,
        peers=("transformers", "transformers-lookup"),
    )
    *_, report = Bench(decoder_of(folder), config).run(PROVENANCE)
    rows = {row["drafter"]: row for row in report["rows"]}
    assert list(rows) == ["none", "ngram", "transformers", "transformers-lookup"]
    for name in ("transformers", "transformers-lookup"):
        row = rows[name]
        assert row["peer"]
        assert row["num_answers"] == rows["none"]["num_answers"]
        assert row["differing_answers"] == []
        assert row["speed"]["num_tokens"] == rows["none"]["speed"]["num_tokens"]
        assert row["acceptance"] is None
        speeds = [one["speed"]["tokens_per_second"]["median"] for one in (row, rows["none"])]
        assert row["ratio"] == pytest.approx(speeds[0] / speeds[1])
    assert rows["none"]["peer"] is None
    assert "transformers-lookup" in format_report(report)
    assert "transformers-lookup" in compare_reports(report, report)
    assert html_report(report).count("<svg") == 4


def test_a_batch_stops_each_answer_at_its_own_end(folder: Path) -> None:
    """Catches padding that is taken for output, and batches cut at the wrong size."""
    decoder = decoder_of(folder)
    peer = load_peer("transformers", decoder.verifier)
    prompts = [[5, 6, 7], [9], [30, 31, 32, 33, 34], [11, 12]]
    samplings = [SamplingParams(max_tokens=count) for count in (4, 9, 6, 3)]
    expected = [decoder.generate(p, s).token_ids for p, s in zip(prompts, samplings, strict=True)]
    peer._eos = [expected[1][2]]  # type: ignore[attr-defined]
    expected = [tokens[: tokens.index(peer._eos[0]) + 1] if peer._eos[0] in tokens else tokens for tokens in expected]  # type: ignore[attr-defined]
    assert len(expected[1]) == 3
    assert peer.generate(prompts, samplings, concurrency=3) == expected


def test_llama_cpp_decodes_the_embedded_file() -> None:
    """Catches a wrong vocabulary and prompts that are not reset; its 8-bit activations may pick other words elsewhere."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from specdec.decoder import SpecDecoder

    decoder = SpecDecoder.from_pretrained("embedded", drafter=None, dtype="float32")
    prompt = decoder.tokenize([{"role": "user", "content": "Count from 1 to 5."}])
    sampling = SamplingParams(max_tokens=8)
    (tokens,) = load_peer("llama.cpp", decoder.verifier).generate([prompt], [sampling], concurrency=1)
    assert decoder.tokenizer.decode(tokens).startswith("1.")


def test_vllm_is_asked_for_the_same_work(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording stand-in for the library: catches lengths, end tokens or numbers of conversations that are not passed on."""
    calls: list[dict[str, Any]] = []

    class Engine:
        def __init__(self, **options: Any) -> None:
            calls.append(options)

        def generate(self, prompts: Any, params: Any, use_tqdm: bool) -> Any:
            calls.append({"prompts": prompts, "params": params})
            return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=(7, 2))]) for _ in prompts]

    library = ModuleType("vllm")
    library.__version__, library.LLM, library.SamplingParams = "0.0", Engine, lambda **options: options  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", library)
    verifier = SimpleNamespace(**vars(decoder_of(folder).verifier))
    with pytest.raises(InvalidInputError, match="runs on a GPU and the target is on cpu"):
        load_peer("vllm", verifier)
    verifier.device = torch.device("cuda")
    with pytest.raises(InvalidInputError, match="names no drafter checkpoint"):
        load_peer("vllm:nothing", verifier)
    peer = load_peer("vllm", verifier)
    assert peer.generate([[1, 2], [3]], [SamplingParams(max_tokens=n) for n in (5, 6)], concurrency=8) == [[7, 2], [7, 2]]
    peer.generate([[1]], [SamplingParams(max_tokens=5)], concurrency=8)
    started, asked, _ = calls
    assert (started["model"], started["max_num_seqs"], started["dtype"]) == (str(folder), 8, "float32")
    assert started["enable_prefix_caching"] is False
    assert asked["prompts"] == [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [3]}]
    assert [one["max_tokens"] for one in asked["params"]] == [5, 6]
    assert asked["params"][0]["stop_token_ids"] == [2]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peers": ("transformer",)}, "did you mean 'transformers'"),
        ({"peers": ("llama.cpp:missing.gguf",)}, "no file 'missing.gguf'"),
        ({"peers": ("llama.cpp",)}, "give it as llama.cpp:FILE"),
        ({"peers": ("transformers",), "temperatures": (0.0, 1.0)}, "the temperature is 1"),
        ({"peers": ("transformers-lookup",), "concurrencies": (1, 4)}, "concurrency is 4 and peer 'transformers-lookup' decodes 1"),
    ],
)
def test_what_a_peer_cannot_do_is_said_before_measuring(changes: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Bench(decoder_of(folder), BenchConfig(**{"sets": (PROMPTS,)} | changes))


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    file = folder / "model.safetensors"
    with pytest.raises(InvalidInputError, match="needs the package llama-cpp-python"):
        load_peer(f"llama.cpp:{file}", decoder_of(folder).verifier)
