"""What a decoding step of each AITER backend costs the host: no length read back, one plan, no
memory filled or made anew.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.attention.aiter.groups import blocks_for
from specdec.attention.aiter.latent.mla import RocmAiterMlaBackend
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.backend import AttentionMetadata
from specdec.attention.mla import IndexerRows, MlaRows
from tests.helpers import attention_case
from tests.helpers import fa_case as fa
from tests.helpers import latent_case as mla
from tests.helpers import sparse_case as sparse
from tests.helpers.aiter_emulation import Machine
from tests.helpers.guards import HostSyncError, no_host_sync
from tests.helpers.rocm import Install
from tests.specdec.attention.aiter.latent.test_mla_prefill import DeviceTensor

NUM_LAYERS = 3
WIDTHS = {"decode": (1, True), "verify": (5, True), "draft": (5, False)}
"""Rows per request, and causality."""

Alter = Callable[[AttentionMetadata], AttentionMetadata]
Context = AbstractContextManager[Any]


@dataclass
class Subject:
    """A backend, and a step of it: plan once, run every layer."""

    backend: Any
    make: Callable[[list[int], int, bool], tuple[AttentionMetadata, Callable[[Any], Tensor]]]
    """From lengths, rows per request and causality: metadata, and one layer given a plan."""

    def step(
        self,
        lengths: list[int],
        kind: str,
        *,
        alter: Alter = lambda m: m,
        context: Context | None = None,
    ) -> Tensor:
        """Plans and runs all layers within `context`."""
        metadata, layer = self.make(lengths, *WIDTHS[kind])
        metadata = alter(metadata)
        with context or nullcontext():
            plan = self.backend.plan(metadata)
            for _ in range(NUM_LAYERS - 1):
                layer(plan)
            return layer(plan)


def ordinary(layout: str) -> Subject:
    """Ordinary heads."""
    backend = fa.BACKENDS[layout](attention_case.spec())

    def make(lengths: list[int], width: int, causal: bool) -> Any:
        case = attention_case.Case(
            backend.spec, lengths, [width] * len(lengths), uniform=True, causal=causal
        )
        cache = case.cache()
        backend.write(cache, case.old["key"], case.old["value"], case.old_slots)
        return case.metadata, lambda plan: backend.run(
            case.query, **case.new, cache=cache, plan=plan, scale=0.1
        )

    return Subject(backend, make)


def latent() -> Subject:
    """Dense latent attention."""
    backend = RocmAiterMlaBackend(mla.tiny())

    def make(lengths: list[int], width: int, causal: bool) -> Any:
        case = mla.Case(backend.spec, lengths, [width] * len(lengths), uniform=True, causal=causal)
        cache = case.cache()
        return case.metadata, lambda plan: backend.run(case.rows, case.up, cache, plan, scale=0.1)

    return Subject(backend, make)


def indexed() -> Subject:
    """Sparse latent attention, each layer with a selection of its own."""
    backend = RocmAiterMlaSparseBackend(sparse.spec())

    def make(lengths: list[int], width: int, causal: bool) -> Any:
        assert causal
        case, done = sparse.Case(backend.spec, lengths), [n - width for n in lengths]
        layers = case.layers(backend)
        case.forward(backend, layers, [0] * len(done), done, known=True)
        (layer,) = layers
        rows = MlaRows(
            *(torch.cat([t[-width:] for t in ts]) for ts in zip(*layer.rows, strict=True))
        )
        index = IndexerRows(
            *(torch.cat([t[-width:] for t in ts]) for ts in zip(*layer.index, strict=True))
        )

        def run(plan: Any) -> Tensor:
            selected = backend.select(index, layer.cache, plan)
            return backend.run(rows, layer.up, layer.cache, plan, scale=0.2, selected=selected)

        return case.metadata(done, [width] * len(done), known=False), run

    return Subject(backend, make)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "rocm_aiter_fa": lambda: ordinary("plain"),
    "rocm_aiter_fa_shuffle": lambda: ordinary("shuffle"),
    "rocm_aiter_mla": latent,
    "rocm_aiter_mla_sparse": indexed,
}
STEPS = [
    (name, kind)
    for name in SUBJECTS
    for kind in WIDTHS
    if (name, kind) != ("rocm_aiter_mla_sparse", "draft")
]
"""Sparse latent attention has no bidirectional blocks: beside it drafters run on ordinary heads."""


@pytest.fixture
def rocm(rocm: Install) -> Callable[[str], Machine]:
    """Pretends a machine on which the backend of a name runs, in float32 and small sizes where it
    has to.
    """
    return lambda name: rocm(tiny="mla" in name)


def unreadable(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same with tensors whose values the host cannot have."""
    tensors = {
        f.name: getattr(metadata, f.name)
        for f in fields(metadata)
        if isinstance(getattr(metadata, f.name), Tensor)
    }
    assert "seq_lens" in tensors and metadata.seq_lens_host is None
    return replace(
        metadata, **{name: tensor.as_subclass(DeviceTensor) for name, tensor in tensors.items()}
    )


