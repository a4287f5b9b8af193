"""The emulation of AITER: right where it answers, and an error wherever the real kernel would not
be.
"""

import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import MisuseError
from tests.helpers.aiter_emulation.signatures import VERSIONS
from tests.helpers.aiter_emulation_case import Load, assert_rounded_once
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import HostSyncError, no_host_sync
from tests.helpers.paged_emulation_case import (
    DIM,
    HEADS,
    KV_HEADS,
    LENGTHS,
    SIZE,
    Paged,
    common,
    paged_loader,
    paged_v1,
    unified,
    varlen,
)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """See `paged_loader`."""
    return paged_loader(monkeypatch, tmp_path)


def plain(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    scale: float,
    left: int = -1,
    right: int = -1,
    softcap: float = 0,
    sinks: Any = None,
) -> Tensor:
    """Attention of the last rows of a request in float64, one query and key at a time; `right` 0 is
    causal.
    """
    out = torch.zeros(q.shape, dtype=torch.float64)
    group = q.shape[1] // keys.shape[1]
    for i, head in itertools.product(range(len(q)), range(q.shape[1])):
        own = len(keys) - len(q) + i
        seen = [
            j
            for j in range(len(keys))
            if (left < 0 or j >= own - left) and (right < 0 or j <= own + right)
        ]
        scores = (
            torch.stack([q[i, head].double() @ keys[j, head // group].double() for j in seen])
            * scale
        )
        scores = softcap * torch.tanh(scores / softcap) if softcap else scores
        weights = torch.cat(
            [scores, sinks[head : head + 1].double()] if sinks is not None else [scores]
        ).softmax(0)
        out[i, head] = sum(
            w * values[j, head // group].double() for w, j in zip(weights, seen, strict=False)
        )
    return out


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize(
    "extra", [{}, {"window_size": (8, 0)}, {"softcap": 0.7}, {"sinks": torch.randn(HEADS)}]
)
def test_unified_attention(load: Load, shuffled: bool, extra: dict[str, Any]) -> None:
    """Ragged causal rows in both layouts, into the caller's tensor."""
    aiter, _ = load()
    paged, widths = Paged(), [3, 1, 5]
    q = torch.randn(9, HEADS, DIM).bfloat16()
    arguments = unified(paged, q, widths, **extra)
    if shuffled:
        arguments |= {"k": paged.key5, "v": paged.value5, "shuffled_kv_cache": True}
    assert aiter.unified_attention(**arguments) is arguments["out"]
    for i, rows in enumerate(q.split(widths)):
        left = extra.get("window_size", (-1, 0))[0]
        how = {"softcap": extra.get("softcap", 0), "sinks": extra.get("sinks")}
        assert_rounded_once(
            arguments["out"].split(widths)[i],
            plain(rows, paged.keys[i], paged.values[i], scale=0.2, left=left, right=0, **how),
        )


@pytest.mark.parametrize("window", [(-1, -1), (8, 8), (8, -1), (8, 0), (-1, 2)])
@pytest.mark.parametrize("dense", [False, True])
def test_flash_attn_with_kvcache(load: Load, window: tuple[int, int], dense: bool) -> None:
    """Uniform bidirectional rows on a paged and on a dense cache; windows on each side."""
    aiter, _ = load()
    paged = Paged()
    q = torch.randn(3, 5, HEADS, DIM).bfloat16()
    key, value = paged.key, paged.value
    if dense:
        key, value = (side[paged.table.long()].flatten(1, 2) for side in (key, value))
    out, lse = aiter.flash_attn_with_kvcache(
        q,
        key,
        value,
        cache_seqlens=paged.lens,
        page_table=None if dense else paged.table,
        softmax_scale=0.2,
        causal=False,
        window_size=window,
        return_softmax_lse=True,
    )
    assert lse.shape == (3, HEADS, 5)
    for i in range(3):
        assert_rounded_once(
            out[i],
            plain(q[i], paged.keys[i], paged.values[i], scale=0.2, left=window[0], right=window[1]),
        )


def test_kvcache_takes_fewer_keys_than_rows(load: Load) -> None:
    """Rows that see all keys see them wherever they stand; of no keys they make zeros, whose
    denominators are zero.
    """
    aiter, _ = load()
    paged = Paged()
    q = torch.randn(3, 5, HEADS, DIM).bfloat16()
    few = torch.tensor([2, 0, 5], dtype=torch.int32)
    keywords = {
        "cache_seqlens": few,
        "page_table": paged.table,
        "softmax_scale": 0.2,
        "return_softmax_lse": True,
    }
    out, lse = aiter.flash_attn_with_kvcache(q, paged.key, paged.value, causal=False, **keywords)
    assert out[1].eq(0).all() and lse[1].eq(-torch.inf).all()
    for i in (0, 2):
        keys = paged.keys[i][: few[i]].repeat_interleave(HEADS // KV_HEADS, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q[i].float(), keys.float()) * 0.2
        torch.testing.assert_close(lse[i], scores.logsumexp(-1))


def test_kvcache_appends_and_counts_in_place(load: Load) -> None:
    """Passing new keys writes them and moves the caller's lengths, which a backend that has written
    its cache must not do.
    """
    aiter, _ = load()
    paged = Paged()
    new, lens = torch.randn(3, 2, KV_HEADS, DIM).bfloat16(), paged.lens.clone()
    q = torch.randn(3, 2, HEADS, DIM).bfloat16()
    out = aiter.flash_attn_with_kvcache(
        q, paged.key, paged.value, new, new, cache_seqlens=lens, page_table=paged.table
    )
    assert lens.tolist() == [n + 2 for n in LENGTHS]
    assert_rounded_once(
        out[0],
        plain(
            q[0],
            torch.cat([paged.keys[0], new[0]]),
            torch.cat([paged.values[0], new[0]]),
            scale=DIM**-0.5,
            right=0,
        ),
    )


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "extra",
    [{}, {"window_size": (8, 8)}, {"logits_soft_cap": 0.7}, {"sink_ptr": torch.randn(HEADS)}],
)
def test_flash_attn_varlen_func(load: Load, causal: bool, extra: dict[str, Any]) -> None:
    """Packed rows that are the last of their keys; causal is aligned at the end."""
    aiter, _ = load()
    paged, widths = Paged(), [3, 1, 5]
    q = torch.randn(9, HEADS, DIM).bfloat16()
    cu_q = torch.tensor([0, 3, 4, 9], dtype=torch.int32)
    cu_k = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    out = aiter.flash_attn_varlen_func(
        q,
        torch.cat(paged.keys),
        torch.cat(paged.values),
        cu_q,
        cu_k,
        5,
        40,
        softmax_scale=0.2,
        causal=causal,
        **extra,
    )
    window = extra.get("window_size", (-1, -1))
    how = {"softcap": extra.get("logits_soft_cap", 0), "sinks": extra.get("sink_ptr")}
    for i, rows in enumerate(q.split(widths)):
        right = 0 if causal else window[1]
        want = plain(
            rows, paged.keys[i], paged.values[i], scale=0.2, left=window[0], right=right, **how
        )
        assert_rounded_once(out.split(widths)[i], want)


@pytest.mark.parametrize(
    "extra", [{"window_size": (1, 0)}, {"logits_soft_cap": 0.7}, {"window_size": (5, 5)}]
)
def test_which_prompts_go_to_assembly(load: Load, extra: dict[str, Any]) -> None:
    """With a window that hides something, or a softcap, heads of 128 keep their sinks."""
    aiter, machine = load()
    attempt = varlen(128, sink_ptr=torch.zeros(HEADS), **extra)
    if extra == {"window_size": (5, 5)}:
        with pytest.raises(MisuseError, match="drops the sinks"):
            attempt(aiter, machine)
    else:
        attempt(aiter, machine)


def test_varlen_writes_for_no_keys_what_it_is_told_to(load: Load) -> None:
    """What the kernels write there is not known."""
    aiter, _ = load(no_keys=(torch.nan, torch.inf))
    q, k = torch.randn(3, HEADS, DIM).bfloat16(), torch.randn(4, KV_HEADS, DIM).bfloat16()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [0, 4, 4]))
    out, lse = aiter.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 2, 4, return_lse=True)
    assert out[2].isnan().all() and lse[:, 2].tolist() == [torch.inf] * HEADS
    assert out[:2].isfinite().all() and lse[:, :2].isfinite().all()


def test_varlen_returns_the_lse_heads_first_and_nothing_for_no_keys(load: Load) -> None:
    """What merging two parts relies on."""
    aiter, _ = load()
    q, k = torch.randn(3, HEADS, DIM).bfloat16(), torch.randn(4, KV_HEADS, DIM).bfloat16()
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 3], [0, 4, 4]))
    out, lse = aiter.flash_attn_varlen_func(q, k, k, cu_q, cu_k, 2, 4, return_lse=True)
    plain, exact = (
        (
            q[:2].to(dtype).transpose(0, 1)
            @ k.to(dtype).repeat_interleave(2, 1).permute(1, 2, 0)
            * DIM**-0.5
        ).logsumexp(-1)
        for dtype in (torch.float32, torch.float64)
    )
    assert_as_exact(lse[:, :2], plain, exact)
    assert not out[2].any() and lse[:, 2].tolist() == [-torch.inf] * HEADS


