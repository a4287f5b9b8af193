"""The self-check of latent attention, sparse or not, with the model's own heads.

Attention is compared with plain torch over the same positions. What an indexer chooses may cost
twice the score that rounding to 8 bits costs.
"""

from collections.abc import Iterator
from dataclasses import astuple, replace
from functools import partial

import torch
from torch import Tensor

import specdec.device.device
from specdec.attention.backend import AttentionSpec
from specdec.attention.check import Phase, Requests
from specdec.attention.mla import (
    IndexerRows,
    MlaBackend,
    MlaRows,
    MlaSpec,
    SparseMlaBackend,
    UpProjection,
)
from specdec.attention.torch_ref.mla import TorchRefMlaBackend
from specdec.device.deviation import Deviation, deviation, normal, worst
from specdec.device.self_check import reasons_against

PHASES = (
    Phase([40, 17], [40, 17], known=True),  # prompts
    Phase([90, 21, 40], [30, 1, 40], known=True),  # chunks, a single row and a prompt beside them
    Phase([700, 21, 64], [1, 1, 1]),  # decoding
    # verification, for which the kernels of decoding differ
    Phase([700, 21, 64], [2, 2, 2]),
    Phase([700, 21, 64], [4, 4, 4]),
    Phase([700, 21, 64], [9, 9, 9]),
)
BEYOND = 40
"""Tokens past those that an indexer chooses."""


def reasons_against_latent(backend: type[MlaBackend], spec: MlaSpec) -> list[str]:
    """Why `auto` should pass over a backend that could serve `spec`, by its self-check."""
    if backend.unsupported_reasons(spec):
        return []
    check = partial(check_latent, backend, spec)
    return reasons_against(backend.name, spec.device, check, *latent_variant(spec))


def latent_variant(spec: MlaSpec) -> tuple[torch.dtype | str, ...]:
    """What tells one verdict from another: types, shape, indexer, and how prompts are computed."""
    sizes = (spec.num_heads, spec.kv_lora_rank, spec.qk_nope_head_dim, spec.qk_rope_head_dim)
    shape = "x".join(map(str, (*sizes, spec.v_head_dim)))
    indexer = ["x".join(map(str, astuple(spec.indexer)))] if spec.indexer else []
    prompts = [] if spec.fp8_prefill else ["prompts16"]
    types = dict.fromkeys((spec.dtype, spec.kv_dtype))
    return (*types, shape, f"blocks{spec.block_size}", *indexer, *prompts)


def check_latent(backend: type[MlaBackend], spec: MlaSpec) -> Deviation:
    """The worst of all phases, and of what an indexer chooses."""
    spec = replace(spec, non_causal=False)
    attention = backend(spec)
    phases = list(PHASES)
    if spec.indexer:
        phases.append(Phase([spec.indexer.topk + BEYOND, 21], [5, 5]))
    return worst(one for phase in phases for one in Latents(spec, phase).deviations(attention))


