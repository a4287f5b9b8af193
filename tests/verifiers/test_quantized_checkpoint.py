"""Whole quantized checkpoints, written by hand from tiny models, against the numbers that they
stand for.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.gguf import Quantized
from specdec.layers.packed.weight import PackedWeight
from tests.helpers import quantized
from tests.helpers.quantized import Written, quantize_files
from tests.helpers.tiny_models import plain_model
from tests.verifiers.weights.test_checkpoint import logits, read, verifier_of
from verifiers.formats.lists import Listed

PLAIN = ("lm_head", "embed_tokens", "mlp.gate", "router", "shared_expert_gate", "weights_proj")
"""What checkpoints leave as it is."""


class Case(NamedTuple):
    """A way to quantize."""

    config: dict[str, Any]  # `quantization_config`
    write: Callable[[Tensor], Written]
    plain: str  # under which name the config lists `PLAIN`
    stored: bool = True  # packed as it is


def _group(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


BLOCK = (16, 24)
_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [*BLOCK]}
CASES = {
    "fp8": Case(_FP8, lambda w: quantized.float8(w, BLOCK), "modules_to_not_convert"),
    "fp8_bfloat16": Case(
        _FP8, lambda w: quantized.float8(w, BLOCK, torch.bfloat16), "modules_to_not_convert"
    ),
    "fp8_exponents": Case(
        _FP8, lambda w: quantized.float8(w, BLOCK, torch.float8_e8m0fnu), "modules_to_not_convert"
    ),
    "fp8_tensor": Case(
        {"quant_method": "fp8"},
        lambda w: quantized.float8(w, (w.shape[0], w.shape[1])),
        "modules_to_not_convert",
    ),
    "channel": Case(
        _group(num_bits=8, type="float", strategy="channel"),
        lambda w: quantized.float8(w, (1, w.shape[1]), torch.bfloat16, name="weight_scale"),
        "ignore",
    ),
    "int4": Case(
        _group(num_bits=4, type="int", strategy="group", group_size=16),
        lambda w: quantized.packed_integers(w, 4, 16),
        "ignore",
    ),
    "int4_zeros": Case(
        _group(num_bits=4, type="int", strategy="group", group_size=16, symmetric=False),
        lambda w: quantized.packed_integers(w, 4, 16, zeros=True),
        "ignore",
    ),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 8},
        lambda w: quantized.awq(w, 8),
        "modules_to_not_convert",
    ),
    "gptq": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 8}, lambda w: quantized.gptq(w, 4, 8), ""
    ),
    "gptq_scattered": Case(
        {"quant_method": "gptq", "bits": 8, "group_size": 8, "desc_act": True},
        lambda w: quantized.gptq(w, 8, 8, scattered=True),
        "",
        stored=False,
    ),
    "nvfp4": Case(
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        lambda w: quantized.nvfp4(w, divides=False),
        "exclude_modules",
    ),
    "int4_factors": Case(
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        lambda w: quantized.modelopt_int4(w, 8, factors=True),
        "ignore",
        stored=False,
    ),
    "quark": Case(
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32}
            },
        },
        quantized.mxfp4_pairs,
        "exclude",
    ),
    "auto_round": Case(
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 8,
            "packing_format": "auto_round:auto_gptq",
        },
        lambda w: quantized.gptq(w, 4, 8),
        "",
    ),
    "bitsandbytes": Case(
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        lambda w: quantized.bitsandbytes4(w, nested=True),
        "llm_int8_skip_modules",
        stored=False,
    ),
}
MODELS = ("llama", "mixtral", "qwen3_moe", "deepseek_v3", "qwen3_5_moe")
RUNS = [(case, "qwen3_moe") for case in CASES] + [
    ("fp8", name) for name in MODELS if name != "qwen3_moe"
]
LOGITS = [("fp8", "llama"), ("fp8", "mixtral"), ("fp8", "deepseek_v3"), ("int4", "qwen3_moe")]


def fits(case: str, weight: Tensor) -> bool:
    """Whether a format can say such a shape; each model has shapes that are no multiples of its
    groups.
    """
    rows, columns = {
        "awq": (8, 1),
        "gptq": (8, 1),
        "auto_round": (8, 1),
        "nvfp4": (1, 16),
        "quark": (1, 32),
    }.get(case.removesuffix("_scattered"), (1, 1))
    return weight.shape[0] % rows == 0 and weight.shape[1] % columns == 0


@pytest.fixture
def written(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path, Any]:
    """A quantized checkpoint in two files, one with the same numbers unquantized, and the model's
    config.
    """
    case_name, model_name = request.param
    case, model = CASES[case_name], plain_model(model_name)
    plain, target, twin = tmp_path / "plain", tmp_path / "quantized", tmp_path / "twin"
    model.save_pretrained(plain)
    listed: set[str] = set()

    def write(module: str, weight: Tensor) -> Written | None:
        if module in Listed(PLAIN) or not fits(case_name, weight):
            listed.add(module)
            return None
        return case.write(weight)

    numbers = quantize_files(plain, target, case.config, write)
    twin.mkdir()
    save_file(
        {name: tensor.float() for name, tensor in numbers.items()}, twin / "model.safetensors"
    )
    config = json.loads((target / "config.json").read_text())
    if case.plain:
        config["quantization_config"][case.plain] = sorted(listed)
    (target / "config.json").write_text(json.dumps(config))
    return target, twin, model.config


@pytest.mark.parametrize("written", RUNS, indirect=True, ids=lambda run: "-".join(run))
def test_numbers_are_those_that_were_written(written: tuple[Path, Path, Any], request: Any) -> None:
    """With experts joined; packed where a packed form says the same, and only where it was asked
    for. Dequantized at load or by the layers, which on a CPU have plain numbers, the model computes
    the same to the bit.
    """
    target, twin, config = written
    name, _ = run = request.node.callspec.params["written"]
    case, expected = CASES[name], read(twin, config)
    wanted = logits(verifier_of(read(twin, config), config)) if run in LOGITS else None
    for as_stored in (False, True):
        found, packed = read(target, config, as_stored=as_stored), 0
        assert found.keys() == expected.keys()
        for key, weight in found.items():
            numbers = expected[key]
            assert isinstance(numbers, Tensor)
            if isinstance(weight, Quantized):
                packed += 1
                weight = weight.dequantized()
            if case.stored:
                assert weight.equal(numbers), key
            else:
                torch.testing.assert_close(weight, numbers, rtol=1e-6, atol=0)
        assert (packed > 8) == (as_stored and case.stored)
        assert wanted is None or logits(verifier_of(found, config)).equal(wanted)


@pytest.mark.parametrize(
    ("as_stored", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_experts_of_gpt_oss(as_stored: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Blocks of 32 among tensors that stay as they are: packed one way round, in numbers as
    transformers has them.
    """
    model = plain_model("gpt_oss", hidden_size=32, intermediate_size=64)
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors, expected = load_file(path), {}
    for name in [name for name in tensors if name.endswith((".gate_up_proj", ".down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        file = quantized.mxfp4((experts, outputs, inputs))
        tensors |= {f"{name}_{part}": value for part, value in file.parts.items()}
        expected[name] = file.numbers
    save_file(tensors, path)
    model.config.quantization_config = {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["lm_head"],
    }
    found = read(tmp_path, model.config, dtype, as_stored=as_stored)
    for name, numbers in expected.items():
        weight = found[name]
        if as_stored:
            assert isinstance(weight, Quantized) and weight.dequantized().equal(numbers.to(dtype))
        else:
            assert (
                isinstance(weight, Tensor)
                and weight.equal(numbers.transpose(1, 2).to(dtype))
                and weight.is_contiguous()
            )
    assert found.keys() == dict(model.named_parameters()).keys()
    if dtype == torch.float32:
        own = model.state_dict() | {
            name: numbers.transpose(1, 2).float() for name, numbers in expected.items()
        }
        model.load_state_dict(own)
        whole = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        assert logits(verifier_of(found, model.config)).equal(
            logits(verifier_of(dict(whole), model.config))
        )


def fp8_files(
    tmp_path: Path, name: str = "llama", prefix: str = "", **changes: Any
) -> tuple[Path, Any]:
    """An FP8 checkpoint of a tiny model, and the model's config with its `quantization_config`."""
    model = plain_model(name)
    model.save_pretrained(tmp_path / "plain")
    quantization = {**_FP8, "modules_to_not_convert": ["lm_head"], **changes}

    def write(module: str, weight: Tensor) -> Written | None:
        return None if module in Listed(PLAIN) else quantized.float8(weight, BLOCK)

    quantize_files(
        tmp_path / "plain", tmp_path / "fp8", quantization, write, prefix=prefix, shards=1
    )
    model.config.quantization_config = quantization
    return tmp_path / "fp8", model.config


def test_merged_experts_of_8_bit_floats(tmp_path: Path) -> None:
    """As transformers saves them: one tensor for all experts of a layer,
    and one for their scales.
    """
    folder, config = fp8_files(tmp_path, "qwen3_moe")
    expected = read(folder, config)
    path = folder / "model-0.safetensors"
    tensors = load_file(path)
    for layer in range(4):
        scope = f"model.layers.{layer}.mlp.experts"
        for part, merged in (("weight", "down_proj"), ("weight_scale_inv", "down_proj_scale_inv")):
            tensors[f"{scope}.{merged}"] = torch.stack(
                [tensors.pop(f"{scope}.{expert}.down_proj.{part}") for expert in range(4)]
            )
    save_file(tensors, path)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, path.name)})
    )
    found = read(folder, config)
    assert found.keys() == expected.keys()
    for layer in range(4):
        weight, want = (
            weights[f"model.layers.{layer}.mlp.experts.down_proj"] for weights in (found, expected)
        )
        assert isinstance(weight, Quantized) and isinstance(want, Quantized)
        assert weight.dequantized().equal(want.dequantized())


