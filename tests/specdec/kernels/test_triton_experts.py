"""Kernels of routed experts against plain torch; see `tests.helpers.triton_interpreter`."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from specdec.layers.experts.experts import apply_experts
from specdec.layers.experts.routing import PLAIN, Experts, SharedExperts
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.kernels.triton_launch import overlap_options  # noqa: E402
from specdec.layers.experts import triton_expert_groups, triton_experts  # noqa: E402
from specdec.layers.experts.triton_expert_groups import group_by_expert, max_blocks  # noqa: E402
from specdec.layers.experts.triton_experts import (  # noqa: E402
    FEW_ROWS,
    experts,
    few_rows_tile,
    many_rows_tile,
    unsupported_reasons,
)


class Case(NamedTuple):
    """Sizes of a layer."""

    num_experts: int
    top_k: int
    hidden: int
    width: int
    activation: str
    dtype: torch.dtype
    biased: bool = False


CASES = {
    "half": Case(16, 4, 128, 64, "silu", torch.float16),
    "few experts, biases": Case(5, 3, 320, 192, "swiglu_oai", torch.float16, True),
    "nothing divides": Case(9, 2, 72, 40, "gelu_tanh", torch.float16, True),
    "float32": Case(7, 3, 64, 48, "silu", torch.float32),
    "float32, nothing divides": Case(12, 1, 40, 24, "gelu", torch.float32, True),
    "without gates": Case(6, 2, 72, 40, "relu2", torch.float16, True),
}


def layer_of(case: Case, dtype: torch.dtype | None = None) -> Experts:
    """The same random layer for a case."""
    torch.manual_seed(0)

    def random(*shape: int) -> Tensor:
        return (torch.randn(*shape) / shape[-1] ** 0.5).to(DEVICE, dtype or case.dtype)

    experts, hidden, width = case.num_experts, case.hidden, case.width
    first = width if case.activation in PLAIN else 2 * width
    biases = (random(experts, first), random(experts, hidden)) if case.biased else (None, None)
    return Experts(
        random(experts, first, hidden), random(experts, hidden, width), case.activation, *biases
    )


def rows_of(case: Case, count: int, seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Random rows, weights and ids."""
    torch.manual_seed(seed)
    ids = torch.rand(count, case.num_experts).topk(case.top_k).indices.int()
    return (
        (3 * torch.randn(count, case.hidden)).to(DEVICE, case.dtype),
        torch.rand(count, case.top_k).to(DEVICE),
        ids.to(DEVICE),
    )


def summed(got: Tensor, dtype: torch.dtype) -> Tensor:
    """What the next kernel makes of partial sums."""
    return got.sum(0).to(dtype) if got.ndim == 3 else got


@pytest.mark.parametrize(
    ("name", "count"),
    [(name, count) for i, name in enumerate(CASES) for count in ((1, 33), (5, 70))[i % 2]],
)
def test_experts(name: str, count: int) -> None:
    """As exact as plain torch, more pairs than experts and fewer, sorted and not; nothing waits."""
    case = CASES[name]
    layer, (x, weights, ids) = layer_of(case), rows_of(case, count)
    assert unsupported_reasons(layer, case.top_k) == []
    with no_host_sync():
        got = experts(x, weights, ids, layer)
    if count > FEW_ROWS:
        assert got.shape == x.shape and got.dtype == x.dtype
    else:
        assert got.shape == (case.top_k, *x.shape) and got.dtype == torch.float32
    exact = apply_experts(x.double(), weights, ids, layer.to(torch.float64))
    assert_as_exact(summed(got, case.dtype), apply_experts(x, weights, ids, layer), exact)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter multiplies no bfloat16")
def test_bfloat16() -> None:
    """What models are mostly kept in."""
    case = CASES["half"]._replace(dtype=torch.bfloat16)
    layer, (x, weights, ids) = layer_of(case), rows_of(case, 5)
    exact = apply_experts(x.double(), weights, ids, layer.to(torch.float64))
    got = summed(experts(x, weights, ids, layer), case.dtype)
    assert_as_exact(got, apply_experts(x, weights, ids, layer), exact)


