"""Weights of few bits in plain torch, and the layer around them where there are no kernels."""

from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.layers.experts.experts import apply_experts
from specdec.layers.experts.routing import Experts
from specdec.layers.linear import DenseLinear, can_block
from specdec.layers.linear_choice import linear
from specdec.layers.packed.linear import PackedLinear
from specdec.layers.packed.weight import Code, PackedWeight, run_of
from tests.helpers.packed_weights import CODES, packed

E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def test_values_of_codes() -> None:
    """Every code of 4 bits, low half first, times scales of groups, of which the last has fewer
    inputs.
    """
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    scale = torch.tensor([[1.0, 2.0, -0.5]])
    floats = PackedWeight(codes, scale, None, 6, "e2m1", torch.float32)
    values = torch.tensor([*E2M1, *(-x for x in E2M1)])
    factors = torch.tensor([1.0] * 6 + [2.0] * 6 + [-0.5] * 4)
    assert floats.dequantized().equal((values * factors)[None]) and floats.in_features == 16
    ints = PackedWeight(codes, scale, torch.tensor([[8.0, 0.0, 2.5]]), 6, "int4", torch.float32)
    zeros = torch.tensor([8.0] * 6 + [0.0] * 6 + [2.5] * 4)
    assert ints.dequantized().equal(((torch.arange(16) - zeros) * factors)[None])
    signed = PackedWeight(
        torch.tensor([[-128, 127, 3]], dtype=torch.int8),
        scale[:, :1],
        None,
        3,
        "int8",
        torch.float32,
    )
    assert signed.dequantized().tolist() == [[-128, 127, 3]]
    eight = PackedWeight(
        torch.tensor([[-448.0, 2**-9, 1.125]]).to(torch.float8_e4m3fn),
        scale[:, 1:2],
        None,
        3,
        "e4m3",
        torch.float32,
    )
    assert eight.dequantized().tolist() == [[-896, 2**-8, 2.25]]


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("group", [16, 32, 48, 128, 300])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_arranged(code: Code, group: int, experts: tuple[int, ...]) -> None:
    """The same numbers, in runs of one group, padded; no wider a scale than needed, and a zero that
    all share is a number.
    """
    weight = packed(code, (*experts, 20, 300), group, zero=8.0 if code == "int4" else None)
    ours = weight.arranged()
    assert ours.dequantized(torch.float32).equal(weight.dequantized(torch.float32))
    assert ours.run == run_of(group, 300, weight.halves) and ours.in_features == 300
    assert ours.codes.shape[-1] * (1 + ours.halves) % (ours.run * (4 if ours.halves else 2)) == 0
    assert (
        ours.scale.dtype == torch.bfloat16
        and ours.zero is None
        and ours.middle == (8 if code == "int4" else 0)
    )
    again = ours.arranged()
    assert (
        again.codes.view(torch.uint8).equal(ours.codes.view(torch.uint8))
        and again.padding == ours.padding
        and again.middle == ours.middle
    )


def test_arranged_keeps_what_differs() -> None:
    """Zeros of groups, numbers that half precision would round, and groups that no run divides."""
    zero = torch.rand(20, 15)
    weight = packed("int4", (20, 300), 20, zero=zero)
    weight.scale[3, 4] = 1 + 2**-20
    ours = weight.arranged()
    assert (
        ours.run == 1
        and ours.scale.dtype == torch.float32
        and ours.zero is not None
        and ours.zero.equal(zero)
    )
    assert ours.dequantized(torch.float64).equal(weight.dequantized(torch.float64))


@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("arranged", [False, True])
def test_rows_are_chosen_and_joined(code: Code, arranged: bool) -> None:
    """As those of the numbers would be, of one weight or of experts; a part without zeros has zeros
    that are 0.
    """
    first, second = (
        packed(code, (3, 20, 96), 32, zero=torch.rand(3, 20, 3)),
        packed(code, (3, 8, 96), 32),
    )
    if arranged:
        first, second = first.arranged(), second.arranged()
    numbers, others = first.dequantized(torch.float32), second.dequantized(torch.float32)
    order = torch.tensor([19, 0, 3, 3])
    assert first.select(order).dequantized(torch.float32).equal(numbers[:, order])
    assert first.rows(2, 7).dequantized(torch.float32).equal(numbers[:, 2:7])
    assert first.expert(1).dequantized(torch.float32).equal(numbers[1])
    joined = PackedWeight.joined([first, second])
    assert (
        joined.dequantized(torch.float32).equal(torch.cat([numbers, others], dim=1))
        and joined.out_features == 28
    )
    stacked = PackedWeight.stacked([second.expert(number) for number in (2, 0)])
    assert stacked.dequantized(torch.float32).equal(others[[2, 0]])
    assert not PackedWeight.alike([first, packed(code, (3, 8, 96), 48)])


