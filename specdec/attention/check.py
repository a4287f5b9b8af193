"""The self-check of attention with ordinary heads: every phase at tiny size, by a backend and by plain torch."""

from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, Visibility
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.device.deviation import Deviation, deviation, worst
from specdec.device.self_check import reasons_against
from specdec.kv_cache import KVLayerSpec, LayerCache, blocks_for

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
"""A shape that every backend takes, and the fastest of their kernels do."""


class Phase(NamedTuple):
    """Requests of one forward."""

    lengths: list[int]  # tokens in the cache, the rows' own among them
    widths: list[int]  # rows
    known: bool = False  # to the host
    visibility: Visibility = "causal"
    window: int | None = None


PHASES = (
    Phase([40, 17], [40, 17], known=True),  # prompts
    Phase([90, 21, 40], [30, 1, 40], known=True),  # chunks behind a context, a single row and a prompt beside them
    Phase([150, 200, 40], [150, 130, 40], known=True),  # the same, as many rows as have kernels of their own
    Phase([300, 21, 64], [1, 1, 1]),  # decoding
    Phase([300, 21, 64], [1, 1, 1], window=30),
    Phase([300, 21, 64], [5, 5, 5]),  # verification
    Phase([300, 21, 64], [5, 5, 5], visibility="full"),  # a draft block, last since not every backend has it
)


def reasons_against_kernels(backend: type[AttentionBackend], spec: AttentionSpec) -> list[str]:
    """Why `auto` should pass over a backend that could serve `spec`, as far as its self-check knows; see `reasons_against`."""
    if backend.unsupported_reasons(spec):
        return []
    tiny = tiny_spec(spec)
    return reasons_against(backend.name, spec.device, partial(check_attention, backend, tiny), *types_of(tiny))


def tiny_spec(spec: AttentionSpec) -> AttentionSpec:
    """What the check asks of a backend that is to serve `spec`: the same types."""
    return AttentionSpec(spec.device, spec.dtype, HEADS, KV_HEADS, HEAD_DIM, block_size=16, cache_dtype=spec.cache_dtype)


def types_of(spec: AttentionSpec) -> tuple[torch.dtype, ...]:
    """What tells one verdict of a backend from another: the model's type, and the cache's when it is another."""
    return tuple(dict.fromkeys((spec.dtype, spec.kv_dtype)))


def check_attention(backend: type[AttentionBackend], spec: AttentionSpec) -> Deviation:
    """The worst of all phases that `backend` has."""
    blocks = not backend.unsupported_reasons(replace(spec, non_causal=True))
    attention = backend(replace(spec, non_causal=blocks))
    return worst(_deviation(attention, phase) for phase in PHASES if phase.visibility == "causal" or blocks)


def _deviation(attention: AttentionBackend, phase: Phase) -> Deviation:
    """How far one forward is off; how far plain torch is depends on the device, too, which adds up in an order of its own."""
    spec = replace(attention.spec, cache_dtype=None)
    requests = Requests(attention.spec, phase)
    plain = TorchRefBackend(spec)
    exact = TorchRefBackend(replace(spec, device=torch.device("cpu"), dtype=torch.float64))
    return deviation(*map(requests.run, (attention, plain, exact)))


class Requests:
    """Requests whose blocks lie scattered in a cache, with random numbers that the cache holds exactly, on the CPU."""

    def __init__(self, spec: AttentionSpec, phase: Phase) -> None:
        random = torch.Generator().manual_seed(0)
        self.phase, self.size = phase, spec.block_size
        counts = [blocks_for(length, self.size) for length in phase.lengths]
        self.num_blocks = sum(counts) + 1
        tables = (torch.randperm(sum(counts), generator=random) + 1).split(counts)
        self.table = torch.stack([torch.cat([table, table[:1].expand(max(counts) + 2 - len(table))]) for table in tables]).int()
        places = torch.cat([table.repeat_interleave(self.size)[:n] for table, n in zip(tables, phase.lengths, strict=True)])
        offsets = torch.cat([torch.arange(n) % self.size for n in phase.lengths])
        self.slots = places * self.size + offsets
        ends = accumulate(phase.lengths)
        self.is_new = torch.zeros(len(self.slots), dtype=torch.bool)
        for end, width in zip(ends, phase.widths, strict=True):
            self.is_new[end - width : end] = True

        def normal(heads: int, rows: int) -> Tensor:
            return torch.randn(rows, heads, spec.head_dim, generator=random)

        self.key, self.value = (normal(spec.num_kv_heads, len(self.slots)).to(spec.kv_dtype).to(spec.dtype) for _ in "kv")
        self.query = normal(spec.num_heads, sum(phase.widths)).to(spec.dtype)

    def run(self, attention: AttentionBackend) -> Tensor:
        """Attention of the new rows, where and in the type that `attention` has."""
        spec, phase = attention.spec, self.phase
        cache: LayerCache = KVLayerSpec(spec.num_kv_heads, spec.head_dim).allocate(
            self.num_blocks, self.size, spec.kv_dtype, spec.device
        )

        def part(rows: Tensor, chosen: Tensor) -> Tensor:
            rows = rows[chosen]
            return rows.to(spec.device, spec.dtype if rows.is_floating_point() else rows.dtype)

        if not self.is_new.all():
            attention.write(cache, *(part(rows, ~self.is_new) for rows in (self.key, self.value, self.slots)))
        key, value, slots = (part(rows, self.is_new) for rows in (self.key, self.value, self.slots))
        query = self.query.to(spec.device, spec.dtype)
        plan = attention.plan(self._metadata(slots))
        return attention.run(query, key, value, cache, plan, scale=spec.head_dim**-0.5, window=phase.window)

    def _metadata(self, slot_mapping: Tensor) -> AttentionMetadata:
        phase, device = self.phase, slot_mapping.device
        table = self.table.to(device)
        if phase.known:
            return AttentionMetadata.packed(phase.widths, phase.lengths, table, slot_mapping)
        lengths = torch.tensor(phase.lengths, dtype=torch.int32, device=device)
        metadata = AttentionMetadata.uniform(phase.widths[0], lengths, table, slot_mapping, max_seq_len=table.shape[1] * self.size)
        return replace(metadata, visibility=phase.visibility)
