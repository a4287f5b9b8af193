"""Other systems beside ours in one bench run."""

import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.dflash.config.checkpoint import read_checkpoint
from drafters.dspark.markov import MarkovConfig
from drafters.shipped import shipped_drafter_path
from evals.bench.bench import Bench
from evals.bench.config import BenchConfig
from evals.peers.llama_cpp import LlamaCppPeer
from evals.peers.peer import load_peer
from evals.report.compare import compare_reports
from evals.report.html import html_report
from evals.report.table import format_report
from specdec.base.errors import InvalidInputError
from specdec.sampling.params import SamplingDefaults, SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.drafters.tiny import TINY, write_tiny_dflash
from tests.evals.tiny import PROMPTS, PROVENANCE, save_tiny, tiny_decoder
from tests.helpers.gguf_files import write_gguf
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from verifiers.load import load_verifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny decoder's own weights as a folder."""
    return save_tiny(tmp_path_factory.mktemp("tiny"))


def decoder_of(folder: Path) -> Any:
    """The tiny decoder under the name of its folder, as the command line would have loaded it."""
    decoder = tiny_decoder()
    decoder.verifier.name = str(folder)
    return decoder


@pytest.mark.slow
@pytest.mark.parametrize(
    "defaults",
    [SamplingDefaults(), SamplingDefaults(1.2, min_tokens=4)],
    ids=["plain", "penalized"],
)
def test_transformers_gives_the_same_tokens_side_by_side(
    folder: Path, defaults: SamplingDefaults
) -> None:
    """Padded batches, an end token inside a batch, and prompt lookup; in float32 nothing may differ
    from plain decoding.
    """
    config = BenchConfig(
        sets=(PROMPTS,),
        num_draft_tokens=(2,),
        max_tokens=12,
        repeats=1,
        warmup=0,
        peers=("transformers", "transformers-lookup"),
    )
    decoder = decoder_of(folder)
    decoder.verifier.defaults = defaults
    *_, report = Bench(decoder, config).run(PROVENANCE)
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
    page = html_report(report)
    assert page.count("<svg") == 5
    assert "fill: var(--side-2)" in page  # the last peer's bar


def test_a_batch_stops_each_answer_at_its_own_end(folder: Path) -> None:
    """Catches padding that is taken for output, and batches cut at the wrong size."""
    decoder = decoder_of(folder)
    peer = load_peer("transformers", decoder.verifier)
    prompts = [[5, 6, 7], [9], [30, 31, 32, 33, 34], [11, 12]]
    samplings = [SamplingParams(max_tokens=count) for count in (4, 9, 6, 3)]
    expected = [decoder.generate(p, s).token_ids for p, s in zip(prompts, samplings, strict=True)]
    eos = expected[1][2]
    peer._eos = [eos]  # type: ignore[attr-defined]
    expected = [tokens[: tokens.index(eos) + 1] if eos in tokens else tokens for tokens in expected]
    assert len(expected[1]) == 3
    assert peer.generate(prompts, samplings, concurrency=3) == expected


def test_a_checkpoint_that_asks_for_what_llama_cpp_has_otherwise(folder: Path) -> None:
    verifier = decoder_of(folder).verifier
    for defaults in (
        SamplingDefaults(1.1),
        SamplingDefaults(min_tokens=1),
        SamplingDefaults(min_length=9),
    ):
        verifier.defaults = defaults
        with pytest.raises(
            InvalidInputError, match="measure all without, by --generation-config none"
        ):
            load_peer("llama.cpp:x.gguf", verifier)


def test_llama_cpp_decodes_the_embedded_file() -> None:
    """Catches a wrong vocabulary and prompts that are not reset; its 8-bit activations may pick
    other words elsewhere.
    """
    pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
    from specdec.session.decoder import SpecDecoder

    decoder = SpecDecoder.from_pretrained("embedded", drafter=None, dtype="float32")
    prompt = decoder.tokenize([{"role": "user", "content": "Count from 1 to 5."}])
    sampling = SamplingParams(max_tokens=8)
    (tokens,) = load_peer("llama.cpp", decoder.verifier).generate(
        [prompt], [sampling], concurrency=1
    )
    assert decoder.tokenizer.decode(tokens).startswith("1.")


