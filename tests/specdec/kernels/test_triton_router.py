"""The kernel that chooses experts against plain torch; see `tests.helpers.triton_interpreter`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from specdec.layers.experts import router
from specdec.layers.experts.routing import Routing
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.layers.experts.triton_router import route  # noqa: E402 (only where Triton can run)

KINDS = {
    "renormalized softmax": Routing(128, 8),
    "softmax": Routing(60, 4, renormalized=False, scaling=1.5),
    "biased softmax": Routing(64, 6, biased=True),
    "softmax in groups": Routing(
        160, 6, num_groups=8, topk_groups=3, renormalized=False, scaling=16.0
    ),
    "sigmoid": Routing(256, 8, scores="sigmoid", biased=True, num_groups=1, scaling=2.5),
    "unbiased sigmoid": Routing(17, 1, scores="sigmoid", renormalized=False),
    "sigmoid in groups": Routing(
        256, 8, scores="sigmoid", biased=True, num_groups=8, topk_groups=4, scaling=2.5
    ),
    "sigmoid in three groups": Routing(
        30, 5, scores="sigmoid", biased=True, num_groups=3, topk_groups=2
    ),
    "sigmoid with a large epsilon": Routing(32, 4, scores="sigmoid", epsilon=0.5),
    "all groups": Routing(32, 3, num_groups=4, topk_groups=4),
    "all experts": Routing(6, 6, renormalized=False),
}
ROWS = 7


def biases(routing: Routing) -> Tensor | None:
    """One that changes what is chosen."""
    scale = 0.2 if routing.scores == "sigmoid" else 0.5 / routing.num_experts
    return scale * torch.randn(routing.num_experts) - 1.5 * scale if routing.biased else None


def on_device(tensor: Tensor | None) -> Tensor | None:
    """The same there."""
    return None if tensor is None else tensor.to(DEVICE)


@pytest.mark.parametrize("kind", KINDS)
def test_route(kind: str) -> None:
    """The same experts in the same order, with weights as exact; logits may be a view."""
    torch.manual_seed(0)
    routing = KINDS[kind]
    logits, bias = 3 * torch.randn(ROWS, routing.num_experts + 5), biases(routing)
    with no_host_sync():
        weights, ids = route(logits.to(DEVICE)[:, 2:-3], routing, on_device(bias))
    logits = logits[:, 2:-3]
    plain, plain_ids = router.route(logits, routing, bias)
    with Float64():
        exact, _ = router.route(logits.double(), routing, bias)
    assert ids.dtype == torch.int32 and ids.cpu().long().equal(plain_ids)
    assert_as_exact(weights.cpu(), plain, exact)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("renormalized softmax", torch.float16),
        ("softmax in groups", torch.bfloat16),
        ("sigmoid", torch.bfloat16),
        ("sigmoid in three groups", torch.float16),
    ],
)
def test_equal_scores(kind: str, dtype: torch.dtype) -> None:
    """Of few different logits, signed zeros among them, the lower experts and groups are taken, in
    their order.
    """
    torch.manual_seed(0)
    routing = KINDS[kind]
    logits = (
        torch.randint(-1, 2, (12, routing.num_experts))
        * torch.tensor([1.0, -1.0]).repeat(12, routing.num_experts // 2)
    ).to(dtype)
    bias = torch.zeros(routing.num_experts) if routing.biased else None
    _, ids = route(logits.to(DEVICE), routing, on_device(bias))
    assert ids.cpu().long().equal(router.route(logits, routing, bias)[1])


def test_extreme_logits() -> None:
    """Far apart, infinite, and a row that is not a number: experts are chosen all the same, and are
    different ones.
    """
    logits = torch.zeros(3, 16)
    logits[0, 3:6] = torch.tensor([200.0, -200.0, 90.0])
    logits[1, ::2] = -torch.inf
    logits[2] = torch.nan
    weights, ids = (x.cpu() for x in route(logits.to(DEVICE), Routing(16, 4)))
    assert ids.tolist() == [[3, 5, 0, 1], [1, 3, 5, 7], [0, 1, 2, 3]]
    assert (
        weights[0].tolist() == [1.0, 0.0, 0.0, 0.0]
        and weights[1].tolist() == [0.25] * 4
        and weights[2].isnan().all()
    )


@pytest.mark.parametrize("kind", ["renormalized softmax", "sigmoid in groups"])
def test_partial_sums_and_a_bias_of_the_gate(kind: str) -> None:
    """They are added up before anything else, in float32."""
    torch.manual_seed(0)
    routing = KINDS[kind]
    parts, gate_bias, bias = (
        torch.randn(3, ROWS, routing.num_experts),
        torch.randn(routing.num_experts),
        biases(routing),
    )
    got = route(parts.to(DEVICE), routing, on_device(bias), gate_bias=gate_bias.to(DEVICE))
    whole = parts[0] + parts[1] + parts[2] + gate_bias
    expected = route(whole.to(DEVICE), routing, on_device(bias))
    assert all(x.equal(y) for x, y in zip(got, expected, strict=True))
    half = gate_bias.half()
    got = route(whole.half().to(DEVICE), routing, on_device(bias), gate_bias=half.to(DEVICE))
    expected = route((whole.half().float() + half.float()).to(DEVICE), routing, on_device(bias))
    assert all(x.equal(y) for x, y in zip(got, expected, strict=True))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "sigmoid in groups"])
def test_what_is_shared(kind: str, gated: bool) -> None:
    """Comes behind what is chosen, which stays as it is, with a weight of 1 or the sigmoid of one
    more logit.
    """
    torch.manual_seed(0)
    routing = KINDS[kind]
    parts, bias = (
        torch.randn(3, ROWS, routing.num_experts + 9).to(DEVICE),
        on_device(biases(routing)),
    )
    weights, ids = route(parts, routing, bias, shared=3, shared_gate=gated)
    expected = route(parts[..., : routing.num_experts], routing, bias)
    assert weights[:, : routing.top_k].equal(expected[0]) and ids[:, : routing.top_k].equal(
        expected[1]
    )
    assert (
        ids[:, routing.top_k :].tolist()
        == [[routing.num_experts + part for part in range(3)]] * ROWS
    )
    gate = (parts[0] + parts[1] + parts[2])[:, [routing.num_experts]].cpu()
    if not gated:
        gate[:] = torch.inf  # whose sigmoid is 1
    plain, exact = gate.sigmoid(), gate.double().sigmoid()
    assert_as_exact(weights[:, routing.top_k :].cpu(), plain.expand(-1, 3), exact.expand(-1, 3))


def test_rows_alone() -> None:
    """A row has the same bits whatever rows are beside it."""
    torch.manual_seed(0)
    for routing in (KINDS["renormalized softmax"], replace(KINDS["sigmoid"], biased=False)):
        logits = torch.randn(5, routing.num_experts).to(DEVICE)
        together, alone = route(logits, routing), route(logits[3:4], routing)
        assert all(x[3:4].equal(y) for x, y in zip(together, alone, strict=True))
