"""The emulation of AITER's latent attention, indexer and routing: right where it answers, and an error elsewhere."""

import importlib
import inspect
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.ops import aiter as loader
from tests.aiter_emulation import Machine, MisuseError, install
from tests.aiter_emulation.mla_objects import code_object
from tests.aiter_emulation.signatures import SOURCES, VERSIONS
from tests.guards import no_host_sync

RANK, ROPE = 32, 16
FN, FNUZ = torch.float8_e4m3fn, torch.float8_e4m3fnuz
Load = Callable[..., tuple[Any, Machine]]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Load:
    """Installs the emulation and imports it, functions of submodules beside the exported ones."""

    def setup(**machine: Any) -> tuple[Any, Machine]:
        pretended = install(monkeypatch, tmp_path, Machine(**{"any_shape": True, "num_compute_units": 8, **machine}))
        module = importlib.import_module("aiter")
        for name in ("mla_decode_fwd", "fp8_mqa_logits", "deepgemm_fp8_paged_mqa_logits"):
            home = "aiter." + SOURCES[name].removesuffix(".py").replace("/", ".")
            setattr(module, name, getattr(importlib.import_module(home), name))
        return module, pretended

    return setup


def starts(lengths: list[int]) -> Tensor:
    """Where each of the lengths starts, and where the last one ends."""
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """Rows [Sq, heads, D], the last of [Sk, heads, D]; also the logarithm of the denominator [Sq, heads]."""
    scores = torch.einsum("ihd,jhd->ihj", q.double(), keys.double()) * scale
    if causal:
        hidden = torch.ones(len(q), len(keys)).triu(len(keys) - len(q) + 1).bool()
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    return torch.einsum("ihj,jhd->ihd", scores.softmax(-1), values.double()), scores.logsumexp(-1)


class Latents:
    """A batch of uniform queries over a cache of scattered latents, and what the decode functions are called with."""

    def __init__(
        self,
        lengths: list[int],
        *,
        heads: int = 16,
        query_len: int = 1,
        causal: bool = True,
        query: torch.dtype = torch.bfloat16,
        cache: torch.dtype = torch.bfloat16,
        rank: int = RANK,
        rope: int = ROPE,
    ) -> None:
        torch.manual_seed(1)
        self.lengths, self.heads, self.query_len, self.causal, self.rank = lengths, heads, query_len, causal, rank
        num_slots, width = sum(lengths) + 5, rank + rope
        self.latents = torch.randn(num_slots, width).to(cache)
        self.indices = torch.randperm(num_slots)[: sum(lengths)].int()
        self.q = torch.randn(len(lengths) * query_len, heads, width).to(query)
        self.o = torch.full((len(self.q), heads, rank), torch.nan, dtype=torch.bfloat16)
        self.queries, self.keys = starts([query_len] * len(lengths)), starts(lengths)
        self.pages = torch.ones(len(lengths), dtype=torch.int32)
        self.scales = {"q_scale": torch.full((1,), 0.5), "kv_scale": torch.full((1,), 1.5)}
        self.factors = tuple(
            s.item() if t.itemsize == 1 else 1.0 for s, t in zip(self.scales.values(), (query, cache), strict=True)
        )

    def plan(self, aiter: Any, **changes: Any) -> dict[str, Tensor]:
        """The outputs of the planner, by the names that `mla_decode_fwd` gives them."""
        sizes = aiter.get_mla_metadata_info_v1(
            len(self.lengths), self.query_len, self.heads, self.q.dtype, self.latents.dtype, False, fast_mode=True
        )
        names = ("work_meta_data", "work_indptr", "work_info_set", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
        plan = {
            name: torch.full(shape if isinstance(shape, tuple) else (shape,), 77).to(dtype)
            for name, (shape, dtype) in zip(names, sizes, strict=True)
        }
        self.replan(aiter, plan, **changes)
        return plan

    def replan(self, aiter: Any, plan: dict[str, Tensor], **changes: Any) -> None:
        """Plans into buffers that exist."""
        outputs = {("work_metadata_ptrs" if name == "work_meta_data" else name): tensor for name, tensor in plan.items()}
        arguments = {
            "seqlens_qo_indptr": self.queries,
            "seqlens_kv_indptr": self.keys,
            "kv_last_page_lens": self.pages,
            "num_heads_per_head_k": self.heads,
            "num_heads_k": 1,
            "is_causal": self.causal,
            "max_seqlen_qo": self.query_len,
            "uni_seqlen_qo": self.query_len,
            "dtype_q": self.q.dtype,
            "dtype_kv": self.latents.dtype,
        }
        aiter.get_mla_metadata_v1(**{**arguments, **outputs, **changes})

    def decode(self, aiter: Any, plan: dict[str, Tensor] | None, **changes: Any) -> Any:
        """Calls `mla_decode_fwd`; `causal` is passed only where it matters, since old versions lack it."""
        arguments = {
            "q": self.q,
            "kv_buffer": self.latents.view(-1, 1, 1, self.latents.shape[1]),
            "o": self.o,
            "qo_indptr": self.queries,
            "kv_indptr": self.keys,
            "kv_indices": self.indices,
            "kv_last_page_lens": self.pages,
            "max_seqlen_q": self.query_len,
            "sm_scale": 0.2,
            **({} if self.causal else {"causal": False}),
            **(self.scales if self.latents.dtype.itemsize == 1 else {}),
            **(plan or {}),
        }
        return aiter.mla_decode_fwd(**{**arguments, **changes})

    def wanted(self) -> tuple[Tensor, Tensor]:
        """What belongs into `o`, and the logarithms of the denominators."""
        latents = self.latents.float()[self.indices.long()] * self.factors[1]
        outs, logs = [], []
        for rows, own in zip(self.q.float().split(self.query_len), latents.split(self.lengths), strict=True):
            keys = own[:, None].expand(-1, self.heads, -1)
            out, log = attention(rows * self.factors[0], keys, keys[..., : self.rank], 0.2, self.causal)
            outs.append(out)
            logs.append(log)
        return torch.cat(outs), torch.cat(logs)


def close(got: Tensor, want: Tensor, tolerance: float = 1.5e-2) -> None:
    torch.testing.assert_close(got.double(), want.double(), atol=tolerance, rtol=tolerance)


GFX950 = {"architecture": "gfx950"}
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
    "not causal, gfx950": (GFX950, {"query_len": 5, "causal": False}),
    "one query, not causal": ({}, {"causal": False}),
}


