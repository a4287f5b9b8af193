"""Sparse latent attention on the emulation of AITER: selections, cached plans; nothing waits."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.aiter.latent import mla_indexer, mla_sparse_plan
from specdec.attention.aiter.latent.mla_sparse import RocmAiterMlaSparseBackend
from specdec.attention.mla import IndexerRows, IndexerSpec, MlaRows
from tests.helpers.aiter_emulation import Machine, MisuseError, indexer
from tests.helpers.bounds import Float64, assert_as_exact
from tests.helpers.guards import HostSyncError, no_host_sync
from tests.helpers.pairs import pairs
from tests.helpers.rocm import FP8, Install
from tests.helpers.sparse_case import REAL, Case, rounded, sets, spec


@pytest.fixture
def rocm(rocm: Install) -> Install:
    """In float32, on small latents."""
    return partial(rocm, tiny=True)


STEPS: list[tuple[Sequence[int], bool]] = [
    ((17, 1, 30), True),  # prompts
    ((3, 20, 1), True),  # one continues, one goes on, one decodes among them
    ((1, 1, 1), False),
    ((5, 5, 5), False),
    ((1, 1, 1), False),
]
LENGTHS = [sum(widths[i] for widths, _ in STEPS) for i in range(3)]


@pytest.mark.parametrize("num_heads", [4, 16, 24, 48])
def test_every_phase_equals_torch_ref(rocm: Install, num_heads: int) -> None:
    """Prompts, chunks, decoding and verification, one plan for two layers: wrong rows, positions,
    slots, padding of heads.
    """
    rocm()
    case = Case(spec(num_heads=num_heads), LENGTHS, num_layers=2)
    case.check(RocmAiterMlaSparseBackend(case.spec), STEPS)


@pytest.mark.parametrize(
    ("version", "architecture", "num_heads", "fp8"),
    [
        *pairs(["0.1.15", "0.1.16", "0.1.20"], [*FP8], [16, 40], [False, True]),
        *(("0.1.20", architecture, 128, False) for architecture in FP8),
    ],
)
def test_real_sizes(
    rocm: Install, version: str, architecture: str, num_heads: int, fp8: bool
) -> None:
    """The kernels' own sizes, where the emulation refuses whatever has no code object, in both
    types of cache.
    """
    rocm(version=version, architecture=architecture, tiny=False)
    cache = {"cache_dtype": FP8[architecture]} if fp8 else {}
    asked = spec(**{**REAL, "num_heads": num_heads, **cache})
    assert RocmAiterMlaSparseBackend.unsupported_reasons(asked) == []
    steps: list[tuple[Sequence[int], bool]] = [((8, 2), True), ((2, 2), False)]
    Case(asked, [10, 4]).check(RocmAiterMlaSparseBackend(asked), steps)


def test_large_batches_keep_to_the_plan(rocm: Install) -> None:
    """Left to itself, AITER drops the plan of 32 tokens and more on gfx950, for a kernel whose
    lists are made on the fly.
    """
    machine = rocm(architecture="gfx950", tiny=False)
    case = Case(spec(**REAL), [34])
    case.history(RocmAiterMlaSparseBackend(case.spec), [((34,), True)])
    assert [
        call.details["persistent"] for call in machine.calls if call.name == "mla_decode_fwd"
    ] == [True]


@pytest.mark.parametrize("architecture", FP8)
def test_selection_is_the_best_of_the_rounded_scores(rocm: Install, architecture: str) -> None:
    """Arbitrary queries and keys: what is chosen is exactly what 8-bit scores say, and mostly what
    unrounded ones do.
    """
    rocm(architecture=architecture)
    case = Case(spec(), LENGTHS, exact=False)
    results = case.history(RocmAiterMlaSparseBackend(case.spec), STEPS)
    (_, index, _), topk = case._made[0], 6
    done, same, total = [0, 0, 0], 0, 0
    for (widths, _), (selections, _) in zip(STEPS, results, strict=True):
        found = iter(sets(selections[0]))
        for i, width in enumerate(widths):
            for position in range(done[i], done[i] + width):
                row, chosen = index[i], next(found)
                for round_off in (lambda x: rounded(x, FP8[architecture]), lambda x: x):
                    query, keys = round_off(row.query[position]), round_off(row.key[: position + 1])
                    scores = row.weights[position] @ (query @ keys.t()).relu()
                    best = set(scores.topk(min(topk, position + 1)).indices.tolist())
                    if round_off(torch.tensor([0.3]))[0] != torch.tensor(0.3):
                        assert chosen == best
                    else:
                        same, total = same + len(chosen & best), total + len(best)
        done = [d + w for d, w in zip(done, widths, strict=True)]
    assert 0.9 < same / total < 1


def test_a_row_selects_the_same_however_it_is_run(rocm: Install) -> None:
    """Prefilled whole or in chunks, verified in a block or decoded alone, beside others or not: the
    reason why drafts change nothing."""
    rocm()
    case = Case(spec(), [40, 33], exact=False)
    for index in case._made[0][
        1
    ]:  # of very different size, so that a scale shared by rows would lose the small ones
        index.query.mul_(10.0 ** (torch.arange(len(index.query)) % 4 * 3)[:, None, None])
    backend = RocmAiterMlaSparseBackend(case.spec)
    ways: list[list[tuple[Sequence[int], bool]]] = [
        [((40, 33), True)],
        [((30, 23), True), ((10, 10), True)],
        [((30, 23), True), ((5, 5), False), ((5, 5), False)],
        [((30, 23), True), *[((1, 1), False)] * 10],
    ]
    found = []
    for steps in ways:
        per_request: list[list[set[int]]] = [[], []]
        for (widths, _), (selections, _) in zip(steps, case.history(backend, steps), strict=True):
            rows = sets(selections[0])
            per_request[0] += rows[: widths[0]]
            per_request[1] += rows[widths[0] :]
        found.append(per_request)
    assert found[1:] == found[:1] * 3
    assert [len(rows) for rows in found[0]] == [40, 33]


def test_short_sequences_attend_to_everything(rocm: Install) -> None:
    """Up to `topk` tokens nothing is scored, and attention is dense; the keys are stored all the
    same.
    """
    machine = rocm()
    assert spec().indexer is not None
    case = Case(spec(indexer=IndexerSpec(16, 32, topk=64)), LENGTHS, exact=False)
    backend = RocmAiterMlaSparseBackend(case.spec)
    references = [case.reference(dtype) for dtype in (torch.float32, torch.float64)]
    layers, done = case.layers(backend), [0, 0, 0]
    want_layers = [case.layers(reference)[0] for reference in references]
    for widths, known in STEPS:
        selections, outputs = case.forward(backend, layers, done, widths, known=known)
        parts = [slice(d, d + w) for d, w in zip(done, widths, strict=True)]
        wanted = []
        for reference, layer in zip(references, want_layers, strict=True):
            rows = MlaRows(
                *(
                    torch.cat([t[p] for t, p in zip(ts, parts, strict=True)])
                    for ts in zip(*layer.rows, strict=True)
                )
            )
            plan = reference.plan(case.metadata(done, widths, known=known))
            with Float64() if reference.spec.dtype == torch.float64 else nullcontext():
                wanted.append(reference.run(rows, layer.up, layer.cache, plan, scale=0.2))
        assert_as_exact(outputs[0], *wanted)
        assert sets(selections[0]) == [
            set(range(p + 1)) for part in parts for p in range(part.start, part.stop)
        ]
        done = [d + w for d, w in zip(done, widths, strict=True)]
    assert not machine.names() & {"fp8_mqa_logits", "deepgemm_fp8_paged_mqa_logits"}
    assert sum(call.name == "indexer_k_quant_and_cache" for call in machine.calls) == len(STEPS)


def test_growing_past_topk(rocm: Install) -> None:
    """The first token that does not see everything, in a prefill and in decoding."""
    rocm()
    case = Case(spec(), [9, 10])
    steps: list[tuple[Sequence[int], bool]] = [
        ((3, 4), True),
        *[((1, 1), True)] * 2,
        ((2, 2), False),
        ((2, 2), True),
    ]
    case.check(RocmAiterMlaSparseBackend(case.spec), steps)


def test_index_keys_cut_from_a_joined_product(rocm: Install) -> None:
    """AITER's writer walks dense rows, whatever lies between those that it is given."""
    rocm()
    case = Case(spec(), [30, 9])
    backend = RocmAiterMlaSparseBackend(case.spec)
    written = []
    for joined in (False, True):
        layer = case.layers(backend)[0]
        query, key, weights = (torch.cat(list(ts)) for ts in zip(*layer.index, strict=True))
        if joined:
            key = torch.cat([key, key], dim=1)[:, : key.shape[1]]
        assert key.is_contiguous() != joined
        plan = backend.plan(case.metadata([0, 0], [30, 9], known=True))
        backend.select(IndexerRows(query, key, weights), layer.cache, plan)
        written.append(layer.cache.index_key.clone())
    assert torch.equal(*written) and written[0].any()