class FakeVllm:
    """A recording stand-in for the library.

    Attributes:
        calls: options of every engine, and prompt and sampling of every request.
        waiting, max_waiting: requests that have not ended, and how many there were at most.
        running: engines that were started and not shut down.
        fails: the next engine does not start.
        counts: what the engine tells of its drafts; each request adds 10 steps and 35 accepted
            drafts.
        library: the module.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: dict[str, float] = {}
        self.calls: list[dict[str, Any]] = []
        self.waiting: list[tuple[str, list[int]]] = []
        self.max_waiting = 0
        self.running = 0
        self.fails = False
        self.library = library = ModuleType("vllm")
        library.__version__, library.LLM, library.SamplingParams = (  # type: ignore[attr-defined]
            "0.23.0",
            self.start,
            lambda **options: options,
        )
        library.inputs, library.sampling_params = (  # type: ignore[attr-defined]
            ModuleType("vllm.inputs"),
            ModuleType("vllm.sampling_params"),
        )
        library.inputs.tokens_input = lambda token_ids: {"prompt_token_ids": token_ids}
        library.sampling_params.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
        for module in (library, library.inputs, library.sampling_params):
            monkeypatch.setitem(sys.modules, module.__name__, module)

    def start(self, **options: Any) -> SimpleNamespace:
        self.calls.append(options)
        if self.fails:
            raise RuntimeError("no memory")
        self.running += 1
        core = SimpleNamespace(shutdown=self.shut_down)
        engine = SimpleNamespace(engine_core=core, add_request=self.add_request, step=self.step)
        return SimpleNamespace(llm_engine=engine, get_metrics=self.get_metrics)

    def get_metrics(self) -> list[Any]:
        counters = [
            SimpleNamespace(name=f"vllm:spec_decode_num_{name}", value=value)
            for name, value in self.counts.items()
        ]
        return [SimpleNamespace(name="vllm:a_histogram", buckets={}), *counters]

    def shut_down(self) -> None:
        self.running -= 1

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        self.calls.append({"prompt": prompt, "params": params})
        self.waiting.append((request_id, prompt["prompt_token_ids"]))
        self.max_waiting = max(self.max_waiting, len(self.waiting))

    def step(self) -> list[Any]:
        """Ends the request that came last, and says of the first that it goes on."""
        ended = self.waiting.pop()
        self.counts = {
            name: self.counts.get(name, 0.0) + more
            for name, more in (("drafts", 10), ("accepted_tokens", 35))
        }
        going_on = [
            SimpleNamespace(request_id=name, finished=False, outputs=[])
            for name, _ in self.waiting[:1]
        ]
        answer = SimpleNamespace(token_ids=(*ended[1], 2))
        return [*going_on, SimpleNamespace(request_id=ended[0], finished=True, outputs=[answer])]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    return FakeVllm(monkeypatch)


def gpu_verifier(folder: Path, **changes: Any) -> Any:
    """The tiny target as if it lay on a GPU."""
    verifier = decoder_of(folder).verifier
    names = ("name", "dtype", "max_model_len", "eos_token_ids", "embedding_scale")
    return SimpleNamespace(
        **{name: getattr(verifier, name) for name in names}
        | {"device": torch.device("cuda")}
        | changes
    )


def test_vllm_is_asked_for_the_same_work(folder: Path, vllm: FakeVllm) -> None:
    """Catches lengths, end tokens or numbers of conversations that are not passed on, and what the
    user set to end outputs.
    """
    with pytest.raises(InvalidInputError, match="runs on a GPU and the target is on cpu"):
        load_peer("vllm", decoder_of(folder).verifier)
    with pytest.raises(InvalidInputError, match="names no drafter checkpoint"):
        load_peer("vllm:nothing", gpu_verifier(folder))
    peer = load_peer("vllm", gpu_verifier(folder))
    controls: dict[str, Any] = {"repetition_penalty": 1.3, "min_tokens": 2}
    samplings = [
        SamplingParams(max_tokens=5, stop_token_ids=(8, 9), **controls),
        SamplingParams(max_tokens=6, ignore_eos=True),
    ]
    assert peer.generate([[1, 2], [3]], samplings, concurrency=8) == [[1, 2, 2], [3, 2]]
    started, *asked = vllm.calls
    assert (started["model"], started["max_num_seqs"], started["dtype"]) == (
        str(folder),
        256,
        "float32",
    )
    assert started["enable_prefix_caching"] is False
    assert [one["prompt"] for one in asked] == [
        {"prompt_token_ids": [1, 2]},
        {"prompt_token_ids": [3]},
    ]
    params = [one["params"] for one in asked]
    assert [one["max_tokens"] for one in params] == [5, 6]
    assert [(one["repetition_penalty"], one["min_tokens"]) for one in params] == [
        (1.3, 2),
        (1.0, 0),
    ]
    assert [(one["stop_token_ids"], one["ignore_eos"]) for one in params] == [
        ([2, 8, 9], False),
        ([], True),
    ]


@pytest.mark.parametrize("concurrency", [1, 3, 8])
def test_vllm_has_as_many_conversations_as_asked_for(
    folder: Path, vllm: FakeVllm, concurrency: int
) -> None:
    """Catches answers in the order in which they end, and more or fewer conversations at once than
    in our engine.
    """
    peer = load_peer("vllm", gpu_verifier(folder))
    for prompts in ([[number] for number in range(3, 10)], [[4, 5]]):
        vllm.max_waiting = 0
        answers = peer.generate(prompts, [SamplingParams()] * len(prompts), concurrency=concurrency)
        assert answers == [[*prompt, 2] for prompt in prompts]
        assert vllm.max_waiting == min(concurrency, len(prompts))


def test_a_head_goes_to_releases_that_know_it_with_whole_tables(
    tmp_path: Path, vllm: FakeVllm
) -> None:
    """Catches a head that is left out, tied tables that vLLM would not find, and a name that is
    taken for a folder.
    """
    embedded: Any = SimpleNamespace(
        name="embedded",
        dtype=torch.bfloat16,
        max_model_len=8192,
        eos_token_ids=(2,),
        embedding_scale=1.0,
        device=torch.device("cuda"),
    )
    with pytest.raises(
        InvalidInputError,
        match=r"peer 'vllm:embedded': the drafter has a head, which vLLM 0\.23\.0 does not know",
    ):
        load_peer("vllm:embedded", embedded)
    vllm.library.__version__ = "0.26.0"  # type: ignore[attr-defined]
    peer = load_peer("vllm:embedded", embedded)
    assert peer.tau is None  # nothing is generated
    for _ in range(2):  # of each call for itself
        vllm.counts = {"drafts": 5.0, "accepted_tokens": 1.0}
        peer.generate([[1]], [SamplingParams()], concurrency=1)
        assert peer.tau == 4.5
    asked = vllm.calls[0]["speculative_config"]
    assert (asked["method"], asked["num_speculative_tokens"]) == ("dspark", 15)
    config, tensors = read_checkpoint(asked["model"])
    own, tied = read_checkpoint(shipped_drafter_path())
    assert config.head == own.head and own.tied_tables and not config.tied_tables
    table = "markov_head.markov_w2.weight"
    assert tensors[table].shape == (own.vocab_size, tied[table].shape[0])


def test_heads_that_vllm_would_take_for_others_stay_away(
    folder: Path, tmp_path: Path, vllm: FakeVllm
) -> None:
    """Of DSpark's heads it knows the one that looks at the token before alone."""
    vllm.library.__version__ = "0.26.0"  # type: ignore[attr-defined]
    write_tiny_dflash(tmp_path / "drafter", replace(TINY, head=MarkovConfig(rank=4, kind="gated")))
    with pytest.raises(
        InvalidInputError, match=r"the drafter has a head, which vLLM 0\.26\.0 does not know"
    ):
        load_peer(f"vllm:{tmp_path / 'drafter'}", gpu_verifier(folder))