def test_lists_with_the_prefix_of_a_composite(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The names of the text model and of the whole are one; what is quantized though listed is
    used, and said.
    """
    listed = [
        "lm_head",
        "model.language_model.layers.0.mlp.gate_proj",
        "model.layers.1.mlp.up_proj",
    ]
    for prefix in ("", "language_model."):
        folder, config = fp8_files(
            tmp_path / (prefix or "none"), prefix=prefix, modules_to_not_convert=listed
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = read(folder, config)
        assert isinstance(found["model.layers.0.mlp.gate_proj.weight"], PackedWeight)
        (message,) = [
            record.message
            for record in caplog.records
            if record.name == "verifiers.weights.checkpoint"
        ]
        first = f"{prefix}model.layers.0.mlp.gate_proj"
        assert (
            message
            == f"2 modules are quantized though the config lists them as plain, the first being"
            f" {first}; their scales are used"
        )


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (
            "weight_scale_inv",
            "holds 8-bit floats without a scale; fetch the whole checkpoint again",
        ),
        ("weight", "has weight_scale_inv but no weight; fetch the whole checkpoint again"),
    ],
)
def test_a_missing_part_is_named(part: str, message: str, tmp_path: Path) -> None:
    folder, config = fp8_files(tmp_path)
    path = folder / "model-0.safetensors"
    lost = f"model.layers.2.mlp.up_proj.{part}"
    tensors = {name: tensor for name, tensor in load_file(path).items() if name != lost}
    save_file(tensors, path)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, path.name)})
    )
    with pytest.raises(CheckpointError, match=rf"'model\.layers\.2\.mlp\.up_proj' {message}"):
        read(folder, config)


def test_8_bit_floats_without_a_config_are_refused(tmp_path: Path) -> None:
    folder, config = fp8_files(tmp_path)
    del config.quantization_config
    entries = json.loads((folder / "config.json").read_text())
    del entries["quantization_config"]
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(CheckpointError, match="8-bit floats without a scale"):
        read(folder, config)


def test_experts_of_several_kinds_become_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One expert of a layer that was left out of the quantization, and the log says so."""
    model = plain_model("mixtral")
    model.save_pretrained(tmp_path / "plain")

    def write(module: str, weight: Tensor) -> Written | None:
        out = module in Listed((*PLAIN, "layers.1.block_sparse_moe.experts.2"))
        return None if out else quantized.float8(weight, BLOCK)

    numbers = quantize_files(tmp_path / "plain", tmp_path / "fp8", _FP8, write)
    with caplog.at_level(logging.WARNING):
        found = read(tmp_path / "fp8", model.config)
    weight = found["model.layers.1.mlp.experts.down_proj"]
    scope = "model.layers.1.block_sparse_moe.experts"
    assert isinstance(weight, Tensor)
    assert weight.equal(
        torch.stack([numbers[f"{scope}.{expert}.w2.weight"].float() for expert in range(4)])
    )
    assert isinstance(found["model.layers.0.mlp.experts.down_proj"], PackedWeight)
    said = [
        record.message for record in caplog.records if record.name == "verifiers.weights.checkpoint"
    ]
    assert len(said) == 2 and all(
        "layers.1.mlp.experts.0." in line and "stored in several ways" in line for line in said
    )


@pytest.mark.parametrize("left_out", [(), ("layers.1.feed_forward.experts.2",)])
def test_experts_that_transformers_has_the_other_way_round(
    left_out: tuple[str, ...], tmp_path: Path
) -> None:
    """Llama 4's: one by one and [out, in] in a quantized file, [E, in, out] in plain numbers."""
    model = plain_model("llama4")
    model.save_pretrained(tmp_path / "plain")
    path = tmp_path / "plain" / "model.safetensors"
    tensors = load_file(path)
    for name in [name for name in tensors if ".experts." in name]:
        scope, _, joined = name.rpartition(".")
        parts = tensors.pop(name).chunk(2 if joined == "gate_up_proj" else 1, dim=2)
        for part, weights in zip(joined.removesuffix("_proj").split("_"), parts, strict=True):
            for expert, weight in enumerate(weights):
                tensors[f"{scope}.{expert}.{part}_proj.weight"] = weight.t().contiguous()
    save_file(tensors, path)

    def write(module: str, weight: Tensor) -> Written | None:
        return None if module in Listed((*PLAIN, *left_out)) else quantized.float8(weight, BLOCK)

    numbers = quantize_files(tmp_path / "plain", tmp_path / "fp8", _FP8, write)
    scope = "model.layers.1.feed_forward.experts"
    whole = [
        torch.cat([numbers[f"{scope}.{expert}.{part}_proj.weight"] for part in ("gate", "up")])
        for expert in range(4)
    ]
    found = read(tmp_path / "fp8", model.config)[f"{scope}.gate_up_proj"]
    plain = read(tmp_path / "fp8", model.config, as_stored=False)[f"{scope}.gate_up_proj"]
    assert isinstance(plain, Tensor) and plain.equal(torch.stack(whole).mT.float())
    assert isinstance(found, Tensor) == bool(left_out)
    assert not isinstance(found, Tensor) or found.equal(plain)
    assert plain.shape == dict(model.named_parameters())[f"{scope}.gate_up_proj"].shape


@pytest.mark.parametrize(
    ("quantization", "write"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, quantized.bitsandbytes4),
        (
            {"quant_method": "gptq", "bits": 4, "group_size": 8},
            lambda w: quantized.gptq(w, 4, 8, scattered=True),
        ),
    ],
    ids=["bitsandbytes", "gptq"],
)
def test_what_no_packed_form_has_is_said_once(
    quantization: dict[str, Any],
    write: Callable[[Tensor], Written],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """And becomes numbers of the model's type."""
    model = plain_model("mixtral")
    model.save_pretrained(tmp_path / "plain")

    def each(module: str, weight: Tensor) -> Written | None:
        return None if module in Listed(PLAIN) else write(weight)

    quantize_files(tmp_path / "plain", tmp_path / "target", quantization, each)
    for as_stored, count in ((True, 1), (False, 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = read(tmp_path / "target", model.config, torch.bfloat16, as_stored=as_stored)
        assert all(
            isinstance(weight, Tensor) and weight.dtype == torch.bfloat16
            for weight in found.values()
        )
        said = [
            record.message
            for record in caplog.records
            if record.name == "verifiers.weights.checkpoint"
        ]
        assert len(said) == count and all(
            "68 quantized weights become plain numbers" in line for line in said
        )


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.svdquant_lora_a", "shared_input_rotation_64"]
)
def test_what_a_quantized_layer_computes_besides_is_refused(name: str, tmp_path: Path) -> None:
    """It would be left out without an error; biases and scales of activations are no such
    things.
    """
    folder, config = fp8_files(tmp_path)
    path = folder / "model-0.safetensors"

    def add(added: str) -> None:
        save_file({**load_file(path), added: torch.ones(3)}, path)
        (folder / "model.safetensors.index.json").write_text(
            json.dumps({"weight_map": dict.fromkeys(load_file(path), path.name)})
        )

    for harmless in ("up_proj.bias", "up_proj.act_scale", "gate.extra"):
        add(f"model.layers.1.mlp.{harmless}")
    assert read(folder, config)
    add(name)
    with pytest.raises(
        CheckpointError, match=rf"'{name}' changes what a quantized layer computes and is not read"
    ):
        read(folder, config)
