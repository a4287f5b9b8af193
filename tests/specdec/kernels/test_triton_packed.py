"""Products with weights of few bits against plain torch; see `tests.helpers.triton_interpreter`."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from specdec.layers.packed.gguf import GGUF_TYPES, GgufWeight
from specdec.layers.packed.linear import PackedLinear
from specdec.layers.packed.table import PackedTable
from specdec.layers.packed.weight import Code, PackedWeight, values_of
from tests.helpers.bounds import assert_as_exact
from tests.helpers.ggml import blocks
from tests.helpers.guards import no_host_sync
from tests.helpers.packed_weights import in_order, packed
from tests.helpers.ptx import run
from tests.helpers.triton_interpreter import require_triton

DEVICE = require_triton()

from specdec.layers.packed import triton_packed, triton_packed_codes  # noqa: E402
from specdec.layers.packed.triton_packed import (  # noqa: E402
    MANY_ROWS,
    Tile,
    Wide,
    dequantized,
    few_rows,
    multiply,
    product,
)


class Case(NamedTuple):
    """A weight."""

    code: Code
    group: int
    outputs: int
    inputs: int
    zero: str = "none"  # or "one" for all, or "many"
    biased: bool = False


CASES = {
    "e4m3": Case("e4m3", 128, 96, 1024),
    "e4m3, a scale per row": Case("e4m3", 600, 72, 600, biased=True),
    "int8, ragged": Case("int8", 32, 72, 616, biased=True),
    "int8, a scale and a zero per row": Case("int8", 512, 64, 512, "many"),
    "int4": Case("int4", 128, 96, 1024, "one", True),
    "int4, zeros": Case("int4", 64, 72, 600, "many"),
    "int4, a scale per row": Case("int4", 320, 64, 320, "one"),
    "int4, small groups": Case("int4", 48, 64, 288, "many", True),
    "e2m1": Case("e2m1", 32, 96, 1024),
    "e2m1, groups of 16": Case("e2m1", 16, 72, 360, biased=True),
}


def weight_of(case: Case) -> tuple[PackedWeight, Tensor | None]:
    """The weight of a case as its checkpoint has it, and its bias."""
    torch.manual_seed(0)
    groups = -(-case.inputs // case.group)
    zero = {"none": None, "one": 8.0, "many": torch.randint(5, 11, (case.outputs, groups)).float()}[
        case.zero
    ]
    bias = torch.randn(case.outputs).to(DEVICE, torch.float16) if case.biased else None
    return packed(
        case.code, (case.outputs, case.inputs), case.group, zero=zero, device=DEVICE
    ), bias


def rows_of(case: Case, count: int) -> Tensor:
    """Random rows."""
    return torch.randn(count, case.inputs).to(DEVICE, torch.float16)


def check(
    got: Tensor, x: Tensor, weight: PackedWeight, bias: Tensor | None, *, gated: bool = False
) -> None:
    """As exact as half-precision rounding of the product with the unrounded weight."""
    exact = x.double() @ weight.dequantized(torch.float64).T + (
        0 if bias is None else bias.double()
    )
    if gated:
        gate, up = exact.chunk(2, dim=-1)
        exact = F.silu(gate) * up
    whole = (got.sum(0) if got.ndim == 3 else got).half()
    assert_as_exact(whole, exact.half(), exact)


# One row, and some that the medium and the wide tile serve.
FEW = [
    (name, how, (1, 12, 40)[(i + j) % 3])
    for i, name in enumerate(CASES)
    for j, how in enumerate(("plain", "gated", "split"))
    if (i + 2 * j) % 3
]


@pytest.mark.parametrize(("name", "how", "rows"), FEW)
def test_few_rows(monkeypatch: pytest.MonkeyPatch, name: str, how: str, rows: int) -> None:
    """Every code, groups and widths that nothing divides, rows of a wider tensor; sums of splits
    have one bias; nothing waits.
    """
    case, gated = CASES[name], how == "gated"
    tile = Tile(
        16,
        4,
        256,
        splits=2,
        direct=case.code != "e4m3",
        medium=Wide(16, 16, 128),
        wide=Wide(32, 16, 128),
    )
    monkeypatch.setattr(triton_packed, "TILES", dict.fromkeys((4, 8), ((0, tile),)))
    triton_packed.tile_for.cache_clear()
    weight, bias = weight_of(case)
    linear = PackedLinear(weight, bias)
    x = torch.cat([rows_of(case, rows)] * 2, dim=1)[:, : case.inputs]
    with no_host_sync():
        got = linear.few_rows(x, activation="silu" if gated else None, may_split=how == "split")
    triton_packed.tile_for.cache_clear()
    assert got is not None and got.dtype == (torch.float32 if how == "split" else torch.float16)
    assert got.shape == (*((2,) if how == "split" else ()), rows, case.outputs // (1 + gated))
    check(got, x, weight, bias, gated=gated)


TILES = [
    Tile(32, 2, 64),
    Tile(16, 8, 256, splits=3),
    Tile(32, 2, 256, direct=True),
    Tile(16, 8, 1024, splits=3, direct=True),
    Tile(64, 1, 128, splits=2),
    MANY_ROWS,
]


@pytest.mark.parametrize(
    ("tile", "name"),
    [
        (tile, ("e4m3", "int4, zeros", "e2m1, groups of 16")[(i + j) % 3])
        for i, tile in enumerate(TILES)
        for j in (0, 1)
    ],
)
def test_every_division(tile: Tile, name: str) -> None:
    """Lanes and splits that have nothing to add, and one lane for all."""
    case = CASES[name]
    weight, bias = weight_of(case)
    x = rows_of(case, 3)
    check(multiply(x, weight.arranged(), bias, tile), x, weight, bias)


@pytest.mark.parametrize(
    ("name", "how"),
    [("int8, ragged", "plain"), ("int4, zeros", "gated"), ("int8, ragged", "split")],
)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    """Alone, and first or last of up to 64."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", in_order)
    case = CASES[name]
    weight, bias = weight_of(case)
    ours, many = weight.arranged(), rows_of(case, 64)
    options: dict[str, Any] = {
        "activation": "silu" if how == "gated" else None,
        "may_split": how == "split",
    }
    whole = few_rows(many, ours, bias, **options)
    assert whole is not None
    for count in (
        (1, 9, 33) if DEVICE.type == "cpu" else range(1, 65)
    ):  # one of each tile of rows, none of them full
        for rows in (slice(0, count), slice(64 - count, 64)):
            got = few_rows(many[rows], ours, bias, **options)
            assert got is not None and got.equal(whole[..., rows, :]), count