@pytest.mark.parametrize("window", [0, 9])
def test_paged_attention_v1(load: Load, window: int) -> None:
    """One row per request, with a window as a length."""
    aiter, _ = load()
    paged, q = Paged(), torch.randn(3, HEADS, DIM).bfloat16()
    arguments = paged_v1(paged, q, sliding_window=window)
    aiter.paged_attention_v1(**arguments)
    for i in range(3):
        assert_rounded_once(
            arguments["out"][i : i + 1],
            plain(
                q[i : i + 1], paged.keys[i], paged.values[i], scale=0.2, left=window - 1, right=0
            ),
        )


@pytest.mark.parametrize(("units", "kernel"), [(304, "paged_attention_rocm"), (4, "pa_fwd_asm")])
def test_paged_attention_common(load: Load, units: int, kernel: str) -> None:
    """HIP for few rows, assembly for many, the same answer."""
    aiter, machine = load(num_compute_units=units)
    paged, q = Paged(dim=128), torch.randn(3, HEADS, 128).bfloat16()
    arguments = common(paged, q)
    aiter.paged_attention_common(**arguments)
    assert kernel in machine.names()
    for i in range(3):
        assert_rounded_once(
            arguments["out_"][i : i + 1],
            plain(q[i : i + 1], paged.keys[i], paged.values[i], scale=128**-0.5, right=0),
        )