def test_scales_and_zeros_of_other_groups_are_refused() -> None:
    codes, scale = torch.zeros(2, 8, dtype=torch.uint8), torch.ones(2, 2)
    with pytest.raises(ValueError, match="scales are "):
        PackedWeight(codes, scale[:, :1], None, 8, "int4", torch.float32)
    with pytest.raises(ValueError, match="zeros are "):
        PackedWeight(codes, scale, scale[:1], 8, "int4", torch.float32)


def test_bytes_and_places() -> None:
    """Codes, scales and zeros count; a type is that of rows, and codes stay."""
    weight = packed("int4", (20, 96), 32, zero=torch.rand(20, 3))
    assert weight.nbytes == 20 * 48 + 2 * 20 * 3 * 4
    assert (
        weight.to(torch.float64).dtype == torch.float64
        and weight.to(torch.float64).codes is weight.codes
    )
    assert weight.to(torch.device("meta")).device.type == "meta"


@pytest.mark.parametrize("code", CODES)
def test_linear(code: Code) -> None:
    """A CPU multiplies numbers; the layer that keeps codes gives the same, with what joins it."""
    weight, bias = packed(code, (20, 96), 32), torch.randn(20)
    x, residual = torch.randn(2, 3, 96), torch.randn(2, 3, 20)
    whole = linear(weight.to(torch.float32), bias)
    assert isinstance(whole, DenseLinear) and whole.weight.equal(weight.dequantized(torch.float32))
    brain = linear(weight.to(torch.bfloat16))
    assert isinstance(brain, DenseLinear) != can_block(torch.zeros(1, 1, dtype=torch.bfloat16))
    kept = PackedLinear(weight.to(torch.float32), bias)
    torch.testing.assert_close(kept(x, residual), whole(x, residual))
    assert (kept.in_features, kept.out_features, kept.dtype) == (96, 20, torch.float32)
    assert (
        kept.prefetchable is None
        and kept.few_rows(x[0]) is None
        and kept.nbytes < weight.nbytes * 1.4
    )


def test_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of more outputs than exist as numbers at a time."""
    monkeypatch.setattr("specdec.layers.packed.linear.SLICE_OUTPUTS", 7)
    weight, x = packed("int4", (20, 96), 32, zero=8.0, dtype=torch.float32), torch.randn(5, 96)
    seen: list[int] = []
    numbers = PackedWeight.dequantized

    def counted(part: PackedWeight, *dtype: Any) -> Tensor:
        seen.append(part.out_features)
        return numbers(part, *dtype)

    exact = x @ weight.dequantized().T
    monkeypatch.setattr(PackedWeight, "dequantized", counted)
    torch.testing.assert_close(PackedLinear(weight)(x), exact)
    assert seen == [7, 7, 6]


@pytest.mark.parametrize("code", CODES)
def test_experts(code: Code) -> None:
    """Expert by expert, also those that nobody chose; their bytes are those of codes, scales and
    biases.
    """
    gate_up, down, biases = (
        packed(code, (5, 96, 64), 32),
        packed(code, (5, 64, 48), 16),
        (torch.randn(5, 96), torch.randn(5, 64)),
    )
    layer = Experts(gate_up, down, "silu", *biases).to(torch.float32)
    plain = Experts(
        gate_up.dequantized(torch.float32), down.dequantized(torch.float32), "silu", *biases
    )
    x, weights, ids = torch.randn(3, 64), torch.rand(3, 2), torch.tensor([[0, 3], [3, 1], [1, 0]])
    torch.testing.assert_close(
        apply_experts(x, weights, ids, layer), apply_experts(x, weights, ids, plain)
    )
    assert (layer.num_experts, layer.width) == (5, 48) and isinstance(layer.gate_up, PackedWeight)
    assert layer.nbytes < sum(part.nbytes for part in (gate_up, down, *biases)) * 1.2