SLICED = ("int8, ragged", "int4, small groups")
# Few rows' most, tiles of many, and slices of the weight as numbers, whose kernel
# `test_numbers_in_memory` has for all weights.
MANY = [(name, 64 + i % 2) for i, name in enumerate(CASES)] + [(name, 257) for name in SLICED]


@pytest.mark.parametrize(("name", "rows"), MANY)
def test_any_number_of_rows(monkeypatch: pytest.MonkeyPatch, name: str, rows: int) -> None:
    """Tiles of rows, and slices of the weight as numbers, which have to be rounded; with a
    residual, and leading dimensions.
    """
    case = CASES[name]
    weight, bias = weight_of(case)
    monkeypatch.setattr(triton_packed, "SLICE_BYTES", 64 * case.inputs * 2)
    linear, x = PackedLinear(weight, bias), rows_of(case, rows)
    residual = torch.randn(1, rows, case.outputs).to(DEVICE, torch.float16)
    got = linear(x[None], residual)
    numbers = weight.dequantized(torch.float64)
    exact = x.double() @ numbers.T + (0 if bias is None else bias.double()) + residual.double()
    plain = F.linear(x, numbers.half(), bias) + residual
    assert_as_exact(got, plain, exact)


@pytest.mark.parametrize(("name", "tiled"), [("e4m3", True), ("int4, zeros", False)])
def test_short_groups_become_numbers_first(name: str, tiled: bool) -> None:
    """Numbers are rounded, so both ways have other bits."""
    weight, x = weight_of(CASES[name])[0].arranged(), rows_of(CASES[name], 65)
    ways = {kind: product(x, weight, max_tiled_rows=256 if kind else 64) for kind in (True, False)}
    assert product(x, weight).equal(ways[tiled]) and not ways[True].equal(ways[False])


@pytest.mark.parametrize("name", CASES)
def test_numbers_in_memory(name: str) -> None:
    """Of some outputs too, to the bit but where a zero is taken."""
    weight = weight_of(CASES[name])[0]
    ours = weight.arranged()
    for start, end in ((0, weight.out_features), (8, 41)):
        expected = weight.rows(start, end).dequantized(torch.float16)
        assert dequantized(ours.rows(start, end), torch.float16).equal(expected)


def test_products_that_are_torchs() -> None:
    """Float32, more rows, and groups that no run divides, which the layer multiplies with all the
    same.
    """
    weight = packed("int4", (32, 240), 20, zero=8.0, device=DEVICE)
    x = torch.randn(3, 240).to(DEVICE, torch.float16)
    linear = PackedLinear(weight)
    assert linear.few_rows(x) is None and linear.prefetchable is None
    torch.testing.assert_close(linear(x), F.linear(x, weight.dequantized()))
    whole = PackedLinear(packed("int4", (32, 256), 32, device=DEVICE))
    assert whole.few_rows(torch.randn(65, 256).to(DEVICE, torch.float16)) is None
    assert whole.few_rows(torch.randn(3, 256).to(DEVICE)) is None
    assert (
        PackedLinear(packed("e4m3", (32, 256), 32, dtype=torch.float32, device=DEVICE)).few_rows(
            torch.randn(3, 256)
        )
        is None
    )


ASSEMBLED: list[tuple[Code, int]] = [
    ("e4m3", 0), ("int8", 0), ("int4", 2), ("int4", 4), ("int4", 8), ("e2m1", 0),
    ("int5", 0), ("int5", 16), ("int6", 32), ("nl4", 0),
]  # fmt: skip


