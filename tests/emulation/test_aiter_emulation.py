"""The emulation of AITER: right where it answers, and an error wherever the real kernel would not
be.
"""

import importlib
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import Machine, MisuseError, install
from tests.helpers.aiter_emulation.signatures import SOURCES, VERSIONS
from tests.helpers.aiter_emulation_case import Misuse, assert_rounded_once, check_misuse
from tests.helpers.bounds import assert_as_exact
from tests.helpers.guards import HostSyncError, no_host_sync

ONE_KEY = torch.ones(3, dtype=torch.int32)
HEADS, KV_HEADS, DIM, SIZE = 4, 2, 64, 16
LENGTHS = [40, 17, 33]
Load = Callable[..., tuple[Any, Machine]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """Installs the emulation and imports it, Triton's functions beside the exported ones."""

    def setup(**machine: Any) -> tuple[Any, Machine]:
        pretended = install(monkeypatch, tmp_path, Machine(**machine))
        module = importlib.import_module("aiter")
        for name in ("flash_attn_with_kvcache", "unified_attention"):
            home = "aiter." + SOURCES[name].removesuffix(".py").replace("/", ".")
            setattr(module, name, getattr(importlib.import_module(home), name))
        return module, pretended

    return setup


class Paged:
    """Keys and values of three requests, and the same in a cache of scattered blocks in both
    layouts.
    """

    def __init__(self, dtype: torch.dtype = torch.bfloat16, dim: int = DIM) -> None:
        torch.manual_seed(0)
        self.keys, self.values = (
            [torch.randn(n, KV_HEADS, dim).to(dtype) for n in LENGTHS] for _ in "kv"
        )
        self.table = (torch.randperm(12) + 1).view(3, 4).int()
        self.lens = torch.tensor(LENGTHS, dtype=torch.int32)
        self.key, self.value = (torch.zeros(13, SIZE, KV_HEADS, dim, dtype=dtype) for _ in "kv")
        for i, n in enumerate(LENGTHS):
            for j in range(n):
                place = int(self.table[i, j // SIZE]), j % SIZE
                self.key[place], self.value[place] = self.keys[i][j], self.values[i][j]
        x = 16 // self.key.element_size()
        self.key5 = (
            self.key.view(13, SIZE, KV_HEADS, dim // x, x).permute(0, 2, 3, 1, 4).contiguous()
        )
        self.value5 = (
            self.value.view(13, SIZE // x, x, KV_HEADS, dim).permute(0, 3, 1, 4, 2).contiguous()
        )


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


def unified(paged: Paged, q: Tensor, widths: list[int], **changes: Any) -> dict[str, Any]:
    """Arguments of `unified_attention`."""
    return {
        "q": q,
        "k": paged.key,
        "v": paged.value,
        "out": torch.full_like(q, torch.nan),
        "cu_seqlens_q": torch.tensor([0, *itertools.accumulate(widths)], dtype=torch.int32),
        "max_seqlen_q": max(widths),
        "seqused_k": paged.lens,
        "max_seqlen_k": 64,
        "softmax_scale": 0.2,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": paged.table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
        **changes,
    }


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
    attempt = _varlen(128, sink_ptr=torch.zeros(HEADS), **extra)
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


def paged_v1(paged: Paged, q: Tensor, **changes: Any) -> dict[str, Any]:
    """Arguments of `paged_attention_v1`."""
    return {
        "out": torch.full_like(q, torch.nan),
        "workspace_buffer": torch.zeros(3 * q.shape[1] * (q.shape[2] * 2 + 8), dtype=torch.uint8),
        "query": q,
        "key_cache": paged.key,
        "value_cache": paged.value,
        "scale": 0.2,
        "block_tables": paged.table,
        "cu_query_lens": None,
        "context_lens": paged.lens,
        "max_context_len": 64,
        "alibi_slopes": None,
        "kv_cache_dtype": "auto",
        "kv_cache_layout": "NHD",
        "logits_soft_cap": 0.0,
        "k_scale": torch.ones(1),
        "v_scale": torch.ones(1),
        **changes,
    }


def common(paged: Paged, q: Tensor, **changes: Any) -> dict[str, Any]:
    """Arguments of `paged_attention_common`."""
    rows, heads, dim = q.shape
    return {
        "Q": q,
        "K": paged.key5,
        "V": paged.value5,
        "exp_sums": torch.zeros(rows, heads, 1),
        "max_logits": torch.zeros(rows, heads, 1),
        "tmp_out": q.new_zeros(rows, heads, 1, dim),
        "block_tables": paged.table,
        "context_lens": paged.lens,
        "block_tables_stride0": 4,
        "scale": dim**-0.5,
        "max_seq_len": 64,
        "out_": torch.full_like(q, torch.nan),
        **changes,
    }


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


FNUZ = torch.float8_e4m3fnuz
Attempt = Callable[[Any, Machine], Any]


def _unified(
    rows: int = 3, cache: dict[str, Any] | None = None, dim: int = DIM, **changes: Any
) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> Any:
        paged = Paged(**(cache or {}))
        q = torch.randn(rows, HEADS, dim).to(
            paged.key.dtype if paged.key.itemsize > 1 else torch.bfloat16
        )
        given = {
            name: value(paged) if callable(value) else value for name, value in changes.items()
        }
        return aiter.unified_attention(**unified(paged, q, [rows // 3] * 3, **given))

    return attempt


def _paged_v1(rows: int = 3, heads: int = HEADS, dim: int = DIM, **changes: Any) -> Attempt:
    return lambda aiter, _: aiter.paged_attention_v1(
        **paged_v1(Paged(dim=dim), _q(rows, dim, heads), **changes)
    )


def _common(dim: int = DIM, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Attempt:
    return lambda aiter, _: aiter.paged_attention_common(
        **common(Paged(dtype, dim=dim), _q(dim=dim), **changes)
    )


def _shuffled(dim: int) -> Attempt:
    return _unified(
        cache={"dim": dim},
        dim=dim,
        k=lambda p: p.key5,
        v=lambda p: p.value5,
        shuffled_kv_cache=True,
    )


def _kvcache(cache: dict[str, Any] | None = None, **changes: Any) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> Any:
        paged = Paged(**(cache or {}))
        q = torch.randn(3, 2, HEADS, paged.key.shape[3]).bfloat16()
        arguments = {
            "cache_seqlens": paged.lens,
            "page_table": paged.table,
            "causal": False,
            **changes,
        }
        return aiter.flash_attn_with_kvcache(q, paged.key, paged.value, **arguments)

    return attempt


def _write(rows: Tensor, slot: int = 20) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> Any:
        caches = [torch.zeros(13, SIZE, KV_HEADS, DIM, dtype=FNUZ) for _ in "kv"]
        aiter.reshape_and_cache_flash(
            rows, rows, *caches, torch.tensor([slot]), "fp8", torch.ones(1), torch.ones(1)
        )

    return attempt


def _varlen(dim: int = DIM, **changes: Any) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> Any:
        starts, keys = (
            torch.tensor([0, 3], dtype=torch.int32),
            torch.zeros(3, KV_HEADS, dim).bfloat16(),
        )
        arguments = {"max_seqlen_q": 3, "max_seqlen_k": 3, **changes}
        value = keys[..., :128]
        return aiter.flash_attn_varlen_func(_q(dim=dim), keys, value, starts, starts, **arguments)

    return attempt


def _q(rows: int = 3, dim: int = DIM, heads: int = HEADS) -> Tensor:
    return torch.randn(rows, heads, dim).bfloat16()


def _starts(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _poisoned(paged: Paged) -> Tensor:
    paged.value[int(paged.table[0, 2]), 12] = torch.nan  # position 44 of a request with 40 tokens
    return paged.value


ONE = torch.ones(1)
SMALL = torch.zeros(9, dtype=torch.uint8)
STRIDED = torch.ones(3, 8, dtype=torch.int32)[:, :4]
WIDE = torch.ones(3, 19, dtype=torch.int32)
FP8_SCALARS = {f"{side}_QScale_{kernel}": ONE for side in "KV" for kernel in ("hip", "asm")}
MISUSES: dict[str, Misuse] = {
    "unified, not causal": Misuse(_unified(causal=False), "causal", AssertionError),
    "unified, right window": Misuse(_unified(window_size=(8, 8)), "right window"),
    "unified, bound too small": Misuse(_unified(max_seqlen_k=39), "max_seqlen_k"),
    "unified, rows too few": Misuse(_unified(rows=6, max_seqlen_q=1), "rows"),
    "unified, int64 table": Misuse(_unified(block_table=lambda p: p.table.long()), "int32"),
    "unified, narrow table": Misuse(_unified(block_table=lambda p: p.table[:, :2]), "columns"),
    "unified, NaN behind the end": Misuse(_unified(v=_poisoned), "not finite"),
    "unified, blocks of 8": Misuse(
        _unified(k=lambda p: p.key[:, :8], v=lambda p: p.value[:, :8]), "block size 8"
    ),
    "unified, fp8 without descales": Misuse(_unified(cache={"dtype": FNUZ}), "descales"),
    "unified, the other fp8": Misuse(
        _unified(cache={"dtype": FNUZ}), "gfx950", machine={"architecture": "gfx950"}
    ),
    "unified, float32": Misuse(_unified(cache={"dtype": torch.float32}), "bf16 or fp16"),
    "unified, shuffled in 0.1.15": Misuse(
        _unified(shuffled_kv_cache=True),
        "shuffled_kv_cache",
        TypeError,
        machine={"version": "0.1.15"},
    ),
    "unified, shuffled head of 80": Misuse(_shuffled(80), "head of 80 in the shuffled layout"),
    "unified, float16 in 0.1.16": Misuse(
        _unified(cache={"dtype": torch.float16}, max_seqlen_k=513),
        "float16 caches",
        AssertionError,
        machine={"version": "0.1.16"},
    ),
    "kvcache, fp8 keys": Misuse(_kvcache({"dtype": FNUZ}), "mixed precision", ValueError),
    "kvcache, fewer keys than rows": Misuse(
        _kvcache(cache_seqlens=ONE_KEY, causal=True), "2 queries on 1"
    ),
    "kvcache, a window behind fewer": Misuse(
        _kvcache(cache_seqlens=ONE_KEY, window_size=(8, 8)), "2 queries on 1"
    ),
    "kvcache, softcap": Misuse(_kvcache(softcap=1.0), "softcap", NotImplementedError),
    "kvcache, ragged rows": Misuse(
        _kvcache(cu_seqlens_q=_starts(0, 1)), "cu_seqlens_q", NotImplementedError
    ),
    "kvcache, head of 8": Misuse(_kvcache({"dim": 8}), "head of 8"),
    "kvcache, out=": Misuse(_kvcache(out=ONE), "out", TypeError),
    "kvcache, compiles in a capture": Misuse(
        _kvcache(), "compiles during capture", machine={"capturing": True}
    ),
    "kvcache, 0.1.15 in a capture": Misuse(
        _kvcache(), "waits for the device", machine={"version": "0.1.15", "capturing": True}
    ),
    "paged, two rows": Misuse(_paged_v1(rows=6), "only the first"),
    "paged, rows skipped": Misuse(_paged_v1(rows=4, cu_query_lens=_starts(0, 1, 2, 4)), "skips"),
    "paged, starts one short": Misuse(_paged_v1(cu_query_lens=_starts(0, 1, 2)), "past the end"),
    "paged, small workspace": Misuse(_paged_v1(workspace_buffer=SMALL), "workspace", ValueError),
    "paged, small workspace in 0.1.15": Misuse(
        _paged_v1(workspace_buffer=SMALL), "workspace", machine={"version": "0.1.15"}
    ),
    "paged, narrow table": Misuse(
        _paged_v1(max_context_len=65), "table narrower than 65", ValueError
    ),
    "paged, narrow table in 0.1.15": Misuse(
        _paged_v1(max_context_len=65), "table narrower than 65", machine={"version": "0.1.15"}
    ),
    "paged, strided table": Misuse(_paged_v1(block_tables=STRIDED), "row stride"),
    "paged, head of 16": Misuse(_paged_v1(dim=16), "head size 16"),
    "paged, group of 20": Misuse(_paged_v1(heads=40), "40 heads"),
    "paged, RDNA": Misuse(_paged_v1(), "gfx1100", machine={"architecture": "gfx1100"}),
    "common, own scale on assembly": Misuse(
        _common(128, scale=0.1), "ignores the scale", machine={"num_compute_units": 4}
    ),
    "common, scalars on assembly": Misuse(
        _common(128, FNUZ, kv_cache_dtype="fp8", **FP8_SCALARS),
        "scale per slot",
        machine={"num_compute_units": 4},
    ),
    "common, plain layout": Misuse(
        _common(K=torch.zeros(13, SIZE, KV_HEADS, DIM).bfloat16()), "shuffled layout"
    ),
    "common, small scratch": Misuse(
        _common(max_seq_len=300, block_tables=WIDE), "scratch", ValueError
    ),
    "common, small scratch in 0.1.15": Misuse(
        _common(max_seq_len=300, block_tables=WIDE), "scratch", machine={"version": "0.1.15"}
    ),
    "common, narrow table": Misuse(_common(max_seq_len=65), "table narrower than 65", ValueError),
    "common, narrow table in 0.1.15": Misuse(
        _common(max_seq_len=65), "table narrower than 65", machine={"version": "0.1.15"}
    ),
    "common, strided table": Misuse(_common(block_tables=STRIDED), "row stride"),
    "writer, overflow": Misuse(
        _write(torch.full((1, KV_HEADS, DIM), 300.0).bfloat16()), "overflows"
    ),
    "writer, strided rows": Misuse(
        _write(torch.zeros(1, DIM, KV_HEADS).bfloat16().transpose(1, 2)), "contiguous"
    ),
    "writer, slot past the end": Misuse(
        _write(torch.zeros(1, KV_HEADS, DIM).bfloat16(), 13 * SIZE), "past the cache"
    ),
    "varlen, sinks with lse": Misuse(
        _varlen(sink_ptr=torch.zeros(HEADS), return_lse=True), "sinks together"
    ),
    "varlen, sinks on assembly": Misuse(
        _varlen(128, sink_ptr=torch.zeros(HEADS)), "drops the sinks"
    ),
    "varlen, sinks on assembly, unlike heads": Misuse(
        _varlen(192, sink_ptr=torch.zeros(HEADS)), "drops the sinks"
    ),
    "varlen, bound too small": Misuse(_varlen(max_seqlen_k=2), "max_seqlen_k"),
    "varlen, RDNA": Misuse(_varlen(), "gfx1100", machine={"architecture": "gfx1100"}),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(load: Load, name: str) -> None:
    """Every limit the backends have to respect."""
    check_misuse(load, MISUSES[name])


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