def test_scores_past_a_row_are_minus_infinity(rocm: Install) -> None:
    """Also in columns that no kernel writes, for top-k kernels that read in strides."""
    rocm()
    case = Case(spec(), [30, 9])
    backend = RocmAiterMlaSparseBackend(case.spec)
    layer = case.layers(backend)[0]
    index = IndexerRows(*(torch.cat([t[-2:] for t in ts]) for ts in zip(*layer.index, strict=True)))
    plan = backend.plan(case.metadata([28, 7], [2, 2], known=False))
    backend.select(index, layer.cache, plan)
    assert plan.scores is not None and plan.scores.shape[1] % mla_indexer.SCORE_COLUMNS == 0
    assert [int(n) for n in plan.scores.isfinite().sum(1)] == [29, 30, 8, 9]
    assert (plan.scores[3, 9:] == -torch.inf).all()


@pytest.mark.parametrize("version", ["0.1.16", "0.1.20"])
@pytest.mark.parametrize("rows", [1, 6, 7, 9])
def test_scores_in_parts_that_32_bits_address(
    rocm: Install, monkeypatch: pytest.MonkeyPatch, rows: int, version: str
) -> None:
    """Requests are scored in as many calls as it takes, on the same scores, and select what they
    select in one.
    """
    machine = rocm(version=version)
    case = Case(spec(), [30, 20, 41, 9])
    steps: list[tuple[Sequence[int], bool]] = [((26, 16, 37, 5), True), ((3,) * 4, False)]
    want = case.history(case.reference(), steps)
    monkeypatch.setattr(indexer, "SCORE_BYTES", max(3, rows) * 4 * mla_indexer.SCORE_COLUMNS)
    if version < "0.1.18" and rows < 12:
        with pytest.raises(MisuseError, match="overflow the kernel's 32-bit addresses"):
            case.history(RocmAiterMlaSparseBackend(case.spec), steps)
    monkeypatch.setattr(mla_indexer, "MAX_SCORE_BYTES", rows * 4 * mla_indexer.SCORE_COLUMNS)
    machine.calls.clear()
    got = case.history(RocmAiterMlaSparseBackend(case.spec), steps)
    assert [[sets(s) for s in r[0]] for r in got] == [[sets(s) for s in r[0]] for r in want]
    for name in ("deepgemm_fp8_paged_mqa_logits", "top_k_per_row_decode"):
        assert sum(call.name == name for call in machine.calls) == {1: 4, 6: 2, 7: 2, 9: 2}[rows]