@pytest.mark.parametrize("name", ["few experts, biases", "float32", "without gates"])
def test_a_row_has_the_same_bits_whatever_is_beside_it(name: str) -> None:
    """Alone, among few and among many that choose as it does or otherwise,
    first or last of them.
    """
    case = CASES[name]
    layer = layer_of(case)
    x, weights, ids = rows_of(case, 1)
    alone = experts(x, weights, ids, layer)[:, 0]
    for count, place in ((2, 1), (5, 2), (32, 31), (64, 17)):
        rows, factors, others = rows_of(case, count, seed=count)
        others[: count // 2] = ids  # half of them choose the same
        rows[place], factors[place], others[place] = x[0], weights[0], ids[0]
        assert experts(rows, factors, others, layer)[:, place].equal(alone), (count, place)


SHARED = {
    "half, one part": (CASES["half"], 1),
    "nothing divides, two parts": (CASES["nothing divides"]._replace(biased=False), 2),
    "float32, three parts": (CASES["float32"], 3),
    "without gates, two parts": (CASES["without gates"]._replace(biased=False), 2),
}


@pytest.mark.parametrize(
    ("name", "count"), [*zip(SHARED, (1, 5, 33, 1), strict=True), ("half, one part", 33)]
)
def test_shared_experts(name: str, count: int) -> None:
    """As if they were further experts that each row has chosen,
    with the same bits for a row alone.
    """
    case, parts = SHARED[name]
    layer, (x, weights, ids) = layer_of(case), rows_of(case, count)
    sides = 1 if case.activation in PLAIN else 2
    assert isinstance(layer.gate_up, Tensor) and isinstance(layer.down, Tensor)
    gate_up, down = -layer.gate_up[:parts], layer.down[:parts].flip(1)
    # One side of all parts, then the other; inputs of all parts, side by side.
    joined = (
        gate_up.unflatten(1, (sides, case.width))
        .transpose(0, 1)
        .reshape(-1, case.hidden)
        .contiguous()
    )
    shared = SharedExperts(joined, down.transpose(0, 1).flatten(1).contiguous(), parts)
    others = torch.arange(
        case.num_experts, case.num_experts + parts, dtype=torch.int32, device=DEVICE
    ).expand(count, parts)
    ids, weights = (
        torch.cat([ids, others], 1),
        torch.cat([weights, torch.rand(count, parts).to(DEVICE)], 1),
    )
    got = experts(x, weights, ids, layer, shared)
    assert got.shape == (case.top_k + parts, *x.shape)
    whole = Experts(
        torch.cat([layer.gate_up, gate_up]), torch.cat([layer.down, down]), case.activation
    )
    exact = apply_experts(x.double(), weights, ids, whole.to(torch.float64))
    assert_as_exact(summed(got, case.dtype), apply_experts(x, weights, ids, whole), exact)
    assert experts(x[-1:], weights[-1:], ids[-1:], layer, shared)[:, 0].equal(got[:, -1])


def test_many_rows_are_independent() -> None:
    """A row has the same bits among others of the same number, wherever it stands."""
    case = CASES["few experts, biases"]
    layer, (x, weights, ids) = layer_of(case), rows_of(case, 70)
    expected = experts(x, weights, ids, layer)[69]
    others = rows_of(case, 70, seed=2)
    for tensor, own in zip(others, (x, weights, ids), strict=True):
        tensor[3] = own[69]
    assert experts(*others, layer)[3].equal(expected)


@pytest.mark.parametrize(("width", "described"), [(320, True), (40, True), (40, False)])
def test_wide_tiles(monkeypatch: pytest.MonkeyPatch, width: int, described: bool) -> None:
    """Many rows per expert, weights by descriptor and by address, whose tiles reach beyond an
    expert's columns and inputs.
    """
    if described and DEVICE.type != "cpu" and not overlap_options(DEVICE)["OVERLAP"]:
        pytest.skip("this GPU has no descriptors")
    monkeypatch.setattr(triton_experts, "describable", lambda weight, tile: described)
    case = Case(3, 2, 72, width, "swiglu_oai", torch.float16, True)
    layer, (x, weights, ids) = layer_of(case), rows_of(case, 120)
    assert many_rows_tile(240, 3, 2, gated=False, memory=227 * 1024)[:4] == (128, 256, 64, 8)
    exact = apply_experts(x.double(), weights, ids, layer.to(torch.float64))
    assert_as_exact(experts(x, weights, ids, layer), apply_experts(x, weights, ids, layer), exact)


def test_rows_of_a_wider_tensor() -> None:
    """Rows need not be adjacent."""
    case = CASES["half"]
    layer = layer_of(case)
    for count in (5, 70):
        x, weights, ids = rows_of(case, count)
        wide = torch.cat([x, x], dim=1)[:, : case.hidden]
        assert not wide.is_contiguous() and experts(wide, weights, ids, layer).equal(
            experts(x, weights, ids, layer)
        )


def test_one_expert_for_all() -> None:
    """Every row chooses the same two, most blocks are not needed, and the last expert is among
    them.
    """
    case = CASES["half"]._replace(top_k=2)
    layer = layer_of(case)
    for count in (33, 200):
        x, weights, ids = rows_of(case, count)
        ids[:] = torch.tensor([15, 3], dtype=torch.int32)
        got = summed(experts(x, weights, ids, layer), case.dtype)
        exact = apply_experts(x.double(), weights, ids, layer.to(torch.float64))
        assert_as_exact(got, apply_experts(x, weights, ids, layer), exact)


def test_the_sum_has_the_rows_own_order() -> None:
    """Experts that return huge numbers in turn: what is left of their sum tells in which order it
    was taken.
    """
    outputs = torch.tensor([2.0**24, 1.0, -(2.0**24)], device=DEVICE)
    layer = Experts(
        torch.zeros(3, 4, 2, device=DEVICE),
        torch.zeros(3, 2, 2, device=DEVICE),
        "silu",
        None,
        outputs.repeat(2, 1).T.contiguous(),
    )
    ids = torch.tensor(
        [[0, 1, 2], [0, 2, 1], [2, 0, 1], [1, 0, 2]], dtype=torch.int32, device=DEVICE
    )
    weights = torch.ones(4, 3, device=DEVICE)
    many = experts(
        torch.zeros(80, 2, device=DEVICE), weights.repeat(20, 1), ids.repeat(20, 1), layer
    )
    assert many[:, 0].tolist() == 20 * [0.0, 1.0, 1.0, 0.0]
    few = experts(torch.zeros(4, 2, device=DEVICE), weights, ids, layer)
    assert few[:, :, 0].T.equal(outputs[ids.long()]), (
        "a row's parts are in its own order, for the next kernel to add up"
    )


@pytest.mark.parametrize(
    ("count", "num_experts", "top_k", "block_rows"),
    [(65, 40, 8, 16), (300, 9, 4, 32), (700, 6, 2, 128), (5, 40, 3, 16)],
)
def test_groups(
    monkeypatch: pytest.MonkeyPatch, count: int, num_experts: int, top_k: int, block_rows: int
) -> None:
    """Each expert's pairs in the order of their numbers, padded to blocks; then blocks that are not
    needed.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(triton_expert_groups, "TILE", 64)
    chance = torch.rand(count, num_experts)
    chance[:, 2] = 0  # an expert without rows
    ids = chance.topk(top_k).indices.int().to(DEVICE)
    groups = group_by_expert(ids, num_experts, block_rows)
    flat = ids.flatten().tolist()
    expected: list[tuple[int, list[int]]] = []
    for expert in range(num_experts):
        pairs = [pair for pair, chosen in enumerate(flat) if chosen == expert]
        for start in range(0, len(pairs), block_rows):
            block = pairs[start : start + block_rows]
            expected.append((expert, block + [len(flat)] * (block_rows - len(block))))
    used = len(expected)
    assert len(groups.experts) == max_blocks(len(flat), num_experts, block_rows) >= used
    assert groups.experts.tolist() == [expert for expert, _ in expected] + [-1] * (
        len(groups.experts) - used
    )
    assert groups.pairs[:used].tolist() == [block for _, block in expected]


def test_max_blocks_is_enough_and_no_more() -> None:
    """The worst that can be chosen needs as many."""
    for num_pairs, num_experts, rows in ((100, 6, 16), (7, 20, 16), (500, 32, 32)):
        hit = min(num_pairs, num_experts)
        worst = [1] * hit
        for _ in range(num_pairs - hit):  # into the expert whose next block begins soonest
            worst[max(range(hit), key=lambda expert: (worst[expert] - 1) % rows)] += 1
        needed = sum(-(-count // rows) for count in worst)
        assert needed == max_blocks(num_pairs, num_experts, rows)


def test_how_a_row_is_added_up_depends_on_no_other() -> None:
    """Columns and depth of a tile are those of the shape."""
    chip: dict[str, Any] = {"processors": 132, "memory": 227 * 1024}
    for width, top_k in ((768, 8), (2880, 4), (7168, 8), (24, 2)):
        for gated in (True, False):
            tiles = [
                few_rows_tile(width, top_k, rows, 2, gated=gated, **chip)
                for rows in range(1, FEW_ROWS + 1)
            ]
            assert len({(tile.columns, tile.depth) for tile in tiles}) == 1
            assert all(tile.rows >= rows for rows, tile in enumerate(tiles, start=1))
    for itemsize in (2, 4):
        for pairs in (520, 4096, 262144):
            tiles = [
                many_rows_tile(pairs, 128, itemsize, gated=gated, memory=227 * 1024)
                for gated in (True, False)
            ]
            assert tiles[0].rows == tiles[1].rows, "both products go by the same blocks"


def test_who_has_descriptors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wide tiles on chips that have them, of weights whose rows are aligned."""
    wide, narrow = (
        many_rows_tile(pairs, 8, 2, gated=True, memory=227 * 1024) for pairs in (4096, 64)
    )
    monkeypatch.setattr(triton_experts, "overlap_options", lambda device: {"OVERLAP": True})
    weight = torch.zeros(8, 16, 64, dtype=torch.float16, device=DEVICE)
    assert triton_experts.describable(weight, wide) and not triton_experts.describable(
        weight, narrow
    )
    assert not triton_experts.describable(weight[..., :63].contiguous(), wide)
    assert not triton_experts.describable(weight.flatten()[1:-63].view(-1, 1, 64), wide)
    monkeypatch.setattr(triton_experts, "overlap_options", lambda device: {"OVERLAP": False})
    assert not triton_experts.describable(weight, wide)


def test_reasons() -> None:
    """Types, strides, and too many experts per token."""
    layer = layer_of(CASES["half"])
    assert isinstance(layer.gate_up, Tensor) and isinstance(layer.down, Tensor)
    assert unsupported_reasons(layer, 4) == []
    assert unsupported_reasons(layer.to(torch.float64), 4) == [
        "experts in float64 (the kernels take bfloat16, float16 or float32)"
    ]
    assert (
        "experts in float16 and float32"
        in unsupported_reasons(Experts(layer.gate_up.float(), layer.down, "silu"), 4)[0]
    )
    assert unsupported_reasons(
        Experts(layer.gate_up, layer.down.mT.contiguous().mT, "silu"), 33
    ) == [
        "experts that are not contiguous",
        "33 experts per token (the kernels take up to 32)",
    ]