class Latents:
    """One layer's requests, whose blocks lie scattered in a cache. There are latents and an
    indexer's rows of all positions; those of a forward are chosen from them.
    """

    def __init__(self, spec: MlaSpec, phase: Phase) -> None:
        cpu, heads = torch.device("cpu"), spec.num_heads
        shape = AttentionSpec(cpu, spec.dtype, 1, 1, spec.latent_dim, spec.block_size)
        self.spec = spec
        self.requests = requests = Requests(replace(shape, cache_dtype=spec.cache_dtype), phase)
        count, rows = len(requests.slots), sum(phase.widths)
        self.latent = requests.key[:, 0]
        self.index: IndexerRows | None = None
        if spec.indexer is not None:
            keys = normal(count, spec.indexer.head_dim).to(spec.dtype)
            query = normal(count, spec.indexer.num_heads, spec.indexer.head_dim).to(spec.dtype)
            self.index = IndexerRows(query, keys, normal(count, spec.indexer.num_heads).abs())
        self.nope = normal(rows, heads, spec.qk_nope_head_dim).to(spec.dtype)
        self.rope = normal(rows, heads, spec.qk_rope_head_dim).to(spec.dtype)
        rank = spec.kv_lora_rank
        key = (normal(heads, spec.qk_nope_head_dim, rank) * rank**-0.5).to(spec.dtype)
        value = (normal(heads, rank, spec.v_head_dim) * rank**-0.5).to(spec.dtype)
        self.up = UpProjection(key, value)

    def deviations(self, attention: MlaBackend) -> Iterator[Deviation]:
        """How far attention is off, and what its choice of positions costs."""
        cpu, plain = torch.device("cpu"), replace(self.spec, cache_dtype=None)
        got, selected = self.run(attention, None)
        known = self.requests.phase.known
        prompts = known and attention.prefill_dtype.itemsize == 1
        # within prompts, single rows decode
        met = not known or 1 in self.requests.phase.widths
        queries = attention.query_dtype.itemsize == 1 and met
        here = replace(plain, device=cpu, dtype=torch.float64)
        backends = TorchRefMlaBackend(plain), TorchRefMlaBackend(here)
        like, _ = self.run(backends[0], selected, rounds_rows=prompts, rounds_queries=queries)
        exact, _ = self.run(backends[1], selected)
        yield deviation(got, like, exact)
        if selected is not None:
            yield self._loss(selected.cpu())

    def run(
        self,
        attention: MlaBackend,
        selected: Tensor | None,
        *,
        rounds_rows: bool = False,
        rounds_queries: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of the new rows, and the positions, chosen by itself unless they are given.

        With `rounds_rows` of rows in 8 bits, as prompts may be computed; with `rounds_queries` of
        queries alone, as those of decoding may be.
        """
        spec, requests = attention.spec, self.requests
        cut = self._rounded if rounds_rows else Tensor.double
        cut_query = self._rounded if rounds_queries else cut
        new, rank = requests.is_new, spec.kv_lora_rank
        size = requests.num_blocks, spec.block_size
        cache = attention.cache_spec.allocate(*size, spec.kv_dtype, spec.device)
        whole = cut(self.latent).to(spec.device, spec.dtype)
        latent = whole.split([rank, spec.qk_rope_head_dim], 1)
        slots, there = requests.slots.to(spec.device), new.to(spec.device)
        if not new.all():
            attention.write(cache, latent[0][~there], latent[1][~there], slots[~there])
        chooses = self.index is not None and selected is None
        if chooses and not new.all():
            assert isinstance(attention, SparseMlaBackend)
            before = attention.plan(requests.before(spec.device))
            attention.select(self._index(spec, ~new), cache, before)
        plan = attention.plan(requests.metadata(slots[there]))
        if chooses:
            assert isinstance(attention, SparseMlaBackend)
            selected = attention.select(self._index(spec, new), cache, plan)
        queries = (cut_query(rows) for rows in (self.nope, self.rope))
        nope, rope = (rows.to(spec.device, spec.dtype) for rows in queries)
        rows = MlaRows(nope, rope, *(part[there] for part in latent))
        up = UpProjection(*(cut(maps).to(spec.device, spec.dtype) for maps in self.up))
        chosen = None if selected is None else selected.to(spec.device)
        scale = (spec.qk_nope_head_dim + spec.qk_rope_head_dim) ** -0.5
        return attention.run(rows, up, cache, plan, scale=scale, selected=chosen), selected

    def _index(self, spec: MlaSpec, chosen: Tensor) -> IndexerRows:
        assert self.index is not None
        return IndexerRows(*(rows[chosen].to(spec.device) for rows in self.index))

    def _loss(self, selected: Tensor) -> Deviation:
        """The share of the best positions' scores that is lost, and twice that of rounding."""
        index, phase = self.index, self.requests.phase
        assert index is not None and self.spec.indexer is not None
        lost = usual = best_sum = 0.0
        row = first = 0
        for length, width in zip(phase.lengths, phase.widths, strict=True):
            keys = index.key[first : first + length]
            for position in range(length - width, length):
                query, weights = index.query[first + position], index.weights[first + position]
                seen = keys[: position + 1]
                pairs = ((cut(query), cut(seen)) for cut in (Tensor.double, self._rounded))
                scores, near = (weights.double() @ (q @ k.T).relu() for q, k in pairs)
                count = min(self.spec.indexer.topk, position + 1)
                chosen = selected[row][selected[row] >= 0].long()
                if len(chosen.unique()) != count or len(chosen) != count or chosen.max() > position:
                    raise ArithmeticError(f"a row of {position + 1} tokens chooses wrong positions")
                best = scores.topk(count).values.sum()
                best_sum += float(best)
                lost += float(best - scores[chosen].sum())
                usual += float(best - scores[near.topk(count).indices].sum())
                row += 1
            first += length
        unit = torch.finfo(torch.float32).eps
        return Deviation(lost / best_sum, 2 * usual / best_sum + unit)

    def _rounded(self, rows: Tensor) -> Tensor:
        """In 8 bits, each vector with the least power of two that makes it fit."""
        dtype = specdec.device.device.float8_dtype(self.spec.device)
        most = rows.double().abs().amax(-1, keepdim=True) / torch.finfo(dtype).max
        scale = most.clamp(min=1e-30).log2().ceil().exp2()
        return (rows.double() / scale).to(dtype).double() * scale
