"""A paged cache that the tests of AITER's emulation attend to, and arguments of its kernels."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.aiter_emulation import Machine, install
from tests.helpers.aiter_emulation.signatures import SOURCES
from tests.helpers.aiter_emulation_case import Attempt, Load

HEADS, KV_HEADS, DIM, SIZE = 4, 2, 64, 16


LENGTHS = [40, 17, 33]


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


def varlen(dim: int = DIM, **changes: Any) -> Attempt:
    """Calls `flash_attn_varlen_func` with three rows and as many keys."""

    def attempt(aiter: Any, _: Machine) -> Any:
        starts, keys = (
            torch.tensor([0, 3], dtype=torch.int32),
            torch.zeros(3, KV_HEADS, dim).bfloat16(),
        )
        arguments = {"max_seqlen_q": 3, "max_seqlen_k": 3, **changes}
        value = keys[..., :128]
        return aiter.flash_attn_varlen_func(
            random_query(dim=dim), keys, value, starts, starts, **arguments
        )

    return attempt


def random_query(rows: int = 3, dim: int = DIM, heads: int = HEADS) -> Tensor:
    """Rows in bfloat16."""
    return torch.randn(rows, heads, dim).bfloat16()


def paged_loader(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Load:
    """A function that installs the emulation and imports it, Triton's functions beside the exported
    ones; sizes are the kernels' own.
    """

    def load(**machine: Any) -> tuple[Any, Machine]:
        pretended = install(monkeypatch, folder, Machine(**machine))
        module = importlib.import_module("aiter")
        for name in ("flash_attn_with_kvcache", "unified_attention"):
            home = "aiter." + SOURCES[name].removesuffix(".py").replace("/", ".")
            setattr(module, name, getattr(importlib.import_module(home), name))
        return module, pretended

    return load
