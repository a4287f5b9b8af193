"""Gates behind attention and recurrent layers against Transformers; see
`tests.helpers.triton_interpreter`.
"""

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated
from transformers.models.zamba2.modeling_zamba2 import Zamba2RMSNormGated

from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.pairs import pairs
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

# Imported only where Triton can run.
from specdec.layers.ops.triton_gated_norm import gated_norm, sigmoid_gate  # noqa: E402

TYPES = [torch.float32, torch.float16, torch.bfloat16]


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers on the device."""
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        pytest.skip("Triton's interpreter does not round to bfloat16")
    torch.manual_seed(sum(shape))
    return torch.randn(*shape).to(DEVICE, dtype)


def norms(kind: str, x: Tensor, gate: Tensor, weight: Tensor, width: int) -> Tensor:
    """What Transformers' module gives."""
    if kind == "gate first":
        module = Zamba2RMSNormGated(x.shape[1], width, eps=1e-3)
        module.weight.data = weight
        return module(x, gate)
    if kind == "sigmoid":  # older versions have no such model
        module = pytest.importorskip(
            "transformers.models.kimi_linear.modeling_kimi_linear"
        ).KimiLinearRMSNormGated
    else:
        module = Qwen3_5RMSNormGated
    head = module(width, eps=1e-3)
    head.weight.data = weight
    return head(x.view(-1, width), gate.reshape(-1, width)).view(x.shape)


@pytest.mark.parametrize(
    ("sizes", "kind", "dtype", "late"),
    pairs(
        [(3, 4, 128), (1, 1, 8), (5, 3, 20), (2, 2, 1100), (2, 40, 64)],
        ["gate last", "gate first", "sigmoid"],
        TYPES,
        [False, True],
    ),
)
def test_gated_norm(sizes: tuple[int, int, int], kind: str, dtype: torch.dtype, late: bool) -> None:
    """Any sizes; the gate is part of a wider product; weights in the model's type or in float32."""
    first, (rows, groups, width) = kind == "gate first", sizes
    x, joined = (
        random(rows, groups * width, dtype=dtype),
        random(rows, 2 * groups * width + 3, dtype=dtype),
    )
    gate = joined[:, 3 : 3 + groups * width]
    weight = random(groups * width if first else width, dtype=torch.float32 if late else dtype)
    got = gated_norm(
        x, gate, weight, 1e-3, width=width, gate_first=first, sigmoid=kind == "sigmoid"
    )
    assert got.dtype == dtype and got.is_contiguous()
    plain = norms(kind, x, gate, weight, width).to(dtype)
    with Float64():
        exact = norms(kind, x.double(), gate.double(), weight.double(), width)
    assert_as_exact(got, plain, exact)
    if dtype != torch.float32:
        assert (got == plain).float().mean() > 0.98  # rounded in the same places


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 5), (3, 1030), (9, 512)])
def test_sigmoid_gate(rows: int, width: int, dtype: torch.dtype) -> None:
    """The sigmoid is rounded before the product; rows of both may be apart."""
    joined = random(rows, 3 * width, dtype=dtype)
    x, gate = joined[:, :width], joined[:, 2 * width :]
    got, plain = sigmoid_gate(x, gate), x * gate.sigmoid()
    assert got.dtype == dtype and got.is_contiguous()
    assert_as_exact(got, plain, x.double() * gate.double().sigmoid())
    if dtype != torch.float32:
        assert (got == plain).float().mean() > 0.98
