"""The emulation of AITER's layers: right where it answers, and an error elsewhere."""

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.helpers.aiter_emulation.signatures import SOURCES, VERSIONS
from tests.helpers.aiter_emulation_case import (
    Attempt,
    Load,
    Misuse,
    assert_rounded_once,
    check_misuse,
    loader,
)
from tests.helpers.guards import no_host_sync

ROPE = "fused_qk_rope_reshape_and_cache"
ROWS, HEADS, KV_HEADS, DIM, BLOCKS, SIZE = 5, 4, 2, 32, 3, 16


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """See `loader`."""
    plain = loader(monkeypatch, tmp_path)

    def setup(**machine: Any) -> Any:
        aiter, pretended = plain(**machine)
        home = "aiter." + SOURCES[ROPE].removesuffix(".py").replace("/", ".")
        setattr(aiter, ROPE, getattr(importlib.import_module(home), ROPE))
        return aiter, pretended

    return setup


def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Always the same random numbers for a shape."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def assert_written(got: Tensor, exact: Tensor, architecture: str) -> None:
    """`exact` rounded, or on gfx942 cut off: not above it in magnitude, and less than a unit in the
    last place below.
    """
    if architecture == "gfx950":
        return assert_rounded_once(got, exact)
    short = (exact.abs() - got.double().abs()) / exact.abs()
    assert short.min() > -1e-5 and 2**-8 < short.max() < 2**-7


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_norms(load: Load, architecture: str, version: str) -> None:
    """Weighted before they are written; the sum normed before it is."""
    aiter, _ = load(architecture=architecture, version=version)
    x, residual, weight = normal(ROWS, 64), normal(ROWS + 1, 64)[:ROWS], normal(64)

    def exact(rows: Tensor) -> Tensor:
        return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()

    with no_host_sync():
        got = aiter.rmsnorm2d_fwd(input=x, weight=weight, epsilon=1e-5)
        out, added = torch.empty_like(x), torch.empty_like(x)
        aiter.rmsnorm2d_fwd_with_add(
            out=out, input=x, residual_in=residual, residual_out=added, weight=weight, epsilon=1e-5
        )
    assert_written(got, exact(x.double()), architecture)
    total = x.double() + residual.double()
    assert_written(out, exact(total), architecture)
    if architecture == "gfx950":
        assert torch.equal(added, x + residual)
    else:
        assert (added.double().abs() <= total.abs()).all() and (added != x + residual).any()


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_gated(load: Load, name: str, architecture: str) -> None:
    """Gate first, then up."""
    aiter, _ = load(architecture=architecture)
    joined, out = normal(ROWS, 96), torch.empty(ROWS, 48, dtype=torch.bfloat16)
    with no_host_sync():
        getattr(aiter, name)(out=out, input=joined)
    gate, up = joined.double().chunk(2, dim=-1)
    activated = F.silu(gate) if name == "silu_and_mul" else F.gelu(gate, approximate="tanh")
    assert_written(out, activated * up, architecture)


