"""Which format a config names, what is said of others, and that no setting ends in a traceback."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.gguf import Quantized
from tests.helpers import quantized
from tests.helpers.quantized import Written
from verifiers.formats.float8 import Float8
from verifiers.formats.format import Stored
from verifiers.formats.method import FORMATS, format_of, method_of, stated_quantization

W = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))


def numbers(weight: Stored) -> Tensor:
    return weight.dequantized(torch.float64) if isinstance(weight, Quantized) else weight.double()


AUTO_ROUND: dict[str, tuple[dict[str, Any], Written]] = {
    "gptq": ({"bits": 4, "packing_format": "auto_round:auto_gptq"}, quantized.gptq(W, 4, 16)),
    "unnamed": ({"bits": 4}, quantized.gptq(W, 4, 16)),
    "zeros as they are": (
        {"bits": 4, "packing_format": "auto_round", "sym": False},
        quantized.gptq(W, 4, 16, version=2),
    ),
    "gptqmodel": (
        {"bits": 4, "packing_format": "auto_round:gptqmodel"},
        quantized.gptq(W, 4, 16, version=2),
    ),
    "two bits": ({"bits": 2, "packing_format": "auto_round:auto_gptq"}, quantized.gptq(W, 2, 16)),
    "layer of its own": (
        {"bits": 4, "extra_config": {"x": {"bits": 8, "group_size": 32}}},
        quantized.gptq(W, 8, 32),
    ),
    "awq": ({"bits": 4, "packing_format": "auto_round:auto_awq"}, quantized.awq(W, 16)),
    "mxfp4": (
        {"bits": 4, "data_type": "mx_fp", "packing_format": "auto_round:llm_compressor"},
        Written(
            {
                "weight_packed": quantized.mxfp4_pairs(W).parts["weight"],
                **quantized.mxfp4_pairs(W).parts,
            },
            quantized.mxfp4_pairs(W).numbers,
        ),
    ),
    "nvfp4": ({"bits": 4, "data_type": "nv_fp4_with_static_gs"}, quantized.nvfp4(W, divides=True)),
    "mxfp8": (
        {"bits": 8, "data_type": "mx_fp"},
        quantized.float8(W, (1, 32), torch.uint8, name="weight_scale"),
    ),
    "fp8 blocks": (
        {"bits": 8, "data_type": "fp", "group_size": [16, 32]},
        quantized.float8(W, (16, 32)),
    ),
    "fp8": (
        {"bits": 8, "data_type": "fp8"},
        quantized.float8(W, (1, 64), torch.bfloat16, name="weight_scale"),
    ),
}


@pytest.mark.parametrize("kind", AUTO_ROUND)
@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_auto_round(kind: str, method: str) -> None:
    """Tensors of GPTQ, AWQ and of floats under other names."""
    settings, file = AUTO_ROUND[kind]
    form = format_of({"group_size": 16} | settings | {"quant_method": method})
    form.check("x", file.parts)
    weight = form.read("x", file.parts, torch.bfloat16)
    assert isinstance(weight, Quantized)
    torch.testing.assert_close(numbers(weight), file.numbers, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"bits": 4, "data_type": "mx_int"},
            "AutoRound's mx_int is not read, but int, fp8, nv_fp and mx_fp are",
        ),
        ({"spinquant_config": {"r1": True}}, "AutoRound's layers rotate their inputs"),
        ({"bits": 4, "data_type": "nvfp4_v2"}, "AutoRound's nvfp4_v2 is not read"),
        ({"bits": 8, "packing_format": "auto_round:auto_awq"}, "AWQ with 8 bits"),
        (
            {"extra_config": {"x": 5}},
            r"extra_config\['x'\] of quantization_config is 5, which must be an object",
        ),
    ],
)
def test_what_of_auto_round_is_not_read(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        format_of({"quant_method": "auto-round"} | settings)


@pytest.mark.parametrize("method", ["fbgemm_fp8", "mxfp8", "fp8"])
@pytest.mark.parametrize(
    "file",
    [
        quantized.float8(W, (1, 64), name="weight_scale"),
        quantized.float8(W, (1, 32), torch.uint8),
        quantized.float8(W, (32, 64)),
    ],
    ids=["rows", "powers of two", "one scale"],
)
def test_floats_whose_scales_tell_their_blocks(method: str, file: Written) -> None:
    form = format_of({"quant_method": method})
    assert isinstance(form, Float8) and numbers(form.read("x", file.parts, torch.bfloat16)).equal(
        file.numbers
    )


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"group_size": 64, "bits": 4}, "mlx"),
        *(
            ({"quant_method": name}, name)
            for name in ("hqq", "torchao", "quanto", "nvfp4", "aqlm", "gemma", "metal")
        ),
        ({"loads": 1}, "a method that it does not name"),
        ({"quant_method": ["x"]}, r"\['x'\]"),
    ],
)
def test_other_methods_are_named_with_a_way_out(quantization: dict[str, Any], name: str) -> None:
    with pytest.raises(
        CheckpointError,
        match=r"weights quantized with .* are not read, but .* and GGUF are; take such",
    ) as caught:
        format_of(quantization)
    assert method_of(quantization) in str(caught.value) and name.replace("\\", "") in str(
        caught.value
    )


def test_bitsandbytes_may_not_name_itself() -> None:
    assert method_of({"load_in_4bit": True}) == "bitsandbytes"


def test_where_a_config_says_it() -> None:
    """Nothing is said by null or an empty object, and another value is no format."""
    assert stated_quantization({}) is stated_quantization({"quantization_config": {}}) is None
    for value in (5, 0, "", [], "gptq", [1]):
        with pytest.raises(
            CheckpointError,
            match=r"quantization_config is .*; it must be an object, so fetch config.json again",
        ):
            stated_quantization({"quantization_config": value})


def _settings(node: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        yield (*path, key)
        if isinstance(value, Mapping):
            yield from _settings(value, (*path, key))


def _put(node: Mapping[str, Any], path: tuple[str, ...], value: object) -> dict[str, Any]:
    inner = value if len(path) == 1 else _put(node[path[0]], path[1:], value)
    return {**node, path[0]: inner}


_SPEC = {"dtype": "fp8_e4m3", "qscheme": "per_block", "block_size": [16, 32], "group_size": None}
_GROUP: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
}
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "fp8": (
        {
            "weight_block_size": [16, 32],
            "modules_to_not_convert": ["lm_head"],
            "ignored_layers": [],
        },
        quantized.float8(W, (16, 32)).parts,
    ),
    "gptq": (
        {
            "bits": 4,
            "group_size": 16,
            "desc_act": False,
            "static_groups": False,
            "checkpoint_format": "gptq",
            "dynamic": {},
        },
        quantized.gptq(W, 4, 16).parts,
    ),
    "awq": (
        {
            "bits": 4,
            "group_size": 16,
            "version": "gemm",
            "zero_point": True,
            "modules_to_not_convert": ["lm_head"],
        },
        quantized.awq(W, 16).parts,
    ),
    "auto-round": (
        {
            "bits": 4,
            "group_size": 16,
            "packing_format": "auto_round",
            "data_type": "int",
            "extra_config": {"x": {"bits": 8}},
        },
        quantized.gptq(W, 4, 16, version=2).parts,
    ),
    "bitsandbytes": (
        {"load_in_4bit": True, "load_in_8bit": False, "llm_int8_skip_modules": ["lm_head"]},
        quantized.bitsandbytes4(W).parts,
    ),
    "compressed-tensors": (
        {
            "ignore": ["re:.*head"],
            "format": "pack-quantized",
            "sparsity_config": {"format": "dense"},
            "transform_config": {"config_groups": {}},
            "config_groups": {
                "group_0": _GROUP | {"weights": _GROUP["weights"] | {"block_structure": None}}
            },
        },
        quantized.packed_integers(W, 4, 16).parts,
    ),
    "modelopt": (
        {
            "quant_algo": "FP8_PB_WO",
            "group_size": 16,
            "ignore": ["lm_head"],
            "exclude_modules": [],
            "quantization": {},
        },
        quantized.float8(W, (16, 16), name="weight_scale").parts,
    ),
    "mxfp4": ({"modules_to_not_convert": ["lm_head"]}, {}),
    "quark": (
        {
            "exclude": ["*head"],
            "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
            "global_quant_config": {"weight": _SPEC},
            "layer_quant_config": {"*k_proj": {"weight": _SPEC}},
            "layer_type_quant_config": {"Linear": {"weight": _SPEC}},
        },
        quantized.float8(W, (16, 32), name="weight_scale").parts,
    ),
}
VALUES: tuple[Any, ...] = (
    None,
    0,
    1,
    -1,
    10**30,
    1.5,
    float("nan"),
    True,
    "x",
    "re:(",
    [],
    [1],
    ["re:("],
    [["x"]],
    [16, 32],
    {},
    {"a": 1},
    {"a": {}},
)


@pytest.mark.parametrize("method", WHOLE)
def test_every_setting_may_be_anything(method: str) -> None:
    """What is read then is read, and all else is refused by one line."""
    whole, parts = WHOLE[method]
    assert format_of({"quant_method": method} | whole) and method in FORMATS
    refused = 0
    for path in _settings({"quant_method": method} | whole):
        for value in VALUES:
            try:
                form = format_of(_put({"quant_method": method} | whole, path, value))
                form.lists_as_plain("model.layers.0.mlp.up_proj")
                if parts:
                    form.read("x", parts, torch.bfloat16)
            except CheckpointError as error:
                refused += 1
                assert "\n" not in str(error) and ";" in str(error), (path, value)
    assert refused >= len(VALUES) - 2


ODD: dict[str, Any] = {
    **{
        str(kind): lambda tensor, kind=kind: tensor.float().to(kind)
        for kind in (torch.float32, torch.int64, torch.bool, torch.int8)
    },
    "complex": lambda tensor: tensor.float().to(torch.complex64),
    "a number": lambda tensor: tensor.flatten()[0],
    "empty": lambda tensor: tensor.flatten()[:0],
    "flat": lambda tensor: tensor.flatten(),
    "shorter": lambda tensor: tensor.flatten()[:-1],
    "deeper": lambda tensor: tensor[None, None],
    "twice": lambda tensor: torch.cat([tensor.flatten()] * 2),
}
MORE: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {
    "scattered groups": (
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": _GROUP}},
        quantized.packed_integers(W, 4, 16, zeros=True, scattered=True).parts,
    ),
    "nested scales": (
        {"quant_method": "bitsandbytes"},
        quantized.bitsandbytes4(W, nested=True).parts,
    ),
    "eight bits": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        quantized.bitsandbytes8(W).parts,
    ),
    "factors": (
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ"},
        quantized.modelopt_int4(W, 32, factors=True).parts,
    ),
    "nvfp4": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        quantized.nvfp4(W, divides=False).parts,
    ),
    "words": (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "uint4", "qscheme": "per_group", "group_size": 32}
            },
        },
        quantized.quark_int4(W, 32, signed=False).parts,
    ),
}


@pytest.mark.parametrize("name", [*WHOLE, *MORE])
def test_every_tensor_may_be_anything(name: str) -> None:
    """What goes together is read, and all else is refused by one line; scales are never of
    integers.
    """
    quantization, parts = MORE.get(name) or (
        {"quant_method": name} | WHOLE[name][0],
        WHOLE[name][1],
    )
    form = format_of(quantization)
    for part in parts:
        for kind, change in ODD.items():
            try:
                form.weight("x", parts | {part: change(parts[part])}, torch.bfloat16)
            except CheckpointError as error:
                assert "\n" not in str(error) and ";" in str(error), (part, kind)
            else:
                wrong = kind in ("torch.int64", "torch.bool", "complex")
                assert not wrong or not part.endswith(
                    ("scale", "scales", "scale_inv", "absmax", "SCB", "scale_2")
                ), (part, kind)
