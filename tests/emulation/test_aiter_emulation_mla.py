"""The emulation of AITER's latent attention: right where it answers, and an error elsewhere."""

import importlib
import inspect
from typing import Any

import pytest
import torch

from specdec.kernels import aiter as families
from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_emulation.mla_objects import code_object, is_native
from tests.helpers.aiter_emulation.signatures import VERSIONS
from tests.helpers.aiter_emulation_case import (
    FN,
    FNUZ,
    GFX950,
    Attempt,
    Load,
    Misuse,
    assert_rounded_once,
    check_misuse,
)
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.latents_emulation_case import RANK, ROPE, Latents

FP8_942, FP8_950 = {"query": FNUZ, "cache": FNUZ}, {"query": FN, "cache": FN}
DECODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "16 heads": ({}, {}),
    "16 heads of real size": ({"any_shape": False}, {"rank": 512, "rope": 64}),
    "4 queries": ({"version": "0.1.15"}, {"query_len": 4}),
    "folded": ({"version": "0.1.16"}, {"heads": 48}),
    "folded, 3 queries": ({}, {"heads": 32, "query_len": 3}),
    "8-bit": ({}, FP8_942),
    "8-bit cache": ({}, {"cache": FNUZ}),
    "8-bit, gfx950": (GFX950, {**FP8_950, "heads": 128, "query_len": 2}),
    "float32": ({"allow_float32": True}, {"query": torch.float32, "cache": torch.float32}),
    "many queries, gfx950": (GFX950, {"heads": 64, "query_len": 5}),
    "tiles of rows, gfx950": (GFX950, {**FP8_950, "heads": 32, "query_len": 5}),
    "not causal, gfx950": (GFX950, {"query_len": 5, "causal": False}),
    "one query, not causal": ({}, {"causal": False}),
}


@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize("units", [2, 64])
def test_decode(load: Load, name: str, units: int) -> None:
    """By work lists with few and with many splits: every row right, in the caller's tensor, with no
    host waiting.
    """
    options, shape = DECODES[name]
    aiter, machine = load(**{"num_compute_units": units, **options})
    batch = Latents([40, 7, 90], **shape)
    with no_host_sync():
        plan = batch.plan(aiter)
        batch.decode(aiter, plan)
    assert_rounded_once(batch.o, batch.wanted()[0])
    assert (plan["reduce_indptr"][-1] > 0) == (units == 64) or units == 2
    assert [call.name for call in machine.calls] == [
        "get_mla_metadata_info_v1",
        "get_mla_metadata_v1",
        "mla_decode_fwd",
    ]


@pytest.mark.parametrize("shape", [{}, {"query_len": 4}, {"query_len": 8}, FP8_942])
def test_decode_without_a_plan(load: Load, shape: dict[str, Any]) -> None:
    """The other kernel, which splits by its own heuristic."""
    aiter, machine = load()
    batch = Latents([40, 17, 90], **shape)
    batch.decode(aiter, None)
    assert_rounded_once(batch.o, batch.wanted()[0])
    assert machine.calls[-1].details["persistent"] is False


@pytest.mark.parametrize("version", ["0.1.17", "0.1.18"])
def test_large_batches_ignore_their_plan(load: Load, version: str) -> None:
    """From 0.1.18 on, on gfx950: from 32 requests on,
    the plainest decode takes the other kernel.
    """
    aiter, machine = load(version=version, **GFX950)
    batch = Latents([3] * 32)
    batch.decode(aiter, batch.plan(aiter))
    assert_rounded_once(batch.o, batch.wanted()[0])
    assert machine.calls[-1].details["persistent"] is (version == "0.1.17")


@pytest.mark.parametrize("shape", [{}, {"heads": 32, "query_len": 2}])
def test_decode_returns_the_lse(load: Load, shape: dict[str, Any]) -> None:
    """Of split and of unsplit rows, as merging two parts needs it."""
    aiter, _ = load(**GFX950)
    batch = Latents([40, 7, 90], **shape)
    _, lse = batch.decode(aiter, batch.plan(aiter), return_lse=True)
    assert_as_exact(lse, batch.wanted(torch.float32)[1], batch.wanted()[1])


def test_folded_heads_swap_the_storage(load: Load) -> None:
    """A view of the output taken before the call is not written."""
    aiter, _ = load()
    batch = Latents([40, 7], heads=32, query_len=2)
    whole = batch.o
    batch.o = whole[:]
    batch.decode(aiter, batch.plan(aiter))
    assert_rounded_once(batch.o, batch.wanted()[0])
    assert whole.isnan().all()


