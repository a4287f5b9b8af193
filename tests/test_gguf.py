"""GGUF files wherever a checkpoint is named: commands, Python, drafters, the hub's cache."""

from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.report.provenance import checkpoint
from specdec import SpecDecoder
from specdec.base.checkpoint import hub
from specdec.base.checkpoint.gguf_names import chosen, quant_of
from specdec.base.errors import CheckpointError
from specdec.cli.main import main
from specdec.kernels.native import native
from specdec.layers.packed import cpu as packed_cpu
from tests.helpers.gguf_files import write_gguf
from tests.helpers.hub_cache import COMMIT, cached, offline
from tests.helpers.tiny_models import plain_greedy, plain_model, tiny_tokenizer
from verifiers import needs as needs_module
from verifiers.gguf.file import GgufFiles
from verifiers.load import load_verifier
from verifiers.needs import read_needs

CPU: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
Patch = pytest.MonkeyPatch
Log = pytest.LogCaptureFixture
PROMPT = [5, 6, 7, 8, 9]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What files say is kept here."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_UNPACKED", {})
    return tmp_path / "cache"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A Qwen2."""
    path = tmp_path / "files" / "tiny-Q4_K_M.gguf"
    path.parent.mkdir()
    write_gguf(path, plain_model("qwen2"), "qwen2")
    return path


def tokens(model: str | Path, drafter: str | Path | None = None) -> list[int]:
    decoder = SpecDecoder.from_pretrained(model, drafter=drafter, **CPU)
    try:
        return list(decoder.generate(PROMPT, max_tokens=12).token_ids)
    finally:
        decoder.close()


def test_a_file_and_its_folder(file: Path) -> None:
    """The tokens of the model that was written, by itself and with itself as the draft model."""
    expected = plain_greedy(plain_model("qwen2"), PROMPT, 12)
    for name in (file, str(file), file.parent):
        assert tokens(name) == expected
    assert tokens(file, drafter=file) == expected


def test_a_quantized_file_drafts(file: Path) -> None:
    """A file with other numbers; outputs are the target's."""
    small = file.parent.parent / "small.gguf"
    write_gguf(
        small,
        plain_model("qwen2", seed=1, num_hidden_layers=2),
        "qwen2",
        kinds={"attn_q.weight": "Q8_0", "ffn_up.weight": "Q4_0"},
    )
    assert tokens(file, drafter=small) == tokens(file)


def test_what_a_file_says_of_sampling(tmp_path: Path, caplog: Log) -> None:
    """The server's defaults are made of it; what we do not have is said, as far as it does
    something.
    """
    said = {"temp": 0.5, "top_k": 3, "penalty_repeat": 1.5, "mirostat": 0, "xtc_probability": 0.0}
    path = tmp_path / "sampled.gguf"
    general = {f"sampling.{key}": value for key, value in said.items()}
    write_gguf(path, plain_model("qwen2"), "qwen2", general=general)
    verifier, _ = load_verifier(path, device=torch.device("cpu"), dtype=torch.float32)
    assert verifier.defaults.stated == {"temperature": 0.5, "top_k": 3}
    words = "llama.cpp would apply general.sampling.penalty_repeat 1.5, which specdec does not have"
    (line,) = [
        record.getMessage() for record in caplog.records if "llama.cpp" in record.getMessage()
    ]
    assert words in line
    needs = read_needs(str(path), device=torch.device("cpu"), dtype=torch.float32, gpu_bytes=10**9)
    assert [words in note for note in needs.notes] == [True]