@pytest.mark.parametrize("name", DECODES)
@pytest.mark.parametrize("units", [2, 64])
def test_decode(load: Load, name: str, units: int) -> None:
    """By work lists with few and with many splits: every row right, in the caller's tensor, with no host waiting."""
    options, shape = DECODES[name]
    aiter, machine = load(**{"num_compute_units": units, **options})
    batch = Latents([40, 7, 90], **shape)
    with no_host_sync():
        plan = batch.plan(aiter)
        batch.decode(aiter, plan)
    close(batch.o, batch.wanted()[0])
    assert (plan["reduce_indptr"][-1] > 0) == (units == 64) or units == 2
    assert [call.name for call in machine.calls] == ["get_mla_metadata_info_v1", "get_mla_metadata_v1", "mla_decode_fwd"]


@pytest.mark.parametrize("shape", [{}, {"query_len": 4}, {"query_len": 8}, FP8_942])
def test_decode_without_a_plan(load: Load, shape: dict[str, Any]) -> None:
    """The other kernel, which splits by its own heuristic."""
    aiter, machine = load()
    batch = Latents([40, 17, 90], **shape)
    batch.decode(aiter, None)
    close(batch.o, batch.wanted()[0])
    assert machine.calls[-1].details["persistent"] is False


def test_large_batches_ignore_their_plan(load: Load) -> None:
    """0.1.20 on gfx950: from 32 requests on, the plainest decode takes the other kernel."""
    aiter, machine = load(**GFX950)
    batch = Latents([3] * 32)
    batch.decode(aiter, batch.plan(aiter))
    close(batch.o, batch.wanted()[0])
    assert machine.calls[-1].details["persistent"] is False


@pytest.mark.parametrize("shape", [{}, {"heads": 32, "query_len": 2}])
def test_decode_returns_the_lse(load: Load, shape: dict[str, Any]) -> None:
    """Of split and of unsplit rows, as merging two parts needs it."""
    aiter, _ = load(**GFX950)
    batch = Latents([40, 7, 90], **shape)
    _, lse = batch.decode(aiter, batch.plan(aiter), return_lse=True)
    close(lse, batch.wanted()[1], 1e-3)


def test_folded_heads_swap_the_storage(load: Load) -> None:
    """A view of the output taken before the call is not written."""
    aiter, _ = load()
    batch = Latents([40, 7], heads=32, query_len=2)
    whole = batch.o
    batch.o = whole[:]
    batch.decode(aiter, batch.plan(aiter))
    close(batch.o, batch.wanted()[0])
    assert whole.isnan().all()


def test_a_batch_padded_for_a_graph(load: Load) -> None:
    """Requests without keys, where the starts repeat, come out as zeros and disturb nobody."""
    aiter, _ = load()
    batch = Latents([40, 7, 0, 0])
    batch.decode(aiter, batch.plan(aiter))
    close(batch.o, batch.wanted()[0])  # a softmax over nothing sums to nothing
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
        parts, logs, reduce_final_map=final, max_seqlen_q=2, num_kv_splits=0, final_output=out, final_lse=lse, **arrays
    )
    weights = torch.stack([logs[:2], logs[4:]]).softmax(0)[..., None]
    close(out[1:3], weights[0] * parts[:2] + weights[1] * parts[4:])
    close(lse[1:3], torch.logaddexp(logs[:2], logs[4:]), 1e-5)
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
        close(cache.float().view(8, -1)[[5, 0]] * factor, rows[[0, 2]], 0.1)
        assert not cache.float().view(8, -1)[[1, 2, 3, 4, 6, 7]].any()