def test_a_batch_padded_for_a_graph(load: Load) -> None:
    """Requests without keys, where the starts repeat, come out as zeros and disturb nobody."""
    aiter, _ = load()
    batch = Latents([40, 7, 0, 0])
    batch.decode(aiter, batch.plan(aiter))
    assert_rounded_once(batch.o, batch.wanted()[0])
    assert not batch.o[2:].any()


def test_parts_are_merged_by_the_maps(load: Load) -> None:
    """A part that the maps leave out is missing from the result."""
    aiter, _ = load()
    batch = Latents([90])
    plan = batch.plan(aiter)
    count = int(plan["reduce_indptr"][-1])
    plan["reduce_indptr"].clamp_(max=count - 1)
    batch.decode(aiter, plan)
    assert not torch.allclose(batch.o.double(), batch.wanted()[0], atol=5e-2)


def test_reduction(load: Load) -> None:
    """Two parts merge by their logarithms; groups of one part and of none keep their rows."""
    aiter, _ = load(any_shape=False)
    parts, logs = torch.randn(6, 16, 128), torch.randn(6, 16)
    out = torch.full((6, 16, 128), 5.0, dtype=torch.bfloat16)
    lse = torch.full((6, 16), 5.0)
    maps = {"reduce_indptr": [0, 2, 3, 3, 3], "reduce_partial_map": [0, 4, 2, 0]}
    arrays = {name: torch.tensor(values, dtype=torch.int32) for name, values in maps.items()}
    final = torch.tensor([[1, 3], [3, 5], [5, 6], [0, 0]], dtype=torch.int32)
    aiter.mla_reduce_v1(
        parts,
        logs,
        reduce_final_map=final,
        max_seqlen_q=2,
        num_kv_splits=0,
        final_output=out,
        final_lse=lse,
        **arrays,
    )
    exact = logs.double()
    weights = torch.stack([exact[:2], exact[4:]]).softmax(0)[..., None]
    assert_rounded_once(out[1:3], weights[0] * parts[:2] + weights[1] * parts[4:])
    assert_as_exact(
        lse[1:3], torch.logaddexp(logs[:2], logs[4:]), torch.logaddexp(exact[:2], exact[4:])
    )
    kept = [0, 3, 4, 5]
    assert (out[kept] == 5).all() and (lse[kept] == 5).all()


def test_latents_are_written(load: Load) -> None:
    """Both parts side by side, scaled in 8 bits; negative slots are left out."""
    aiter, _ = load()
    compressed, rotated = torch.randn(3, RANK).bfloat16(), torch.randn(3, ROPE).bfloat16()
    slots = torch.tensor([5, -1, 0])
    for dtype, kind, factor in ((torch.bfloat16, "auto", 1.0), (FNUZ, "fp8", 0.5)):
        cache = torch.zeros(2, 4, RANK + ROPE, dtype=dtype)
        aiter.concat_and_cache_mla(compressed, rotated, cache, slots, kind, torch.tensor([0.5]))
        rows = torch.cat([compressed, rotated], -1).float()
        assert torch.equal(
            cache.float().view(8, -1)[[5, 0]], (rows[[0, 2]] / factor).to(dtype).float()
        )
        assert not cache.float().view(8, -1)[[1, 2, 3, 4, 6, 7]].any()


def _decode(
    shape: dict[str, Any] | None = None, planned: dict[str, Any] | None = None, **changes: Any
) -> Attempt:
    """A decode with something wrong about its shape, its plan or its call; a function gets the
    batch.
    """

    def attempt(aiter: Any, _: Machine) -> None:
        batch = Latents([40, 7, 90], **(shape or {}))
        plan = batch.plan(aiter, **(planned or {}))
        batch.decode(
            aiter,
            plan,
            **{name: value(batch) if callable(value) else value for name, value in changes.items()},
        )

    return attempt


def _stale(lengths: list[int]) -> Attempt:
    """The plan of another batch of the same shape."""

    def attempt(aiter: Any, _: Machine) -> None:
        plan = Latents([40, 7, 90]).plan(aiter)
        batch = Latents(lengths)
        batch.decode(aiter, plan)

    return attempt


def _skips_a_key(aiter: Any, _: Machine) -> None:
    """The second part of the longest request begins one key late."""
    batch = Latents([40, 7, 90], query_len=5, query=FN, cache=FN)
    plan = batch.plan(aiter)
    works = plan["work_info_set"]
    (late, *_rest) = [row for row, work in enumerate(works.tolist()) if 47 < work[4] < 137]
    works[late, 4] += 1
    batch.decode(aiter, plan)


