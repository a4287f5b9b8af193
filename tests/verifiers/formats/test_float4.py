"""4-bit floats: gpt-oss' experts against transformers' converter, and NVFP4 of both writers."""

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from specdec.base.errors import CheckpointError
from specdec.layers.packed.weight import PackedWeight
from tests.helpers import quantized
from verifiers.formats.float4 import Mxfp4, float4
from verifiers.formats.toolkits.modelopt import ModelOpt

DTYPE = torch.bfloat16


@pytest.mark.parametrize("shape", [(3, 24, 64), (2, 10, 96), (1, 5, 2880)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_are_those_of_transformers(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    """To the bit; transformers has them transposed."""
    file = quantized.mxfp4(shape)
    weight = Mxfp4({}).read(
        "x", {f"weight_{name}": part for name, part in file.parts.items()}, dtype
    )
    assert weight.dequantized(torch.float64).equal(file.numbers)
    theirs = convert_moe_packed_tensors(file.parts["blocks"], file.parts["scales"], dtype=dtype)
    assert weight.dequantized().transpose(1, 2).equal(theirs)


def test_every_power_of_two() -> None:
    """Down to 2 ** -127, which is no ordinary number of its type."""
    blocks = torch.full((1, 255, 1, 16), 0x22, dtype=torch.uint8)  # 1.0 throughout
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1)
    weight = Mxfp4({}).read("x", {"weight_blocks": blocks, "weight_scales": scales}, torch.float32)
    assert weight.dequantized(torch.float64)[0, :, 0].equal(
        torch.pow(2.0, torch.arange(255).double() - 127)
    )


@pytest.mark.parametrize("shape", [(24, 64), (10, 48)])
def test_nvfp4_of_modelopt(shape: tuple[int, int]) -> None:
    """Its second scale multiplies; scales of activations do not matter."""
    file = quantized.nvfp4(torch.empty(shape), divides=False)
    weight = ModelOpt({"quant_algo": "NVFP4", "group_size": 16}).read(
        "x", file.parts | {"input_scale": torch.tensor(9.0)}, DTYPE
    )
    assert isinstance(weight, PackedWeight) and weight.group == 16
    assert weight.dequantized(torch.float64).equal(file.numbers)


def test_8_bit_floats_of_modelopt() -> None:
    """One scale for all, or one for each output."""
    for block in ((24, 40), (1, 40)):
        file = quantized.float8(torch.randn(24, 40), block, name="weight_scale")
        scale = file.parts["weight_scale"].squeeze()
        weight = ModelOpt({"quant_algo": "FP8"}).read(
            "x", file.parts | {"weight_scale": scale}, DTYPE
        )
        assert isinstance(weight, PackedWeight) and weight.dequantized(torch.float64).equal(
            file.numbers
        )


def test_what_is_not_read_is_named() -> None:
    with pytest.raises(
        CheckpointError, match="'x' holds 4-bit floats as int32; pairs in uint8 are read"
    ):
        float4("x", torch.ones(8, 8).int(), torch.ones(8, 1), 16, DTYPE)


def test_modules_left_out_may_be_patterns() -> None:
    """With stars, and by the name of a module around them."""
    form = ModelOpt(
        {"quant_algo": "FP8", "exclude_modules": ["lm_head", "*.mlp.gate", "model.layers.1*"]}
    )
    plain = ("lm_head", "model.layers.0.mlp.gate", "model.language_model.layers.1.mlp.up_proj")
    assert all(map(form.lists_as_plain, plain)) and not form.lists_as_plain(
        "model.layers.0.mlp.gate_proj"
    )