class Prefill:
    """Packed prompts in 8 bits, each with some keys before its queries."""

    def __init__(self, widths: list[int], contexts: list[int], heads: int = 16, dim: int = 8) -> None:
        torch.manual_seed(2)
        self.widths, self.lengths, self.heads = widths, [w + c for w, c in zip(widths, contexts, strict=True)], heads
        self.queries, self.keys = starts(widths), starts(self.lengths)
        self.q = torch.randn(sum(widths), heads, dim + 4).to(FN)
        self.k, self.v = torch.randn(sum(self.lengths), heads, dim + 4).to(FN), torch.randn(sum(self.lengths), heads, dim).to(FN)
        self.out = torch.full((len(self.q), heads, dim), torch.nan, dtype=torch.bfloat16)

    def plan(self, aiter: Any, **changes: Any) -> dict[str, Tensor]:
        """The outputs of the planner, by its own names."""
        sizes = aiter.get_ps_metadata_info_v1(len(self.widths), self.heads, max(self.widths))
        names = ("work_metadata_ptrs", "work_indptr", "work_info", "reduce_indptr", "reduce_final_map", "reduce_partial_map")
        plan = {
            name: torch.full(shape if isinstance(shape, tuple) else (shape,), 77).to(dtype)
            for name, (shape, dtype) in zip(names, sizes, strict=True)
        }
        arguments = {
            "seqlens_qo_indptr": self.queries,
            "pages_kv_indptr": self.keys,
            "context_lens": torch.tensor(self.lengths, dtype=torch.int32),
            "gqa_ratio": 1,
            "num_heads_k": self.heads,
            "kvlen_granularity": 128,
            "block_size": 1,
        }
        aiter.get_ps_metadata_v1(**{**arguments, **plan, **changes})
        return plan

    def run(self, aiter: Any, plan: dict[str, Tensor], **changes: Any) -> tuple[Tensor, Tensor]:
        """Both kernels; partial results before the reduction, and the logarithms after it."""
        count = int(plan["reduce_indptr"][-1]) * 256
        partial, logs = torch.full((count, *self.out.shape[1:]), torch.nan), torch.full((count, self.heads), torch.nan)
        one = torch.ones(1)
        arguments = {
            "Q": self.q,
            "K": self.k,
            "V": self.v,
            "qo_indptr": self.queries,
            "kv_indptr": self.keys,
            "kv_page_indices": torch.arange(len(self.k), dtype=torch.int32),
            "work_indptr": plan["work_indptr"],
            "work_info_set": plan["work_info"],
            "max_seqlen_q": max(self.widths),
            "softmax_scale": 0.3,
            "is_causal": True,
            "splitData": partial,
            "splitLse": logs,
            "output": self.out,
            **{f"{side}_scale": one for side in "qkv"},
        }
        aiter.mla_prefill_ps_asm_fwd(**{**arguments, **changes})
        lse = torch.full((len(self.q), self.heads), torch.nan)
        maps = {name: plan[name] for name in ("reduce_indptr", "reduce_final_map", "reduce_partial_map")}
        splits = {"num_kv_splits": 0} if "num_kv_splits" in inspect.signature(aiter.mla_reduce_v1).parameters else {}
        aiter.mla_reduce_v1(
            partial_output=partial, partial_lse=logs, max_seqlen_q=256, final_output=self.out, final_lse=lse, **maps, **splits
        )
        return partial, lse


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("units", [3, 48, 112])
def test_prefill(load: Load, version: str, units: int) -> None:
    """Several prompts, some longer than a tile and some with a context: no row is missing, and unsplit rows have no logarithm."""
    aiter, _ = load(version=version, num_compute_units=units, **GFX950)
    batch = Prefill([300, 20, 1, 530], [0, 150, 40, 0])
    plan = batch.plan(aiter)
    _, lse = batch.run(aiter, plan)
    split = set()
    for group in range(int((plan["reduce_indptr"].diff() > 0).sum())):
        split |= set(range(*plan["reduce_final_map"][group].tolist()))
    for i in range(4):
        rows, keys = (slice(int(s[i]), int(s[i + 1])) for s in (batch.queries, batch.keys))
        want, log = attention(batch.q[rows].float(), batch.k[keys].float(), batch.v[keys].float(), 0.3, True)
        close(batch.out[rows], want)
        mine = [row for row in range(rows.start, rows.stop) if row in split]
        close(lse[mine], log[[row - rows.start for row in mine]], 1e-3)
    assert lse[[row for row in range(851) if row not in split]].isnan().all()
    assert bool(split)