def _other_heads(aiter: Any, _: Machine) -> None:
    plan = Latents([40, 7, 90], heads=32).plan(aiter)
    Latents([40, 7, 90]).decode(aiter, plan)


def _copied_plan(aiter: Any, _: Machine) -> None:
    batch = Latents([40, 7, 90])
    plan = batch.plan(aiter)
    batch.decode(aiter, {**plan, "work_info_set": plan["work_info_set"].clone()})


def _no_plan(shape: dict[str, Any]) -> Attempt:
    return lambda aiter, _: Latents([40, 7, 90], **shape).decode(aiter, None)


def _reduced(heads: int, dim: int) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        maps = {
            name: torch.zeros(2, dtype=torch.int32)
            for name in ("reduce_indptr", "reduce_partial_map")
        }
        parts, out = torch.zeros(2, heads, dim), torch.zeros(2, heads, dim).bfloat16()
        final = torch.zeros(1, 2, dtype=torch.int32)
        aiter.mla_reduce_v1(
            parts,
            parts[..., 0],
            reduce_final_map=final,
            max_seqlen_q=1,
            num_kv_splits=0,
            final_output=out,
            **maps,
        )

    return attempt


def _write_latents(value: float = 0.0, **changes: Any) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        arguments = {
            "kv_c": torch.full((1, RANK), value).bfloat16(),
            "k_pe": torch.zeros(1, ROPE).bfloat16(),
            "kv_cache": torch.zeros(2, 4, RANK + ROPE, dtype=FNUZ),
            "slot_mapping": torch.tensor([3]),
            "kv_cache_dtype": "fp8",
            "scale": torch.ones(1),
        }
        aiter.concat_and_cache_mla(**{**arguments, **changes})

    return attempt


