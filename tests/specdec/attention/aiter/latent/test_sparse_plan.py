"""AITER's work plan in sparse latent attention: when it is made again, when not, and what its
buffers hold.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.attention.aiter.latent import latents
from specdec.attention.aiter.latent.latents import LatentKernels
from specdec.attention.aiter.latent.mla_sparse_plan import SparsePlan, SparsePlanner
from specdec.attention.backend import AttentionMetadata
from tests.helpers.aiter_emulation import Machine, install
from tests.helpers.sparse_case import REAL, spec


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """A machine with AITER."""
    return install(monkeypatch, tmp_path, Machine())


def planner_of(**changes: Any) -> SparsePlanner:
    """A planner that selects 6 positions per token."""
    return SparsePlanner(LatentKernels(spec(**{**REAL, **changes})), topk=6)


def plans_made(machine: Machine) -> int:
    """Calls of AITER's planner so far."""
    return sum(call.name == "get_mla_metadata_v1" for call in machine.calls)


def known(seq_lens: Sequence[int], widths: Sequence[int]) -> AttentionMetadata:
    """Metadata with lengths the host knows; the planner looks at nothing else."""
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *accumulate(widths)], dtype=torch.int32),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32),
        block_table=torch.zeros(len(widths), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(widths), dtype=torch.int64),
        num_reqs=len(widths),
        num_tokens=sum(widths),
        max_query_len=max(widths),
        max_seq_len=max(seq_lens),
        query_lens=list(widths),
        seq_lens_host=list(seq_lens),
    )


def unknown(metadata: AttentionMetadata) -> AttentionMetadata:
    """The same for a host that does not know them."""
    return replace(metadata, query_lens=None, seq_lens_host=None)


def steady(num_reqs: int, width: int, *, least: int | None = None) -> AttentionMetadata:
    """A step of `width` rows each, of which the host knows that every request has `least` tokens:
    just enough for 6 keys a row.
    """
    least = 6 + width - 1 if least is None else least
    return replace(
        unknown(known([least + 7 * i for i in range(num_reqs)], [width] * num_reqs)),
        min_seq_len=least,
    )


def indptr(plan: SparsePlan) -> list[int]:
    """The filled part of `kv_indptr`."""
    return plan.work_plan.kv_indptr[: plan.metadata.num_tokens + 1].tolist()


def test_d2_same_key_is_not_planned_again(machine: Machine) -> None:
    """Also when contexts grow, once all of them hold more than `topk` tokens; the index lists
    follow all the same.
    """
    planner = planner_of()
    for seq_lens in ([30, 12], [34, 13], [38, 21]):
        plan = planner.plan(known(seq_lens, [4, 1]))
        assert plan.positions.tolist() == [*range(seq_lens[0] - 4, seq_lens[0]), seq_lens[1] - 1]
        assert indptr(plan) == [0, 6, 12, 18, 24, 30]
    assert plans_made(machine) == 1


CHANGES: list[tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]] = [
    (([30, 12], [4, 1]), ([30, 12], [4, 2])),  # one row more
    (([30, 12], [4, 1]), ([12, 30], [1, 4])),  # the other way round
    (([9, 4], [3, 3]), ([4, 9], [3, 3])),  # equal rows, equal lengths in another order
    (([5, 6], [2, 2]), ([6, 5], [2, 2])),
    (([9, 9], [4, 4]), ([8, 9], [4, 4])),  # both longer than topk; one context is not
    (([8, 8], [2, 4]), ([8, 8], [4, 2])),  # equal lengths, rows differ
    (([7, 9], [5, 1]), ([9, 7], [5, 1])),
]


@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_d2_changed_key_is_planned_again(machine: Machine, before: Any, after: Any) -> None:
    """Every part of the key alone: what a shorter key would take for the same."""
    planner = planner_of()
    planner.plan(known(*before))
    plan = planner.plan(known(*after))
    assert plans_made(machine) == 2
    fresh = planner_of().plan(known(*after))
    used = fresh.work_plan.work["work_indptr"][-1]
    assert torch.equal(
        plan.work_plan.work["work_info_set"][:used], fresh.work_plan.work["work_info_set"][:used]
    )
    assert indptr(plan) == indptr(fresh)


