"""Bad input from the command line down to real files: one line with the value, the limit and the
way out, and nothing lost.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split

from drafters.dflash.config.checkpoint import write_checkpoint
from specdec import EngineConfig, SpecDecError, SpecDecoder
from specdec.base.errors import LONGEST, CheckpointError, InvalidInputError
from specdec.base.packages import ROOT
from specdec.base.registry import VERBS
from specdec.cli import main as main_module
from specdec.cli.main import main
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from tests.helpers.waiting import HANG

Capture = pytest.CaptureFixture[str]
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target and a drafter for it, on disk."""
    root = tmp_path_factory.mktemp("models")
    model = plain_model("llama")
    model.save_pretrained(root / "target")
    tiny_tokenizer().save_pretrained(root / "target")
    drafter = random_dflash(paged_verifier(model), causal=(False, True, True))
    write_checkpoint(root / "drafter", drafter.config, drafter.model.state_dict())
    return root


def fails(capsys: Capture, *arguments: str | Path, status: int = 2) -> str:
    """The one line that the command prints before it exits with `status`."""
    assert main(["generate", *map(str, arguments)]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if line.startswith("specdec: error: ")]
    assert len(lines) == 1, captured.err
    assert "Traceback" not in captured.err
    return lines[0]


def test_the_folders_work(folders: Path, capsys: Capture) -> None:
    """What the other tests damage is sound."""
    given = ["generate", "abc", "--raw", "--max-tokens", "5", "--drafter"]
    assert main([*given, str(folders / "drafter"), "--model", str(folders / "target")]) == 0
    assert "tokens per verify step" in capsys.readouterr().err