@pytest.mark.parametrize("command", ["generate", "doctor"])
def test_commands(command: str, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the file's chat template."""
    prompt = ["ab", "--max-tokens", "3"] if command == "generate" else []
    models = ["--model", str(file), "--drafter", str(file), "--device", "cpu", "--dtype", "float32"]
    assert main([command, *prompt, *models]) == 0
    assert command == "generate" or "would run     yes" in capsys.readouterr().out


def test_needs_are_told_from_the_file(file: Path) -> None:
    needs = read_needs(str(file), device=torch.device("cpu"), dtype=torch.float32, gpu_bytes=10**9)
    assert needs.would_run and (needs.hidden_size, needs.num_layers, needs.vocab_size) == (
        32,
        4,
        97,
    )


@pytest.mark.parametrize("compiler", [True, False])
def test_blocks_are_computed_in_bfloat16_on_any_cpu(
    compiler: bool, file: Path, tmp_path: Path, monkeypatch: Patch
) -> None:
    """Our own products take them there, in bfloat16 alone, whatever torch is good at. Catches ones
    that become four times as large, and as slow.
    """
    if compiler and native() is None:
        pytest.skip("this machine has no C++ compiler")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(packed_cpu, "native", native if compiler else lambda: None)
    plain_model("qwen2").save_pretrained(tmp_path / "folder")
    tiny_tokenizer().save_pretrained(tmp_path / "folder")
    half = torch.bfloat16 if compiler else torch.float32
    asked: list[tuple[str | Path, dict[str, Any], torch.dtype]] = [(file, {}, half)]
    if compiler:
        asked += [
            ("embedded", {}, half),
            (tmp_path / "folder", {}, torch.float32),
            (file, {"weights": "bfloat16"}, torch.bfloat16),
            (file, {"dtype": "float32"}, torch.float32),
        ]
    for name, options, expected in asked:
        decoder = SpecDecoder.from_pretrained(name, drafter=None, device="cpu", **options)
        assert decoder.engine.verifier.dtype == expected
        decoder.close()
    for name, expected in ((str(file), half), ("embedded", half), (str(file.parent), half)):
        needs = read_needs(name, device=torch.device("cpu"), dtype=None, gpu_bytes=10**9)
        assert needs.dtype == expected


@pytest.mark.parametrize("keeps", [True, False])
def test_needed_memory(keeps: bool, file: Path, monkeypatch: Patch) -> None:
    """Matrices in blocks keep their bytes where products take them; all else becomes numbers."""
    monkeypatch.setattr(needs_module, "keeps_blocks", lambda *_: keeps)
    kinds = {"ffn_up.weight": "Q8_0", "attn_q.weight": "Q4_0"}
    write_gguf(file, plain_model("qwen2"), "qwen2", kinds=kinds)
    entries = GgufFiles(file).entries.values()
    sizes = [one.size if keeps and one.kind != 0 else prod(one.shape) * 2 for one in entries]
    needs = read_needs(str(file), device=torch.device("cpu"), dtype=torch.bfloat16, gpu_bytes=10**9)
    assert (needs.weights, needs.unpacked) == (sum(sizes), not keeps)
    assert needs.stored == "F32, Q8_0, Q4_0"


def test_names_on_the_hub(file: Path, tmp_path: Path, monkeypatch: Patch, caplog: Log) -> None:
    """By file, by quantization and by repository alone; of several the usual one is taken."""
    (file.parent / "tiny-Q8_0.gguf").write_bytes(file.read_bytes())
    (file.parent / "mmproj-tiny-f16.gguf").write_bytes(b"GGUF")
    cached(tmp_path / "hub", "acme/tiny-GGUF", file.parent)
    offline(monkeypatch, tmp_path / "hub")
    expected = tokens(file)
    for name in (
        "acme/tiny-GGUF:tiny-Q8_0.gguf",
        "acme/tiny-GGUF:Q8_0",
        "acme/tiny-GGUF:q4_k_m@main",
        "acme/tiny-GGUF",
    ):
        assert tokens(name) == expected
        assert checkpoint(name)["revision"] == COMMIT
        assert any(digest.endswith(".gguf") for digest in checkpoint(name)["sha256"])
    assert (
        "tiny-Q4_K_M.gguf is taken of 2 GGUF files; name another as acme/tiny-GGUF:" in caplog.text
    )
    with pytest.raises(
        CheckpointError,
        match=r"no one GGUF file of Q5_K_M; there is Q4_K_M, Q8_0: name one",
    ):
        tokens("acme/tiny-GGUF:Q5_K_M")
    with pytest.raises(CheckpointError, match=r"out of reach and no\.gguf is not in its cache"):
        tokens("acme/tiny-GGUF:no.gguf")


def test_several_files_in_a_folder(file: Path) -> None:
    (file.parent / "tiny-Q8_0.gguf").write_bytes(file.read_bytes())
    with pytest.raises(
        CheckpointError,
        match=r"holds 2 GGUF files; name one of them, such as '.*tiny-Q4_K_M\.gguf'",
    ):
        tokens(file.parent)


def test_a_changed_file_is_read_again(file: Path) -> None:
    """What it says is kept by its size and time."""
    before = tokens(file)
    write_gguf(file, plain_model("qwen2", seed=3), "qwen2", {"context_length": 256})
    assert tokens(file) == plain_greedy(plain_model("qwen2", seed=3), PROMPT, 12) != before
    assert SpecDecoder.from_pretrained(file, drafter=None, **CPU).verifier.max_model_len == 256


@pytest.mark.parametrize(
    ("file", "quant"),
    [
        ("a-Q4_K_M.gguf", "Q4_K_M"),
        ("a.q8_0.gguf", "q8_0"),
        ("a-UD-IQ2_XXS-00001-of-00003.gguf", "UD-IQ2_XXS"),
        ("Q6_K/a-Q6_K-00001-of-00002.gguf", "Q6_K"),
        ("a-bf16.gguf", "bf16"),
        ("a.gguf", None),
    ],
)
def test_quantizations_in_names(file: str, quant: str | None) -> None:
    assert quant_of(file) == quant
    others = ["b-Q3_K_S.gguf", "mmproj-Q6_K.gguf"]
    assert quant is None or chosen([file, *others], quant.lower()) == file
