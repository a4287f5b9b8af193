"""`specdec doctor --model`: what a target needs, and what a drafter needs of it, from config files
alone.
"""

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
from verifiers import needs

GB = 10**9

QWEN3_8B: dict[str, Any] = {
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": False,
}
DRAFTER: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
    "num_target_layers": 36,
    "dflash_config": {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]},
}


def folder(
    path: Path, config: dict[str, Any], total_size: int | None = None, **changes: Any
) -> str:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config | changes))
    if total_size is not None:
        index = {"metadata": {"total_size": total_size}, "weight_map": {}}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(path)


def doctor(
    capsys: pytest.CaptureFixture[str], model: str, *options: str, status: int = 0
) -> dict[str, str]:
    """What it prints, by the word at the beginning of a line; further lines belong to the word
    above.
    """
    assert (
        main(
            [
                "doctor",
                "--device",
                "cpu",
                "--dtype",
                "bfloat16",
                "--gpu-memory",
                "192",
                "--model",
                model,
                *options,
            ]
        )
        == status
    )
    out = capsys.readouterr().out
    said: dict[str, str] = {}
    for line in out.splitlines():
        assert len(line) <= 132, line
        name = line[:14].strip()
        if name:
            said[name] = line[14:]
        else:
            last = next(reversed(said))
            said[last] += "\n" + line.strip()
    assert len(out.splitlines()) <= 20
    return said


def test_a_target_that_would_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """All figures from the config: 36 layers of 8 heads of 128 for keys and for values, and 8.19
    billion weights.
    """
    said = doctor(
        capsys,
        folder(tmp_path / "target", QWEN3_8B),
        "--drafter",
        folder(tmp_path / "drafter", DRAFTER),
    )
    assert said["type"] == "qwen3"
    assert said["runs on"] == "our own layers"
    assert said["attention"] == "torch_ref"
    assert said["cache"] == "keys and values of 36 layers\n144.0 KiB per token"
    assert said["context"] == "40,960 tokens, whose cache takes 6.0 GB"
    assert said["weights"] == "16.4 GB, stored as bfloat16"
    assert said["memory"] == "1 GPU of 192 GB"
    drafter = said["drafter"].replace("\n", " ")
    assert drafter.endswith(
        "dflash, 15 drafts, taps layers 1, 9, 17, 25, 33 of 36, 1,049 M parameters, fits"
    )
    assert said["would run"] == "yes" and "missing" not in said


def test_the_embedded_model_and_its_drafter(capsys: pytest.CaptureFixture[str]) -> None:
    said = doctor(capsys, "embedded")
    assert said["cache"].endswith("22.5 KiB per token") and said["weights"].startswith("0.3 GB")
    assert said["drafter"].startswith("smollm2-dflash: dspark, ") and said["drafter"].endswith(
        "fits"
    )
    assert doctor(capsys, "embedded", "--drafter", "none")["drafter"] == "none"


