"""Rows of requests on the device: what the host writes between steps, with one copy for all
requests of a step.
"""

import pytest
import torch
from torch import Tensor

from specdec.base.blocks import BlockShape
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk
from specdec.engine.slots import SlotState
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingPlan

MAX_BLOCKS = 6


def slot_state() -> SlotState:
    return SlotState(
        max_num_seqs=4,
        max_blocks=MAX_BLOCKS,
        block_size=4,
        max_model_len=24,
        vocab_size=50,
        device=torch.device("cpu"),
    )


def request(slot: int, block_ids: list[int], **sampling: object) -> Request:
    """A request in `slot` whose prompt says which slot that is."""
    made = Request(
        slot,
        [slot + 1, slot + 11],
        SamplingParams(**sampling),  # type: ignore[arg-type]
        seed=2**63 - 1 - slot,
        max_total_len=20,
    )
    made.slot, made.block_ids = slot, list(block_ids)
    return made


def plan_of(requests: list[Request]) -> SamplingPlan:
    return SamplingPlan.of([request.sampling for request in requests])


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Everything that any state copies from the host, as it goes."""
    made: list[Tensor] = []
    copy = SlotState.tensor

    def counted(*args: object) -> Tensor:
        made.append(copy(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(SlotState, "tensor", counted)
    return made


def test_block_tables_grow_with_their_requests(copies: list[Tensor]) -> None:
    """Catches entries in another's row or column, entries left out, and a copy for each request."""
    state = slot_state()
    one, two, three = request(2, [7, 8]), request(0, [9]), request(3, [5])
    state.begin([one, two, three])
    state.extend_block_tables([one, two, three])
    one.block_ids += [10]
    three.block_ids += [11, 12, 13]
    copies.clear()
    state.extend_block_tables([one, two, three])
    assert len(copies) == 1
    state.extend_block_tables([one, two, three])
    assert len(copies) == 1
    assert state.block_table.tolist() == [
        [9, 9, 9, 9, 9, 9],
        [0, 0, 0, 0, 0, 0],
        [7, 8, 10, 7, 7, 7],
        [5, 11, 12, 13, 5, 5],
        [NULL_BLOCK] * MAX_BLOCKS,
    ]


def test_a_slot_forgets_its_last_request() -> None:
    """A shorter successor must find no block of its predecessor, and its own entries are written
    again.
    """
    state = slot_state()
    before, after = request(1, [4, 5, 6]), request(1, [8, 9])
    for each in (before, after):
        state.begin([each])
        state.extend_block_tables([each])
    assert state.block_table[1].tolist() == [8, 9, 8, 8, 8, 8]


def test_newcomers_get_their_own_sampling(copies: list[Tensor]) -> None:
    """Catches rows swapped, seeds that lose digits as floating-point numbers, and neighbors
    touched.
    """
    state = slot_state()
    hot = request(3, [1], temperature=0.7, top_k=5, top_p=0.9, min_p=0.1)
    plain = request(0, [2])
    state.begin([hot, plain])
    assert len(copies) == 1  # beside the two of the sampling
    sampling = state.sampling
    assert sampling.temperature.tolist() == pytest.approx([0, 0, 0, 0.7, 0])
    assert sampling.top_k.tolist() == [0, 0, 0, 5, 0]
    assert sampling.top_p.tolist() == pytest.approx([1, 1, 1, 0.9, 1])
    assert sampling.min_p.tolist() == pytest.approx([0, 0, 0, 0.1, 0])
    assert sampling.repetition_penalty.tolist() == [1] * 5
    assert sampling.seeds.tolist() == [2**63 - 1, 0, 0, 2**63 - 4, 0]


def test_tokens_seen_are_those_of_the_prompt() -> None:
    """A penalized newcomer in a slot whose last request had seen other tokens."""
    state = slot_state()
    state.begin([request(2, [1], repetition_penalty=1.5)])
    assert state.sampling.seen is not None
    state.sampling.seen[2, 40] = True
    state.begin([request(2, [1], repetition_penalty=1.2), request(1, [2])])
    assert state.sampling.seen.nonzero().tolist() == [[2, 3], [2, 13]]


