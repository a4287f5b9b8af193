"""Weights in ggml's blocks: the numbers that package `gguf` makes of them, in every form."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.layers.linear_choice import linear
from specdec.layers.packed.gguf import GGUF_TYPES, PLAIN_TYPES, GgufWeight, alike, joined
from tests.helpers.ggml import blocks, numbers_of
from tests.helpers.packed_weights import packed


def weight_of(kind: str, outputs: int = 20, inputs: int = 768, *experts: int) -> GgufWeight:
    return GgufWeight.from_blocks(blocks(kind, outputs, inputs, *experts), kind, torch.float32)


@pytest.mark.parametrize("kind", GGUF_TYPES)
def test_numbers(kind: str) -> None:
    """Those of the package to the bit, from bytes that may say anything; as kernels read them, too,
    in as many bytes.
    """
    weight = weight_of(kind)
    numbers = numbers_of(weight.parts[0].raw, kind)
    assert weight.dequantized().equal(numbers) and weight.shape == (20, 768)
    ours = weight.packed().arranged()
    assert ours.run > 1 and ours.padding == 0 and ours.dequantized().equal(numbers)
    assert ours.plain == (kind in PLAIN_TYPES)
    assert ours.nbytes <= 1.03 * weight.nbytes
    assert weight.to(torch.bfloat16).dequantized().equal(numbers.bfloat16())
    assert weight.packed().dequantized(torch.float64).float().allclose(numbers)


PAIRS = [
    ("Q4_K", "Q6_K", "int6", True),
    ("Q6_K", "Q5_K", "int6", True),
    ("Q4_K", "Q5_K", "int5", True),
    ("Q5_0", "Q8_0", "int8", False),
    ("Q4_0", "Q5_0", "int5", False),
    ("Q5_0", "Q5_1", "int6", False),
    ("Q4_0", "IQ4_NL", "int8", False),
    ("Q6_K", "Q8_0", "int8", False),
    ("Q4_1", "Q4_K", "int4", False),
]


@pytest.mark.parametrize(("first", "second", "code", "nested"), PAIRS)
def test_parts_of_several_types(first: str, second: str, code: str, nested: bool) -> None:
    """One form has room for both, in which no number is rounded."""
    one, other = weight_of(first), weight_of(second, 8)
    whole = joined([one, one, other])
    assert isinstance(whole, GgufWeight) and whole.kinds == (first, second) and alike([one, other])
    numbers = torch.cat([one.dequantized(), one.dequantized(), other.dequantized()])
    ours = whole.packed().arranged()
    assert (ours.code, ours.outer is not None) == (code, nested) and ours.run > 1
    for weight in (whole, ours):
        assert weight.dequantized().equal(numbers) and weight.shape == (48, 768)
        for start, end in ((0, 10), (35, 45), (44, 48), (3, 3)):
            assert weight.rows(start, end).dequantized().equal(numbers[start:end])


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_1", "Q8_0"])
def test_parts(kind: str) -> None:
    """Rows in another order, inputs between blocks, experts."""
    weight = weight_of(kind, 20, 768, 3)
    numbers = weight.dequantized()
    order = torch.tensor([19, 0, 3, 3])
    assert weight.select(order).dequantized().equal(numbers[:, order])
    assert weight.packed().select(order).dequantized().equal(numbers[:, order])
    assert weight.divides(512) and not weight.divides(248)
    assert weight.inputs(256, 512).dequantized().equal(numbers[..., 256:512])
    assert weight.expert(1).dequantized().equal(numbers[1])
    assert weight.packed().expert(1).dequantized().equal(numbers[1])
    stacked = GgufWeight.stacked([weight.expert(2), weight.expert(0)])
    assert stacked.dequantized().equal(numbers[[2, 0]])
    assert weight.to(torch.device("meta")).device.type == "meta"


def test_what_is_no_block_is_refused() -> None:
    with pytest.raises(ValueError, match="IQ2_XS is not multiplied as it is stored"):
        GgufWeight.from_blocks(torch.zeros(1, 74, dtype=torch.uint8), "IQ2_XS", torch.float32)
    with pytest.raises(ValueError, match="have 144 bytes"):
        GgufWeight.from_blocks(torch.zeros(1, 145, dtype=torch.uint8), "Q4_K", torch.float32)
    with pytest.raises(ValueError, match=r"rows of 144 torch\.int8"):
        GgufWeight.from_blocks(torch.zeros(1, 144, dtype=torch.int8), "Q4_K", torch.float32)


def test_no_form_is_joined_with_another() -> None:
    weights: list[Any] = [
        weight_of("Q8_0", 8, 96),
        packed("int8", (8, 96), 32, dtype=torch.float32),
    ]
    assert not alike(weights) and alike(weights[1:] * 2)
    assert joined(weights[1:] * 2).shape == (16, 96)


def test_linear() -> None:
    """A product with any form is that of the numbers."""
    weight, x = joined([weight_of("Q4_K"), weight_of("Q6_K")]), torch.randn(3, 768)
    exact: Tensor = x @ weight.dequantized().T
    torch.testing.assert_close(linear(weight)(x), exact)
