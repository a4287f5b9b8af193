"""What the AITER backends for ordinary heads promise, line by line: A what a step plans, B draft
blocks, E the shuffled layout.
"""

import ast
import dataclasses
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import specdec.attention
from specdec.attention.aiter import groups
from specdec.attention.aiter.fa import RocmAiterFaBackend
from specdec.attention.aiter.groups import AiterPlan, plan_groups, plan_packed
from specdec.attention.aiter.latent import latents, mla_entries, mla_prefill_fp8, mla_sparse_plan
from specdec.attention.aiter.latent import mla as rocm_aiter_mla
from specdec.attention.selector import refusals
from specdec.engine.capture.buckets import length_bucket
from tests.helpers.attention_case import Case, spec
from tests.helpers.fa_case import (
    BACKENDS,
    SHAPES,
    added,
    assert_right,
    case_of,
    spied,
)
from tests.helpers.guards import no_host_sync
from tests.helpers.rocm import FP8, Install

DEAD_FIELDS = {
    "min_query_len", "swa_seq_lens", "seq_tot", "num_actual_kv_tokens", "num_prefill_tokens",
    "common_prefix_len", "total_tokens",
}  # fmt: skip
"""What plans of this kind tend to carry along although no kernel asks for it."""


def test_a1_plans_hold_only_what_is_read() -> None:
    """A field that no code reads costs every step that fills it in."""
    read: set[str] = set()
    for path in Path(next(iter(specdec.attention.__path__))).glob("aiter/**/*.py"):
        nodes = ast.walk(ast.parse(path.read_text()))
        read |= {
            n.attr for n in nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Load)
        }
    kinds = [
        kind
        for module in (
            groups, latents, rocm_aiter_mla, mla_entries, mla_prefill_fp8, mla_sparse_plan,
        )
        for kind in vars(module).values()
        if isinstance(kind, type)
        and dataclasses.is_dataclass(kind)
        and kind.__module__ == module.__name__
    ]  # fmt: skip
    fields = {(kind.__name__, field.name) for kind in kinds for field in dataclasses.fields(kind)}
    assert len(kinds) >= 10
    assert {entry for entry in fields if entry[1] not in read} == set()
    assert {name for _, name in fields} & DEAD_FIELDS == set()


def content(plan: AiterPlan) -> list[Any]:
    """All that a plan holds, tensors as lists."""
    values = [
        getattr(group, field.name) for group in plan.groups for field in dataclasses.fields(group)
    ]
    return [value.tolist() if isinstance(value, Tensor) else value for value in values]


@pytest.mark.parametrize("layout", BACKENDS)
@pytest.mark.parametrize(("shape", "causal"), [("single", True), ("block", True), ("block", False)])
def test_a2_a_plan_for_capture_is_the_ordinary_plan(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, layout: str, shape: str, causal: bool
) -> None:
    """Nothing is switched for a capture, in the plan or in the backend, and the captured step gives
    the same bits.
    """
    machine = rocm()
    case = case_of(shape, causal=causal)
    backend = BACKENDS[layout](case.spec)
    want, plain = case.attend(backend, scale=0.1), content(backend.plan(case.metadata))
    before = dict(vars(backend))
    machine.capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert content(backend.plan(case.metadata)) == plain
    assert torch.equal(case.attend(backend, scale=0.1), want)
    assert vars(backend) == before


@pytest.mark.parametrize("layout", BACKENDS)
@pytest.mark.parametrize("window", [None, 9])
def test_a4_decoding_is_the_same_however_lengths_are_known(
    rocm: Install, layout: str, window: int | None
) -> None:
    """Decoding alone, with lengths that only the device has: on either layout the bits of the path
    on which the host has them.
    """
    machine = rocm(tiny=True)
    lengths, widths, _ = SHAPES["single"]
    asked = spec(dtype=torch.float32)
    unknown = Case(asked, lengths, widths, uniform=True)
    # a sequence of one token is a prefill
    known = Case(asked, lengths[:1] + lengths[2:], [1, 1, 1], uniform=False)
    backend = BACKENDS[layout](asked)
    assert [group.phase for group in backend.plan(known.metadata).groups] == ["decode"]
    got = unknown.attend(backend, scale=0.2, window=window)
    unknown.check(got, added=added(machine), scale=0.2, window=window)
    host_less = replace(known.metadata, query_lens=None, seq_lens_host=None)
    got = known.attend(backend, scale=0.2, window=window)
    known.metadata = host_less
    assert torch.equal(known.attend(backend, scale=0.2, window=window), got)