def truncate(name: str) -> Damage:
    def damage(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: len(content) // 2])

    return damage


def reweighted(change: Callable[[dict[str, Any]], object]) -> Damage:
    """With other weights than there were."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return damage


def drop(tensor: str) -> Damage:
    return reweighted(lambda tensors: tensors.pop(tensor))


def set_key(**values: object) -> Damage:
    def damage(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | values))

    return damage


def remove(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_text(content)

    return damage


def fill(tensor: str, value: float) -> Damage:
    return reweighted(lambda tensors: tensors[tensor].fill_(value))


def index(file: str) -> Damage:
    def damage(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": {"fc.weight": file}})
        )

    return damage


READ, CONFIG = (f"cannot read the {what} of target" for what in ("weights", "config"))

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 3,
    "long_factor": [2.0] * 3,
}
"""With factors for fewer numbers than a head has."""
ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (truncate("model.safetensors"), (READ, "is damaged", "fetch the whole checkpoint again")),
        (truncate("config.json"), ("config.json of target", "is not valid JSON")),
        (
            drop("model.layers.2.mlp.up_proj.weight"),
            ("lacks 1 tensors", "model.layers.2.mlp.up_proj.weight", "fetch"),
        ),
        (
            set_key(num_hidden_layers=5),
            ("lacks 9 tensors", "model.layers.4.input_layernorm.weight"),
        ),
        (set_key(intermediate_size=50), (READ, "[48, 32] and the config asks for [50, 32]")),
        (set_key(model_type="t5"), ("encoder-decoder",)),
        (set_key(rope_parameters=LONGROPE), (READ, "torch.Size([8])")),
        (
            set_key(rope_parameters=LONGROPE | {"original_max_position_embeddings": 0}),
            (CONFIG, "original_max_position_embeddings is 0"),
        ),
        (remove("config.json"), ("target", "has no config.json")),
        (remove("model.safetensors"), (READ, "there are no weights")),
        (write("config.json", "null"), ("config.json of target", "holds no JSON object")),
        (
            write("tokenizer_config.json", "[]"),
            ("cannot read the tokenizer of target", "write it again"),
        ),
        (set_key(vocab_size="97"), (CONFIG, "vocab_size")),
        (set_key(num_key_value_heads=0), ("num_key_value_heads is 0", "at least 1")),
        (set_key(num_hidden_layers=0), ("num_hidden_layers is 0", "at least 1")),
        (
            set_key(max_position_embeddings=10**18),
            ("max_position_embeddings is 1000", "[1, 2**31)"),
        ),
    ],
)
def test_damaged_target(
    folders: Path, tmp_path: Path, capsys: Capture, damage: Damage, said: Sequence[str]
) -> None:
    """A truncated or incomplete target never runs with whatever weights were left."""
    shutil.copytree(folders / "target", tmp_path / "target")
    damage(tmp_path / "target")
    line = fails(capsys, "abc", "--raw", "--model", tmp_path / "target")
    for part in said:
        assert part in line


def test_a_missing_package_is_named(
    folders: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read of a GGUF file;
    no package is needed for what safetensors files hold.
    """
    shutil.copytree(folders / "target", tmp_path / "target")
    remove("model.safetensors")(tmp_path / "target")
    (tmp_path / "target" / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("verifiers.gguf.file.find_spec", lambda name: None)
    line = fails(capsys, "abc", "--raw", "--model", tmp_path / "target")
    assert (
        "'model.gguf' needs package gguf, which is not installed; run: python -m pip install gguf"
        in line
    )


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (
            truncate("model.safetensors"),
            ("'model.safetensors' is damaged", "fetch the whole checkpoint again"),
        ),
        (drop("fc.weight"), ("tensor fc.weight is missing",)),
        (set_key(num_target_layers=9), ("was made for 9 target layers, not 4",)),
        (set_key(vocab_size=120), ("vocabulary has 120 tokens, the target's 97",)),
        (set_key(architectures=["DSpineDraftModel"]), ("is not supported yet",)),
        (remove("model.safetensors"), ("there are no weights",)),
        (
            fill("fc.weight", torch.nan),
            ("tensor fc.weight holds NaN or infinite values", "download it again"),
        ),
        (write("config.json", "[" * 100_000), ("config.json of drafter", "is not valid JSON")),
        (set_key(block_size=10**30), ("block_size is", "at most 1,024")),
        (set_key(num_hidden_layers=10**9), ("num_hidden_layers is 1000000000", "[1, 1,024]")),
        (set_key(head_dim=10**30), ("head_dim is", "below 2**31")),
        (set_key(max_position_embeddings=0), ("max_position_embeddings is 0", "positive")),
        (set_key(sliding_window=True), ("config.json enables no window",)),
        (set_key(rope_parameters=ROPE | {"rope_theta": 10**400}), ("rope_theta is 1000",)),
        (
            set_key(rope_parameters=ROPE | {"original_max_position_embeddings": 0}),
            ("RoPE's original_max_position_embeddings is 0",),
        ),
        (set_key(rms_norm_eps=-1), ("rms_norm_eps is -1.0", "at least 0")),
        (set_key(final_logit_softcapping=-5), ("final_logit_softcapping is -5.0", "positive")),
        (
            set_key(input_embedding_scale=10**400),
            ("input_embedding_scale is 1000", "it must be a number"),
        ),
        (
            set_key(speculators_config={"verifier": {"architectures": 5}}),
            ("architectures are 5", "a list"),
        ),
        (index("../../model.safetensors"), ("does not name a file beside it for each tensor",)),
        (
            index("x" * 5000),
            ("of the files that model.safetensors.index.json tells of are missing",),
        ),
    ],
)
def test_damaged_or_foreign_drafter(
    folders: Path, tmp_path: Path, capsys: Capture, damage: Damage, said: Sequence[str]
) -> None:
    """A drafter that is broken, or made for another target, is refused with the reason."""
    shutil.copytree(folders / "drafter", tmp_path / "drafter")
    damage(tmp_path / "drafter")
    line = fails(
        capsys, "abc", "--raw", "--model", folders / "target", "--drafter", tmp_path / "drafter"
    )
    for part in said:
        assert part in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("abc", "--drafter", "ngramm"),
            ("unknown drafter 'ngramm'", "known: auto, ngram, suffix, dflash"),
        ),
        (
            ("abc", "--drafter", "smollm2-dflash"),
            ("made for embedded", "does not fit", "vocabulary has 49152 tokens, the target's 97"),
        ),
        (
            ("abc", "--drafter", "{drafter}", "-k", "5"),
            ("num_draft_tokens is 5 and the drafter gives at most 4",),
        ),
        (("abc", "--attention", "flash"), ("unknown attention backend 'flash'", "torch_ref")),
        (("abc", "--device", "cuda:77"), ("cuda:77", "cpu")),
        (("abc", "--device", "quantum"), ("unknown device 'quantum'",)),
        (("abc", "--dtype", "int3"), ("unknown dtype 'int3'", "float32")),
        (("abc", "--top-p", "1.5"), ("top_p is 1.5", "(0, 1]")),
        (("abc", "--top-k", str(2**63)), (f"top_k is {2**63}", "below 2**31")),
        (
            ("abc", "--repetition-penalty", "1e-300"),
            ("repetition_penalty is 1e-300", "[1e-30, 1e30]"),
        ),
        (("a\udcffb",), ("prompt 1 is not UTF-8 text (byte 1)", "convert it")),
        (("--file", "a\0b"), ("cannot read 'a\\x00b'", "--file takes")),
        (("abc", "--kv-memory", "1K"), ("budget of 1,024 bytes", "give it at least")),
        (("abc" * 300,), ("prompt has 900 tokens and the limit is 512",)),
        (
            ("abc", "--max-tokens", "300", "--kv-memory", "100K"),
            ("cache blocks and the cache has", "max_tokens"),
        ),
        (("",), ("prompt",)),
    ],
)
def test_bad_arguments(
    folders: Path, capsys: Capture, arguments: Sequence[str], said: Sequence[str]
) -> None:
    """Unknown names list the known ones; numbers come with their range."""
    given = [argument.format(drafter=folders / "drafter") for argument in arguments]
    line = fails(capsys, *given, "--raw", "--model", folders / "target")
    for part in said:
        assert part in line