def test_vllm_never_holds_two_engines(folder: Path, vllm: FakeVllm) -> None:
    """Catches an engine that keeps its memory, one that failed to start and is then asked, and two
    peers that take turns.
    """
    peer = load_peer("vllm", gpu_verifier(folder))
    ask = partial(peer.generate, [[1]], [SamplingParams()])
    for concurrency in (1, 4, 300):
        ask(concurrency=concurrency)
        assert vllm.running == 1
    assert [call["max_num_seqs"] for call in vllm.calls if "max_num_seqs" in call] == [256, 300]
    vllm.fails = True
    with pytest.raises(RuntimeError, match="no memory"):
        ask(concurrency=301)
    assert vllm.running == 0
    vllm.fails = False
    assert ask(concurrency=4) == [[1, 2]]
    assert vllm.running == 1
    with pytest.raises(
        InvalidInputError, match="has peer 'vllm'; measure 'vllm:a/b' in a run of its own"
    ):
        load_peer("vllm:a/b", gpu_verifier(folder))
    del peer, ask
    load_peer("vllm", gpu_verifier(folder))


def test_vllm_gets_the_weights_that_transformers_reads(
    folder: Path, tmp_path: Path, vllm: FakeVllm
) -> None:
    """Further safetensors files beside the model, as the embedded one has, would be loaded as if
    they were its own.
    """
    shutil.copytree(folder, tmp_path / "model")
    (tmp_path / "model" / "blocks.safetensors").write_bytes(b"other weights")
    peer = load_peer("vllm", gpu_verifier(tmp_path / "model"))
    peer.generate([[1]], [SamplingParams()], concurrency=1)
    given = Path(vllm.calls[0]["model"])
    assert {file.name for file in given.iterdir()} == {file.name for file in folder.iterdir()}
    assert (given / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    del peer
    assert not given.exists()
    # with it vLLM chooses as Transformers does
    (tmp_path / "model" / "model.safetensors.index.json").write_text("{}")
    load_peer("vllm", gpu_verifier(tmp_path / "model")).generate(
        [[1]], [SamplingParams()], concurrency=1
    )
    assert vllm.calls[2]["model"] == str(tmp_path / "model")


@pytest.mark.parametrize(
    ("changes", "target", "said"),
    [
        ({"windows": (3, None, None)}, {}, "a sliding window"),
        ({"causal": (True, True, True)}, {}, "causal layers"),
        ({"sample_from_anchor": True}, {}, "sample_from_anchor"),
        ({"input_embedding_scale": 2.0}, {}, "an embedding scale of 2"),
        ({}, {"embedding_scale": 8.0}, "an embedding scale of 8"),
        ({"output_multiplier": 0.5}, {}, "an output multiplier of 0.5"),
        ({"final_logit_softcapping": 30.0}, {}, "a softcap"),
        ({}, {}, None),
    ],
)
def test_vllm_is_given_no_drafter_that_it_reads_otherwise(
    changes: dict[str, Any],
    target: dict[str, Any],
    said: str | None,
    folder: Path,
    tmp_path: Path,
    vllm: FakeVllm,
) -> None:
    """vLLM 0.23 raises no error for these; its drafts would be wrong and its figures too low."""
    config = replace(TINY, **changes)
    write_tiny_dflash(tmp_path / "drafter", config)
    name, verifier = f"vllm:{tmp_path / 'drafter'}", gpu_verifier(folder, **target)
    if said is not None:
        with pytest.raises(
            InvalidInputError, match=f"the drafter has {said}, which vLLM 0.23.0 does not know"
        ):
            load_peer(name, verifier)
        return
    load_peer(name, verifier).generate([[1]], [SamplingParams()], concurrency=1)
    assert vllm.calls[0]["speculative_config"] == {
        "method": "dflash",
        "model": str(tmp_path / "drafter"),
        "num_speculative_tokens": config.block_size - 1,
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peers": ("transformer",)}, "did you mean 'transformers'"),
        ({"peers": ("llama.cpp:missing.gguf",)}, "no file 'missing.gguf'"),
        ({"peers": ("llama.cpp",)}, "give it as llama.cpp:FILE"),
        ({"peers": ("transformers",), "temperatures": (0.0, 1.0)}, "the temperature is 1"),
        (
            {"peers": ("transformers-lookup",), "concurrencies": (1, 4)},
            "concurrency is 4 and peer 'transformers-lookup' decodes 1",
        ),
    ],
)
def test_what_a_peer_cannot_do_is_said_before_measuring(
    changes: dict[str, Any], message: str, folder: Path
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        Bench(decoder_of(folder), BenchConfig(**{"sets": (PROMPTS,)} | changes))


@pytest.mark.parametrize("as_folder", [False, True])
def test_peers_get_the_file_of_a_gguf_target(
    as_folder: bool, tmp_path: Path, vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named itself or by a folder; catches peers that are given what a file was unpacked to, where
    no weights lie.
    """
    file = tmp_path / "model" / "tiny.gguf"
    file.parent.mkdir()
    write_gguf(file, plain_model("qwen2"), "qwen2")
    if as_folder:
        plain_model("qwen2").config.save_pretrained(file.parent)
        tiny_tokenizer().save_pretrained(file.parent)
    named = file.parent if as_folder else file
    device = torch.device("cpu")
    verifier, tokenizer = load_verifier(named, device=device, dtype=torch.float32, block_size=4)
    peer = load_peer("transformers", verifier)
    prompt, sampling = [5, 6, 7], SamplingParams(max_tokens=6, ignore_eos=True)
    ours = SpecDecoder(verifier, tokenizer).generate(prompt, sampling).token_ids
    (theirs,) = peer.generate([prompt], [sampling], concurrency=1)
    assert theirs == ours[: len(theirs)] and theirs
    given: list[Path] = []
    monkeypatch.setattr(LlamaCppPeer, "__init__", lambda peer, path, *rest: given.append(path))
    load_peer("llama.cpp", verifier)
    assert given == [file]
    asked = load_peer("vllm", gpu_verifier(named))
    asked.generate([[1]], [SamplingParams()], concurrency=1)
    assert vllm.calls[0]["model"] == str(file)


def test_what_transformers_cannot_load_is_one_line(tmp_path: Path) -> None:
    """Its own reader knows fewer architectures than ours."""
    verifier = decoder_of(tmp_path / "nowhere").verifier
    with pytest.raises(InvalidInputError, match=r"peer 'transformers' cannot load '.*nowhere': "):
        load_peer("transformers", verifier)


def test_a_missing_package_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    file = folder / "model.safetensors"
    with pytest.raises(InvalidInputError, match="needs the package llama-cpp-python"):
        load_peer(f"llama.cpp:{file}", decoder_of(folder).verifier)
