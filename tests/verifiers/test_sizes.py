"""Sizes of weights from configs alone, against those of public files."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.checks.public_targets import data
from tests.helpers.tiny_configs import CONFIGS
from tests.helpers.tiny_models import plain_model
from verifiers.config.wrappers import config_of, text_config
from verifiers.formats.method import stated_quantization
from verifiers.sizes import parameters, weight_bytes

GB = 1e9


def text_of(target: str, **changes: Any) -> Any:
    return text_config(config_of(data()["targets"][target]["config"] | changes))


@pytest.mark.parametrize("name", ["llama", "llama_tied", "gemma3", "qwen3_moe", "qwen3_5_moe"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    """Of the model on the CPU, in which a tied matrix is one."""
    config = CONFIGS[name]()
    changes = {"tie_word_embeddings": config.tie_word_embeddings} if name == "gemma3" else {}
    model: nn.Module = plain_model(name, **changes)
    tied = {id(parameter): parameter.numel() for parameter in model.parameters()}
    assert sum(parameters(model.config).values()) == sum(tied.values())


@pytest.mark.parametrize(
    ("target", "gigabytes"),
    [
        ("Qwen3-4B", 8.04),
        ("Qwen3-8B", 16.38),
        ("Llama-3.1-8B-Instruct", 16.06),
        ("Qwen3-30B-A3B", 61.06),
        ("Qwen3.5-9B", 18.0),
        ("gpt-oss-20b", 13.76),
        ("gpt-oss-120b", 65.25),
        ("DeepSeek-V3", 671.0),
    ],
)
def test_public_sizes(target: str, gigabytes: float) -> None:
    """Within a fiftieth: block scales are not counted,
    nor what lies in the file beside the model.
    """
    config = text_of(target)
    found = weight_bytes(config, stated_quantization(config), torch.bfloat16)
    assert found / GB == pytest.approx(gigabytes, rel=0.02)


def test_a_model_without_a_head_of_its_own_class_has_one() -> None:
    """Transformers has the bare text model of Qwen3-VL alone."""
    counts = parameters(text_of("Qwen3-VL-235B-A22B"))
    assert counts["lm_head.weight"] == 151936 * 4096
    assert sum(counts.values()) / 1e9 == pytest.approx(235, rel=0.01)


@pytest.mark.parametrize(
    ("quantization", "bits"),
    [
        ({"quant_method": "fp8"}, 8.0),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt_fp4", "quant_algo": "W4A16_NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "MXFP8"}, 8.0),
        ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}}}, 8.0),
        (
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
                },
                "exclude": ["lm_head"],
            },
            4.25,
        ),
        ({"quant_method": "auto-round", "bits": 2, "group_size": 32}, 4.5),
        (
            {
                "quant_method": "auto-round",
                "bits": 4,
                "group_size": 128,
                "packing_format": "auto_round:auto_awq",
            },
            4.125,
        ),
        ({"quant_method": "auto-round", "bits": 8, "data_type": "mx_fp"}, 8.0),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8 + 1 / 64),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 16.0),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, 16.0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4_AWQ"}, 16.0),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.125),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, 8.125),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"g": {"weights": {"num_bits": 4, "group_size": 32}}},
            },
            4.5,
        ),
    ],
)
def test_bits_of_what_is_packed(quantization: dict[str, Any], bits: float) -> None:
    """All projections, and neither embeddings nor head nor norms."""
    config = text_of("Qwen3-8B")
    counts = parameters(config)
    plain = sum(count for name, count in counts.items() if "_proj" not in name)
    expected = (sum(counts.values()) - plain) * bits / 8 + 2 * plain
    assert weight_bytes(config, quantization, torch.bfloat16) == pytest.approx(expected, rel=1e-6)


def test_a_files_size_comes_first() -> None:
    """In the type that the numbers will have; packed ones stay, unless they become plain."""
    config = text_of("Qwen3-8B")
    assert weight_bytes(config, None, torch.bfloat16, total_size=1000) == 1000
    assert weight_bytes(config, None, torch.float32, total_size=1000) == 2000
    fp8 = {"quant_method": "fp8"}
    assert weight_bytes(config, fp8, torch.bfloat16, total_size=1000) == 1000
    assert weight_bytes(
        config, fp8, torch.bfloat16, total_size=1000, packed=False
    ) / GB == pytest.approx(16.38, rel=0.01)
    for widened, gigabytes in (
        ({"quant_method": "bitsandbytes"}, 16.38),
        ({"quant_method": "gptq", "bits": 2}, 6.05),
    ):
        assert weight_bytes(config, widened, torch.bfloat16, total_size=1000) / GB == pytest.approx(
            gigabytes, rel=0.02
        )


@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8", "modules_to_not_convert": ["self_attn"]},
        {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.self_attn*"]},
    ],
)
def test_experts_alone_are_packed(quantization: dict[str, Any]) -> None:
    """By MXFP4 always, and by others whose lists leave attention out."""
    config = text_of("gpt-oss-20b")
    counts = parameters(config)
    experts = sum(
        count for name, count in counts.items() if "experts." in name and "bias" not in name
    )
    bits = 4.25 if quantization["quant_method"] == "mxfp4" else 8
    expected = experts * bits / 8 + 2 * (sum(counts.values()) - experts)
    assert weight_bytes(config, quantization, torch.bfloat16) == pytest.approx(expected, rel=1e-9)
