"""8-bit prefill on the emulation of gfx950: which prompts take it, what is planned, and that every
row comes out right.
"""

import dataclasses
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.aiter import groups
from specdec.attention.aiter.latent import mla_prefill_fp8
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend, _keys_and_values
from specdec.attention.aiter.latent.mla_prefill_fp8 import (
    Fp8PrefillPlan,
    quantized,
    unavailable_reasons,
)
from specdec.attention.aiter.latent.prefill_schedule import Schedule
from specdec.attention.mla import MlaSpec
from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_emulation_case import assert_rounded_once
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import HostSyncError
from tests.helpers.latent_case import SHAPES, Case, spec
from tests.helpers.rocm import FP8, Install


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """Latents may be narrower than the decode kernels have them."""
    return partial(rocm, architecture="gfx950", any_shape=True, num_compute_units=8)


def narrow(**changes: Any) -> MlaSpec:
    """Heads as the 8-bit kernel has them, on latents that are quick to compute with."""
    return spec(**{"kv_lora_rank": 16, **changes})


def rounded(**changes: Any) -> MlaSpec:
    """The same on an 8-bit cache."""
    return narrow(cache_dtype=FP8["gfx950"], **changes)


def prompts(asked: MlaSpec, *lengths: int, **options: Any) -> Case:
    """Whole prompts."""
    return Case(asked, list(lengths), list(lengths), uniform=False, **options)


def assert_right(case: Case, backend: RocmAiterMlaBackend, **options: Any) -> None:
    """Attention of exactly the rounded numbers, up to the type of the output; near that of the
    exact ones.
    """
    got, first = case.attend(backend, **options), 0
    key, value = _keys_and_values(case.rows.compressed, case.rows.key_rope, case.up)
    query = torch.cat([case.rows.query_nope, case.rows.query_rope], -1)
    query, key, value = (
        rounded.double() * scale
        for rounded, scale in (quantized(t, FP8["gfx950"]) for t in (query, key, value))
    )
    for width in case.widths:
        rows = slice(first, first + width)
        scores = torch.einsum("qhd,khd->hqk", query[rows], key[rows]) * case.scale
        scores = scores.masked_fill(torch.ones(width, width, dtype=torch.bool).triu(1), -torch.inf)
        want = torch.einsum("hqk,khv->qhv", scores.softmax(-1), value[rows])
        assert_rounded_once(got[rows], want)
        first += width
    assert_near(got, case.want())


def assert_near(got: Tensor, exact: Tensor) -> None:
    """`got` is off by the rounding of query, key and value to 8 bits: of each number half a unit in
    its last place at most.
    """
    assert (got - exact).norm() < 3 * torch.finfo(FP8["gfx950"]).eps / 2 * exact.norm()


def calls(machine: Machine, name: str) -> int:
    """How often a function has been called."""
    return sum(call.name == name for call in machine.calls)


def plan_of(backend: RocmAiterMlaBackend, case: Case) -> Fp8PrefillPlan:
    """The 8-bit part of a plan."""
    plan = backend.plan(case.metadata).fp8_prefill
    assert plan is not None
    return plan