def test_the_prefill_plan_by_hand(load: Load) -> None:
    """Two clusters of two groups; five units of keys, three for the first group; the second tile is cut."""
    aiter, _ = load(num_compute_units=4, **GFX950)
    plan = Prefill([300], [0], heads=2).plan(aiter)
    tile = [[0, -1, 0, 256, 0, 256, 0], [0, 0, 256, 300, 0, 128, 172], [0, 256, 256, 300, 128, 300, 0]]
    assert plan["work_info"][:6].tolist() == [[*work, (head + 1) << 16 | head] for head in range(2) for work in tile]
    assert plan["work_indptr"].tolist() == [0, 2, 3, 5, 6]
    assert (
        plan["reduce_indptr"].tolist() == [0, 2, 2]
        and plan["reduce_partial_map"].tolist() == [0, 256, *[0] * 2][: len(plan["reduce_partial_map"])]
    )
    assert plan["reduce_final_map"].tolist() == [[256, 300], [0, 0]]
    assert plan["work_metadata_ptrs"].view(torch.int64).tolist() == [77, 77]
    aiter, _ = load(num_compute_units=2, **GFX950)
    assert Prefill([600], [0], heads=2).plan(aiter)["work_info"][:3, 2].tolist() == [0, 512, 256]  # from the head and the tail


