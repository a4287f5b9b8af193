"""The self-check of attention with ordinary heads: every phase, by a backend and by plain torch.

It has the model's own heads. Contexts go past 512 tokens, where AITER divides the keys of a row
among programs, and one batch has more rows times heads than twice the compute units, where its
assembly kernels begin.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.attention.backend import AttentionBackend, AttentionMetadata, AttentionSpec, Visibility
from specdec.attention.torch_ref.fa import TorchRefBackend
from specdec.device.deviation import Deviation, deviation, worst
from specdec.device.self_check import reasons_against, times_of
from specdec.kernels.triton_launch import num_processors
from specdec.kv_cache import KVLayerSpec, LayerCache, blocks_for


class Phase(NamedTuple):
    """Requests of one forward."""

    lengths: list[int]  # tokens in the cache, the rows' own among them
    widths: list[int]  # rows
    known: bool = False  # to the host
    visibility: Visibility = "causal"
    window: int | None = None


PHASES = (
    Phase([40, 17], [40, 17], known=True),  # prompts
    # chunks behind a context, a single row and a prompt beside them
    Phase([90, 21, 40], [30, 1, 40], known=True),
    # the same, as many rows as have kernels of their own
    Phase([150, 200, 40], [150, 130, 40], known=True),
    Phase([700, 21, 64], [1, 1, 1]),  # decoding
    Phase([700, 21, 64], [1, 1, 1], window=30),
    Phase([700, 21, 64], [5, 5, 5]),  # verification
    Phase([700, 21, 64], [5, 5, 5], visibility="full"),  # draft blocks, which not all backends have
)

STEP = Phase([1000] * 4, [8] * 4)
"""A step that is timed."""
PROMPT = Phase([1024], [1024], known=True)
"""A prompt that is timed."""
STEPS_PER_PROMPT = 64
"""Steps that weigh as much as a prompt: those of an answer of some 200 tokens."""


def reasons_against_kernels(backend: type[AttentionBackend], spec: AttentionSpec) -> list[str]:
    """Why `auto` should pass over a backend that could serve `spec`, as far as its self-check
    knows; see `reasons_against`.
    """
    if backend.unsupported_reasons(spec):
        return []
    checked = checked_spec(spec)
    check = partial(check_attention, backend, checked)
    return reasons_against(backend.name, spec.device, check, *variant_of(checked))


def times_of_backends(
    backends: Sequence[type[AttentionBackend]], spec: AttentionSpec, *, again: bool = False
) -> dict[str, float]:
    """Microseconds of a step and a share of a prompt, by name; see `self_check.times_of`.

    They count twice for a backend that leaves the layers around it to plain torch.
    """
    spec = checked_spec(spec)

    def ways() -> dict[str, Callable[[], object]]:
        return {backend.name: _work(backend(spec)) for backend in backends}

    names = [backend.name for backend in backends]
    return times_of("attention", spec.device, ways, *names, *variant_of(spec), again=again)


def _work(attention: AttentionBackend) -> Callable[[], None]:
    step, prompt = (Requests(attention.spec, phase).launch(attention) for phase in (STEP, PROMPT))
    turns = 1 if attention.fits_fused_layers else 2

    def work() -> None:
        for _ in range(turns):
            prompt()
            for _ in range(STEPS_PER_PROMPT):
                step()

    return work


def checked_spec(spec: AttentionSpec) -> AttentionSpec:
    """What the check asks of a backend that is to serve `spec`: its types, heads and blocks."""
    plain = replace(spec, windows=frozenset({None}), further=(), chunk=None)
    return replace(plain, non_causal=False, reads_others=False)


def variant_of(spec: AttentionSpec) -> tuple[torch.dtype | str, ...]:
    """What tells one verdict of a backend from another: types of model and cache, and the shape."""
    shape = f"{spec.num_heads}x{spec.num_kv_heads}x{spec.head_dim}"
    extras = {"sinks": spec.sinks, "softcap": spec.softcap is not None}
    kinds = [name for name, has in extras.items() if has]
    return (*dict.fromkeys((spec.dtype, spec.kv_dtype)), shape, f"blocks{spec.block_size}", *kinds)


def phases(spec: AttentionSpec) -> tuple[Phase, ...]:
    """All that are checked, with a batch that gives every compute unit two heads and more."""
    many = 2 * num_processors(spec.device) // spec.num_heads + 1
    return (Phase([20] * many, [1] * many), *PHASES)


def check_attention(backend: type[AttentionBackend], spec: AttentionSpec) -> Deviation:
    """The worst of all phases that `backend` has."""
    blocks = not backend.unsupported_reasons(replace(spec, non_causal=True))
    attention = backend(replace(spec, non_causal=blocks))
    found = [phase for phase in phases(spec) if phase.visibility == "causal" or blocks]
    return worst(_deviation(attention, phase) for phase in found)


def _deviation(attention: AttentionBackend, phase: Phase) -> Deviation:
    """How far one forward is off; how far plain torch is depends on the device, too, which adds up
    in an order of its own.
    """
    spec = replace(attention.spec, cache_dtype=None)
    requests = Requests(attention.spec, phase)
    plain = TorchRefBackend(spec)
    exact = TorchRefBackend(replace(spec, device=torch.device("cpu"), dtype=torch.float64))
    return deviation(*map(requests.run, (attention, plain, exact)))


class Requests:
    """Requests whose blocks lie scattered in a cache, with random numbers that the cache holds
    exactly, on the CPU.
    """

    def __init__(self, spec: AttentionSpec, phase: Phase) -> None:
        random = torch.Generator().manual_seed(0)
        self.phase, self.size = phase, spec.block_size
        counts = [blocks_for(length, self.size) for length in phase.lengths]
        self.num_blocks = sum(counts) + 1
        tables = (torch.randperm(sum(counts), generator=random) + 1).split(counts)
        self.table = torch.stack(
            [torch.cat([table, table[:1].expand(max(counts) + 2 - len(table))]) for table in tables]
        ).int()
        each = zip(tables, phase.lengths, strict=True)
        owned = [table.repeat_interleave(self.size)[:n] for table, n in each]
        places = torch.cat(owned)
        offsets = torch.cat([torch.arange(n) % self.size for n in phase.lengths])
        self.slots = places * self.size + offsets
        ends = accumulate(phase.lengths)
        self.is_new = torch.zeros(len(self.slots), dtype=torch.bool)
        for end, width in zip(ends, phase.widths, strict=True):
            self.is_new[end - width : end] = True

        def normal(heads: int, rows: int) -> Tensor:
            return torch.randn(rows, heads, spec.head_dim, generator=random)

        self.key, self.value = (
            normal(spec.num_kv_heads, len(self.slots)).to(spec.kv_dtype).to(spec.dtype)
            for _ in "kv"
        )
        self.query = normal(spec.num_heads, sum(phase.widths)).to(spec.dtype)
        sinks = torch.randn(spec.num_heads, generator=random).to(spec.dtype)
        self.sinks = sinks if spec.sinks else None

    def run(self, attention: AttentionBackend) -> Tensor:
        """Attention of the new rows, where and in the type that `attention` has."""
        return self.launch(attention)()

    def launch(self, attention: AttentionBackend) -> Callable[[], Tensor]:
        """The same, of which each call is one forward."""
        spec, phase = attention.spec, self.phase
        layer = KVLayerSpec(spec.num_kv_heads, spec.head_dim)
        cache: LayerCache = layer.allocate(self.num_blocks, self.size, spec.kv_dtype, spec.device)

        def part(rows: Tensor, chosen: Tensor) -> Tensor:
            rows = rows[chosen]
            return rows.to(spec.device, spec.dtype if rows.is_floating_point() else rows.dtype)

        if not self.is_new.all():
            known = (part(rows, ~self.is_new) for rows in (self.key, self.value, self.slots))
            attention.write(cache, *known)
        key, value, slots = (part(rows, self.is_new) for rows in (self.key, self.value, self.slots))
        query = self.query.to(spec.device, spec.dtype)
        sinks = None if self.sinks is None else self.sinks.to(spec.device, spec.dtype)
        plan = attention.plan(self.metadata(slots))
        options: dict[str, Any] = {"window": phase.window, "softcap": spec.softcap, "sinks": sinks}
        options["scale"] = spec.head_dim**-0.5
        return lambda: attention.run(query, key, value, cache, plan, **options)

    def before(self, device: torch.device) -> AttentionMetadata:
        """The forward of all that the new rows find in the cache, a prompt of each request."""
        pairs = zip(self.phase.lengths, self.phase.widths, strict=True)
        lengths = {i: length - width for i, (length, width) in enumerate(pairs) if length > width}
        table, slots = self.table[[*lengths]].to(device), self.slots[~self.is_new].to(device)
        return AttentionMetadata.packed([*lengths.values()], [*lengths.values()], table, slots)

    def metadata(self, slot_mapping: Tensor) -> AttentionMetadata:
        """Metadata of the forward that is checked."""
        phase, device = self.phase, slot_mapping.device
        table = self.table.to(device)
        if phase.known:
            return AttentionMetadata.packed(phase.widths, phase.lengths, table, slot_mapping)
        lengths = torch.tensor(phase.lengths, dtype=torch.int32, device=device)
        metadata = AttentionMetadata.uniform(
            phase.widths[0], lengths, table, slot_mapping, max_seq_len=table.shape[1] * self.size
        )
        return replace(metadata, visibility=phase.visibility)
