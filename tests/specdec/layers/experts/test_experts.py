"""Routed experts in plain torch against transformers' modules."""

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.layers.experts.experts import apply_experts
from specdec.layers.experts.routing import Experts
from specdec.model.core import RoutedExperts
from tests.helpers.bounds import assert_as_exact

HIDDEN, WIDTH, EXPERTS, TOP_K = 24, 20, 9, 4

_SIZES = {"hidden_size": HIDDEN, "num_experts_per_tok": TOP_K}
FAMILIES: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_moe": ("Qwen3Moe", {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH}, "silu"),
    "qwen2_moe": (
        "Qwen2Moe",
        {"num_experts": EXPERTS, "moe_intermediate_size": WIDTH, "hidden_act": "gelu"},
        "gelu",
    ),
    "mixtral": (
        "Mixtral",
        {"num_local_experts": EXPERTS, "intermediate_size": WIDTH, "hidden_act": "relu"},
        "relu",
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": EXPERTS,
            "moe_intermediate_size": WIDTH,
            "hidden_act": "gelu_pytorch_tanh",
        },
        "gelu_tanh",
    ),
    "gpt_oss": ("GptOss", {"num_local_experts": EXPERTS, "intermediate_size": WIDTH}, "swiglu_oai"),
}
"""Folder and prefix of transformers' names, numbers of the config, and our name of the activation.
"""


def module_of(family: str) -> Any:
    """Experts of transformers with random weights, some activations of which are beyond gpt-oss's
    bounds.
    """
    prefix, numbers, _ = FAMILIES[family]
    home = f"transformers.models.{family}"
    config: Any = getattr(import_module(f"{home}.configuration_{family}"), f"{prefix}Config")(
        **_SIZES, **numbers
    )
    config._experts_implementation = "eager"
    module: nn.Module = getattr(import_module(f"{home}.modeling_{family}"), f"{prefix}Experts")(
        config
    )
    for parameter in module.parameters():
        parameter.data = torch.randn_like(parameter)
    return module


def ours(module: Any, family: str) -> Experts:
    """The same weights as we hold them: gpt-oss keeps its own transposed,
    gate and up interleaved.
    """
    activation = FAMILIES[family][2]
    if family != "gpt_oss":
        return Experts(module.gate_up_proj, module.down_proj, activation)

    def apart(joined: Tensor) -> Tensor:
        return torch.cat([joined[:, ::2], joined[:, 1::2]], dim=1).contiguous()

    first, second = (
        module.gate_up_proj.transpose(1, 2),
        module.down_proj.transpose(1, 2).contiguous(),
    )
    return Experts(
        apart(first), second, activation, apart(module.gate_up_proj_bias), module.down_proj_bias
    )


def routed(rows: int) -> tuple[Tensor, Tensor]:
    """Random weights and ids; experts 2 and 7 go unused."""
    ids = torch.stack(
        [torch.tensor([0, 1, 3, 4, 5, 6, 8])[torch.randperm(7)[:TOP_K]] for _ in range(rows)]
    )
    return torch.rand(rows, TOP_K), ids


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_equal_to_transformers(family: str) -> None:
    """As exact as its module, with experts that no row has chosen."""
    torch.manual_seed(0)
    module, x = module_of(family), torch.randn(50, HIDDEN)
    weights, ids = routed(50)
    got, plain = apply_experts(x, weights, ids, ours(module, family)), module(x, ids, weights)
    assert_as_exact(got, plain, module.double()(x.double(), ids, weights.double()))


def test_the_sum_has_the_rows_own_order() -> None:
    """Experts that return huge numbers in turn: what is left of their sum tells in which order it
    was taken.
    """
    large = 2.0**24
    outputs = torch.tensor([large, 1.0, -large])
    down = torch.zeros(3, 1, 1)
    layer = Experts(torch.zeros(3, 2, 1), down, "silu", down_bias=outputs[:, None])
    ids = torch.tensor([[0, 1, 2], [0, 2, 1], [2, 0, 1], [1, 0, 2]])
    got = apply_experts(torch.zeros(4, 1), torch.ones(4, 3), ids, layer)
    assert got[:, 0].tolist() == [0.0, 1.0, 1.0, 0.0]


def test_half_precision_sums_in_float32() -> None:
    """A token's experts are added up before they are rounded."""
    torch.manual_seed(0)
    layer = ours(module_of("qwen3_moe"), "qwen3_moe")
    half = layer.to(torch.bfloat16)
    wide = half.to(torch.float32)
    x, (weights, ids) = torch.randn(30, HIDDEN).bfloat16(), routed(30)
    got = apply_experts(x, weights, ids, half)
    parts = torch.stack(
        [apply_experts(x, torch.ones(30, 1), ids[:, [k]], half).float() for k in range(TOP_K)], 1
    )
    total = torch.zeros(30, HIDDEN)
    for k in range(TOP_K):
        total += parts[:, k] * weights[:, [k]]
    assert got.dtype == torch.bfloat16 and got.equal(total.bfloat16())
    assert not got.equal(apply_experts(x.float(), weights, ids, wide).bfloat16())


def test_expected_experts() -> None:
    """As counted in random choices; one row has exactly its own."""
    torch.manual_seed(0)
    counts = torch.tensor(
        [len({*torch.rand(8, 32).topk(4).indices.flatten().tolist()}) for _ in range(400)]
    ).float()
    expected = RoutedExperts(32, 4, 0).expected(8)
    assert abs(float(counts.mean()) - expected) < 4 * float(counts.std()) / 400**0.5
    assert (
        RoutedExperts(32, 4, 0).expected(1) == pytest.approx(4)
        and RoutedExperts(32, 32, 0).expected(3) == 32
    )


def test_sizes() -> None:
    """Numbers of a layer, and its bytes with biases."""
    layer = Experts(
        torch.zeros(3, 10, 4), torch.zeros(3, 4, 5), "silu", torch.zeros(3, 10), torch.zeros(3, 4)
    )
    assert (layer.num_experts, layer.width, layer.nbytes) == (3, 5, 4 * (120 + 60 + 30 + 12))