def test_a5_decoding_needs_no_lengths_on_the_host(rocm: Install) -> None:
    """A decode group has none."""
    rocm()
    for causal in (True, False):
        for shape in ("single", "block"):
            case = case_of(shape, causal=causal)
            (group,) = RocmAiterFaBackend(case.spec).plan(case.metadata).groups
            assert group.query_lens is group.seq_lens_host is None


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_b1_every_group_carries_the_causality_of_its_forward(shape: str, causal: bool) -> None:
    """Of both ways to plan, and whether or not the host knows the lengths, as it does not when
    drafting.
    """
    metadata = case_of(shape, causal=causal).metadata
    for plan in (plan_groups(metadata, 16), plan_packed(metadata, 16)):
        assert {group.causal for group in plan.groups} == {causal}


@pytest.mark.parametrize("layout", BACKENDS)
def test_b2_the_class_says_that_it_serves_blocks(rocm: Install, layout: str) -> None:
    """Before there is an object, a model, or a weight."""
    rocm()
    assert BACKENDS[layout].unsupported_reasons(spec(non_causal=True)) == []
    assert not refusals(spec(non_causal=True))[BACKENDS[layout].name]
    assert BACKENDS[layout].unsupported_reasons(spec(non_causal=True, softcap=3.0)) != []


def test_b4_scales_of_an_eight_bit_cache(rocm: Install) -> None:
    """float32, one per request and head as the kernel indexes them, and views of one number rather
    than filled tables.
    """
    rocm()
    case = case_of("block", cache_dtype=FP8["gfx942"])
    backend = RocmAiterFaBackend(case.spec)
    calls = spied(backend, "unified_attention")
    assert_right(case, backend, scale=0.1)
    (arguments,) = calls
    for name in ("k_descale", "v_descale"):
        assert arguments[name].shape == (4, 2) and arguments[name].dtype == torch.float32
        assert arguments[name].stride() == (0, 0) and arguments[name][0, 0] == 1
    assert arguments["q_descale"] is None


@pytest.mark.parametrize("causal", [True, False])
def test_b5_every_row_is_written_and_in_its_place(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, causal: bool
) -> None:
    """Groups of a mixed forward write their own rows; one they leave out would be poison, one
    written twice another's.
    """
    rocm(tiny=True)
    empty = torch.empty_like
    monkeypatch.setattr(
        torch, "empty_like", lambda *args, **options: empty(*args, **options).fill_(torch.nan)
    )
    case = case_of("mixed", causal=causal, dtype=torch.float32)
    assert_right(case, RocmAiterFaBackend(case.spec), scale=0.2)


def test_b7_no_phase_is_causal_by_habit(rocm: Install) -> None:
    """Bidirectional rows behind a context, with and without a window, see the rows behind them in
    every call of the kernel.
    """
    rocm(tiny=True)
    for window in (None, 9):
        case = case_of("mixed", causal=False, dtype=torch.float32)
        backend = RocmAiterFaBackend(case.spec)
        calls = spied(backend, "flash_attn_varlen_func")
        assert_right(case, backend, scale=0.2, window=window)
        assert len(calls) >= 2 and not any(call["causal"] for call in calls)
        assert {call["window_size"] for call in calls} == {(-1, -1) if window is None else (8, 8)}


def test_b7_the_draft_kernel_splits_the_keys_there_are(rocm: Install) -> None:
    """It splits by the width of the block table: that follows the context, not the longest sequence
    that could ever come.
    """
    machine = rocm()
    case = Case(spec(), [100, 30], [5, 5], uniform=True, causal=False, spare=8185)
    backend = RocmAiterFaBackend(case.spec)
    calls = spied(backend, "flash_attn_with_kvcache")
    case.check(case.attend(backend, layers=2, scale=0.1), scale=0.1)
    assert [
        call.details["keys"] for call in machine.calls if call.name == "flash_attn_with_kvcache"
    ] == [512, 512]
    first, second = (call["page_table"] for call in calls)
    assert first is second and first.is_contiguous()  # cut once for all layers