def test_prefill_ends_with_length_and_anchor() -> None:
    """Only chunks that end a prefill count; after a preemption the anchor is the last
    output token.
    """
    state = slot_state()
    first, second, third = request(0, [1]), request(1, [2]), request(2, [3])
    second.output_token_ids = [30, 31]
    chunks = [(first, 2, True), (second, 3, True), (third, 1, False)]
    state.end_prefill([Chunk(each, 0, end, admitted=True, last=last) for each, end, last in chunks])
    assert state.seq_lens.tolist() == [2, 3, 0, 0, 0]
    assert state.anchors.tolist() == [11, 31, 0, 0, 0]


def test_a_batch_is_known_by_requests_and_slots() -> None:
    """A request that comes back in another slot, after a preemption, is another batch: its rows lie
    elsewhere.
    """
    first, second = request(0, [1]), request(1, [2])
    state = slot_state()
    both = state.select([first, second])
    assert state.select([first, second]) is both
    assert state.select([second, first]) is not both
    assert state.select([first]).requests == [first]
    assert state.select([first, second]) is not both
    both = state.select([first, second])
    second.slot = 3
    assert state.select([first, second]) is not both


@pytest.mark.parametrize("longest", [18, 19])
def test_rows_of_a_step(longest: int) -> None:
    """Positions, slots and lengths against plain arithmetic, at edges of blocks; only ids past the
    model's length are clamped.
    """
    state = slot_state()
    state.max_model_len = 22
    requests = [request(2, [7, 8, 9, 10, 11, 12]), request(0, [5, 4])]
    state.begin(requests)
    state.extend_block_tables(requests)
    state.end_prefill(
        [
            Chunk(each, 0, end, admitted=True, last=True)
            for each, end in zip(requests, (longest, 3), strict=True)
        ]
    )
    slots = state.slot_indices(requests)
    batch = state.gather(
        slots,
        state.sampling.select(slots, plan_of(requests)),
        shape=BlockShape(3),
        max_seq_len=longest + 4,
    )
    assert batch.anchors.tolist() == [13, 11]
    for width in (4, 2, 4):
        positions = [[start + i for i in range(width)] for start in (longest, 3)]
        blocks = [[7, 8, 9, 10, 11, 12], [5, 4]]
        metadata = batch.metadata(width, visibility="causal" if width == 2 else "full")
        assert metadata.visibility == ("causal" if width == 2 else "full")
        assert batch.positions(width).tolist() == positions
        assert batch.position_ids(width).tolist() == [min(p, 21) for row in positions for p in row]
        assert (
            metadata.seq_lens.tolist() == [longest + width, 3 + width]
            and metadata.seq_lens.dtype == torch.int32
        )
        assert metadata.query_start_loc.tolist() == [0, width, 2 * width]
        assert metadata.slot_mapping.tolist() == batch.slot_mapping(width).tolist()
        assert metadata.slot_mapping.tolist() == [
            4 * table[p // 4] + p % 4
            for table, row in zip(blocks, positions, strict=True)
            for p in row
        ]


def test_sampling_state_that_nobody_reads_is_left_out() -> None:
    """And what somebody reads is there: a step of greedy requests gathers nothing."""
    state = slot_state()
    greedy, warm = (
        request(0, [1]),
        request(3, [2], temperature=0.5, top_p=0.9, repetition_penalty=1.5),
    )
    state.begin([greedy, warm])

    def rows(requests: list[Request]) -> list[list[float]]:
        sampling = state.sampling.select(state.slot_indices(requests), plan_of(requests))
        return [*sampling.floats.tolist(), *sampling.ints.tolist()]

    assert rows([greedy]) == [[]] * 11
    floats = [[0, 0.5], [1, pytest.approx(0.9)], [0, 0], [1, 1.5], [0, 0], [0, 0]]
    ints = [[0, 0], [2**63 - 1, 2**63 - 4], [2, 2], [2**31] * 2, [2**31] * 2]
    assert rows([greedy, warm]) == [*floats, *ints]