@pytest.mark.parametrize("shuffled", [False, True])
def test_writers(load: Load, shuffled: bool) -> None:
    """Rows land where the readers look; negative slots are left out."""
    aiter, _ = load()
    paged = Paged()
    slots = torch.cat(
        [
            row.repeat_interleave(SIZE)[:n] * SIZE
            for row, n in zip(paged.table, LENGTHS, strict=True)
        ]
    ).long()
    slots += torch.cat([torch.arange(n) % SIZE for n in LENGTHS])
    key, value = torch.cat(paged.keys), torch.cat(paged.values)
    wanted = (paged.key5, paged.value5) if shuffled else (paged.key, paged.value)
    caches = tuple(torch.zeros_like(side) for side in wanted)
    if shuffled:
        aiter.reshape_and_cache(key, value, *caches, slots, "auto", asm_layout=True)
    else:
        aiter.reshape_and_cache_flash(
            key, value, *caches, slots, "auto", torch.ones(1), torch.ones(1)
        )
    assert all(torch.equal(got, want) for got, want in zip(caches, wanted, strict=True))
    before = [side.clone() for side in caches]
    with_gap = torch.full_like(slots, -1)
    if not shuffled:
        aiter.reshape_and_cache_flash(
            -key, -value, *caches, with_gap, "auto", torch.ones(1), torch.ones(1)
        )
    assert all(torch.equal(got, want) for got, want in zip(caches, before, strict=True))


def test_only_the_old_kvcache_kernel_waits(load: Load) -> None:
    """The emulated kernels may look at values under the guard; the host code that reads lengths may
    not.
    """
    new, _ = load()
    old, _ = load(version="0.1.15")
    paged = Paged()
    arguments = {"cache_seqlens": paged.lens, "page_table": paged.table}
    q = torch.randn(3, 2, HEADS, DIM).bfloat16()
    with no_host_sync():
        new.flash_attn_with_kvcache(q, paged.key, paged.value, **arguments)
    with pytest.raises(HostSyncError), no_host_sync():
        old.flash_attn_with_kvcache(q, paged.key, paged.value, **arguments)


def test_arguments_moved_between_versions(load: Load) -> None:
    """Calls by position break where AITER's order changed."""
    orders = []
    for version in VERSIONS:
        aiter, _ = load(version=version)
        orders.append(list(inspect.signature(aiter.unified_attention).parameters))
    assert orders[0][16] == "alibi_slopes" and {order[16] for order in orders[1:]} == {"q_scales"}