@pytest.mark.parametrize("missing", ["get_ps_metadata_info_v1", "mla_prefill_ps_asm_fwd"])
def test_c1_a_missing_function_means_the_ordinary_prefill(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """Without a function prompts run as they do on a bfloat16 cache when 8 bits are turned off, bit
    for bit.
    """
    machine = rocm()
    case = prompts(rounded(), 40, 9)
    case.spec = narrow(fp8_prefill=False)
    want = case.attend(RocmAiterMlaBackend(case.spec))
    monkeypatch.delattr(sys.modules["aiter"], missing)
    backend = RocmAiterMlaBackend(rounded())
    assert backend.fp8_prefill_reasons == [f"amd-aiter has no {missing}"]
    assert RocmAiterMlaBackend.unsupported_reasons(rounded(kv_lora_rank=512)) == []
    torch.testing.assert_close(prompts(rounded(), 40, 9).attend(backend), want, atol=0, rtol=0)
    assert calls(machine, "mla_prefill_ps_asm_fwd") == 0


def test_c1_the_probe_says_why_and_never_raises(
    rocm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every condition has its reason, on machines without a GPU, without AITER and with a broken
    one, too.
    """
    assert unavailable_reasons(rounded())[0] == "cpu is not a ROCm device"
    assert "AITER is not installed" in unavailable_reasons(rounded())[1]
    rocm()
    assert unavailable_reasons(rounded()) == unavailable_reasons(narrow()) == []
    assert unavailable_reasons(narrow(fp8_prefill=False)) == [
        "prompts are asked for in the model's own type"
    ]
    assert "float16" in unavailable_reasons(rounded(dtype=torch.float16))[0]
    assert (
        "heads other than 192"
        in unavailable_reasons(rounded(qk_nope_head_dim=192, v_head_dim=256))[0]
    )
    assert "129 heads" in unavailable_reasons(rounded(num_heads=129))[0]
    monkeypatch.setitem(sys.modules, "aiter", None)
    assert "cannot be used" in unavailable_reasons(rounded())[0]
    rocm(architecture="gfx942")
    assert "the kernel is for gfx950" in unavailable_reasons(rounded())[0]


def test_c1_the_probe_is_asked_once(rocm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither plans nor layers probe the machine again."""
    rocm()
    backend = RocmAiterMlaBackend(rounded())
    monkeypatch.setattr(mla_prefill_fp8, "unavailable_reasons", None)
    monkeypatch.setattr(mla_prefill_fp8.aiter, "load", None)
    prompts(rounded(), 40, 9).attend(backend)


def test_c2_whole_prompts_alone_have_a_plan(rocm: Install) -> None:
    """With every list of the schedule."""
    rocm()
    backend = RocmAiterMlaBackend(rounded())
    plan = plan_of(backend, prompts(rounded(), 40, 9))
    assert tuple(plan.lists) == Schedule._fields
    assert (plan.max_q_len, plan.kv_indices.tolist()) == (40, list(range(49)))
    for case in (
        Case(rounded(), *SHAPES["extend"][:2], uniform=False),
        Case(rounded(), *SHAPES["single"][:2], uniform=True),
    ):
        assert backend.plan(case.metadata).fp8_prefill is None
    assert backend.plan(prompts(rounded(), 9, causal=False).metadata).fp8_prefill is None


def test_c3_buffers_are_made_once(rocm: Install) -> None:
    """Sized by AITER's own answer for the largest batch of a size, and at the same addresses for
    every smaller one.
    """
    machine = rocm()
    backend = RocmAiterMlaBackend(rounded())

    def addresses(case: Case) -> list[int]:
        plan = plan_of(backend, case)
        return [kept.data_ptr() for kept in (plan.kv_indices, *plan.lists.values())]

    first = addresses(prompts(rounded(), 500, 400, 300, 300))
    assert addresses(prompts(rounded(), 400, 300, 350)) == first
    assert calls(machine, "get_ps_metadata_info_v1") == 1
    buffers = backend._fp8_prefill._buffers[4, 512]  # type: ignore[union-attr]
    sizes = sys.modules["aiter"].get_ps_metadata_info_v1(4, 16, 512)[1:]
    assert [b.shape for b in buffers.values()] == [torch.zeros(shape).shape for shape, _ in sizes]


class DeviceTensor(Tensor):
    """A tensor whose values the host may not see, as are those computed from it."""


def _refuse(*_: Any, **__: Any) -> Any:
    raise HostSyncError("read back")


for _name in (
    "item",
    "cpu",
    "tolist",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
):
    setattr(DeviceTensor, _name, _refuse)


@pytest.mark.parametrize("shape", ["prefill", "mixed"])
def test_c4_nothing_is_read_back(rocm: Install, shape: str) -> None:
    """The schedule comes from the host's lengths, and not from AITER's planner, which waits for the
    device.
    """
    machine = rocm()
    case = Case(rounded(), *SHAPES[shape][:2], uniform=False)
    want = case.attend(RocmAiterMlaBackend(case.spec))
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping")
    on_device = {name: getattr(case.metadata, name).as_subclass(DeviceTensor) for name in names}
    machine.on_device = list(on_device.values())
    case.metadata = dataclasses.replace(case.metadata, **on_device)
    case.rows = type(case.rows)(*(tensor.as_subclass(DeviceTensor) for tensor in case.rows))
    got = case.attend(RocmAiterMlaBackend(case.spec))
    torch.testing.assert_close(got.as_subclass(Tensor), want, atol=0, rtol=0)
    assert "get_ps_metadata_v1" not in machine.names()
    with pytest.raises(HostSyncError):
        on_device["seq_lens"].max().item()


def test_c5_every_row_is_written_in_place_and_scratch_is_shared(
    rocm: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that neither kernel writes would stay poison; layers and smaller batches use one
    workspace.
    """
    machine = rocm(num_compute_units=48)
    empty = torch.empty

    def poisoned(*args: Any, **options: Any) -> Tensor:
        tensor = empty(*args, **options)
        return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch, "empty", poisoned)
    planned: list[list[int]] = []
    inner = mla_prefill_fp8.schedule

    def counted(lengths: list[int], *args: Any, **options: Any) -> Any:
        planned.append(lengths)
        return inner(lengths, *args, **options)

    monkeypatch.setattr(mla_prefill_fp8, "schedule", counted)
    case, backend = prompts(rounded(), 300, 40), RocmAiterMlaBackend(rounded())
    assert_right(case, backend, layers=2)
    assert planned == [[300, 40]] and calls(machine, "mla_prefill_ps_asm_fwd") == 2
    scratch = backend._fp8_prefill.scratch._buffers  # type: ignore[union-attr]
    kept = dict(scratch)
    case.attend(backend)
    assert [name for name, _, _ in kept] == ["arange", "partials"] and scratch.keys() == kept.keys()
    assert all(scratch[key] is buffer for key, buffer in kept.items())


@pytest.mark.parametrize(
    ("lengths", "num_compute_units"),
    [((2,), 304), ((300,), 16), ((300,), 48), ((257, 2, 255, 280), 16), ((257, 2, 255, 280), 304)],
)
def test_c7_any_number_of_splits_and_requests(
    rocm: Install, lengths: tuple[int, ...], num_compute_units: int
) -> None:
    """Tiles whole and split, several per request, several requests: every row is written by the one
    kernel or by the other.
    """
    rocm(num_compute_units=num_compute_units)
    case, backend = prompts(rounded(), *lengths), RocmAiterMlaBackend(rounded())
    assert_right(case, backend)
    num_tiles = plan_of(backend, case).num_partial_tiles
    assert (num_tiles == 0) == (num_compute_units == 16 or max(lengths) == 2)


@pytest.mark.parametrize("chunk", [16, 4096])
def test_c7_prompts_beside_chunks_and_decoding(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    """In one forward, whole prompts take the 8-bit kernel, chunks behind a context the ordinary
    one, and single rows decode.
    """
    monkeypatch.setattr(groups, "CONTEXT_TOKENS", chunk)
    machine = rocm()
    case = Case(rounded(), *SHAPES["mixed"][:2], uniform=False)
    got, want = case.attend(RocmAiterMlaBackend(case.spec)), case.want()
    assert {"mla_prefill_ps_asm_fwd", "flash_attn_varlen_func", "mla_decode_fwd"} <= machine.names()
    for rows, exact in zip(got.split(case.widths), want.split(case.widths), strict=True):
        assert_near(rows, exact)


@pytest.mark.parametrize("asked", [narrow(), rounded()])
def test_c7_on_by_itself_with_either_cache(rocm: Install, asked: MlaSpec) -> None:
    """A bfloat16 cache keeps its latents unrounded, and prompts are computed in 8 bits all the
    same.
    """
    machine = rocm()
    case = prompts(asked, 40, 9)
    assert_right(case, RocmAiterMlaBackend(asked))
    assert (
        calls(machine, "mla_prefill_ps_asm_fwd") == 1
        and "flash_attn_varlen_func" not in machine.names()
    )


def test_c7_turned_off(rocm: Install) -> None:
    """Asked for, prompts keep the accuracy of bfloat16, and the description says why."""
    machine, asked = rocm(), narrow(fp8_prefill=False)
    case = prompts(asked, 40, 9)
    assert_as_exact(case.attend(RocmAiterMlaBackend(asked)), case.plain(), case.want())
    assert "mla_prefill_ps_asm_fwd" not in machine.names()
    assert [RocmAiterMlaBackend(spec).prefill_dtype for spec in (asked, narrow())] == [
        torch.bfloat16,
        torch.float8_e4m3fn,
    ]
    assert RocmAiterMlaBackend.describe(asked)[:1] == [
        "prompts in 8 bits: no: prompts are asked for in the model's own type"
    ]
    assert RocmAiterMlaBackend.describe(narrow())[:1] == [
        "prompts in 8 bits: yes, those without a context"
    ]


def test_no_copy_in_flight_loses_its_source(rocm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device may copy a plan's lists long after the host has gone on: the next plan must not
    write where they lie.
    """
    rocm()
    sources: list[tuple[Tensor, Tensor]] = []
    copy = Tensor.copy_

    def watched(self: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if non_blocking:
            sources.append((source, source.clone()))
        return copy(self, source, non_blocking)

    monkeypatch.setattr(Tensor, "copy_", watched)
    backend = RocmAiterMlaBackend(rounded())
    for lengths in ([300, 40], [40, 300]):
        plan_of(backend, prompts(rounded(), *lengths))
    assert len(sources) >= 2 * 5
    assert all(torch.equal(source, was) for source, was in sources)


@pytest.mark.parametrize(
    ("num_heads", "version"), [(1, "0.1.20"), (20, "0.1.16"), (48, "0.1.15"), (80, "0.1.15")]
)
def test_c7_heads_are_added(rocm: Install, num_heads: int, version: str) -> None:
    """Kernel and merge have few head counts, fewer in old versions; the added heads change nothing
    and are cut off.
    """
    machine = rocm(version, any_shape=False, num_compute_units=304)
    case = prompts(rounded(num_heads=num_heads, kv_lora_rank=512), 140, 20)
    assert_right(case, RocmAiterMlaBackend(case.spec))
    assert "mla_reduce_v1" in machine.names()


@pytest.mark.parametrize("factor", [2.0**12, 2.0**-14])
def test_c7_numbers_beyond_the_type_keep_their_size(rocm: Install, factor: float) -> None:
    """With a fixed scale of 1, numbers above 448 would saturate and small ones vanish."""
    rocm()
    case, backend = prompts(rounded(), 40, 9), RocmAiterMlaBackend(rounded())
    want = case.attend(backend)
    case.rows = case.rows._replace(
        query_nope=case.rows.query_nope * factor, query_rope=case.rows.query_rope * factor
    )
    case.up = case.up._replace(value=case.up.value * factor)
    case.scale /= factor
    assert torch.equal(case.attend(backend) / factor, want)  # powers of two: the same digits


def test_c7_rounding_saturates_and_ignores_the_neighbors() -> None:
    """Powers of two as factors: a larger neighbor in the batch leaves a number's rounding alone;
    nothing becomes NaN.
    """
    dtype = torch.float8_e4m3fn
    torch.manual_seed(0)
    numbers = torch.randn(1000, dtype=torch.bfloat16)

    def round_trip(*others: float) -> Tensor:
        rounded, factor = quantized(
            torch.cat([numbers, torch.tensor(others, dtype=torch.bfloat16)]), dtype
        )
        assert (
            rounded.float().isfinite().all()
            and factor.shape == (1,)
            and factor.dtype == torch.float32
        )
        assert bool(torch.log2(factor) == torch.log2(factor).round())
        return rounded.float() * factor

    alone = round_trip()
    # of a number's size, as its rounding is off at most; tiny ones have fixed steps
    half = torch.finfo(dtype).eps / 2
    assert ((alone - numbers.float()).abs() <= half * numbers.float().abs().clamp(min=2**-12)).all()
    normal = numbers.abs() > 0.05
    assert torch.equal(round_trip(100.0)[:1000][normal], alone[normal])
    assert round_trip(450.0, -3e4)[-1] == pytest.approx(-3e4, rel=half)
    assert not round_trip(0.0)[-1] and not quantized(torch.zeros(3), dtype)[0].float().any()
    rows = torch.randn(5, 2, 16, dtype=torch.bfloat16)
    expected = quantized(rows[:3], dtype)
    rows[3, 1, 7], rows[4] = torch.nan, torch.inf
    rounded, factor = quantized(rows, dtype)
    assert torch.equal(rounded[:3].float(), expected[0].float()) and torch.equal(
        factor, expected[1]
    )
    assert rounded[3, 1, 7].float().isnan()
