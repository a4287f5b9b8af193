"""`specdec doctor --model`: what a target needs, from config files alone."""

import json
from pathlib import Path

import pytest
import torch

from tests.specdec.cli.doctor.configs import DRAFTER, GB, QWEN3_8B, doctor, folder
from verifiers import needs


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
    assert said["cache"].endswith(
        "72.0 KiB per token in 8 bits, if no layer's keys are too large for them"
    )


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
    by 2, 4 and 8, and shared by two of 16 ranks each.
    """
    fits = folder(tmp_path / "fits", QWEN3_8B, total_size=172 * GB)
    assert doctor(capsys, fits)["memory"] == "1 GPU of 192 GB"
    said = doctor(capsys, folder(tmp_path / "large", QWEN3_8B, total_size=346 * GB))
    assert said["memory"] == "4 GPUs of 192 GB" and said["would run"] == "yes"
    assert said["ranks"] == (
        "weights of a GPU: 173 GB on 2, 86.5 GB on 4, 43.3 GB on 8, 22.4 GB on 16"
        " (--tensor-parallel)"
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
