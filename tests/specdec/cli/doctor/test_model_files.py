"""`specdec doctor --model`: what is missing in a checkpoint, and what a drafter needs of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError

from specdec.base.checkpoint import hub
from specdec.base.errors import CheckpointError
from specdec.cli.main import main
from tests.helpers.tiny_models import tiny_tokenizer
from tests.specdec.cli.doctor.configs import DRAFTER, GB, QWEN3_8B, doctor, folder
from verifiers import needs

WHOLE = tiny_tokenizer().backend_tokenizer.to_str()


KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
}


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (
            {"tokenizer_config.json": json.dumps(KIMI), "tiktoken.model": "IQ== 0"},
            "its tokenizer is TikTokenTokenizer, code from its",
        ),
        (
            {"tokenizer_config.json": '{"auto_map": {"AutoTokenizer": ["a.B", null]}}'},
            "its tokenizer is a class of its own, code",
        ),
        (
            {"tiktoken.model": "IQ== 0"},
            "its tokenizer is tiktoken.model of tiktoken alone, which does not say where text is"
            " split",
        ),
        ({"some.tiktoken": "IQ== 0"}, "its tokenizer is some.tiktoken of tiktoken alone"),
        (
            {"tokenizer.model": "I+/Q== 0\nIg== 1\n"},
            "its tokenizer is tokenizer.model of tiktoken alone",
        ),
        (
            {"model.safetensors": ""},
            "it has no tokenizer: neither tokenizer.json nor another vocabulary",
        ),
        ({"tokenizer.model": "\n\x0e\n\x05", "model.safetensors": ""}, None),
        (
            {
                "tokenizer_config.json": json.dumps(KIMI),
                "tiktoken.model": "IQ== 0",
                "tokenizer.json": WHOLE,
            },
            None,
        ),
        ({"tokenizer.json": "{}"}, "cannot read the tokenizer of target "),
        (
            {
                "tokenizer_config.json": '{"tokenizer_class": "Qwen2TokenizerFast"}',
                "vocab.json": "{}",
                "model.safetensors": "",
            },
            None,
        ),
    ],
)
def test_the_tokenizer_is_looked_at(
    files: dict[str, str], reason: str | None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = folder(tmp_path / "target", QWEN3_8B)
    for name, text in files.items():
        (Path(target) / name).write_text(text)
    said = doctor(capsys, target, status=int(reason is not None))
    assert said["would run"] == ("yes" if reason is None else "no")
    assert reason is None or said["missing"].replace("\n", " ").startswith(reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "jamba"}, "it keeps a recurrent state"),
        ({"model_type": "never_heard_of"}, "has no model of type 'never_heard_of'"),
        (
            {**QWEN3_8B, "quantization_config": {"quant_method": "hqq"}},
            "'hqq' are not read, but auto-round, awq, bitsandbytes",
        ),
        (
            {**QWEN3_8B, "num_attention_heads": 30},
            "torch_ref: 30 query heads do not share 8 key heads evenly",
        ),
    ],
    ids=["recurrent", "unknown", "quantized", "no backend"],
)
def test_what_is_missing_is_named(
    config: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = doctor(capsys, folder(tmp_path / "target", config), status=1)
    assert reason in said["missing"].replace("\n", " ") and said["would run"] == "no"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 2048}, "takes 10240 features, not 5 taps of 4096"),
        ({"vocab_size": 152000}, "its vocabulary has 152000 tokens, the target's 151936"),
        (
            {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 36]}},
            "it taps layer 36 of a target whose last layer is 35",
        ),
        ({"architectures": ["DSpineDraftModel"]}, "DSpineDraftModel"),
        ({"block_size": None}, "config.json lacks block_size"),
        (
            {"quantization_config": {"quant_method": "hqq"}},
            "weights quantized with 'hqq' are not read",
        ),
    ],
    ids=["hidden size", "vocabulary", "taps", "algorithm", "config", "format"],
)
def test_a_drafter_that_does_not_fit(
    changes: dict[str, Any], reason: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target, drafter = (
        folder(tmp_path / "target", QWEN3_8B),
        folder(tmp_path / "drafter", DRAFTER, **changes),
    )
    said = doctor(capsys, target, "--drafter", drafter, status=1)
    assert reason in said["missing"].replace("\n", " ") and said["would run"] == "no"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "embedded", "--heads", "8", "--mla"], "--mla does not go with --model"),
        (["--drafter", "ngram"], "--drafter goes with --model"),
        (["--gpu-memory", "80"], "--gpu-memory goes with --model"),
        (
            ["--model", "embedded", "--gpu-memory", "0"],
            "--gpu-memory is 0; give the memory of one GPU in GB",
        ),
        (["--model", "./nowhere"], "target './nowhere' is not a folder, and no name on the hub"),
        (["--model", "no name"], "is not a folder, and no name on the hub"),
    ],
)
def test_mistakes(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_a_config(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "has no config.json" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("[1]")
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "holds no JSON object" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["doctor", "--model", str(tmp_path)]) == 2
    assert "is not valid JSON" in capsys.readouterr().err


def test_only_config_files_are_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the hub, file by file, and never a weight."""
    source, asked = Path(folder(tmp_path / "target", QWEN3_8B, total_size=16 * GB)), []
    (source / "generation_config.json").write_text(
        '{"eos_token_id": 2, "repetition_penalty": 1.1, "num_beams": 4}'
    )

    def download(name: str, file: str, **_: Any) -> str:
        asked.append(file)
        if not (source / file).is_file():
            raise EntryNotFoundError(file)
        return str(source / file)

    monkeypatch.setattr(hub, "hf_hub_download", download)
    found = needs.read_needs(
        "some/model", device=torch.device("cpu"), dtype=torch.bfloat16, gpu_bytes=192 * GB
    )
    assert found.weights == 16 * GB and found.would_run
    assert all(file.endswith(".json") for file in asked)
    (note,) = found.notes
    assert (
        "repetition_penalty 1.1 where a request names none" in note
        and "generate would apply num_beams 4" in note
    )
    with pytest.raises(CheckpointError, match="give a folder with config"):
        hub.json_file("/nowhere", "config.json", what="target")


def test_what_a_checkpoint_asks_of_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Is named; what no request could ask is in the way."""
    target = folder(tmp_path / "target", QWEN3_8B, eos_token_id=2)
    assert "requests" not in doctor(capsys, target)
    path = Path(target) / "generation_config.json"
    path.write_text('{"eos_token_id": 2, "min_new_tokens": 3}')
    assert "min_new_tokens 3 where a request names none" in doctor(capsys, target)["requests"]
    path.write_text('{"eos_token_id": "2"}')
    assert "eos_token_id in generation_config.json" in doctor(capsys, target, status=1)["missing"]


def test_a_language_model_as_drafter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By its own config: what it needs to run is what it needs to draft."""
    target = folder(tmp_path / "target", QWEN3_8B)
    draft = folder(
        tmp_path / "draft",
        QWEN3_8B,
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=2,
        vocab_size=1000,
    )
    said = doctor(capsys, target, "--drafter", draft)
    assert (
        said["drafter"].startswith(f"{draft}: draft-model, 7 drafts, ")
        and said["would run"] == "yes"
    )
    hybrid = {"model_type": "nemotron_h", "architectures": ["NemotronHForCausalLM"]}
    said = doctor(capsys, target, "--drafter", folder(tmp_path / "hybrid", hybrid), status=1)
    assert "cannot have recurrent layers" in said["missing"]