@pytest.mark.parametrize(("name", "kind"), STEPS)
def test_a3_a_decoding_and_a_drafting_step_read_no_lengths(
    rocm: Callable[[str], Machine], name: str, kind: str
) -> None:
    """With lengths whose host reads raise, and under a guard that refuses those of every tensor:
    the same bits come out.
    """
    rocm(name)
    subject, lengths = SUBJECTS[name](), [40, 9, 33]
    want = subject.step(lengths, kind)
    assert torch.equal(subject.step(lengths, kind, alter=unreadable).as_subclass(Tensor), want)
    assert torch.equal(subject.step(lengths, kind, context=no_host_sync()), want)
    with pytest.raises(HostSyncError):
        unreadable(subject.make(lengths, *WIDTHS[kind])[0]).seq_lens.max().item()


CALLS: dict[tuple[str, str], tuple[dict[str, int], dict[str, int]]] = {
    ("rocm_aiter_fa", "decode"): ({}, {"reshape_and_cache_flash": 1, "paged_attention_v1": 1}),
    ("rocm_aiter_fa", "verify"): ({}, {"reshape_and_cache_flash": 1, "unified_attention": 1}),
    ("rocm_aiter_fa", "draft"): ({}, {"reshape_and_cache_flash": 1, "flash_attn_with_kvcache": 1}),
    ("rocm_aiter_fa_shuffle", "decode"): ({}, {"reshape_and_cache": 1, "paged_attention_rocm": 1}),
    ("rocm_aiter_fa_shuffle", "verify"): ({}, {"reshape_and_cache": 1, "unified_attention": 1}),
    ("rocm_aiter_fa_shuffle", "draft"): (
        {},
        {"reshape_and_cache": 1, "flash_attn_with_kvcache": 1},
    ),
    **{
        ("rocm_aiter_mla", kind): (
            {"get_mla_metadata_v1": 1},
            {"concat_and_cache_mla": 1, "mla_decode_fwd": 1},
        )
        for kind in WIDTHS
    },
    **{
        ("rocm_aiter_mla_sparse", kind): (
            {"get_mla_metadata_v1": 1},
            {
                "indexer_k_quant_and_cache": 1,
                "deepgemm_fp8_paged_mqa_logits": 1,
                "top_k_per_row_decode": 1,
                "concat_and_cache_mla": 1,
                "mla_decode_fwd": 1,
            },
        )
        for kind in ("decode", "verify")
    },
}
"""AITER's functions that a step calls once, and those that each of its layers calls."""

FACTORIES = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
FILLED = (
    "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full",
)  # fmt: skip


@dataclass
class Memory(TorchDispatchMode):
    """Watches what a step itself, not AITER, makes and fills."""

    made: list[Tensor] = field(default_factory=list)
    filled: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("fill_", "zero_"):
            self.filled.append(args[0])
        if name in FILLED:
            self.filled.append(result)
        if name in FACTORIES:
            self.made.append(result)
        return result


