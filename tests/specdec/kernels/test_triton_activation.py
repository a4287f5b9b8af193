"""Activations within a kernel and in one of their own against plain torch; see
`tests.helpers.triton_interpreter`.
"""

import pytest
import torch

from specdec.layers.experts.routing import PLAIN
from specdec.layers.ops.activation import ACTIVATIONS, gated
from specdec.layers.ops.activation import activate as plainly
from tests.helpers.bounds import assert_as_exact
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

import triton  # noqa: E402 (only where it can run)
import triton.language as tl  # noqa: E402

from specdec.layers.ops import triton_activation  # noqa: E402
from specdec.layers.ops.triton_activation import activate  # noqa: E402


@triton.jit
def _activate_kernel(
    gate: tl.tensor, up: tl.tensor, output: tl.tensor, KIND: tl.constexpr, SIZE: tl.constexpr
) -> None:
    place = tl.arange(0, SIZE)
    tl.store(output + place, activate(tl.load(gate + place), tl.load(up + place), KIND))


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activation(kind: str) -> None:
    """As exact as plain torch, far from zero too; what is not a number stays so."""
    torch.manual_seed(0)
    gate, up = (4 * torch.randn(2, 4096)).to(DEVICE)
    gate[:4] = torch.tensor([-80.0, 80.0, 0.0, torch.nan])
    up[4] = torch.nan
    output = torch.empty_like(gate)
    _activate_kernel[(1,)](gate, up, output, KIND=kind, SIZE=4096)
    plain = gated(gate, up, kind)
    assert output.isnan().equal(plain.isnan()) and output.isnan().sum() == 2
    numbers = ~plain.isnan()
    assert_as_exact(
        output[numbers], plain[numbers], gated(gate[numbers].double(), up[numbers].double(), kind)
    )


@pytest.mark.parametrize("kind", [*PLAIN, "gelu"])
def test_activation_of_a_product(kind: str) -> None:
    """With a gate half as wide as the product, without one as wide; rows may be apart."""
    torch.manual_seed(0)
    product = torch.randn(3, 2100).to(DEVICE)[:, 30:2090]
    got = triton_activation.gated(product, kind)
    assert got.is_contiguous()
    assert_as_exact(got, plainly(product, kind), plainly(product.double(), kind))