def test_d2_key_holds_all_that_the_plan_depends_on(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads, types, and the bound on splits, beside lengths."""
    metadata = known([30, 12], [4, 1])
    keys = {
        planner_of()._key(metadata),
        planner_of(num_heads=32)._key(metadata),
        planner_of(cache_dtype=torch.float8_e4m3fnuz)._key(metadata),
        planner_of(dtype=torch.float8_e4m3fnuz)._key(metadata),
        planner_of()._key(known([30, 12], [1, 4])),
    }
    planner = planner_of()
    planner.plan(metadata)
    monkeypatch.setattr(latents, "MAX_SPLIT_PER_BATCH", 2)
    planner.plan(metadata)
    assert len(keys) == 5 and plans_made(machine) == 2


def test_d3_shrinking_batches_clear_what_they_leave(machine: Machine) -> None:
    """Request ids and index lists of rows that are gone become zero, and nothing beyond them; the
    indptr repeats its last value.
    """
    topk = 6
    for of in (unknown, lambda m: m):
        planner = planner_of()
        buffers = planner.plan(of(known([40] * 16, [1] * 16))).buffers
        buffers.request_ids.fill_(9)
        buffers.kv_indices.fill_(9)
        planner.plan(of(known([40] * 13, [1] * 13)))
        planner.plan(of(known([40] * 9, [1] * 9)))
        assert planner.plan(of(known([40] * 9, [1] * 9))).buffers is buffers
        assert buffers.request_ids.tolist() == [*range(9), *[0] * 7]
        assert (buffers.kv_indices[: 9 * topk] == 9).all() and (
            buffers.kv_indices[9 * topk : 16 * topk] == 0
        ).all()
        assert buffers.kv_indices[16 * topk] == 9
        buffers.kv_indices.fill_(9)
        planner.plan(of(known([40] * 12, [1] * 12)))
        assert (buffers.kv_indices == 9).all()  # growing clears nothing
        plan = planner.plan(of(known([40] * 10, [1] * 10)))
        assert (buffers.kv_indices[10 * topk : 12 * topk] == 0).all() and (
            buffers.kv_indices[12 * topk :] == 9
        ).all()
        assert plan.work_plan.kv_indptr.tolist() == [*range(0, 61, 6), *[60] * 6]


def test_d4_buffers_begin_as_zeros(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph reads to the largest extent it was made for, also before that was ever filled."""

    def poisoned(*shape: Any, **kwargs: Any) -> Tensor:
        return torch.full(shape if isinstance(shape[0], int) else shape[0], 77, **kwargs)

    monkeypatch.setattr(torch, "empty", poisoned)
    plan = planner_of().plan(known([40] * 9, [1] * 9))
    assert plan.buffers.capacity == 16
    assert plan.buffers.request_ids[9:].tolist() == [0] * 7 and not plan.buffers.kv_indices.any()
    assert (plan.work_plan.work["work_info_set"] != 77).all()


def test_d6_unknown_lengths_are_planned_every_time(machine: Machine) -> None:
    """No lengths, no key: two different batches would share it. Nor does such a plan disturb one
    that has a key.
    """
    planner = planner_of()
    metadata = known([30, 12], [4, 4])
    for count in range(1, 4):
        plan = planner.plan(unknown(metadata))
        assert plans_made(machine) == count and plan.work_plan.key is None
    first = planner.plan(metadata)
    planner.plan(unknown(known([30, 2], [2, 2])))
    planner.plan(unknown(metadata))
    assert plans_made(machine) == 6
    again = planner.plan(metadata)
    assert plans_made(machine) == 6 and again.work_plan is first.work_plan is not plan.work_plan


def test_d6_new_buffers_hold_no_plan(machine: Machine) -> None:
    """A plan belongs to the buffers it was written to: after a reallocation the same key is planned
    again.
    """
    planner = planner_of()
    metadata = known([30, 12], [4, 4])
    planner.plan(metadata)
    planner._work_plans.clear()
    planner.plan(metadata)
    assert plans_made(machine) == 2


def test_d6_a_failing_planner_leaves_no_key(machine: Machine) -> None:
    """What a failed call leaves behind must not be taken for the plan before it."""
    planner = planner_of()
    metadata, other = known([30, 12], [4, 4]), known([30, 3], [5, 3])
    planner.plan(metadata)
    ops = planner.kernels.ops

    def fail(**_: Any) -> None:
        raise RuntimeError("out of luck")

    planner.kernels.ops = replace(ops, get_mla_metadata_v1=fail)
    with pytest.raises(RuntimeError):
        planner.plan(other)
    planner.kernels.ops = ops
    planner.plan(metadata)
    assert plans_made(machine) == 2


def test_d6_capture_and_replay(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A captured plan takes no key and no keyed buffers, for its replays go unseen; forwards after
    it clear the whole tail.
    """
    planner = planner_of()
    metadata = known([30] * 9, [1] * 9)
    planner.plan(metadata)
    capturing = [True]
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    captured = planner.buffers(9)
    captured.kv_indices.fill_(9)
    graph = planner.plan(metadata)
    assert (captured.kv_indices[54:96] == 0).all()
    assert graph.work_plan.key is None and plans_made(machine) == 2
    capturing[0] = False
    assert planner.plan(metadata).work_plan is not graph.work_plan and plans_made(machine) == 2
    captured.request_ids.fill_(9)
    captured.kv_indices.fill_(9)
    planner.plan(unknown(known([30] * 10, [1] * 10)))
    assert (
        captured.request_ids.tolist() == [*range(10), *[0] * 6]
        and (captured.kv_indices[60:96] == 0).all()
    )
    capturing[0] = True
    captured.kv_indices.fill_(9)
    planner.plan(unknown(known([30] * 12, [1] * 12)))
    assert (captured.kv_indices[72:96] == 0).all()


def test_steady_steps_are_planned_once_per_number_of_rows(machine: Machine) -> None:
    """However the lengths go on, in whatever order batches shrink and grow, in blocks or row by
    row; the lists follow each time.
    """
    planner = planner_of()
    for num_reqs, width, made in [
        (3, 1, 1),
        (3, 1, 1),
        (2, 1, 2),
        (5, 1, 3),
        (3, 1, 3),
        (1, 3, 3),
        (1, 5, 3),
        (5, 3, 4),
        (2, 1, 4),
    ]:
        for least in (None, 40):
            plan = planner.plan(steady(num_reqs, width, least=least))
            assert plans_made(machine) == made, (num_reqs, width)
            assert indptr(plan) == [*range(0, 6 * num_reqs * width + 1, 6)]
            assert plan.buffers.request_ids[: num_reqs * width].tolist() == [
                i for i in range(num_reqs) for _ in range(width)
            ]


@pytest.mark.parametrize("width", [1, 4])
def test_a_row_short_of_keys_is_planned_each_time(machine: Machine, width: int) -> None:
    """One key too few for the first row of the shortest request: its length counts, and changes."""
    planner = planner_of()
    planner.plan(steady(3, width))
    for count, lengths in enumerate(
        ([4 + width, 12, 19], [3 + width, 12, 19], [2 + width, 12, 19]), start=2
    ):
        plan = planner.plan(replace(unknown(known(lengths, [width] * 3)), min_seq_len=4 + width))
        assert plans_made(machine) == count
        assert indptr(plan)[1] == lengths[0] - width + 1
    plan = planner.plan(steady(3, width))
    assert plans_made(machine) == 4 and indptr(plan) == [*range(0, 18 * width + 1, 6)]


def test_steady_plans_share_no_memory(machine: Machine) -> None:
    """A graph that holds one of them goes on reading it after any other batch was planned."""
    planner = planner_of()
    plans = [planner.plan(steady(n, 1)).work_plan for n in (1, 2, 3, 4)]
    planner.plan(unknown(known([30, 2], [1, 1])))
    planner.plan(known([30, 12], [4, 1]))
    everything = [*plans, *planner._work_plans.values()]
    memory = [
        t.untyped_storage().data_ptr()
        for plan in everything
        for t in (plan.kv_indptr, *plan.work.values())
    ]
    assert len(everything) == 6 and len(set(memory)) == len(memory)
    for count, plan in enumerate(plans, start=1):
        kept = {name: part.clone() for name, part in plan.work.items()}
        assert planner.plan(steady(count, 1)).work_plan is plan
        assert all(
            torch.equal(part.view(torch.uint8), kept[name].view(torch.uint8))
            for name, part in plan.work.items()
        )
    assert plans_made(machine) == 6


def test_a_graph_does_not_make_a_steady_plan(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a capture records is not done yet: only a plan made before is taken, and none is noted
    as made.
    """
    planner, capturing = planner_of(), [True]
    monkeypatch.setattr(Tensor, "is_cuda", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    recorded = planner.plan(steady(3, 1))
    assert plans_made(machine) == 1 and not planner._steady_plans
    capturing[0] = False
    made = planner.plan(steady(3, 1))
    assert plans_made(machine) == 2 and made.work_plan is not recorded.work_plan
    capturing[0] = True
    assert planner.plan(steady(3, 1)).work_plan is made.work_plan and plans_made(machine) == 2


def test_a_failing_planner_leaves_no_steady_plan(machine: Machine) -> None:
    """What a failed call leaves behind must not be taken for a plan."""
    planner = planner_of()
    ops = planner.kernels.ops

    def fail(**_: Any) -> None:
        raise RuntimeError("out of luck")

    planner.kernels.ops = replace(ops, get_mla_metadata_v1=fail)
    with pytest.raises(RuntimeError):
        planner.plan(steady(3, 1))
    planner.kernels.ops = ops
    planner.plan(steady(3, 1))
    assert plans_made(machine) == 1


def test_what_pads_a_steady_batch_reads_no_old_slots(machine: Machine) -> None:
    """A captured step lists `topk` slots for rows that have fewer; what lay there may be of
    another, larger cache.
    """
    planner, size = planner_of(), 16
    metadata = replace(steady(2, 1), block_table=torch.tensor([[3, 4], [0, 0]], dtype=torch.int32))
    plan = planner.plan(metadata)
    plan.buffers.kv_indices.fill_(10**6)
    plan.list_slots(
        torch.tensor([[5, 0, 17, 2, 1, 16], [0, -1, -1, -1, -1, -1]], dtype=torch.int32), size
    )
    assert plan.entries().kv_indices.tolist() == [53, 48, 65, 50, 49, 64, *[0] * 6]