@pytest.mark.parametrize(
    "arguments",
    [
        ("a\0b", "--stop", "\0"),
        ("abc", "--stop", "\udcff"),
        ("abc", "--temperature", "1e-30", "--seed", "1"),
        ("abc", "--temperature", "1e300", "--seed", "1"),
        ("abc", "--temperature", "1", "--top-p", "1e-12", "--seed", str(2**63 - 1)),
        ("abc", "--repetition-penalty", "1e9"),
        ("abc", "--max-tokens", "9" * 30, "--kv-memory", "9" * 70),
        ("abc", "--stop-token-ids", "9" * 30, "--stop-token-ids", "-5"),
        ("abc", "--block-size", "1", "--max-prefill-tokens", "1"),
        ("abc", *("--stop", "x" * 680) * 3),
        (*(f"p{i}" for i in range(50)), "--max-num-seqs", "1", "--kv-memory", "64K"),
    ],
    ids=lambda arguments: " ".join(arguments)[:40].encode("ascii", "replace").decode(),
)
def test_extremes_that_work(folders: Path, capsys: Capture, arguments: Sequence[str]) -> None:
    """Values at the ends of their ranges decode as any other: no overflow, no NaN, nothing left
    out.
    """
    models = ["--drafter", str(folders / "drafter"), "--model", str(folders / "target")]
    given = ["--raw", "--max-tokens", "6", "--json"]
    assert main(["generate", *models, *given, *arguments]) == 0
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(
        result["finish_reason"] in ("stop", "length") and len(result["token_ids"]) > 0
        for result in results
    )
    assert len(results) == (50 if arguments[0] == "p0" else 1)


def test_a_line_that_no_tokenizer_takes_leaves_the_others_alone(
    folders: Path, tmp_path: Path, capsys: Capture
) -> None:
    """Half of a surrogate pair, as JSON may spell it; line ends of Windows and a byte order mark
    are no matter.
    """
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt": "abc"}\r\n{"prompt": "a\\ud800b"}\r\n')
    models = ["--file", str(file), "--model", str(folders / "target")]
    assert main(["generate", *models, "--raw", "--max-tokens", "6", "--json"]) == 1
    good, bad = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert good["prompt"] == "abc" and good["token_ids"] and good["error"] is None
    assert bad["token_ids"] == [] and "half of a surrogate pair" in bad["error"]