class Indexed:
    """Indexer keys of two requests in a paged cache."""

    def __init__(self, aiter: Any, fp8: torch.dtype, scale_fmt: str = "ue8m0") -> None:
        torch.manual_seed(3)
        self.lengths, self.size, dim = [37, 20], 16, 32
        self.key = torch.randn(57, dim).bfloat16()
        self.cache = torch.zeros(8, self.size, dim + 4, dtype=torch.uint8)
        self.table = torch.tensor([[6, 2, 5], [1, 7, 0]], dtype=torch.int32)
        self.lens = torch.tensor(self.lengths, dtype=torch.int32)
        positions = [(i, j) for i, n in enumerate(self.lengths) for j in range(n)]
        slots = torch.tensor([int(self.table[i, j // self.size]) * self.size + j % self.size for i, j in positions])
        aiter.indexer_k_quant_and_cache(self.key, self.cache, slots, dim, scale_fmt)
        self.query = torch.randn(2, 2, 16, dim).to(fp8)
        self.weights = torch.randn(4, 16)
        self.starts = starts(self.lengths)

    def gather(self, aiter: Any, fp8: torch.dtype) -> tuple[Tensor, Tensor]:
        """Packed keys and scales."""
        keys, scales = torch.empty(57, 32, dtype=fp8), torch.empty(57, 4, dtype=torch.uint8)
        aiter.cp_gather_indexer_k_quant_cache(self.cache, keys, scales, self.table, self.starts)
        return keys, scales.view(torch.float32).view(-1)


@pytest.mark.parametrize(("architecture", "fp8"), [("gfx942", FNUZ), ("gfx950", FN)])
def test_indexer(load: Load, architecture: str, fp8: torch.dtype) -> None:
    """Both ways to the scores, packed and paged, agree with the plain formula; columns past a context stay as they were."""
    aiter, _ = load(architecture=architecture)
    data = Indexed(aiter, fp8)
    with no_host_sync():
        keys, scales = data.gather(aiter, fp8)
        logits = torch.full((4, 64), 9.0)
        cache = data.cache[:, :, None]
        aiter.deepgemm_fp8_paged_mqa_logits(data.query, cache, data.weights, logits, data.lens, data.table, 64, KVBlockSize=16)
    close(keys.float() * scales[:, None], data.key, 0.07)
    assert torch.equal(scales.log2().round(), scales.log2())
    assert data.cache[6].view(-1)[512:516].view(torch.float32) == scales[0]  # behind the keys of its block
    begins, ends = torch.tensor([0, 0, 37, 37]).int(), torch.tensor([36, 37, 56, 57]).int()
    with no_host_sync():
        packed = aiter.fp8_mqa_logits(data.query.flatten(0, 1), keys, scales, data.weights, begins, ends)
    assert packed.stride(0) == 256
    for row, (begin, end, length) in enumerate([(0, 36, 37), (0, 37, 37), (37, 56, 20), (37, 57, 20)]):
        dots = data.query.flatten(0, 1)[row].double() @ (keys.float() * scales[:, None]).double().T
        want = (dots.relu() * data.weights[row].double()[:, None]).sum(0)[begin:end]
        close(packed[row, begin:end], want, 1e-4)
        close(logits[row, : end - begin], want, 1e-4)
        assert packed[row, :begin].isneginf().all() and packed[row, end:].isneginf().all()
        assert logits[row, end - begin : length].isneginf().all() and (logits[row, length:] == 9).all()


def test_top_k(load: Load) -> None:
    """Columns of the whole row, not counted from its start, filled up with -1; a decode row ends at its own position."""
    aiter, _ = load()
    logits = torch.randn(4, 40)
    logits[:, 30:] = torch.nan
    indices = torch.zeros(4, 8, dtype=torch.int32)
    begins, ends = (torch.tensor(x, dtype=torch.int32) for x in ([0, 10, 28, 5], [30, 30, 30, 5]))
    with no_host_sync():
        aiter.top_k_per_row_prefill(logits, begins, ends, indices, None, 4, 40, 1, k=8)
    for row in range(4):
        best = sorted(range(int(begins[row]), int(ends[row])), key=lambda column: -float(logits[row, column]))[:8]
        assert sorted(indices[row].tolist()) == sorted(best + [-1] * (8 - len(best)))
    lens = torch.tensor([30, 9], dtype=torch.int32)
    with no_host_sync():
        aiter.top_k_per_row_decode(logits, 2, lens, indices, 4, 40, 1, k=8)
    for row, length in enumerate([29, 30, 8, 9]):
        assert set(indices[row].tolist()) == set(logits[row, :length].topk(8).indices.tolist())


def route(logits: Tensor, bias: Tensor | None, groups: int, kept: int, topk: int, softmax: bool = False) -> list[dict[int, float]]:
    """Weights before scaling by expert of every token, one token at a time."""
    rows = []
    for token in logits.double():
        scores = token.softmax(0) if softmax else token.sigmoid()
        choice = scores + (bias.double() if bias is not None else 0)
        members = [list(range(g * len(token) // groups, (g + 1) * len(token) // groups)) for g in range(groups)]
        depth = 2 if bias is not None else 1
        order = sorted(range(groups), key=lambda g: (-sum(sorted((float(choice[e]) for e in members[g]), reverse=True)[:depth]), g))
        allowed = [e for g in order[:kept] for e in members[g]]
        rows.append({e: float(scores[e]) for e in sorted(allowed, key=lambda e: -float(choice[e]))[:topk]})
    return rows


@pytest.mark.parametrize("renorm", [True, False])
@pytest.mark.parametrize("kind", ["biased", "softmax groups", "sigmoid groups", "softmax", "sigmoid"])
def test_routing(load: Load, kind: str, renorm: bool) -> None:
    """Experts and weights as sets per token, also when every biased score is negative."""
    aiter, _ = load()
    torch.manual_seed(4)
    logits, bias = torch.randn(9, 16).bfloat16(), (torch.randn(16) - 3).bfloat16()
    weights, ids = torch.full((9, 3), torch.nan), torch.zeros(9, 3, dtype=torch.int32)
    factor = 2.5 if "groups" in kind or kind == "biased" else 1.0
    softmax = kind.startswith("softmax")
    with no_host_sync():
        if kind == "biased":
            aiter.biased_grouped_topk(logits, bias, weights, ids, 4, 2, renorm, factor)
        elif "groups" in kind:
            aiter.grouped_topk(logits, weights, ids, 4, 2, renorm, softmax, factor)
        elif softmax:
            aiter.topk_softmax(weights, ids, torch.zeros_like(ids), logits, renorm)
        else:
            aiter.topk_sigmoid(weights, ids, logits)
    groups = (4, 2) if "groups" in kind or kind == "biased" else (1, 1)
    wanted = route(logits, bias if kind == "biased" else None, *groups, 3, softmax)
    renorm = renorm and kind != "sigmoid"
    for token, want in enumerate(wanted):
        total = sum(want.values()) if renorm else 1.0
        got = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert got == pytest.approx({expert: weight / total * factor for expert, weight in want.items()}, rel=1e-5)


Attempt = Callable[[Any, Machine], Any]


def _decode(shape: dict[str, Any] | None = None, planned: dict[str, Any] | None = None, **changes: Any) -> Attempt:
    """A decode with something wrong about its shape, its plan or its call; a function gets the batch."""

    def attempt(aiter: Any, _: Machine) -> None:
        batch = Latents([40, 7, 90], **(shape or {}))
        plan = batch.plan(aiter, **(planned or {}))
        batch.decode(aiter, plan, **{name: value(batch) if callable(value) else value for name, value in changes.items()})

    return attempt


def _stale(lengths: list[int]) -> Attempt:
    """The plan of another batch of the same shape."""

    def attempt(aiter: Any, _: Machine) -> None:
        plan = Latents([40, 7, 90]).plan(aiter)
        batch = Latents(lengths)
        batch.decode(aiter, plan)

    return attempt


def _other_heads(aiter: Any, _: Machine) -> None:
    plan = Latents([40, 7, 90], heads=32).plan(aiter)
    Latents([40, 7, 90]).decode(aiter, plan)


def _copied_plan(aiter: Any, _: Machine) -> None:
    batch = Latents([40, 7, 90])
    plan = batch.plan(aiter)
    batch.decode(aiter, {**plan, "work_info_set": plan["work_info_set"].clone()})


def _no_plan(shape: dict[str, Any]) -> Attempt:
    return lambda aiter, _: Latents([40, 7, 90], **shape).decode(aiter, None)


def _prefill(batch: dict[str, Any] | None = None, **changes: Any) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        data = Prefill(**{"widths": [300, 20], "contexts": [0, 0], **(batch or {})})
        plan = data.plan(aiter)
        data.run(aiter, plan, **{name: value(data) if callable(value) else value for name, value in changes.items()})

    return attempt


def _plan_on_device(view: Callable[[Prefill], Tensor]) -> Attempt:
    def attempt(aiter: Any, machine: Machine) -> None:
        data = Prefill([300, 20], [0, 0])
        machine.on_device.append(view(data))
        data.plan(aiter)

    return attempt


def _stale_prefill(aiter: Any, _: Machine) -> None:
    plan = Prefill([300, 20], [0, 0]).plan(aiter)
    Prefill([20, 300], [0, 0]).run(aiter, plan)


def _reduced(heads: int, dim: int) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        maps = {name: torch.zeros(2, dtype=torch.int32) for name in ("reduce_indptr", "reduce_partial_map")}
        parts, out = torch.zeros(2, heads, dim), torch.zeros(2, heads, dim).bfloat16()
        final = torch.zeros(1, 2, dtype=torch.int32)
        aiter.mla_reduce_v1(parts, parts[..., 0], reduce_final_map=final, max_seqlen_q=1, num_kv_splits=0, final_output=out, **maps)

    return attempt


def _route(
    bias: torch.dtype = torch.bfloat16, groups: int = 4, kept: int = 2, ids: torch.dtype = torch.int32, topk: int = 3
) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        weights, chosen = torch.zeros(9, topk), torch.zeros(9, topk, dtype=ids)
        aiter.biased_grouped_topk(torch.randn(9, 16).bfloat16(), torch.zeros(16, dtype=bias), weights, chosen, groups, kept, True)

    return attempt


def _top(strides: tuple[int, int] = (40, 1), length: int = 30, k: int = 8) -> Attempt:
    def attempt(aiter: Any, _: Machine) -> None:
        logits = torch.full((2, 40), torch.nan)
        logits[:, :30] = 0
        indices = torch.zeros(2, 8, dtype=torch.int32)
        aiter.top_k_per_row_decode(logits, 1, torch.tensor([30, length], dtype=torch.int32), indices, 2, *strides, k=k)

    return attempt


def _score_heads(aiter: Any, machine: Machine) -> None:
    data = Indexed(aiter, machine.fp8)
    few = data.query[:, :, :8]
    logits = torch.zeros(4, 64)
    aiter.deepgemm_fp8_paged_mqa_logits(
        few, data.cache[:, :, None], data.weights[:, :8], logits, data.lens, data.table, 64, KVBlockSize=16
    )


def _score_narrow(aiter: Any, machine: Machine) -> None:
    data = Indexed(aiter, machine.fp8)
    logits, cache = torch.zeros(4, 32), data.cache[:, :, None]
    aiter.deepgemm_fp8_paged_mqa_logits(data.query, cache, data.weights, logits, data.lens, data.table, 32, KVBlockSize=16)


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
MISUSES: dict[str, tuple[dict[str, Any], Attempt, type[Exception], str]] = {
    "24 heads": ({}, _decode({"heads": 24}), MisuseError, "multiple of 16"),
    "8 heads": ({}, _decode({"heads": 8}), MisuseError, "multiple of 16"),
    "not causal on gfx942": ({}, _decode({"query_len": 2, "causal": False}), MisuseError, "no code object"),
    "not causal in 0.1.16": ({"version": "0.1.16"}, _decode({"causal": False}), TypeError, "causal"),
    "not causal, 8-bit, 2 queries": (GFX950, _decode({**FP8_950, "query_len": 2, "causal": False}), MisuseError, "no code object"),
    "5 queries on gfx942": ({}, _decode({"query_len": 5}), MisuseError, "no code object"),
    "LSE on gfx942": ({}, _decode(return_lse=True), MisuseError, "no code object"),
    "9 queries without a plan": ({}, _no_plan({"query_len": 7 + 2}), MisuseError, "9 queries on 7|no code object"),
    "48 heads without a plan": ({}, _no_plan({"heads": 48}), MisuseError, "no code object"),
    "RDNA": ({"architecture": "gfx1100"}, _decode(), MisuseError, "gfx1100"),
    "real sizes": ({"any_shape": False}, _decode(), MisuseError, "sizes"),
    "fp16": ({}, _decode({"query": torch.float16, "cache": torch.float16}), MisuseError, "no kernel"),
    "float32": ({}, _decode({"query": torch.float32, "cache": torch.float32}), MisuseError, "no kernel"),
    "the other fp8": ({}, _decode(FP8_950), MisuseError, "no kernel"),
    "8-bit without scales": ({}, _decode(FP8_942, q_scale=None), MisuseError, "q_scale"),
    "8-bit cache without scale": ({}, _decode({"cache": FNUZ}, kv_scale=None), MisuseError, "kv_scale"),
    "implicit scale": ({}, _decode(sm_scale=None), MisuseError, "sm_scale"),
    "logit cap": ({}, _decode(logit_cap=1.0), AssertionError, "logit_cap"),
    "pages of 64": ({}, _decode(page_size=64), MisuseError, "pages of 64"),
    "last pages": ({}, _decode(kv_last_page_lens=torch.zeros(3, dtype=torch.int32)), MisuseError, "kv_last_page_lens"),
    "tail falls to 0": ({}, _decode(kv_indptr=torch.tensor([0, 40, 47, 0]).int()), MisuseError, "repeat the last value"),
    "int64 indices": ({}, _decode(kv_indices=lambda b: b.indices.long()), MisuseError, "int32"),
    "index past the cache": ({}, _decode(kv_indices=lambda b: b.indices + 100), MisuseError, "outside the cache"),
    "negative index": ({}, _decode(kv_indices=lambda b: b.indices - 100), MisuseError, "outside the cache"),
    "too few indices": ({}, _decode(kv_indices=lambda b: b.indices[:90]), MisuseError, "of 90 indices"),
    "strided query": ({}, _decode(q=lambda b: b.q.transpose(0, 1).contiguous().transpose(0, 1)), MisuseError, "dense"),
    "fp16 output": ({}, _decode(o=lambda b: b.o.half()), MisuseError, "output"),
    "more queries than keys": ({}, _no_plan({"query_len": 8}), MisuseError, "8 queries on 7"),
    "query bound too small": ({}, _decode({"query_len": 2}, max_seqlen_q=1), MisuseError, "max_seqlen_q 1 below 2"),
    "stale plan": ({}, _stale([41, 7, 90]), MisuseError, "other lengths"),
    "stale plan, permuted": ({}, _stale([7, 40, 90]), MisuseError, "other lengths"),
    "plan of another batch size": ({}, _stale([40, 7]), MisuseError, "other (lengths|queries)"),
    "plan for other heads": ({}, _other_heads, MisuseError, "planned for heads 32"),
    "plan for another type": ({}, _decode(FP8_942, {"dtype_q": BF16, "dtype_kv": BF16}), MisuseError, "planned for kind bf16"),
    "plan without the cache's type": (
        {"version": "0.1.15"},
        _decode(FP8_942, {"dtype_q": None, "dtype_kv": None}),
        MisuseError,
        "planned for kind bf16",
    ),
    "causal plan": (GFX950, _decode({"query_len": 2, "causal": False}, {"is_causal": True}), MisuseError, "planned for causal"),
    "plan for fewer queries": ({}, _decode({"query_len": 2}, {"max_seqlen_qo": 1}), MisuseError, "max_seqlen_qo 1 below 2"),
    "plan for uniform queries": ({}, _decode(planned={"uni_seqlen_qo": 2}), MisuseError, "uni_seqlen_qo"),
    "plan with int64 starts": ({}, _decode(planned={"seqlens_kv_indptr": torch.zeros(4).long()}), MisuseError, "int32"),
    "plan with granularity 24": ({}, _decode(planned={"kv_granularity": 24}), MisuseError, "granularity"),
    "plan into small buffers": ({}, _decode(planned={"work_info_set": torch.zeros(2, 8).int()}), MisuseError, "elements"),
    "copied plan": ({}, _copied_plan, MisuseError, "another plan"),
    "compiles in a capture": ({"capturing": True}, _no_plan({}), MisuseError, "compiles during capture"),
    "prefill on gfx942": ({}, _prefill(), MisuseError, "gfx942"),
    "prefill, not causal": (GFX950, _prefill(is_causal=False), MisuseError, "logarithms"),
    "prefill, 8 heads": (GFX950, _prefill({"heads": 8}), MisuseError, "multiple of 16"),
    "prefill, real sizes": ({**GFX950, "any_shape": False}, _prefill(), MisuseError, "sizes"),
    "prefill, bf16": (GFX950, _prefill(V=lambda d: d.v.bfloat16()), MisuseError, "takes"),
    "prefill, fp16 output": (GFX950, _prefill(output=lambda d: d.out.half()), MisuseError, "bf16 bits"),
    "prefill without a scale": (GFX950, _prefill(k_scale=None), MisuseError, "k_scale"),
    "prefill without work": (GFX950, _prefill(work_indptr=None), MisuseError, "work list"),
    "prefill, small scratch": (
        {**GFX950, "num_compute_units": 48},
        _prefill(splitData=torch.zeros(256, 16, 8)),
        MisuseError,
        "scratch",
    ),
    "prefill, stale plan": (GFX950, _stale_prefill, MisuseError, "other lengths"),
    "prefill plan on the device": (GFX950, _plan_on_device(lambda d: d.queries), MisuseError, "makes the host wait"),
    "prefill plan on the device, a view": (GFX950, _plan_on_device(lambda d: d.keys[1:]), MisuseError, "makes the host wait"),
    "prefill plan in a capture": ({**GFX950, "capturing": True}, _prefill(), MisuseError, "cannot be captured"),
    "reduction of 20 heads": ({"any_shape": False}, _reduced(20, 512), MisuseError, "not compiled for 20 heads"),
    "reduction on RDNA": ({"architecture": "gfx1100"}, _reduced(16, 512), MisuseError, "gfx1100"),
    "bias of another type": ({}, _route(bias=torch.float32), MisuseError, "reads the bias"),
    "3 groups": ({}, _route(groups=3), MisuseError, "3 groups"),
    "5 of 4 groups": ({}, _route(kept=5), MisuseError, "5 of 4 groups"),
    "int64 ids": ({}, _route(ids=torch.int64), MisuseError, "int32 ids"),
    "more experts than the groups hold": ({}, _route(topk=9), MisuseError, "9 experts from 2 groups"),
    "top-k of unwritten columns": ({}, _top(length=31), MisuseError, "nobody wrote"),
    "top-k with the width as stride": ({}, _top(strides=(30, 1)), MisuseError, "strides"),
    "top-k of another width": ({}, _top(k=4), MisuseError, "indices"),
    "indexer, 8 heads": ({}, _score_heads, MisuseError, "at least 16 heads"),
    "indexer, context beyond the bound": ({}, _score_narrow, MisuseError, "max_model_len"),
    "latents overflow": ({}, _write_latents(300.0), MisuseError, "overflows"),
    "latents into int32 slots": ({}, _write_latents(slot_mapping=torch.tensor([3]).int()), MisuseError, "int64"),
    "latents past the end": ({}, _write_latents(slot_mapping=torch.tensor([8])), MisuseError, "past the cache"),
    "latents, wrong kind": ({}, _write_latents(kv_cache_dtype="auto"), MisuseError, "kv_cache_dtype"),
}
"""The machine, the call, and what it raises."""


@pytest.mark.parametrize("name", MISUSES)
def test_misuse_raises(load: Load, name: str) -> None:
    """Every limit the backends have to respect."""
    options, attempt, error, message = MISUSES[name]
    aiter, machine = load(**options)
    with pytest.raises(error, match=message):
        attempt(aiter, machine)


def test_which_code_objects_exist() -> None:
    """A sample of what ships: the same call has a kernel on one architecture and aborts on the other."""
    new = {arch: Machine(version="0.1.20", architecture=arch) for arch in ("gfx942", "gfx950")}
    persistent = {"persistent": True}
    assert code_object(new["gfx942"], "bf16", 16, 4, **persistent) == "16p4"
    assert code_object(new["gfx942"], "bf16", 16, 5, **persistent) is None
    assert code_object(new["gfx950"], "bf16", 16, 5, **persistent) == "64p1"
    assert code_object(new["gfx950"], "bf16", 16, 16, causal=False, **persistent) == "32p4+open"
    assert code_object(new["gfx950"], "fp8", 64, 2, causal=False, **persistent) == "32p4+open"
    assert code_object(new["gfx950"], "fp8", 16, 2, causal=False, **persistent) is None
    assert code_object(new["gfx942"], "bf16", 16, 1, causal=False, **persistent) == "16p4"  # one query: nothing to mask
    assert code_object(Machine(version="0.1.15", architecture="gfx950"), "fp8", 64, 2, **persistent) == "32p4"


def test_replanning_in_place(load: Load) -> None:
    """Planning into the same buffers replaces the plan."""
    aiter, _ = load()
    first, second = Latents([40, 7, 90]), Latents([7, 40, 90])
    plan = first.plan(aiter)
    second.replan(aiter, plan)
    second.decode(aiter, plan)
    close(second.o, second.wanted()[0])


def test_arguments_moved_between_versions(load: Load) -> None:
    """Calls of the reduction by position break at 0.1.16; planners name the same two outputs in different orders."""
    orders = []
    for version in VERSIONS:
        aiter, _ = load(version=version)
        orders.append(list(inspect.signature(aiter.mla_reduce_v1).parameters))
    assert orders[0][6] == "final_output" and orders[1][6] == orders[2][6] == "num_kv_splits"
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
    mla = loader.load_mla()
    assert (mla.takes_causal, mla.takes_num_kv_splits) == (version == "0.1.20", version != "0.1.15")
    assert mla.mla_prefill_ps_asm_fwd is not None
    assert loader.load_indexer().version == loader.load_router().version == loader.version_numbers(version)
    assert not any(loader.unavailable_reasons(family) for family in ("fa", "mla", "indexer", "router"))


def test_one_family_does_not_break_another(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing function or keyword is the loss of its own family; the functions of the 8-bit prefill may be missing."""
    aiter, _ = load()
    home = importlib.import_module("aiter.mla")
    monkeypatch.delattr(home, "mla_decode_fwd")
    assert loader.unavailable_reasons("mla") == ["amd-aiter 0.1.20 cannot be used: aiter.mla has no mla_decode_fwd"]
    assert not loader.unavailable_reasons() and not loader.unavailable_reasons("router")
    monkeypatch.setattr(home, "mla_decode_fwd", lambda q, o: None, raising=False)
    assert "takes no qo_indptr" in loader.unavailable_reasons("mla")[0]
    monkeypatch.setattr(home, "mla_decode_fwd", lambda *args, **kwargs: None)  # a wrapper that hides its arguments
    monkeypatch.delattr(aiter, "mla_prefill_ps_asm_fwd")
    mla = loader.load_mla()
    assert mla.takes_causal and mla.mla_prefill_ps_asm_fwd is None
