"""Gated activations against transformers' functions and modules."""

import pytest
import torch
from transformers import GptOssConfig
from transformers.activations import ACT2FN
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from specdec.layers.ops.activation import gated


@pytest.mark.parametrize(
    ("kind", "name"),
    [("silu", "silu"), ("gelu", "gelu"), ("gelu_tanh", "gelu_pytorch_tanh"), ("relu", "relu")],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_named_as_in_transformers(kind: str, name: str, dtype: torch.dtype) -> None:
    """To the bit, in either type."""
    torch.manual_seed(0)
    gate, up = (4 * torch.randn(2, 33, 17)).to(dtype)
    assert gated(gate, up, kind).equal(ACT2FN[name](gate) * up)


def test_gpt_oss() -> None:
    """Its module holds gate and up interleaved; some of either are beyond the bounds."""
    torch.manual_seed(0)
    joined = 6 * torch.randn(9, 64)
    module = GptOssExperts(GptOssConfig(hidden_size=8, intermediate_size=32, num_local_experts=1))
    assert (joined.abs() > 7).any()
    assert gated(joined[:, ::2], joined[:, 1::2], "swiglu_oai").equal(module._apply_gate(joined))
