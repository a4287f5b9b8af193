"""Linear layers that read a four-bit weight when there are few rows."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.layers.linear import FEW_ROWS, GROUP, FourBitWeight, can_pack_four_bit
from specdec.layers.linear_choice import linear
from tests.helpers.bounds import assert_as_exact

OUT, IN = 192, 160

needs_four_bit = pytest.mark.skipif(
    not can_pack_four_bit(torch.ones(1, dtype=torch.bfloat16)), reason="this CPU has no bfloat16 or no AVX-512"
)


def random_weight() -> tuple[FourBitWeight, Tensor, Tensor]:
    """Four-bit fields; their exact values, float64 [out, in]; and the values with the rounding that `Linear` states."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(16, (OUT, IN), generator=generator, dtype=torch.uint8)
    scale = (0.01 + 0.05 * torch.rand(OUT, IN // GROUP, generator=generator)).half()
    minimum = (-7.5 * scale.float() + 0.1 * torch.randn(OUT, IN // GROUP, generator=generator)).half()
    middle = (minimum.float() + 8 * scale.float()).bfloat16()

    def spread(groups: Tensor) -> Tensor:
        return groups.double().repeat_interleave(GROUP, dim=1)

    exact = spread(scale) * codes + spread(minimum)
    rounded = spread(scale.bfloat16()) * (codes.double() - 8) + spread(middle)
    return FourBitWeight(codes[:, ::2] | codes[:, 1::2] << 4, scale, minimum), exact, rounded


def random_rows(num_rows: int, width: int = IN, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_four_bit
def test_four_bit_weight_has_the_stated_values() -> None:
    """Read out column by column with unit rows: catches swapped halves of a byte, a wrong group, and scale taken for minimum."""
    four_bit, exact, rounded = random_weight()
    layer = linear(exact.bfloat16(), four_bit=four_bit)
    unit_rows = torch.eye(IN, dtype=torch.bfloat16).split(FEW_ROWS)
    columns = torch.cat([layer(rows) for rows in unit_rows])
    assert torch.equal(columns, rounded.float().bfloat16().t())
    # As far from the checkpoint's numbers as a bfloat16 weight is, within a factor of two.
    error = (rounded - exact).norm() / (exact.bfloat16().double() - exact).norm()
    assert error < 2


@needs_four_bit
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, FEW_ROWS])
def test_four_bit_product_is_rounded_once(num_rows: int, bias: bool) -> None:
    """Catches sums in bfloat16, and a bias or residual that is lost or added to the caller's tensor."""
    four_bit, exact, rounded = random_weight()
    added = random_rows(1, OUT, seed=2)[0] if bias else None
    layer = linear(exact.bfloat16(), added, four_bit=four_bit)
    x, residual = random_rows(num_rows), random_rows(num_rows, OUT, seed=3)
    exact = x.double() @ rounded.t()
    product = exact.bfloat16() if added is None else exact.bfloat16() + added
    assert_as_exact(layer(x), product, exact if added is None else exact + added.double())
    # A sum that lies between two bfloat16 numbers may fall to either.
    assert (layer(x) != product).float().mean() < 0.01
    before = residual.clone()
    assert torch.equal(layer(x, residual), layer(x) + residual)
    assert torch.equal(residual, before)


@needs_four_bit
def test_a_row_gives_the_same_bits_whatever_rows_are_beside_it() -> None:
    """What lets plain decoding and verification of a few drafts agree to the bit."""
    four_bit, exact, _ = random_weight()
    layer = linear(exact.bfloat16(), four_bit=four_bit)
    x = random_rows(FEW_ROWS)
    together = layer(x)
    for count in range(1, FEW_ROWS):
        assert torch.equal(layer(x[:count]), together[:count])
        assert torch.equal(layer(x[-count:]), together[-count:])


@needs_four_bit
@pytest.mark.skipif(torch.cpu._is_amx_tile_supported(), reason="another CPU picks other kernels")
@pytest.mark.parametrize("inputs", [1536, 4096])
def test_a_lone_row_of_the_full_weight_has_the_same_bits(inputs: int) -> None:
    """Catches the one row that oneDNN adds up in another order when there are many inputs."""
    generator = torch.Generator().manual_seed(0)
    layer = linear(torch.randn(256, inputs, generator=generator).bfloat16())
    for seed in range(20):
        x, residual = random_rows(3, inputs, seed=seed), random_rows(3, 256, seed=seed + 50)
        assert torch.equal(layer(x[:1]), layer(x)[:1])
        assert torch.equal(layer(x[:1], residual[:1]), layer(x, residual)[:1])


@needs_four_bit
def test_many_rows_read_the_full_weight() -> None:
    """Catches a four-bit product used where it is slower, and the full weight made from the wrong tensor."""
    four_bit, exact, _ = random_weight()
    weight = exact.bfloat16()
    x = random_rows(FEW_ROWS + 1)
    assert torch.equal(linear(weight, four_bit=four_bit)(x), linear(weight)(x))
    assert not torch.equal(linear(weight, four_bit=four_bit)(x[:1]), linear(weight)(x[:1]))


def test_four_bits_are_only_for_blocked_bfloat16() -> None:
    """A float32 model must stay exactly the checkpoint's."""
    four_bit, exact, _ = random_weight()
    x = random_rows(2).float()
    assert torch.equal(linear(exact.float(), four_bit=four_bit)(x), F.linear(x, exact.float()))
