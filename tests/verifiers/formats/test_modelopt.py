"""ModelOpt: every algorithm's tensors, and the names that a config may use."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.base.errors import CheckpointError
from specdec.layers.packed.gguf import Quantized
from tests.helpers import quantized
from tests.helpers.quantized import Written
from verifiers.formats.format import Stored
from verifiers.formats.method import format_of
from verifiers.formats.toolkits.modelopt import ModelOpt

SHAPE = (40, 64)


def numbers(weight: Stored) -> Tensor:
    return weight.dequantized(torch.float64) if isinstance(weight, Quantized) else weight.double()


def float8(weight: Tensor, block: tuple[int, int], kind: torch.dtype = torch.float32) -> Written:
    return quantized.float8(weight, block, kind, name="weight_scale")


def shaped(file: Written, *shape: int) -> Written:
    return Written(
        file.parts | {"weight_scale": file.parts["weight_scale"].view(shape)}, file.numbers
    )


def with_factors(file: Written) -> Written:
    """The same for inputs that are divided by factors before."""
    factors = torch.linspace(0.5, 2, file.numbers.shape[1])
    return Written(file.parts | {"pre_quant_scale": factors}, file.numbers * factors.double())


W = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
KINDS: dict[str, tuple[str, Written]] = {
    "fp8": ("FP8", shaped(float8(W, SHAPE))),
    "fp8_channel": ("FP8_PER_CHANNEL_PER_TOKEN", shaped(float8(W, (1, 64)), 40)),
    "fp8_block": ("FP8_PB_WO", shaped(float8(W, (32, 32)), 2, 1, 2, 1)),
    "fp8_block_small_letters": ("fp8_pb_wo", float8(W, (32, 32))),
    "mxfp8": ("MXFP8", float8(W, (1, 32), torch.uint8)),
    "nvfp4": ("NVFP4", quantized.nvfp4(W, divides=False)),
    "nvfp4_weights_alone": ("W4A16_NVFP4", quantized.nvfp4(W, divides=False)),
    "nvfp4_awq": ("NVFP4_AWQ", with_factors(quantized.nvfp4(W, divides=False))),
    "mixed": ("MIXED_PRECISION", quantized.nvfp4(W, divides=False)),
    "mxfp4": ("W4A8_MXFP4_FP8", quantized.mxfp4_pairs(W)),
    "int4_awq": ("W4A16_AWQ", quantized.modelopt_int4(W, 32, factors=False)),
    "int4_awq_factors": ("W4A8_AWQ", quantized.modelopt_int4(W, 32, factors=True)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_are_those_that_were_written(kind: str) -> None:
    """Packed, unless the inputs have factors; each format of a mixture is told by its tensors."""
    algorithm, file = KINDS[kind]
    for quantization in (
        {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": 32},
        {"quantization": {"quant_algo": algorithm, "group_size": 32}},
    ):
        weight = format_of(quantization).read("x", file.parts, torch.bfloat16)
        assert isinstance(weight, Quantized) == ("pre_quant_scale" not in file.parts)
        torch.testing.assert_close(numbers(weight), file.numbers, rtol=1e-6, atol=0)


def test_integers_of_rows() -> None:
    codes, scale = quantized.random_codes(W, 256) - 128, quantized.random_scales(W, (1, 64))[:, 0]
    form = ModelOpt({"quant_algo": "W8A8_SQ_PER_CHANNEL"})
    weight = form.read("x", {"weight": codes.to(torch.int8), "weight_scale": scale}, torch.bfloat16)
    assert numbers(weight).equal(codes * scale.double()[:, None])


def test_second_scales_of_experts() -> None:
    """One for each expert, where all of a layer lie in one tensor."""
    files = [quantized.nvfp4(W * number, divides=False) for number in (1, 2)]
    parts = {name: torch.stack([file.parts[name] for file in files]) for name in files[0].parts}
    parts["weight_scale_2"] = torch.tensor([0.0007, 0.007])
    weight = ModelOpt({"quant_algo": "NVFP4"}).read("x", parts, torch.bfloat16)
    expected = torch.stack([files[0].numbers, files[1].numbers * 10])
    torch.testing.assert_close(numbers(weight), expected, rtol=1e-6, atol=0)
    with pytest.raises(CheckpointError, match="'x' has 3 second scales, not one"):
        ModelOpt({"quant_algo": "NVFP4"}).read(
            "x", parts | {"weight_scale_2": torch.ones(3)}, torch.bfloat16
        )


@pytest.mark.parametrize("method", ["modelopt", "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8"])
def test_names_of_the_method(method: str) -> None:
    assert isinstance(format_of({"quant_method": method, "quant_algo": "W4A16_NVFP4"}), ModelOpt)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"quant_algo": "NVFP4_SVD"},
            "ModelOpt's NVFP4_SVD is not read, but FP8, .* are; take such a checkpoint",
        ),
        (
            {"quant_algo": ["FP8"]},
            r"quant_algo of quantization_config is \['FP8'\], which must be a word",
        ),
    ],
)
def test_what_is_not_read_is_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ModelOpt(changes)


def test_factors_that_do_not_fit() -> None:
    parts = quantized.modelopt_int4(W, 32, factors=True).parts | {"pre_quant_scale": torch.ones(3)}
    with pytest.raises(CheckpointError, match="'x' has 3 factors for 64 inputs"):
        ModelOpt({"quant_algo": "W4A16_AWQ"}).read("x", parts, torch.bfloat16)
