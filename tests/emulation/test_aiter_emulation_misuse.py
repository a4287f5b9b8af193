"""The emulation of AITER raises wherever the real kernel would not be right."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import Machine
from tests.helpers.aiter_emulation_case import (
    Attempt,
    Load,
    Misuse,
    check_misuse,
)
from tests.helpers.paged_emulation_case import (
    DIM,
    HEADS,
    KV_HEADS,
    SIZE,
    Paged,
    common,
    paged_loader,
    paged_v1,
    random_query,
    unified,
    varlen,
)

ONE_KEY = torch.ones(3, dtype=torch.int32)
FNUZ = torch.float8_e4m3fnuz


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
        **paged_v1(Paged(dim=dim), random_query(rows, dim, heads), **changes)
    )


def _common(dim: int = DIM, dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Attempt:
    return lambda aiter, _: aiter.paged_attention_common(
        **common(Paged(dtype, dim=dim), random_query(dim=dim), **changes)
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
        varlen(sink_ptr=torch.zeros(HEADS), return_lse=True), "sinks together"
    ),
    "varlen, sinks on assembly": Misuse(
        varlen(128, sink_ptr=torch.zeros(HEADS)), "drops the sinks"
    ),
    "varlen, sinks on assembly, unlike heads": Misuse(
        varlen(192, sink_ptr=torch.zeros(HEADS)), "drops the sinks"
    ),
    "varlen, bound too small": Misuse(varlen(max_seqlen_k=2), "max_seqlen_k"),
    "varlen, RDNA": Misuse(varlen(), "gfx1100", machine={"architecture": "gfx1100"}),
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """See `paged_loader`."""
    return paged_loader(monkeypatch, tmp_path)


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(load: Load, name: str) -> None:
    """Every limit the backends have to respect."""
    check_misuse(load, MISUSES[name])