def kept(owner: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that an object holds, however deep."""
    seen = set() if seen is None else seen
    if id(owner) in seen:
        return
    seen.add(id(owner))
    if isinstance(owner, Tensor):
        yield owner
        return
    if isinstance(owner, dict):
        parts = list(owner.values())
    elif isinstance(owner, list | tuple):
        parts = list(owner)
    elif is_dataclass(owner):
        parts = [getattr(owner, f.name) for f in fields(owner)]
    elif type(owner).__module__.startswith("specdec.attention"):
        parts = list(vars(owner).values())
    else:
        return
    for part in parts:
        yield from kept(part, seen)


def storages(backend: Any) -> dict[int, int]:
    """Address and bytes of all memory that a backend keeps."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept(backend)}


@pytest.mark.parametrize("kind", ["decode", "verify"])
def test_d2_a_steady_step_plans_nothing(rocm: Callable[[str], Machine], kind: str) -> None:
    """With an indexer, once the host knows that every row has `topk` keys, only the first step of a
    size calls AITER's planner; the bits are those of a step that plans."""
    machine = rocm("rocm_aiter_mla_sparse")
    machine.num_compute_units = 8
    subject, planned = SUBJECTS["rocm_aiter_mla_sparse"](), 0
    for lengths in (
        [40, 10, 33, 21],
        [41, 11, 34, 22],
        [41, 11, 34],
        [42, 12, 35],
        [43, 13, 36, 24],
    ):
        want = subject.step(lengths, kind)
        machine.calls.clear()
        alter = partial(replace, min_seq_len=min(lengths))
        got = subject.step(lengths, kind, alter=alter, context=no_host_sync())
        planned += sum(call.name == "get_mla_metadata_v1" for call in machine.calls)
        assert torch.equal(got, want)
        unread = subject.step(lengths, kind, alter=lambda m: unreadable(alter(m)))  # noqa: B023
        assert torch.equal(unread.as_subclass(Tensor), want)
    assert planned == 2


@pytest.mark.parametrize(("name", "kind"), STEPS)
def test_a_step_plans_once_and_neither_fills_nor_keeps_memory(
    rocm: Callable[[str], Machine], name: str, kind: str
) -> None:
    """Calls of AITER counted; after a warm-up, no memory kept beside that of before, none of it
    filled whole, also when requests leave; and what is made for the time of a step is the layers'
    outputs and, with an indexer, the scores.

    Only the scores are filled, once for all layers: AITER leaves their columns behind a row's last
    key as they are.
    """
    machine = rocm(name)
    subject = SUBJECTS[name]()
    for lengths in ([40, 9, 33, 21], [40, 9, 33]):
        subject.step(lengths, kind)
    before = storages(subject.backend)
    assert before
    per_step, per_layer = CALLS[name, kind]
    for lengths in ([41, 10, 34, 22], [41, 10, 34], [42, 11, 35]):
        metadata, layer = subject.make(lengths, *WIDTHS[kind])
        machine.calls.clear()
        with Memory() as memory:
            plan = subject.backend.plan(metadata)
            outputs = [layer(plan) for _ in range(NUM_LAYERS)]
        want = Counter(per_step) + Counter(
            {call: count * NUM_LAYERS for call, count in per_layer.items()}
        )
        assert Counter(call.name for call in machine.calls) == want
        assert storages(subject.backend) == before
        whole = [
            t
            for t in memory.filled
            if t.numel() * t.itemsize == before.get(t.untyped_storage().data_ptr())
        ]
        fresh = [t.shape for t in memory.filled if t.untyped_storage().data_ptr() not in before]
        width = blocks_for(metadata.max_seq_len, 256) * 256
        assert whole == []
        assert fresh == ([(metadata.num_tokens, width)] if name == "rocm_aiter_mla_sparse" else [])
        # a layer's output, and with an indexer its selection
        most = {"rocm_aiter_mla_sparse": 2}.get(name, 1) * NUM_LAYERS
        assert len(memory.made) <= most, [tuple(t.shape) for t in memory.made]
        assert len(outputs) == NUM_LAYERS
