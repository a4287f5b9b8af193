"""Norms with gates in plain torch against Transformers' modules: the same numbers, rounded in the
same places.
"""

from inspect import signature

import pytest
import torch
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearRMSNormGated
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNormGated

from specdec.layers.ops.norm import GroupNorm, gated_norm
from tests.helpers.bounds import Float64, assert_as_exact

ROWS, GROUPS, WIDTH, EPSILON = 5, 3, 20, 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "kind",
    ["heads", "sigmoid", "gate first", "rounded once, gate first", "rounded once, gate last"],
)
def test_gated_norm(kind: str, dtype: torch.dtype) -> None:
    """Gates before and after the norm, one weight for all groups and one for each; the gate is part
    of a wider product.
    """
    torch.manual_seed(0)
    x, joined = (
        torch.randn(ROWS, GROUPS * WIDTH).to(dtype),
        torch.randn(ROWS, 2 * GROUPS * WIDTH).to(dtype),
    )
    gate, weight = joined[:, GROUPS * WIDTH :], torch.randn(GROUPS * WIDTH).to(dtype)
    shapes = (-1, WIDTH) if kind in ("heads", "sigmoid") else (ROWS, GROUPS * WIDTH)
    module: torch.nn.Module
    if kind == "heads":
        module, weight, norm = (
            Qwen3_5RMSNormGated(WIDTH, eps=EPSILON),
            weight[:WIDTH],
            GroupNorm(weight[:WIDTH], EPSILON),
        )
    elif kind == "sigmoid":
        module, weight = KimiLinearRMSNormGated(WIDTH, eps=EPSILON), weight[:WIDTH]
        norm = GroupNorm(weight, EPSILON, sigmoid=True)
    elif kind == "gate first":
        if "group_size" not in signature(MambaRMSNormGated.__init__).parameters:
            pytest.skip("this Transformers norms all groups together")
        module = MambaRMSNormGated(GROUPS * WIDTH, WIDTH, eps=EPSILON)
        norm = GroupNorm(weight, EPSILON, WIDTH, gate_first=True)
    else:
        first = kind.endswith("first")
        module = FalconH1RMSNormGated(
            GROUPS * WIDTH, eps=EPSILON, n_groups=GROUPS, norm_before_gate=not first
        )
        norm = GroupNorm(weight.float(), EPSILON, WIDTH, gate_first=first)
    module.to(dtype).weight.data = weight
    got = gated_norm(x, gate, norm)
    plain = module(x.view(shapes), gate.reshape(shapes)).view(x.shape)
    with Float64():
        module.double()
        exact = module(x.double().view(shapes), gate.double().reshape(shapes)).view(x.shape)
    assert got.dtype == dtype
    assert_as_exact(got, plain, exact)
    # here it is rounded before the weight, too
    if dtype == torch.bfloat16 and not kind.startswith("rounded once"):
        assert (got == plain).float().mean() > 0.98