def test_an_eight_bit_cache_takes_half(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = doctor(capsys, folder(tmp_path / "target", QWEN3_8B), "--kv-dtype", "fp8")
    assert said["cache"].endswith("72.0 KiB per token in 8 bits")


def test_what_a_hybrid_keeps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A composite whose text part has states: 24 layers of 2 MiB each, and the inputs of a few
    rows.
    """
    text = {"model_type": "qwen3_5_text", "num_hidden_layers": 32, "hidden_size": 4096}
    config = {
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {},
    }
    said = doctor(capsys, folder(tmp_path / "target", config, total_size=19 * GB))
    assert said["type"] == "qwen3_5, its text part qwen3_5_text"
    words, sizes = said["cache"].splitlines()
    assert words == "keys and values of 8 layers; states of 24 layers" and sizes.startswith(
        "32.0 KiB per token, "
    )
    assert 48 < float(sizes.split()[4]) < 60
    assert said["weights"] == "19.0 GB, stored as bfloat16"


def test_layers_for_multi_token_prediction_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """By the names of tensors where an index tells them, else by the config; without any
    `--drafter mtp` is refused.
    """
    text = {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "mtp_num_hidden_layers": 1,
    }
    config = {
        "model_type": "qwen3_5",
        "dtype": "bfloat16",
        "text_config": text,
        "vision_config": {},
    }
    target = folder(tmp_path / "target", config)
    said = doctor(capsys, target, "--drafter", "mtp")
    assert (
        said["prediction"]
        == "layers for multi-token prediction are in the checkpoint: --drafter mtp"
    )
    assert (
        said["drafter"] == "mtp: 7 drafts, taps layers 31 of 32, fits"
        and said["would run"] == "yes"
    )
    index = Path(target) / "model.safetensors.index.json"
    for name, status in (("mtp.fc.weight", 0), ("model.language_model.norm.weight", 1)):
        index.write_text(json.dumps({"metadata": {}, "weight_map": {name: "model-1.safetensors"}}))
        said = doctor(capsys, target, "--drafter", "mtp", status=status)
        assert ("prediction" in said) == (not status)
    assert (
        said["missing"]
        .replace("\n", " ")
        .endswith("has no layers for multi-token prediction that could draft")
    )


def test_windows_and_latents_are_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    oss = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    said = doctor(capsys, folder(tmp_path / "oss", oss, total_size=14 * GB))
    assert said["cache"].startswith("keys and values of 36 layers, 18 of them with a window of 128")
    assert said["weights"] == "14.0 GB, stored as mxfp4"
    said = doctor(
        capsys, folder(tmp_path / "glm", {"model_type": "glm_moe_dsa"}, total_size=100 * GB)
    )
    assert said["cache"].startswith("latents and index keys of ")


def test_quantized_weights_are_counted_as_they_would_be_in_memory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed on a GPU in half precision, in plain numbers on a CPU, in float32, and through
    transformers' modules.
    """
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    target = folder(tmp_path / "target", QWEN3_8B, total_size=9 * GB, quantization_config=fp8)
    assert doctor(capsys, target)["weights"] == "9.0 GB, stored as fp8"
    assert (
        doctor(capsys, target, "--dtype", "float32")["weights"]
        == "32.8 GB, stored as fp8 and plain here"
    )
    for packed, weights in ((False, 16.38 * GB), (True, 9 * GB)):
        monkeypatch.setattr(needs, "keeps_packed", lambda device, dtype, packed=packed: packed)
        found = needs.read_needs(
            target, device=torch.device("cpu"), dtype=torch.bfloat16, gpu_bytes=192 * GB
        )
        assert found.weights == pytest.approx(weights, rel=0.001) and found.unpacked != packed
    monkeypatch.setattr(needs, "describe", lambda config: None)
    assert doctor(capsys, target)["weights"] == "16.4 GB, stored as fp8 and plain here"


def test_formats_that_no_packed_form_has_are_counted_in_plain_numbers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Others as they lie in the files; ModelOpt may say it in a file of its own."""
    four = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    target = folder(tmp_path / "bnb", QWEN3_8B, total_size=6 * GB, quantization_config=four)
    assert doctor(capsys, target)["weights"] == "16.4 GB, stored as bitsandbytes and plain here"
    quark = {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}},
    }
    target = folder(tmp_path / "quark", QWEN3_8B, total_size=9 * GB, quantization_config=quark)
    assert doctor(capsys, target)["weights"] == "9.0 GB, stored as quark"
    apart = folder(tmp_path / "apart", QWEN3_8B, total_size=6 * GB)
    (tmp_path / "apart" / "hf_quant_config.json").write_text(
        json.dumps({"quantization": {"quant_algo": "W4A16_NVFP4"}})
    )
    assert doctor(capsys, apart)["weights"] == "6.0 GB, stored as modelopt"


def test_a_target_for_several_gpus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A tenth of a GPU is left for what is no weight: 172.8 of 192 GB. Its 8 key heads are divided
    by 2, 4 and 8.
    """
    fits = folder(tmp_path / "fits", QWEN3_8B, total_size=172 * GB)
    assert doctor(capsys, fits)["memory"] == "1 GPU of 192 GB"
    said = doctor(capsys, folder(tmp_path / "large", QWEN3_8B, total_size=346 * GB))
    assert said["memory"] == "4 GPUs of 192 GB" and said["would run"] == "yes"
    assert (
        said["ranks"]
        == "weights of a GPU: 173 GB on 2, 86.5 GB on 4, 43.3 GB on 8 (--tensor-parallel)"
    )
    said = doctor(capsys, folder(tmp_path / "huge", QWEN3_8B, total_size=1400 * GB), status=1)
    assert (
        said["missing"]
        == "its weights need 9 GPUs of 192 GB, and it is divided among 2 or 4 or 8 alone"
    )


def test_groups_of_packed_weights_are_divided_or_not(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """4,096 and 12,288 inputs in groups of 1,024: 8 ranks would cut those of the first."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 1024, "sym": True, "desc_act": False}
    said = doctor(
        capsys, folder(tmp_path / "target", QWEN3_8B, total_size=6 * GB, quantization_config=gptq)
    )
    assert said["ranks"].startswith("weights of a GPU: 3.0 GB on 2, 1.5 GB on 4 (")


def test_transformers_modules_have_one_gpu(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = doctor(
        capsys, folder(tmp_path / "target", {"model_type": "gpt2"}, total_size=200 * GB), status=1
    )
    assert said["ranks"] == "one GPU alone, since transformers' modules are not divided"
    assert (
        said["missing"] == "its weights need 2 GPUs of 192 GB, and it is not divided among several"
    )


def test_the_context_and_how_far_it_goes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    said = doctor(capsys, folder(tmp_path / "yarn", QWEN3_8B, rope_scaling=yarn))
    assert said["context"] == "131,072 tokens, whose cache takes 19.3 GB"
    said = doctor(
        capsys,
        folder(tmp_path / "linear", QWEN3_8B, rope_scaling={"rope_type": "linear", "factor": 2.0}),
    )
    assert said["context"].endswith("; its RoPE goes to 81,920 with --max-model-len")
    assert doctor(capsys, folder(tmp_path / "table", {"model_type": "gpt2"}))["context"].endswith(
        ", and no more"
    )


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
        ({"architectures": ["LiLiCorrDraftModel"]}, "LiLiCorrDraftModel"),
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
