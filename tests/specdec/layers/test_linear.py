"""A bfloat16 weight in oneDNN's blocked layout."""

import pytest
import torch
from torch import Tensor

from specdec.layers.linear import DenseLinear, can_block
from specdec.layers.linear_choice import linear


def random_rows(num_rows: int, width: int, seed: int = 1) -> Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.skipif(
    not can_block(torch.ones(1, dtype=torch.bfloat16)), reason="this CPU has no bfloat16"
)
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


@pytest.mark.skipif(
    not can_block(torch.ones(1, dtype=torch.bfloat16)), reason="this CPU has no bfloat16"
)
@pytest.mark.parametrize("rows", [1, 5])
def test_gradients_go_through_a_frozen_weight_to_its_rows(rows: int) -> None:
    """As a drafter's do through the head of its target; catches a product without gradients."""
    weight = torch.randn(96, 1536, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = []
    for layer in (linear(weight), DenseLinear(weight)):
        x, residual = (random_rows(rows, n).requires_grad_() for n in (1536, 96))
        layer(x, residual).backward(random_rows(rows, 96, seed=2))
        found.append((x.grad, residual.grad))
    torch.testing.assert_close(*found)
