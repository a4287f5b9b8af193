"""8-bit floats: blocks of ragged weights, every kind of scale, and the bytes of matrix cores that
read another float.
"""

import pytest
import torch

from specdec.base.errors import CheckpointError
from tests.helpers.quantized import float8 as written
from verifiers.formats.float8 import Float8

DTYPE = torch.bfloat16


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize(
    ("shape", "block"), [((144, 448), (128, 128)), ((72, 100), (16, 24)), ((8, 300), (128, 128))]
)
def test_blocks_of_ragged_weights(
    shape: tuple[int, int], block: tuple[int, int], kind: torch.dtype
) -> None:
    """The last blocks are smaller, and no block size follows from the shapes: 144 / 2 and 448 / 4
    are whole, and wrong.
    """
    file = written(torch.randn(shape), block, kind)
    weight = Float8({"weight_block_size": list(block)}).read("x", file.parts, DTYPE)
    assert weight.group == block[1] and weight.dtype == DTYPE
    assert weight.dequantized(torch.float64).equal(file.numbers)
    assert weight.dequantized().equal(file.numbers.bfloat16())


def test_the_shape_of_deepseeks_latent_projection() -> None:
    """576 x 7168: 4.5 blocks of outputs."""
    file = written(torch.randn(576, 7168), (128, 128))
    weight = Float8({"weight_block_size": [128, 128]}).read("x", file.parts, DTYPE)
    assert file.parts["weight_scale_inv"].shape == (5, 56)
    assert weight.dequantized(torch.float64).equal(file.numbers)


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_scale_for_all(name: str, shape: tuple[int, ...]) -> None:
    """However many dimensions it has; a block size in the config does not matter then."""
    file = written(torch.randn(24, 40), (24, 40), name=name)
    parts = file.parts | {name: file.parts[name].view(shape)}
    for quantization in ({}, {"weight_block_size": None}, {"weight_block_size": [128, 128]}):
        assert (
            Float8(quantization)
            .read("x", parts, DTYPE)
            .dequantized(torch.float64)
            .equal(file.numbers)
        )


def test_joined_experts() -> None:
    """Weights and scales with experts before them."""
    files = [written(torch.randn(40, 48) * (1 + number), (16, 32)) for number in range(3)]
    parts = {name: torch.stack([file.parts[name] for file in files]) for name in files[0].parts}
    weight = Float8({"weight_block_size": [16, 32]}).read("x", parts, DTYPE)
    assert weight.dequantized(torch.float64).equal(torch.stack([file.numbers for file in files]))


def test_scales_that_do_not_fit_are_refused() -> None:
    """As those that another block size would have."""
    file = written(torch.randn(144, 448), (128, 128))
    with pytest.raises(
        CheckpointError,
        match=r"scales of 'x' are \[2, 4\], but its weight \[144, 448\] has \[3, 7\] blocks of 64 x"
        r" 64",
    ):
        Float8({"weight_block_size": [64, 64]}).read("x", file.parts, DTYPE)
    for shape in ((4, 2), (9,)):
        with pytest.raises(
            CheckpointError, match=r"has \[2, 4\] blocks of 128 x 128; check quantization_config"
        ):
            parts = file.parts | {"weight_scale_inv": torch.ones(shape)}
            Float8({"weight_block_size": [128, 128]}).read("x", parts, DTYPE)
    with pytest.raises(CheckpointError, match="has a scale beside float8_e5m2"):
        Float8({}).read(
            "x",
            {"weight": torch.zeros(2, 2).to(torch.float8_e5m2), "weight_scale": torch.ones(1)},
            DTYPE,
        )