def test_b7_the_draft_kernel_is_compiled_for_few_widths(rocm: Install) -> None:
    """As many as there are buckets of captured lengths, and the same ones whether a step is
    launched or replayed.
    """
    rocm()
    case = Case(spec(), [30, 20], [5, 5], uniform=True, causal=False, spare=311)
    backend, longest = RocmAiterFaBackend(case.spec), 313 * 16

    def keys(bound: int) -> int:
        (group,) = backend.plan(replace(case.metadata, max_seq_len=bound)).groups
        table = group.narrow_table
        assert table.is_contiguous() and torch.equal(
            table, case.metadata.block_table[:, : table.shape[1]]
        )
        return table.shape[1] * 16

    bounds = range(1, longest + 1)
    widths = [keys(bound) for bound in bounds]
    assert (
        widths
        == [length_bucket(bound, longest) for bound in bounds]
        == [keys(width) for width in widths]
    )
    assert sorted(set(widths)) == [512, 1024, 2048, 4096, longest]


def test_b7_blocks_are_captured(rocm: Install) -> None:
    """After one warm-up the draft kernel runs within a capture, and the host waits for nothing."""
    machine = rocm()
    case = case_of("block", causal=False)
    backend = RocmAiterFaBackend(case.spec)
    want = case.attend(backend, scale=0.1)
    cache = case.cache()
    backend.write(cache, case.old["key"], case.old["value"], case.old_slots)
    machine.capturing = True
    with no_host_sync():
        got = backend.run(
            case.query, **case.new, cache=cache, plan=backend.plan(case.metadata), scale=0.1
        )
    assert torch.equal(got, want)


@pytest.mark.parametrize("layout", BACKENDS)
def test_b7_blocks_on_an_eight_bit_cache(rocm: Install, layout: str) -> None:
    """The draft kernel takes no 16-bit query on 8-bit keys: they are gathered and turned back
    first.
    """
    machine = rocm()
    case = case_of("block", causal=False, cache_dtype=FP8["gfx942"], non_causal=True)
    assert BACKENDS[layout].unsupported_reasons(case.spec) == []
    assert_right(case, BACKENDS[layout](case.spec), scale=0.1)
    assert "flash_attn_with_kvcache" in machine.names()


def test_b7_blocks_of_different_lengths_are_not_mixed_up(rocm: Install) -> None:
    """The draft kernel has as many rows for each request: known lengths are split, and others
    cannot be passed off as such.
    """
    rocm()
    case = case_of("extend", causal=False)
    assert_right(case, RocmAiterFaBackend(case.spec), scale=0.1)
    assert [g.max_query_len for g in plan_packed(case.metadata, 16).groups] == [3, 2, 17]
    case.metadata = replace(case.metadata, query_lens=None, seq_lens_host=None)
    with pytest.raises(RuntimeError, match=r"shape '\[3, 17, 4, 64\]' is invalid"):
        case.attend(RocmAiterFaBackend(case.spec), scale=0.1)


@pytest.mark.parametrize("layout", BACKENDS)
def test_sinks_reach_every_row(rocm: Install, layout: str) -> None:
    """AITER sends prompts of heads of 128 in bfloat16 to an assembly kernel without sinks: they may
    not go that way.
    """
    rocm()
    for shape in SHAPES:
        case = case_of(shape, head_dim=128)
        assert_right(case, BACKENDS[layout](case.spec), scale=0.1, sinks=torch.randn(4))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("window", [None, 9, 400])
def test_partitions_of_the_plain_kernel(rocm: Install, fp8: bool, window: int | None) -> None:
    """A part per 256 keys of the longest sequence, or of what the window shows of it; the workspace
    holds them all.
    """
    rocm()
    asked = spec(cache_dtype=FP8["gfx942"] if fp8 else None)
    backend = BACKENDS["plain"](asked)
    calls = spied(backend, "paged_attention_v1")
    for longest, parts in ((254, 1), (255, 2), (600, 3)):  # the host's bound is two more
        case = Case(asked, [longest, 40, 3], [1, 1, 1], uniform=True)
        assert_right(case, backend, scale=0.1, window=window)
        arguments = calls.pop()
        parts = {None: parts, 9: 1, 400: min(parts, 2)}[window]
        assert arguments["workspace_buffer"].shape == (3 * 4 * parts * (64 * 2 + 4 + 4),)
        assert arguments["block_tables"].is_contiguous()


@pytest.mark.parametrize("layout", BACKENDS)
@pytest.mark.parametrize("window", [1, 9, 16])
def test_a_table_as_wide_as_its_sequence(rocm: Install, layout: str, window: int) -> None:
    """A window that begins in the last block has no columns behind it to trim to."""
    rocm()
    case = Case(spec(), [48, 33, 32], [1, 1, 1], uniform=True, spare=0)
    assert_right(case, BACKENDS[layout](case.spec), scale=0.1, window=window)