@pytest.mark.parametrize(
    "line", ['{"prompt": "a", "n": ' + "9" * 5000 + "}", "[" * 100_000], ids=["digits", "depth"]
)
def test_json_beyond_the_limits_of_its_reader(line: str, tmp_path: Path, capsys: Capture) -> None:
    """Catches the ValueError and the RecursionError that are no JSONDecodeError."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(line + "\n")
    assert f"{file}:1 is not JSON" in fails(capsys, "--file", file)


def decoder_of(tokenizer: Any) -> SpecDecoder:
    return SpecDecoder(
        paged_verifier(plain_model("llama")),
        tokenizer,
        None,
        EngineConfig(max_num_seqs=2, max_model_len=64),
    )


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        # the template's own, of models that know no system message
        ("{{ raise_exception('no system\nhere') }}", "no system here"),
        ("{{ 1/0 }}", "division by zero"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("{{ 1e400 | int }}", "inf"),
        ("{{ [0] * 10**18 }}", "MemoryError"),
        ("{{ [0] * 10**30 }}", "int"),
        ("{{ 10.0 ** 1000 }}", "out of range"),
        ("{{ messages[5].content }}", "no element 5"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_chat_template_that_refuses_is_one_line(template: str, reason: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(InvalidInputError, match=f"refuses these messages: .*{reason}") as refusal:
        decoder_of(tokenizer).generate([{"role": "user", "content": "hi"}])
    assert "\n" not in str(refusal.value)


def test_a_tokenizer_that_panics_is_one_line() -> None:
    """A panic of Rust is no `Exception`; here an expression that takes too many steps back."""
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex("(x+x+)+y"), "isolated")
    with pytest.raises(InvalidInputError, match=r"the tokenizer of .* cannot read the prompt: "):
        decoder_of(tokenizer).generate("x" * 60)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"),
        torch.OutOfMemoryError("CUDA out of"),
    ],
)
def test_no_memory_is_one_line(
    folders: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A limit of the machine is no defect of ours: the way out instead of a traceback."""

    def full(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(SpecDecoder, "from_pretrained", full)
    line = fails(capsys, "abc", "--model", folders / "target")
    assert "out of memory" in line and "--max-num-seqs" in line


@pytest.mark.parametrize("verb", [verb.name for verb in VERBS])
def test_what_saves_memory_is_an_option_of_the_command(verb: str) -> None:
    """Training has others than decoding."""
    named = re.findall(r"--[a-z-]+", main_module._less_memory(verb))
    known = main_module._parser_of(verb)[1]._option_string_actions
    assert all(option in known for option in named)
    assert verb != "train" or {"--anchors", "--loss-rows", "--batch-size", "--accumulation"} <= set(
        named
    )


def test_paths_that_are_not_there(folders: Path, tmp_path: Path, capsys: Capture) -> None:
    """A missing folder is not taken for a hub name."""
    assert "is not a folder" in fails(capsys, "abc", "--model", tmp_path / "nowhere")
    assert "is not a folder" in fails(
        capsys, "abc", "--model", folders / "target", "--drafter", tmp_path / "nowhere"
    )


def test_one_bad_prompt_of_many_leaves_the_others_alone(folders: Path, capsys: Capture) -> None:
    """Two prompts fail, with a line each; the outputs of the others do not change, and the status
    says that some failed.
    """
    arguments = ["--raw", "--model", str(folders / "target"), "--max-tokens", "6", "--json"]
    assert main(["generate", "abc", "hello", *arguments]) == 0
    good = [json.loads(line)["token_ids"] for line in capsys.readouterr().out.splitlines()]
    assert main(["generate", "abc", "x" * 600, "hello", *arguments]) == 1
    results = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [result["token_ids"] for result in results] == [good[0], [], good[1]]
    assert "prompt has 600 tokens and the limit is 512" in results[1]["error"]


def test_half_the_vocabulary_nan_is_reported(
    folders: Path, tmp_path: Path, capsys: Capture
) -> None:
    """A checkpoint whose weights are NaN ends every request with one clear line and a non-zero
    status.
    """
    shutil.copytree(folders / "target", tmp_path / "target")
    reweighted(lambda tensors: tensors["lm_head.weight"][5].fill_(torch.nan))(tmp_path / "target")
    assert main(["generate", "abc", "--raw", "--model", str(tmp_path / "target")]) != 0
    assert "NaN" in capsys.readouterr().err


def test_no_refusal_is_an_assert() -> None:
    """`python -O` runs none of them; here tables of bad files and values run without."""
    ours = ("base/checkpoint/test_tensor_files", "device/test_deviation", "base/test_metrics")
    theirs = (
        "drafters/dflash/config/test_layout",
        "drafters/dflash/config/test_layout_limits",
        "verifiers/formats/test_integers",
    )
    files = [*(f"specdec/{file}" for file in (*ours, "layers/packed/test_linear")), *theirs]
    chosen = ["-k", "damage or refus or deviations or scales", "-p", "tests.helpers.no_asserts"]
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *chosen]
    run = subprocess.run(
        [*command, *(f"tests/{file}.py" for file in files)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=HANG,
        check=False,
    )
    passed = re.search(r"(\d+) passed", run.stdout)
    assert run.returncode == 0 and passed is not None and int(passed[1]) > 50, run.stdout[-2000:]


@pytest.mark.parametrize("kind", [SpecDecError, CheckpointError, InvalidInputError])
@pytest.mark.parametrize(
    "value", ["a\nb", "\r", "\x00\x1b[2J", "\u2028", "\ud800", "x" * 10**5, "\n" * 10**5]
)
def test_a_message_is_one_line_whatever_value_it_names(
    kind: type[SpecDecError], value: str
) -> None:
    """And keeps its beginning and its way out."""
    message = str(kind(f"there is no model {value}; name another"))
    assert len(message.splitlines()) == 1 and len(message) <= LONGEST + 5 and message.encode()
    assert message.startswith("there is no model ") and message.endswith("; name another")
    assert all(character.isprintable() for character in message)
