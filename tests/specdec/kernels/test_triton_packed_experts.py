"""Kernels of routed experts with weights of few bits against plain torch; see
`tests.helpers.triton_interpreter`.
"""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.layers.experts.experts import apply_experts
from specdec.layers.experts.routing import Experts
from specdec.layers.packed.weight import Code
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.packed_weights import in_order, packed
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.layers.experts.triton_experts import (  # noqa: E402
    FEW_ROWS,
    experts,
    packed_tile,
    unsupported_reasons,
)


class Case(NamedTuple):
    """Sizes of a layer."""

    code: Code
    group: int
    num_experts: int
    top_k: int
    hidden: int
    width: int
    activation: str = "silu"
    zero: float | None = None
    biased: bool = False


CASES = {
    "e4m3": Case("e4m3", 128, 5, 3, 256, 128),
    "int4": Case("int4", 32, 12, 2, 128, 96, zero=8.0),
    "e2m1, gpt-oss": Case("e2m1", 32, 5, 3, 96, 160, "swiglu_oai", biased=True),
    "int8, zeros": Case("int8", 64, 7, 2, 72, 88, "gelu", 3.5, True),
}


def layer_of(case: Case) -> Experts:
    """The same random layer for a case."""
    torch.manual_seed(0)
    shapes = (
        (case.num_experts, 2 * case.width, case.hidden),
        (case.num_experts, case.hidden, case.width),
    )
    weights = [
        packed(case.code, shape, case.group, zero=case.zero, device=DEVICE) for shape in shapes
    ]
    biases = [
        torch.randn(shape[:2]).to(DEVICE, torch.float16) if case.biased else None
        for shape in shapes
    ]
    return Experts(weights[0], weights[1], case.activation, *biases)


def rows_of(case: Case, count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, weights and ids."""
    torch.manual_seed(seed)
    ids = torch.rand(count, case.num_experts).topk(case.top_k).indices.int()
    return (
        torch.randn(count, case.hidden).to(DEVICE, torch.float16),
        torch.rand(count, case.top_k).to(DEVICE),
        ids.to(DEVICE),
    )


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for i, name in enumerate(CASES) for count in ((1, 70), (5, 70))[i % 2]],
)
def test_experts(name: str, count: int) -> None:
    """As exact as plain torch, which rounds the weights, more pairs than experts and fewer, sorted
    and not; nothing waits.
    """
    case = CASES[name]
    layer, (x, weights, ids) = layer_of(case), rows_of(case, count)
    assert unsupported_reasons(layer, case.top_k) == []
    with no_host_sync():
        got = experts(x, weights, ids, layer)
    assert got.ndim == (2 if count > FEW_ROWS else 3)
    exact = apply_experts(x.double(), weights, ids, layer.to(torch.float64))
    got = got.sum(0).half() if got.ndim == 3 else got
    assert_as_exact(got, apply_experts(x, weights, ids, layer), exact)


@pytest.mark.parametrize("name", ["e4m3", "e2m1, gpt-oss"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Alone, among few and among many, some of which choose as it does."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", in_order)
    case = CASES[name]
    layer = layer_of(case)
    x, weights, ids = rows_of(case, 1)
    alone = experts(x, weights, ids, layer)[:, 0]
    for count, place in ((2, 1), (33, 31)):
        rows, factors, others = rows_of(case, count, seed=count)
        others[: count // 2] = ids
        rows[place], factors[place], others[place] = x[0], weights[0], ids[0]
        assert experts(rows, factors, others, layer)[:, place].equal(alone), (count, place)


def test_one_side_packed() -> None:
    """Experts whose other product is not packed, of many rows, which go by the same blocks."""
    case = CASES["e4m3"]
    layer, (x, weights, ids) = layer_of(case), rows_of(case, 110)
    assert not isinstance(layer.down, Tensor)
    half = Experts(layer.gate_up, layer.down.dequantized(), case.activation)
    exact = apply_experts(x.double(), weights, ids, half.to(torch.float64))
    assert_as_exact(experts(x, weights, ids, half), apply_experts(x, weights, ids, half), exact)


def test_tiles_and_reasons() -> None:
    """How a row is added up depends on no other; what the kernels refuse."""
    for bits in (4, 8):
        tiles = [
            packed_tile(bits, rows, few=True, gated=True, memory=227 * 1024)
            for rows in range(1, FEW_ROWS + 1)
        ]
        assert len({(tile.depth, tile.num_warps) for tile in tiles}) == 1
        assert all(tile.rows >= rows for rows, tile in enumerate(tiles, start=1))
    wide = (
        packed("int4", (3, 64, 100), 20, device=DEVICE),
        packed("int4", (3, 100, 32), 32, device=DEVICE),
    )
    assert unsupported_reasons(Experts(*wide, "silu"), 2) == [
        "packed experts in float32, or in groups that 16 does not divide"
    ]