@pytest.mark.parametrize("brain", [True, False])
@pytest.mark.parametrize(("code", "middle"), ASSEMBLED)
def test_assembly(code: Code, middle: int, brain: bool) -> None:
    """What NVIDIA's chips are told to do makes of every word what its codes say."""
    dtype = torch.bfloat16 if brain else torch.float16
    words = torch.arange(2**16, dtype=torch.int32)
    highs = torch.randint(-(2**31), 2**31, (2, 2**16)).int()
    count = 4 if code not in ("e4m3", "int8") else 2
    pairs = words | words.flip(0) << 16  # two words in a register
    above = {"int5": 1, "int6": 2}.get(code, 0)
    text = triton_packed_codes._assembly(code, brain, middle)
    outputs = run(text, pairs, count, dtype, *(highs if above else ()))
    bits = 16 // count
    for i, output in enumerate(outputs):
        for half, word in enumerate((words, words.flip(0))):
            number = (word >> i * bits) & (2**bits - 1)
            number |= (highs[half] >> i * above & 2**above - 1) << 4
            if code in ("e4m3", "int8"):
                kind = torch.float8_e4m3fn if code == "e4m3" else torch.int8
                codes = number.to(torch.uint8).view(kind)
            else:
                codes = number.to(torch.uint8)
            expected = values_of(codes, code, dtype) - middle
            known = expected.isfinite()
            assert output[:, half][known].equal(expected[known]) and known.float().mean() > 0.99


BLOCKS = [*((kind,) for kind in GGUF_TYPES), ("Q4_K", "Q6_K"), ("Q5_0", "Q8_0")]


def blocks_of(kinds: tuple[str, ...], inputs: int = 768) -> PackedWeight:
    """Random blocks of one type, or of two that are joined, as kernels read them."""
    torch.manual_seed(0)
    each = 96 // len(kinds)
    weights = [
        GgufWeight.from_blocks(blocks(kind, each, inputs), kind, torch.float16) for kind in kinds
    ]  # fmt: skip
    return GgufWeight.joined(weights).packed().to(DEVICE).arranged()


@pytest.mark.parametrize("kinds", BLOCKS, ids="+".join)
def test_blocks(monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...]) -> None:
    """GGUF's types: lanes that have nothing to add, splits, gates, many rows, numbers in memory."""
    weight = blocks_of(kinds)
    assert dequantized(weight, torch.float32).equal(weight.dequantized(torch.float32))
    order = torch.tensor([[95, 0], [1, 95]], device=DEVICE)
    assert dequantized(weight, torch.float32, order).equal(weight.dequantized(torch.float32)[order])
    scaled = weight.dequantized()[order] * 1.5
    assert dequantized(weight, torch.float16, order, 1.5).equal(scaled)
    place = BLOCKS.index(kinds)
    x = torch.randn((1, 12, 40)[place % 3], 768).to(DEVICE, torch.float16)
    lanes, medium, wide = (4, 8)[place // 3 % 2], Wide(16, 16, 256), Wide(32, 32, 128)
    tile = Tile(16, lanes, 512, direct=True, medium=medium, wide=wide)
    check(multiply(x, weight, None, tile._replace(splits=1 + place % 2)), x, weight, None)
    check(multiply(x, weight, None, tile, activation="silu"), x, weight, None, gated=True)
    check(multiply(x, weight, None, Tile(16, 2, 128)), x, weight, None)
    check(multiply(x, weight, None, MANY_ROWS), x, weight, None)


@pytest.mark.parametrize(
    ("kinds", "how"), [(("Q4_K",), "gated"), (("Q4_K", "Q6_K"), "plain")], ids=str
)
def test_blocks_of_a_row_are_the_same_whatever_is_beside_it(
    monkeypatch: pytest.MonkeyPatch, kinds: tuple[str, ...], how: str
) -> None:
    if DEVICE.type == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter.np.matmul", in_order)
    weight, many = blocks_of(kinds), torch.randn(64, 768).to(DEVICE, torch.float16)
    activation = "silu" if how == "gated" else None
    whole = few_rows(many, weight, activation=activation)
    assert whole is not None
    for count in (1, 9, 33) if DEVICE.type == "cpu" else range(1, 65):
        for rows in (slice(0, count), slice(64 - count, 64)):
            got = few_rows(many[rows], weight, activation=activation)
            assert got is not None and got.equal(whole[rows]), count


def test_a_table_makes_numbers_of_the_rows_that_it_is_asked_for() -> None:
    """With kernels as without, and in a type that they do not take."""
    weight = GgufWeight.from_blocks(blocks("Q4_K", 40, 512), "Q4_K", torch.float16).to(DEVICE)
    ids = torch.tensor([[39, 3, 3], [0, 39, 7]], device=DEVICE)
    for dtype in (torch.float16, torch.float32):
        table, numbers = PackedTable(weight.to(dtype)), weight.dequantized(dtype)
        assert table.rows(ids).equal(numbers[ids]) and len(table) == 40
        assert table.rows(ids, 0.5).equal(numbers[ids] * 0.5)
        assert table.nbytes < 1.03 * weight.nbytes