class Rope:
    """Rows of a joined product, angles of their own, and an empty cache in either layout."""

    def __init__(
        self, layout: str = "plain", dtype: torch.dtype = torch.bfloat16, dim: int = DIM
    ) -> None:
        joined = normal(ROWS, HEADS + 2 * KV_HEADS, dim, dtype=dtype)
        self.q, self.k, self.v = joined.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        turns = normal(ROWS, dim // 2, dtype=torch.float32)
        self.cos, self.sin = turns.cos().to(dtype), turns.sin().to(dtype)
        self.slots = torch.tensor([20, 33, 21, -1, 47])
        x = 16 // dtype.itemsize
        plain: tuple[int, ...] = (BLOCKS, SIZE, KV_HEADS, dim)
        shapes = (plain, plain)
        if layout == "shuffle":
            shapes = (BLOCKS, KV_HEADS, dim // x, SIZE, x), (BLOCKS, KV_HEADS, SIZE // x, dim, x)
        self.key_cache, self.value_cache = (torch.zeros(shape, dtype=dtype) for shape in shapes)
        self.flash_layout = layout == "plain"

    def __call__(self, aiter: Any, **changes: Any) -> tuple[Tensor, ...]:
        """What the function returns, some of whose arguments are changed."""
        arguments = {
            "q": self.q, "k": self.k, "v": self.v, "key_cache": self.key_cache,
            "value_cache": self.value_cache, "slot_mapping": self.slots, "pos": torch.arange(ROWS),
            "cos": self.cos, "sin": self.sin, "k_scale": None, "v_scale": None, "is_neox": True,
            "flash_layout": self.flash_layout, "output_zeros": False,
        }  # fmt: skip
        found: tuple[Tensor, ...] = getattr(aiter, ROPE)(**arguments | changes)
        return found


def turned(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The rotation in float64."""
    (low, high), c, s = rows.double().chunk(2, dim=-1), cos.double()[:, None], sin.double()[:, None]
    return torch.cat([low * c - high * s, high * c + low * s], dim=-1)


@pytest.mark.parametrize("layout", ["plain", "shuffle"])
def test_rope(load: Load, layout: str) -> None:
    """Query and key rotated, keys and values at their slots, a row without a slot nowhere; angles
    by position.
    """
    aiter, _ = load()
    case, pos = Rope(layout), torch.tensor([2, 0, 1, 4, 3])
    with no_host_sync():
        query, key, *caches = case(aiter, pos=pos, upcast_operand=True)
    cos, sin = case.cos[pos], case.sin[pos]
    assert_rounded_once(query, turned(case.q, cos, sin))
    kept = case.slots >= 0
    assert_rounded_once(key[kept], turned(case.k, cos, sin)[kept])
    assert caches[0] is case.key_cache and caches[1] is case.value_cache and len(caches) == 2
    expected = (
        torch.zeros(BLOCKS, SIZE, KV_HEADS, DIM, dtype=torch.bfloat16),
        torch.zeros(BLOCKS, SIZE, KV_HEADS, DIM).bfloat16(),
    )
    for row, slot in enumerate(case.slots.tolist()):
        if slot >= 0:
            expected[0][slot // SIZE, slot % SIZE], expected[1][slot // SIZE, slot % SIZE] = (
                key[row],
                case.v[row],
            )
    stored = (case.key_cache, case.value_cache)
    if layout == "shuffle":
        order = (0, 3, 1, 2, 4), (0, 2, 4, 1, 3)
        stored = tuple(  # type: ignore[assignment]
            side.permute(axes).reshape(BLOCKS, SIZE, KV_HEADS, DIM)
            for side, axes in zip(stored, order, strict=True)
        )
    assert torch.equal(stored[0], expected[0]) and torch.equal(stored[1], expected[1])
    narrow = case(aiter, pos=pos)[0]
    # every operation rounds
    assert (narrow != query).any() and (narrow.float() - query.float()).abs().max() < 0.1


def norms(**changes: Any) -> Attempt:
    """A norm of a sum, some of whose arguments are changed."""
    names = ("out", "input", "residual_in", "residual_out")
    return lambda aiter, machine: aiter.rmsnorm2d_fwd_with_add(
        **{name: normal(ROWS, 64) for name in names}
        | {"weight": normal(64), "epsilon": 1e-5}
        | changes
    )


def ropes(
    layout: str = "plain", dtype: torch.dtype = torch.bfloat16, dim: int = DIM, **changes: Any
) -> Attempt:
    """A rotation, some of whose arguments are changed."""
    return lambda aiter, machine: Rope(layout, dtype, dim)(aiter, **changes)


def gates(out: Tensor, joined: Tensor) -> Attempt:
    """An activation."""
    return lambda aiter, machine: aiter.silu_and_mul(out, joined)


MISUSES: list[Misuse] = [
    Misuse(norms(weight=normal(64).float()), "takes bf16 or fp16"),
    Misuse(norms(weight=normal(32)), "weight .* for rows of 64"),
    Misuse(norms(input=normal(ROWS, 128)[:, :64]), "dense rows"),
    Misuse(norms(input=normal(3, ROWS, 64)), "dense rows"),
    Misuse(norms(residual_out=normal(ROWS + 1, 64)), "shapes"),
    Misuse(
        norms(**{n: normal(2, 8200) for n in ("out", "input", "residual_in", "residual_out")}),
        "rows of 8200",
    ),
    Misuse(
        norms(**{n: normal(2, 60) for n in ("out", "input", "residual_in", "residual_out")}),
        "no multiple of 8",
    ),
    Misuse(norms(gemma_norm=True), "not emulated"),
    Misuse(norms(gemma_norm=True), "gemma_norm", TypeError, machine={"version": "0.1.16"}),
    Misuse(norms(), "not built for gfx1201", machine={"architecture": "gfx1201"}),
    Misuse(gates(normal(ROWS, 48), normal(ROWS, 48)), "silu_and_mul"),
    Misuse(gates(normal(ROWS, 20), normal(ROWS, 40)), "no multiple of 8"),
    Misuse(gates(normal(ROWS, 48), normal(ROWS, 192)[:, :96]), "dense rows"),
    Misuse(ropes(dtype=torch.float16), "float16"),
    Misuse(ropes(dim=48), "power of 2", AssertionError),
    Misuse(ropes("shuffle", flash_layout=True), "unpack", ValueError),
    Misuse(ropes(flash_layout=False), "unpack", ValueError),
    Misuse(ropes(pos=torch.arange(ROWS) + 1), "outside the table"),
    Misuse(ropes(pos=torch.arange(ROWS).int()), "positions torch.int32"),
    Misuse(ropes(slot_mapping=torch.arange(ROWS).int()), "not int64"),
    Misuse(ropes(slot_mapping=torch.arange(ROWS) + BLOCKS * SIZE), "past the cache"),
    Misuse(ropes(slot_mapping=torch.arange(ROWS - 1)), "slots for 5 rows"),
    Misuse(ropes(sin=normal(ROWS, DIM)[:, : DIM // 2]), "strides of cosines"),
    Misuse(ropes(is_neox=False), "other options"),
    Misuse(ropes(upcast_operand=True), "upcast_operand", TypeError, machine={"version": "0.1.15"}),
]


@pytest.mark.parametrize("misuse", MISUSES, ids=lambda misuse: misuse.message)
def test_misuse(load: Load, misuse: Misuse) -> None:
    """What the kernels do not have raises."""
    check_misuse(load, misuse)