@pytest.mark.parametrize("most", [1, 40, 300, 1500])
def test_prefill_in_chunks(rocm: Install, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """A small workspace cuts between requests and between the rows of one; the selection stays."""
    rocm()
    case = Case(spec(), [37, 3, 20, 18])
    steps: list[tuple[Sequence[int], bool]] = [((17, 1, 9, 2), True), ((20, 2, 11, 16), True)]
    want = case.history(case.reference(), steps)
    monkeypatch.setattr(mla_sparse_plan, "MAX_SCORES", most)
    backend = RocmAiterMlaSparseBackend(case.spec)
    assert [[sets(s) for s in r[0]] for r in case.history(backend, steps)] == [
        [sets(s) for s in r[0]] for r in want
    ]
    chunks = backend.plan(case.metadata([17, 1, 9, 2], [20, 2, 11, 16], known=True)).chunks
    assert chunks is not None and all(
        (c.rows.stop - c.rows.start) * c.num_keys <= max(most, c.num_keys) for c in chunks
    )
    assert [r for c in chunks for r in range(c.rows.start, c.rows.stop)] == list(range(49))
    assert (
        max(c.requests.stop - c.requests.start for c in chunks)
        == {1: 1, 40: 1, 300: 2, 1500: 2}[most]
    )


@pytest.mark.parametrize("relative", [False, True])
def test_index_base_of_the_prefill_does_not_matter(rocm: Install, relative: bool) -> None:
    """Whether AITER counts the chosen keys from the row's start or from the first column."""
    rocm()
    case = Case(spec(), [20, 30, 4])
    backend = RocmAiterMlaSparseBackend(case.spec)
    ops = backend._indexer._ops

    def top_k(rowStarts: Tensor, indices: Tensor, **kwargs: Any) -> None:
        ops.top_k_per_row_prefill(rowStarts=rowStarts, indices=indices, **kwargs)
        if relative:
            indices -= torch.where(indices >= 0, rowStarts[:, None], 0)

    backend._indexer._ops = replace(ops, top_k_per_row_prefill=top_k)
    steps: list[tuple[Sequence[int], bool]] = [((20, 30, 4), True)]
    got, want = (case.history(b, steps) for b in (backend, case.reference()))
    assert sets(got[0][0][0]) == sets(want[0][0][0])


@pytest.mark.parametrize(("version", "decided"), [("0.1.16", False), ("0.1.20", True)])
def test_ties_are_decided_where_aiter_can(rocm: Install, version: str, decided: bool) -> None:
    """Older functions do not know the argument; later ones choose the lower position, so that a tie
    falls the same each time.
    """
    rocm(version=version)
    case = Case(spec(), [35, 18])
    for index in case._made[0][1]:
        index.key.fill_(1)
    results = case.history(
        RocmAiterMlaSparseBackend(case.spec), [((30, 13), True), ((5, 5), False)]
    )
    found = [
        [row == set(range(len(row))) for row in sets(selections[0])] for selections, _ in results
    ]
    alike = [*range(6), *range(30, 36)]  # rows that see no more than they select
    assert all(found[0][row] for row in alike)
    assert [all(rows) for rows in found] == [decided] * 2


def test_shared_selection(rocm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """GLM's layers that use an earlier layer's selection: the same result as ours alone, and its
    index list is made once.
    """
    rocm()
    case = Case(spec(), LENGTHS, num_layers=3)
    made: list[Tensor] = []
    inner = mla_sparse_plan.SparseBuffers.list_slots

    def counted(self: Any, selected: Tensor, *args: Any) -> None:
        made.append(selected)
        inner(self, selected, *args)

    monkeypatch.setattr(mla_sparse_plan.SparseBuffers, "list_slots", counted)
    case.check(RocmAiterMlaSparseBackend(case.spec), STEPS, shared=True)
    assert len(made) == len(STEPS)


def plans_made(machine: Machine) -> int:
    """Calls of AITER's planner so far."""
    return sum(call.name == "get_mla_metadata_v1" for call in machine.calls)


@pytest.mark.parametrize("seed", range(3))
def test_d2_cached_and_fresh_plans_agree_on_random_batches(rocm: Install, seed: int) -> None:
    """Sequences of batches, many of them permutations of each other's lengths, on one backend and
    on a new one each time.

    The emulation refuses a plan that was made for other lengths, and the answers must be equal.
    """
    machine = rocm()
    case = Case(spec(), [30] * 4, seed=seed)
    kept = RocmAiterMlaSparseBackend(case.spec)
    layers, reference, wide = case.layers(kept), case.reference(), case.reference(torch.float64)
    case.forward(kept, layers, [0] * 4, [30] * 4, known=True)
    want_layers, wide_layers = case.layers(reference), case.layers(wide)
    case.forward(reference, want_layers, [0] * 4, [30] * 4, known=True)
    with Float64():
        case.forward(wide, wide_layers, [0] * 4, [30] * 4, known=True)
    chance = random.Random(seed)
    shapes = [
        ([2, 5, 9, 20], [1, 3, 1, 4]),
        ([20, 20, 21, 3], [2, 2, 3, 1]),
        ([6, 5, 4, 3], [1, 2, 3, 4]),
    ]
    cached, order = 0, [0, 1, 2, 3]
    for _ in range(30):
        done, widths = (list(part) for part in chance.choice(shapes))
        order = chance.sample(range(4), 4) if chance.random() < 0.3 else order
        done, widths = [done[i] for i in order], [widths[i] for i in order]
        if chance.random() < 0.3:
            done = [d + 1 if d > 6 else d for d in done]  # the same work on other positions
        before = plans_made(machine)
        uniform = chance.random() < 0.1
        if uniform:
            widths = [2] * 4
        _, got = case.forward(kept, layers, done, widths, known=not uniform)
        cached += plans_made(machine) == before
        _, fresh = case.forward(
            RocmAiterMlaSparseBackend(case.spec), layers, done, widths, known=not uniform
        )
        _, plain = case.forward(reference, want_layers, done, widths, known=not uniform)
        with Float64():
            _, exact = case.forward(wide, wide_layers, done, widths, known=not uniform)
        assert torch.equal(got[0], fresh[0])
        assert_as_exact(got[0], plain[0], exact[0])
    assert cached > 3


def test_an_old_plan_cannot_run(rocm: Install) -> None:
    """Its buffers are those of a newer one."""
    rocm()
    case = Case(spec(), [20, 20])
    backend = RocmAiterMlaSparseBackend(case.spec)
    layers = case.layers(backend)
    old = backend.plan(case.metadata([10, 10], [1, 1], known=False))
    backend.plan(case.metadata([11, 11], [1, 1], known=False))
    layer = layers[0]
    rows = MlaRows(*(torch.cat([t[:1] for t in ts]) for ts in zip(*layer.rows, strict=True)))
    with pytest.raises(AssertionError, match="newer plan"):
        backend.run(
            rows,
            layer.up,
            layer.cache,
            old,
            scale=0.2,
            selected=torch.zeros(2, 6, dtype=torch.int32),
        )


def test_d6_nothing_waits(rocm: Install) -> None:
    """Decoding and verification, from plan to output, under a guard that refuses every read of the
    device.
    """
    rocm()
    case = Case(spec(), LENGTHS, num_layers=2)
    backend = RocmAiterMlaSparseBackend(case.spec)
    layers, done = case.layers(backend), [0, 0, 0]
    for widths, host_knows in STEPS:
        metadata = case.metadata(done, widths, known=host_knows)
        with nullcontext() if host_knows else no_host_sync():
            case.run(backend, layers, done, widths, metadata)
        done = [d + w for d, w in zip(done, widths, strict=True)]


def test_d6_known_lengths_are_not_read_back(rocm: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefill takes its lengths from the host's lists and copies nothing from the device."""
    rocm()
    case = Case(spec(), LENGTHS)
    backend = RocmAiterMlaSparseBackend(case.spec)

    def refuse(*_: Any) -> Any:
        raise HostSyncError("read back")

    layers = case.layers(backend)
    for name in ("item", "cpu", "tolist", "numpy", "nonzero", "__int__", "__index__", "__bool__"):
        monkeypatch.setattr(Tensor, name, refuse)
    case.forward(backend, layers, [0, 0, 0], STEPS[0][0], known=True)
