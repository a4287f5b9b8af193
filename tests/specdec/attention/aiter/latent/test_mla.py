"""AITER's latent attention on the emulation: every case within the kernels' limits and right,
nothing waits, nothing is stale.
"""

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from specdec.attention.aiter import groups
from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.mla import IndexerSpec, MlaRows, MlaSpec
from specdec.attention.selector import select_backend
from specdec.base.errors import BackendError, CapacityError
from specdec.kv_cache import LatentCache, blocks_for
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import no_host_sync
from tests.helpers.latent_case import (
    SHAPES,
    Case,
    assert_right,
    spec,
    tiny,
)
from tests.helpers.pairs import pairs
from tests.helpers.rocm import FP8, Install


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """With compute units enough to split everything, and few enough to be quick."""
    return partial(rocm, num_compute_units=8)


@pytest.mark.parametrize(
    ("shape", "causal", "num_heads", "version"),
    pairs([*SHAPES], [True, False], [4, 16, 24, 32], ["0.1.15", "0.1.17", "0.1.20"]),
)
def test_every_case_equals_torch_ref(
    rocm: Install, shape: str, causal: bool, num_heads: int, version: str
) -> None:
    """Each phase alone and all mixed, in float32: wrong rows, lost context, masks off by one, added
    heads that leak.
    """
    rocm(version, tiny=True)
    lengths, widths, uniform = SHAPES[shape]
    case = Case(tiny(num_heads=num_heads), lengths, widths, uniform=uniform, causal=causal)
    assert_right(case, RocmAiterMlaBackend(case.spec), layers=2)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_context_in_chunks(rocm: Install, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    """Context longer than the workspace is merged chunk by chunk, also when some requests run out
    of it first.
    """
    monkeypatch.setattr(groups, "CONTEXT_TOKENS", chunk)
    machine = rocm(tiny=True)
    case = Case(tiny(), [40, 9, 33], [3, 2, 17], uniform=False)
    assert_right(case, RocmAiterMlaBackend(case.spec))
    calls = [call for call in machine.calls if call.name == "flash_attn_varlen_func"]
    assert len(calls) == 1 + blocks_for(37, max(1, chunk // 3))


@pytest.mark.parametrize(
    ("version", "architecture", "fp8"),
    [  # where the choice of kernels changed; on gfx942's 8-bit cache it never did
        *itertools.product(["0.1.15", "0.1.20"], FP8, [False, True]),
        *itertools.product(["0.1.16", "0.1.17", "0.1.18"], ["gfx950"], [False]),
        *itertools.product(["0.1.18", "0.1.23"], ["gfx950"], [True]),
    ],
)
def test_no_combination_reaches_a_kernel_that_lacks_it(
    rocm: Install, version: str, architecture: str, fp8: bool
) -> None:
    """Heads, rows and causality: AITER aborts the process where it ships no code object, and the
    emulation raises.
    """
    rocm(version, architecture, any_shape=True, num_compute_units=2)
    cache: dict[str, Any] = {"cache_dtype": FP8[architecture]} if fp8 else {}
    for width, num_heads, causal in pairs([1, 2, 3, 4, 9, 16], [8, 24, 48, 128], [True, False]):
        asked = tiny(dtype=torch.bfloat16, num_heads=num_heads, non_causal=not causal, **cache)
        assert_right(
            Case(asked, [20, width + 1], [width, width], uniform=True, causal=causal),
            RocmAiterMlaBackend(asked),
        )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("architecture", "num_heads", "width"),
    [("gfx942", 128, 4), ("gfx942", 20, 1), ("gfx950", 16, 9), ("gfx950", 128, 2)],
)
def test_decoding_in_real_sizes(
    rocm: Install, architecture: str, num_heads: int, width: int, fp8: bool
) -> None:
    """bfloat16 rows on the latents of DeepSeek, which the kernels have built in,
    from either cache.
    """
    rocm(architecture=architecture)
    cache: dict[str, Any] = {"cache_dtype": FP8[architecture]} if fp8 else {}
    asked = spec(num_heads=num_heads, **cache)
    assert RocmAiterMlaBackend.unsupported_reasons(asked) == []
    assert RocmAiterMlaBackend(asked).mixes_cache_types
    assert_right(
        Case(asked, [33, width + 1], [width, width], uniform=True), RocmAiterMlaBackend(asked)
    )


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("num_heads", "dims"), [(16, {}), (20, {"qk_nope_head_dim": 192, "v_head_dim": 256})]
)
def test_prefill_in_real_sizes(
    rocm: Install, num_heads: int, dims: dict[str, int], fp8: bool
) -> None:
    """bfloat16 prompts and chunks with the head sizes of DeepSeek and of GLM, from the rows and
    from a rounded cache.
    """
    rocm()
    asked = spec(num_heads=num_heads, cache_dtype=FP8["gfx942"] if fp8 else None, **dims)
    assert RocmAiterMlaBackend.unsupported_reasons(asked) == []
    assert_right(Case(asked, *SHAPES["mixed"][:2], uniform=False), RocmAiterMlaBackend(asked))


def test_phases(rocm: Install) -> None:
    """A single row behind a context decodes also within a prefill; lengths unknown to the host mean
    decoding.
    """
    rocm(tiny=True)
    backend = RocmAiterMlaBackend(tiny())
    lengths, widths, _ = SHAPES["mixed"]
    plan = backend.plan(Case(tiny(), lengths, widths, uniform=False).metadata)
    assert {g.phase: g.query_lens for g in plan.groups} == {
        "extend": [3, 20],
        "prefill": [17, 33],
        "decode": [1],
    }
    assert plan.decode is not None and plan.decode.kv_indptr.tolist() == [0, 35]
    assert [
        g.phase for g in backend.plan(Case(tiny(), [3, 3], [3, 3], uniform=True).metadata).groups
    ] == ["decode"]


@pytest.mark.parametrize(
    ("width", "causal", "rows"),
    [(1, True, 1), (6, True, 3), (8, True, 4), (5, True, 1), (4, False, 1)],
)
def test_lists_of_entries(rocm: Install, width: int, causal: bool, rows: int) -> None:
    """Each entry lists the slots of exactly the tokens its last row sees, in order; what follows is
    valid, and empty entries.
    """
    rocm(tiny=True)
    assert_entries(tiny(), width, causal, rows)


@pytest.mark.parametrize(
    ("width", "causal", "rows"), [(1, True, 1), (9, True, 9), (24, True, 12), (9, False, 1)]
)
def test_lists_of_eight_bit_queries(rocm: Install, width: int, causal: bool, rows: int) -> None:
    """Eight drafts and their token are one entry, which lists the context once."""
    rocm("0.1.18", "gfx950", tiny=True)
    assert_entries(tiny(cache_dtype=FP8["gfx950"]), width, causal, rows)


def assert_entries(spec: MlaSpec, width: int, causal: bool, rows: int) -> None:
    """What three requests list."""
    lengths = [40, max(9, width), 33]
    case = Case(spec, lengths, [width] * 3, uniform=True, causal=causal)
    backend = RocmAiterMlaBackend(case.spec)
    # leaves longer lists behind
    backend._planner.plan(backend.plan(replace(case.metadata, max_seq_len=500)).groups[0])
    plan = backend.plan(case.metadata).decode
    assert plan is not None and plan.max_seqlen_q == rows
    ends = [
        n - width + rows * (i + 1) if causal else n for n in lengths for i in range(width // rows)
    ]
    assert plan.qo_indptr.tolist() == list(range(0, 3 * width + 1, rows))
    assert plan.kv_indptr.tolist() == [0, *itertools.accumulate(ends)]
    want = torch.cat([case.slots[i // (width // rows)][:end] for i, end in enumerate(ends)])
    assert plan.kv_indices[: len(want)].tolist() == want.tolist()
    assert set(plan.kv_indices.tolist()) <= set(range(case.num_blocks * case.spec.block_size))
    (buffers,) = [
        b
        for (capacity, r), b in backend._planner._buffers.items()
        if r == rows and capacity >= len(ends)
    ]
    assert set(buffers.kv_indptr[len(ends) :].tolist()) == {sum(ends)}
    assert set(buffers.kv_last_page_lens.tolist()) == {1}


def test_memory_keeps_its_address(rocm: Install) -> None:
    """After the first step of each size nothing is allocated, captured graphs find the plans of
    their size where they were, and a plan during capture is the same as outside."""
    machine = rocm(tiny=True)
    backend = RocmAiterMlaBackend(tiny())

    def addresses() -> set[int]:
        planner = backend._planner
        tensors = [
            t
            for b in planner._buffers.values()
            for t in (b.qo_indptr, b.kv_indptr, b.kv_last_page_lens, *b.work.values())
        ]
        return {t.data_ptr() for t in (*tensors, *planner.scratch._buffers.values())}

    cases = [
        Case(tiny(), [40] * n, [width] * n, uniform=True)
        for n in (1, 2, 3, 4, 7)
        for width in (1, 6)
    ]
    outputs = [case.attend(backend) for case in cases]
    kept = addresses()
    first = backend.plan(cases[4].metadata).decode
    again = backend.plan(cases[6].metadata).decode  # four requests where there were three
    assert first is not None and again is not None
    assert first.kv_indptr.data_ptr() == again.kv_indptr.data_ptr()
    assert first.work["work_info_set"].data_ptr() == again.work["work_info_set"].data_ptr()
    machine.capturing = True
    for case, want in zip(reversed(cases), reversed(outputs), strict=True):
        torch.testing.assert_close(case.attend(backend), want, atol=0, rtol=0)
    assert addresses() == kept


def test_large_batches_keep_their_plan(rocm: Install) -> None:
    """Unless told otherwise AITER answers from 32 requests on with a kernel that makes its own
    lists, in the middle of a step.
    """
    machine = rocm("0.1.20", "gfx950", tiny=True)
    case = Case(tiny(num_heads=16), [5] * 40, [1] * 40, uniform=True)
    assert_right(case, RocmAiterMlaBackend(case.spec))
    assert [
        call.details["persistent"] for call in machine.calls if call.name == "mla_decode_fwd"
    ] == [True]


@pytest.mark.parametrize(
    ("num_heads", "width", "times"), [(16, 8, 1), (16, 9, 2), (20, 4, 1), (48, 2, 1), (128, 3, 3)]
)
def test_eight_drafts_read_the_context_once(
    rocm: Install, num_heads: int, width: int, times: int
) -> None:
    """128 rows, heads included, read it together; queries of 16 bits would read it for each group
    of 16 heads, and for each of the entries that 5 or 7 rows are.
    """
    machine = rocm("0.1.18", "gfx950", any_shape=True)
    asked = spec(num_heads=num_heads, cache_dtype=FP8["gfx950"])
    case, backend = Case(asked, [90, 33], [width] * 2, uniform=True), RocmAiterMlaBackend(asked)
    assert_right(case, backend)
    asks = [call for call in machine.calls if call.name == "get_mla_metadata_info_v1"]
    assert {call.details["kind"] for call in asks} == {"fp8"}
    (call,) = (call for call in machine.calls if call.name == "mla_decode_fwd")
    assert call.details["query_len"] == width and call.details["fold"] == 1
    work = backend.plan(case.metadata).decode
    assert work is not None
    used = int(work.work["work_indptr"][-1])
    listed = work.work["work_info_set"][:used].tolist()
    first_key = sum(begin == 0 for _, _, _, _, begin, _, _, _ in listed)
    assert first_key == times


@pytest.mark.parametrize(
    ("version", "architecture", "changes", "reasons"),
    [
        ("0.1.18", "gfx950", {"cache_dtype": torch.float8_e4m3fn}, []),
        ("0.1.17", "gfx950", {"cache_dtype": torch.float8_e4m3fn}, ["older than 0.1.18"]),
        ("0.1.23", "gfx942", {"cache_dtype": torch.float8_e4m3fnuz}, ["gfx942"]),
        ("0.1.23", "gfx950", {}, ["bfloat16 cache"]),
        (
            "0.1.23",
            "gfx950",
            {"cache_dtype": torch.float8_e4m3fn, "fp8_prefill": False},
            ["asked for in the model's own type"],
        ),
    ],
)
def test_when_queries_are_rounded(
    rocm: Install, version: str, architecture: str, changes: dict[str, Any], reasons: list[str]
) -> None:
    """With an 8-bit cache alone, where its kernel takes any number of rows, unless told not to."""
    rocm(version, architecture)
    asked = spec(**changes)
    (line,) = (line for line in RocmAiterMlaBackend.describe(asked) if "queries" in line)
    assert ("yes" in line) == (not reasons)
    assert all(reason in line for reason in reasons)
    assert (RocmAiterMlaBackend(asked).query_dtype.itemsize == 1) == (not reasons)


def test_a_row_is_rounded_the_same_beside_others(rocm: Install) -> None:
    """Plain decoding and verification see the same queries, so drafts change nothing."""
    rocm("0.1.20", "gfx950", any_shape=True)
    asked = spec(cache_dtype=FP8["gfx950"])
    whole = Case(asked, [40, 33], [9, 9], uniform=True)
    together = whole.attend(RocmAiterMlaBackend(asked))
    lone = Case(asked, [40, 33], [9, 9], uniform=True)
    last = [8, 17]
    lone.rows = MlaRows(*(part[last] for part in whole.rows))
    lone.widths = [1, 1]
    lone.metadata = replace(
        whole.metadata,
        query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
        slot_mapping=whole.metadata.slot_mapping[last],
        num_tokens=2,
        max_query_len=1,
    )
    alone = lone.attend(RocmAiterMlaBackend(asked))
    torch.testing.assert_close(alone, together[last], atol=0, rtol=0)


def test_only_the_newest_plan_runs(rocm: Install) -> None:
    """Plans share memory: an older one would attend to another batch's tokens without a
    sign of it.
    """
    rocm(tiny=True)
    case = Case(tiny(), [40, 9], [1, 1], uniform=True)
    backend = RocmAiterMlaBackend(case.spec)
    old = backend.plan(case.metadata)
    backend.plan(case.metadata)
    with pytest.raises(AssertionError, match="newer plan"):
        backend.run(case.rows, case.up, case.cache(), old, scale=0.1)


def test_folded_heads_give_the_output_new_storage(rocm: Install) -> None:
    """With several rows per entry and heads in groups of 16, AITER exchanges the storage of `o`: a
    view made before is garbage.
    """
    machine = rocm(architecture="gfx942")
    case = Case(spec(num_heads=32), [33, 20], [4, 4], uniform=True)
    assert_right(case, RocmAiterMlaBackend(case.spec))
    assert [call.details["fold"] for call in machine.calls if call.name == "mla_decode_fwd"] == [2]


@pytest.mark.parametrize("shape", ["single", "block", "verify"])
@pytest.mark.parametrize("causal", [True, False])
def test_decoding_never_waits(rocm: Install, shape: str, causal: bool) -> None:
    """Neither plan nor layers read from the device or build tensors from host lists."""
    rocm(tiny=True)
    lengths, widths, _ = SHAPES[shape]
    case = Case(tiny(), lengths, widths, uniform=True, causal=causal)
    backend, cache = RocmAiterMlaBackend(case.spec), case.cache()
    with no_host_sync():
        plan = backend.plan(case.metadata)
        got = backend.run(case.rows, case.up, cache, plan, scale=case.scale)
    assert_as_exact(got, case.plain(), case.want())


def test_eight_bit_writes_round_and_saturate(rocm: Install) -> None:
    """AITER's writer converts without saturating, and the emulation raises when it has to."""
    rocm()
    fp8 = FP8["gfx942"]
    case = Case(spec(cache_dtype=fp8), [5], [5], uniform=False)
    cache, backend = case.cache(), RocmAiterMlaBackend(case.spec)
    latent = torch.randn(5, 576).bfloat16() * 300
    rows = case.rows._replace(compressed=latent[:, :512], key_rope=latent[:, 512:])
    backend.run(rows, case.up, cache, backend.plan(case.metadata), scale=0.1)
    written = cache.latent.flatten(0, 1)[case.slots[0]].float()
    assert torch.equal(written, latent.float().clamp(-240, 240).to(fp8).float())


def test_cache_beyond_32_bit_addresses(rocm: Install) -> None:
    """The kernels multiply slot and width in 32 bits; a larger cache would be read in the wrong
    place.
    """
    rocm()
    case = Case(spec(), [5], [5], uniform=False)
    backend = RocmAiterMlaBackend(case.spec)
    assert backend.cache_spec.max_tokens == 3_728_270  # to which an engine keeps its cache
    huge = LatentCache(torch.empty(3_728_271, 1, 576, device="meta"), torch.empty(0))
    with pytest.raises(
        CapacityError, match="3,728,271 tokens and AITER's latent kernels address 3,728,270"
    ):
        backend.run(case.rows, case.up, huge, backend.plan(case.metadata), scale=0.1)


@pytest.mark.parametrize(
    ("version", "architecture", "changes", "reasons"),
    [
        ("0.1.20", "gfx90a", {}, ["architecture gfx90a"]),
        ("0.1.15", "gfx942", {"non_causal": True}, []),
        ("0.1.20", "gfx950", {"cache_dtype": torch.float8_e4m3fn, "num_heads": 1}, []),
        (
            "0.1.20",
            "gfx950",
            {"cache_dtype": torch.float8_e4m3fnuz},
            ["gfx950 computes with torch.float8_e4m3fn"],
        ),
        (
            "0.1.20",
            "gfx942",
            {"indexer": IndexerSpec(64, 128, 2048)},
            ["use rocm_aiter_mla_sparse"],
        ),
        ("0.1.20", "gfx942", {"dtype": torch.float16, "num_heads": 144}, ["float16", "144 heads"]),
        (
            "0.1.20",
            "gfx942",
            {"kv_lora_rank": 256},
            ["latents of 256 and 64 numbers (the kernels take 512 and 64)"],
        ),
        (
            "0.1.20",
            "gfx942",
            {"qk_rope_head_dim": 32},
            ["latents of 512 and 32", "keys of 160 and values of 128"],
        ),
        ("0.1.20", "gfx942", {"qk_nope_head_dim": 192, "v_head_dim": 256}, []),
    ],
)
def test_refusals(
    rocm: Install, version: str, architecture: str, changes: dict[str, Any], reasons: list[str]
) -> None:
    """Every limit is said before work starts, and all at once."""
    rocm(version, architecture)
    found = RocmAiterMlaBackend.unsupported_reasons(spec(**changes))
    assert len(found) == len(reasons), found
    for want, got in zip(reasons, found, strict=True):
        assert want in got


def test_selection(rocm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` takes AITER where it runs, a name means that or an error, and drafters get its backend
    for ordinary heads.
    """
    with pytest.raises(
        BackendError, match="'rocm_aiter_mla' cannot serve this model: cpu is not a ROCm device"
    ):
        select_backend("rocm_aiter_mla", spec())
    rocm()
    chosen = select_backend("auto", spec())
    assert chosen.name == "rocm_aiter_mla" and chosen.mha_backend is RocmAiterFaBackend
    assert select_backend("auto", spec(v_head_dim=64)).name == "torch_ref"
