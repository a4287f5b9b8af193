"""Products with weights in ggml's blocks on a CPU, by our own C++."""

import pytest
import torch
from torch import Tensor

from specdec.kernels import native as library
from specdec.layers.linear import BlockedLinear, DenseLinear
from specdec.layers.linear_choice import drafting_linear, linear
from specdec.layers.packed.cpu import FEW_ROWS, TYPES, GgufLinear
from specdec.layers.packed.gguf import GgufWeight, eight_bits, joined
from tests.helpers.bounds import assert_as_exact
from tests.helpers.ggml import blocks
from tests.helpers.processors import PROCESSORS, library_for

pytestmark = pytest.mark.skipif(library.native() is None, reason="there is no C++ compiler")

OUT, IN = 70, 768


def weight_of(kind: str, outputs: int = OUT, inputs: int = IN) -> GgufWeight:
    return GgufWeight.from_blocks(blocks(kind, outputs, inputs), kind, torch.bfloat16)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(x: Tensor) -> Tensor:
    """Rows as the product sees them, float64."""
    groups = x.double().unflatten(-1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return ((groups / scale.clamp(min=1e-300)).round() * scale).flatten(-2)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, FEW_ROWS])
def test_product(kind: str, count: int) -> None:
    """As exact as float32 sums of the numbers that codes stand for, rounded once."""
    weight, bias = weight_of(kind), random(OUT, seed=1)
    x, residual = random(count, IN), random(count, OUT, seed=2)
    numbers, rows = weight.dequantized(torch.float64), rounded(x)
    exact = rows @ numbers.T + bias.double() + residual.double()
    plain = (rows.float() @ numbers.float().T + bias.float() + residual.float()).bfloat16()
    layer = linear(weight, bias)
    assert isinstance(layer, GgufLinear) and layer.nbytes <= 1.2 * weight.nbytes
    before = residual.clone()
    assert_as_exact(layer(x, residual), plain, exact)
    assert residual.equal(before) and layer(x[None]).equal(layer(x)[None])


@pytest.mark.parametrize("kind", TYPES)
def test_product_of_many_rows(kind: str) -> None:
    """No further off than rounding to 8 bits, which not every CPU does to many."""
    weight, x = weight_of(kind), random(2 * FEW_ROWS + 5, IN)
    numbers = weight.dequantized(torch.float64)
    plain = (rounded(x) @ numbers.T).bfloat16()
    assert_as_exact(linear(weight)(x), plain, x.double() @ numbers.T)


@pytest.mark.parametrize("kind", TYPES)
def test_bits_of_a_row_depend_on_nothing_else(kind: str) -> None:
    """Neither on other rows and their number, nor on threads; a token verified is one decoded."""
    layer, x = linear(weight_of(kind)), random(FEW_ROWS, IN)
    together, threads = layer(x), torch.get_num_threads()
    try:
        for count in (1, 2, 3, 4, 5, 8, 15, 33):
            torch.set_num_threads(1 + count % 3)
            assert layer(x[:count]).equal(together[:count])
            assert layer(x[-count:]).equal(together[-count:])
    finally:
        torch.set_num_threads(threads)


def test_parts_of_several_types() -> None:
    """Outputs of each part in its place, also where 16 does not divide them."""
    parts = [weight_of("Q4_K", 20), weight_of("Q6_K", 9), weight_of("Q5_0", 32)]
    x = random(5, IN)
    whole = joined(parts)
    assert isinstance(whole, GgufWeight)
    assert linear(whole)(x).equal(torch.cat([linear(part)(x) for part in parts], dim=1))


def test_rows_that_are_not_finite() -> None:
    """One gives nothing that is finite, and leaves the others alone."""
    layer, x = linear(weight_of("Q4_K")), random(4, IN)
    right = layer(x)
    x[1, 5], x[2, 700] = torch.inf, torch.nan
    got = layer(x)
    assert not got[1:3].isfinite().any() and got[[0, 3]].equal(right[[0, 3]])
    assert layer(torch.zeros_like(x)).abs().sum() == 0


def test_weights_of_drafters() -> None:
    """Half the bytes, within half a step of 8 bits; whole where 32 does not divide the inputs, and
    in float32.
    """
    weight, bias, x = random(OUT, IN, seed=3), random(OUT, seed=1), random(5, IN)
    weight[0, :32] = 0
    layer = drafting_linear(weight, bias)
    assert isinstance(layer, GgufLinear) and layer.nbytes < 0.7 * weight.nbytes
    numbers = eight_bits(weight).dequantized(torch.float64)
    step = weight.double().unflatten(1, (-1, 32)).abs().amax(-1).repeat_interleave(32, dim=1) / 127
    assert ((numbers - weight.double()).abs() <= 0.51 * step + 1e-12).all()
    exact = rounded(x) @ numbers.T + bias.double()
    assert_as_exact(layer(x), exact.bfloat16(), exact)
    assert isinstance(drafting_linear(weight[:, :40]), BlockedLinear | DenseLinear)
    assert isinstance(drafting_linear(weight.float()), DenseLinear)


def test_rows_that_do_not_fit() -> None:
    """Rows of another width or type, and residuals that would only broadcast, are refused."""
    layer = linear(weight_of("Q4_K"))
    for x in (random(4, 2 * IN), random(4, IN).float()):
        with pytest.raises(ValueError, match=f"rows are .*{IN}.*, not"):
            layer(x)
    for residual in (random(1, OUT), random(4, OUT).float()):
        with pytest.raises(ValueError, match="a residual is"):
            layer(random(4, IN), residual)


@pytest.mark.slow
@pytest.mark.parametrize("processor", PROCESSORS)
def test_other_instructions(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What processors without VNNI, AVX-512 and AVX2 compute, to a rounding of the sums."""
    other = library_for(processor)
    weights = [weight_of(kind) for kind in TYPES]
    own = [linear(weight)(random(7, IN)) for weight in weights]
    monkeypatch.setattr("specdec.layers.packed.cpu.native", lambda: other)
    for weight, expected in zip(weights, own, strict=True):
        got = linear(weight)(random(7, IN))
        torch.testing.assert_close(got, expected, atol=0.02, rtol=0.01)