BF16 = torch.bfloat16
MISUSES: dict[str, Misuse] = {
    "24 heads": Misuse(_decode({"heads": 24}), "multiple of 16"),
    "8 heads": Misuse(_decode({"heads": 8}), "multiple of 16"),
    "not causal on gfx942": Misuse(_decode({"query_len": 2, "causal": False}), "no code object"),
    "not causal in 0.1.16": Misuse(
        _decode({"causal": False}), "causal", TypeError, machine={"version": "0.1.16"}
    ),
    "not causal, 8-bit, 2 queries": Misuse(
        _decode({**FP8_950, "query_len": 2, "causal": False}), "no code object", machine=GFX950
    ),
    "5 queries on gfx942": Misuse(_decode({"query_len": 5}), "no code object"),
    "LSE on gfx942": Misuse(_decode(return_lse=True), "no code object"),
    "9 queries without a plan": Misuse(
        _no_plan({"query_len": 7 + 2}), "9 queries on 7|no code object"
    ),
    "48 heads without a plan": Misuse(_no_plan({"heads": 48}), "no code object"),
    "RDNA": Misuse(_decode(), "gfx1100", machine={"architecture": "gfx1100"}),
    "real sizes": Misuse(_decode(), "sizes", machine={"any_shape": False}),
    "fp16": Misuse(_decode({"query": torch.float16, "cache": torch.float16}), "no kernel"),
    "float32": Misuse(_decode({"query": torch.float32, "cache": torch.float32}), "no kernel"),
    "the other fp8": Misuse(_decode(FP8_950), "no kernel"),
    "8-bit without scales": Misuse(_decode(FP8_942, q_scale=None), "q_scale"),
    "8-bit cache without scale": Misuse(_decode({"cache": FNUZ}, kv_scale=None), "kv_scale"),
    "implicit scale": Misuse(_decode(sm_scale=None), "sm_scale"),
    "logit cap": Misuse(_decode(logit_cap=1.0), "logit_cap", AssertionError),
    "pages of 64": Misuse(_decode(page_size=64), "pages of 64"),
    "last pages": Misuse(
        _decode(kv_last_page_lens=torch.zeros(3, dtype=torch.int32)), "kv_last_page_lens"
    ),
    "tail falls to 0": Misuse(
        _decode(kv_indptr=torch.tensor([0, 40, 47, 0]).int()), "repeat the last value"
    ),
    "int64 indices": Misuse(_decode(kv_indices=lambda b: b.indices.long()), "int32"),
    "index past the cache": Misuse(
        _decode(kv_indices=lambda b: b.indices + 100), "outside the cache"
    ),
    "negative index": Misuse(_decode(kv_indices=lambda b: b.indices - 100), "outside the cache"),
    "too few indices": Misuse(_decode(kv_indices=lambda b: b.indices[:90]), "of 90 indices"),
    "strided query": Misuse(
        _decode(q=lambda b: b.q.transpose(0, 1).contiguous().transpose(0, 1)), "dense"
    ),
    "fp16 output": Misuse(_decode(o=lambda b: b.o.half()), "output"),
    "more queries than keys": Misuse(_no_plan({"query_len": 8}), "8 queries on 7"),
    "query bound too small": Misuse(
        _decode({"query_len": 2}, max_seqlen_q=1), "max_seqlen_q 1 below 2"
    ),
    "stale plan": Misuse(_stale([41, 7, 90]), "other lengths"),
    "plan that skips a key": Misuse(_skips_a_key, "other lengths", machine=GFX950),
    "stale plan, permuted": Misuse(_stale([7, 40, 90]), "other lengths"),
    "plan of another batch size": Misuse(_stale([40, 7]), "other (lengths|queries)"),
    "plan for other heads": Misuse(_other_heads, "planned for heads 32"),
    "plan for another type": Misuse(
        _decode(FP8_942, {"dtype_q": BF16, "dtype_kv": BF16}), "planned for kind bf16"
    ),
    "plan without the cache's type": Misuse(
        _decode(FP8_942, {"dtype_q": None, "dtype_kv": None}),
        "planned for kind bf16",
        machine={"version": "0.1.15"},
    ),
    "causal plan": Misuse(
        _decode({"query_len": 2, "causal": False}, {"is_causal": True}),
        "planned for causal",
        machine=GFX950,
    ),
    "plan for fewer queries": Misuse(
        _decode({"query_len": 2}, {"max_seqlen_qo": 1}), "max_seqlen_qo 1 below 2"
    ),
    "plan for uniform queries": Misuse(_decode(planned={"uni_seqlen_qo": 2}), "uni_seqlen_qo"),
    "plan with int64 starts": Misuse(
        _decode(planned={"seqlens_kv_indptr": torch.zeros(4).long()}), "int32"
    ),
    "plan with granularity 8": Misuse(_decode(planned={"kv_granularity": 8}), "granularity 8"),
    "plan with granularity 24": Misuse(_decode(planned={"kv_granularity": 24}), "granularity"),
    "plan into small buffers": Misuse(
        _decode(planned={"work_info_set": torch.zeros(2, 8).int()}), "elements"
    ),
    "copied plan": Misuse(_copied_plan, "another plan"),
    "compiles in a capture": Misuse(
        _no_plan({}), "compiles during capture", machine={"capturing": True}
    ),
    "reduction of 20 heads": Misuse(
        _reduced(20, 512), "not compiled for 20 heads", machine={"any_shape": False}
    ),
    "reduction on RDNA": Misuse(_reduced(16, 512), "gfx1100", machine={"architecture": "gfx1100"}),
    "latents overflow": Misuse(_write_latents(300.0), "overflows"),
    "latents into int32 slots": Misuse(
        _write_latents(slot_mapping=torch.tensor([3]).int()), "int64"
    ),
    "latents past the end": Misuse(
        _write_latents(slot_mapping=torch.tensor([8])), "past the cache"
    ),
    "latents, wrong kind": Misuse(_write_latents(kv_cache_dtype="auto"), "kv_cache_dtype"),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(load: Load, name: str) -> None:
    """Every limit the backends have to respect."""
    check_misuse(load, MISUSES[name])


def test_which_code_objects_exist() -> None:
    """A sample of what ships: the same call has a kernel on one architecture and aborts on the
    other.
    """
    new = {arch: Machine(version="0.1.20", architecture=arch) for arch in ("gfx942", "gfx950")}
    persistent = {"persistent": True}
    assert code_object(new["gfx942"], "bf16", 16, 4, **persistent) == "16p4"
    assert code_object(new["gfx942"], "bf16", 16, 5, **persistent) is None
    assert code_object(new["gfx950"], "bf16", 16, 5, **persistent) == "64p1"
    assert code_object(new["gfx950"], "bf16", 16, 16, causal=False, **persistent) == "32p4+open"
    assert code_object(new["gfx950"], "fp8", 64, 2, causal=False, **persistent) == "32p4+open"
    assert code_object(new["gfx950"], "fp8", 16, 2, causal=False, **persistent) is None
    # one query: nothing to mask
    assert code_object(new["gfx942"], "bf16", 16, 1, causal=False, **persistent) == "16p4"
    old = {
        version: Machine(version=version, architecture="gfx950")
        for version in ("0.1.15", "0.1.16.post6", "0.1.17", "0.1.18")
    }
    assert code_object(old["0.1.15"], "fp8", 64, 2, **persistent) == "32p4"
    # 32 rows: one kernel, then the other
    assert code_object(old["0.1.16.post6"], "bf16", 16, 2, **persistent) == "16p4"
    assert code_object(old["0.1.17"], "bf16", 16, 2, **persistent) == "64p1"
    assert code_object(old["0.1.16.post6"], "fp8", 32, 1, **persistent) is None
    assert code_object(old["0.1.17"], "fp8", 32, 1, **persistent) == "32p1"
    assert code_object(old["0.1.17"], "fp8", 16, 5, **persistent) is None
    assert code_object(old["0.1.18"], "fp8", 16, 5, **persistent) == "32p4"
    single = {"persistent": False, "lse": True}
    # later ones ignore that it was asked for
    assert code_object(old["0.1.18"], "bf16", 64, 1, **single) == "64n1+lse"
    assert (
        code_object(Machine(version="0.1.19.post2", architecture="gfx950"), "bf16", 64, 1, **single)
        == "64n1"
    )
    assert not is_native(old["0.1.16.post6"], "fp8", 32, 1) and is_native(
        old["0.1.17"], "fp8", 32, 1
    )
    assert not is_native(old["0.1.17"], "fp8", 32, 5) and is_native(old["0.1.18"], "fp8", 32, 5)
    assert not is_native(Machine(version="0.1.17"), "fp8", 64, 1) and is_native(
        Machine(version="0.1.18"), "fp8", 64, 1
    )


def test_replanning_in_place(load: Load) -> None:
    """Planning into the same buffers replaces the plan."""
    aiter, _ = load()
    first, second = Latents([40, 7, 90]), Latents([7, 40, 90])
    plan = first.plan(aiter)
    second.replan(aiter, plan)
    second.decode(aiter, plan)
    assert_rounded_once(second.o, second.wanted()[0])


def test_arguments_moved_between_versions(load: Load) -> None:
    """Calls of the reduction by position break at 0.1.16; planners name the same two outputs in
    different orders.
    """
    orders = []
    for version in VERSIONS:
        aiter, _ = load(version=version)
        orders.append(list(inspect.signature(aiter.mla_reduce_v1).parameters))
    assert [order[6] for order in orders[:2]] == ["final_output"] * 2 and {
        order[6] for order in orders[2:]
    } == {"num_kv_splits"}
    for name, first, second in (
        ("get_mla_metadata_v1", "work_info_set", "work_indptr"),
        ("get_ps_metadata_v1", "work_indptr", "work_info"),
    ):
        names = list(inspect.signature(getattr(aiter, name)).parameters)
        assert names.index(first) + 1 == names.index(second)


@pytest.mark.parametrize("version", VERSIONS)
def test_loading(load: Load, version: str) -> None:
    """Every family loads from every version, and says what the version lacks."""
    load(version=version)
    mla = families.load(families.AiterMla)
    assert mla.reduce_options == ({} if version < "0.1.16" else {"num_kv_splits": 0})
    assert mla.mla_prefill_ps_asm_fwd is not None
    kinds: list[Any] = [
        families.AiterTriton,
        families.AiterFa,
        families.AiterMla,
        families.AiterIndexer,
        families.AiterRouter,
    ]
    for family in kinds:
        assert families.load(family).version == families.version_numbers(version)
        assert not families.unavailable_reasons(family)


def test_one_family_does_not_break_another(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing function or keyword is the loss of its own family; the functions of the 8-bit
    prefill may be missing.
    """
    aiter, _ = load()
    home = importlib.import_module("aiter.mla")
    monkeypatch.delattr(home, "mla_decode_fwd")
    assert families.unavailable_reasons(families.AiterMla) == [
        "amd-aiter 0.1.20 cannot be used: aiter.mla has no mla_decode_fwd"
    ]
    assert not families.unavailable_reasons() and not families.unavailable_reasons(
        families.AiterRouter
    )
    monkeypatch.setattr(home, "mla_decode_fwd", lambda q, o: None, raising=False)
    assert "takes no qo_indptr" in families.unavailable_reasons(families.AiterMla)[0]
    # a wrapper that hides its arguments
    monkeypatch.setattr(home, "mla_decode_fwd", lambda *args, **kwargs: None)
    monkeypatch.delattr(aiter, "mla_prefill_ps_asm_fwd")
    mla = families.load(families.AiterMla)
    assert mla.mla_prefill_ps_asm_fwd is None
