"""Captured prefill: the same tokens as packed, eager prefill, padding that nobody sees, and what is
left to the eager way.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specdec.engine.capture import graphs, prefill_graphs
from specdec.engine.capture.prefill_graphs import (
    PrefillGraphs,
    PrefillShape,
    Spans,
    max_prefill_rows,
)
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.model.core import RoutedExperts
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish, run_all
from tests.helpers.recorder import Recorder
from tests.specdec.engine.capture.test_graphs import MAX_TOKENS, Case, beginnings, run


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of these tests are short, and their chunks shorter."""
    monkeypatch.setattr(prefill_graphs, "MIN_ROWS", 16)
    monkeypatch.setattr(prefill_graphs, "CHUNK_ROWS", (1, 4))
    monkeypatch.setattr(prefill_graphs, "REQUESTS", (1, 4, 8))


def captured_engine(
    case: Case, drafter: str, batch: int, **changes: Any
) -> tuple[SpecEngine, Recorder, list[list[Chunk]]]:
    """An engine with captured prefills of up to 64 rows, its stand-in of a GPU,
    and what was eager.
    """
    engine = case.engine(drafter, batch, capture=True, **changes)
    recorder, eager, packed = Recorder(), [], engine.slots.prefill_batch
    engine.runner.prefill_graphs = PrefillGraphs(
        recorder, engine.slots, engine.runner.prefill_step, dtype=case.verifier.dtype, max_rows=64
    )

    def prefill_batch(chunks: Sequence[Chunk]) -> Any:
        eager.append(list(chunks))
        return packed(chunks)

    engine.slots.prefill_batch = prefill_batch  # type: ignore[method-assign]
    return engine, recorder, eager


@pytest.mark.parametrize(
    ("drafter", "batch", "sampling"),
    [
        ("plain", 1, "greedy"),
        ("ngram", 3, "greedy"),
        ("dflash", 1, "greedy"),
        ("plain", 3, "mixed"),
        ("dflash", 3, "mixed"),
    ],
)
def test_captured_equals_eager(case: Case, drafter: str, batch: int, sampling: str) -> None:
    """Prompts in one chunk and in several, alone and side by side; the drafter's context is that of
    eager prefill.
    """
    prompts = list(case.outputs)
    expected = run(case.engine(drafter, batch, capture=False, pipeline_depth=1), prompts, sampling)
    engine, recorder, eager = captured_engine(case, drafter, batch, pipeline_depth=1)
    requests = run(engine, prompts, sampling)
    for one, other in zip(expected, requests, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert one.num_accepted[:-1] == other.num_accepted[:-1]
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert engine.runner.prefill_graphs is not None
    shapes = set(engine.runner.prefill_graphs.graphs)
    assert {shape.num_rows for shape in shapes} <= {16, 24}, "steps have up to 13 rows"
    assert recorder.num_replays >= 7 and not eager


def test_captured_equals_eager_under_preemption(case: Case) -> None:
    """Requests come back with tokens of their own to prefill, and no first token to choose."""
    engine, recorder, _ = captured_engine(case, "dflash", 3, num_blocks=22, pipeline_depth=1)
    requests = run(engine, list(case.outputs))
    assert engine.scheduler.num_preemptions > 1 and recorder.num_replays > 10
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)


def test_padding_writes_to_the_null_block_alone(case: Case) -> None:
    """Catches rows past a chunk's end that overwrite another request's keys and values, or the
    request's own.
    """
    engine, _, _ = captured_engine(case, "dflash", 3)
    assert engine.runner.prefill_graphs is not None
    engine.add_request([3, 4, 5], SamplingParams(max_tokens=20))
    engine.step()
    ((shape, graph),) = engine.runner.prefill_graphs.graphs.items()
    request = engine.add_request([3, 4, 5, 6, 7], SamplingParams(max_tokens=2))
    changed: list[set[tuple[int, int]]] = []

    def watched() -> None:
        before = [layer.key.clone() for layer in engine.kv_cache.layers]
        graph.replay()
        for layer, keys in zip(engine.kv_cache.layers, before, strict=True):
            differ = (layer.key != keys).flatten(2).any(2).nonzero().tolist()
            changed.append({(block, offset) for block, offset in differ if block != NULL_BLOCK})

    engine.runner.prefill_graphs.graphs[shape] = graph._replace(replay=watched)
    engine.step()
    first, second = request.block_ids[:2]
    assert changed == [{(first, offset) for offset in range(4)} | {(second, 0)}] * len(
        engine.kv_cache.layers
    )


def case_tokens(case: Case, prompt: list[int]) -> list[int]:
    """Greedy output of an engine without graphs."""
    engine = case.engine("plain", 1, capture=False)
    return finish(engine, engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS)))[0]


def check_widths(graphs: PrefillGraphs, spans: Spans, shape: PrefillShape) -> None:
    """A shape has room for chunks and their padding, and no row too many."""
    widths = graphs._widths(spans, shape)
    assert widths is not None and len(widths) == shape.num_reqs and sum(widths) == shape.num_rows
    assert all(0 < width <= shape.max_rows for width in widths)
    for (start, end), width in zip(spans, widths, strict=False):
        assert end - start <= width and start + width <= shape.max_seq_len


def test_what_is_left_to_packed_prefill(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks, many chunks, chunks whose padding has no room, and shapes beyond the most
    graphs.
    """
    engine, recorder, _ = captured_engine(case, "plain", 8)
    captured = engine.runner.prefill_graphs
    assert captured is not None
    request = Request(0, list(range(3, 73)), SamplingParams(), seed=0, max_total_len=80)
    request.block_ids = list(range(1, 22))
    longest = engine.slots.longest

    def chunk(start: int, end: int) -> Chunk:
        return Chunk(request, start, end, last=False, admitted=False)

    def shape(*spans: tuple[int, int]) -> PrefillShape | None:
        if (found := captured._shape(spans)) is not None:
            check_widths(captured, spans, found)
        return found

    bound = min(512, longest)
    assert shape((0, 3)) == shape((0, 16)) == PrefillShape(1, 16, 16, bound)
    assert shape((0, 17)) == shape((0, 24)) == PrefillShape(1, 24, 24, bound)
    assert shape((0, 3), (0, 16)) == PrefillShape(4, 24, 16, bound)
    assert shape((0, 3), (0, 17)) == PrefillShape(4, 24, 24, bound)
    assert shape((0, 30), (0, 16)) == PrefillShape(4, 48, 48, bound), "two rows pad"
    assert shape((0, 30), (0, 17)) == PrefillShape(4, 64, 64, bound)
    assert shape(*[(0, 3)] * 4) == PrefillShape(4, 16, 16, bound)
    assert shape(*[(0, 3)] * 5) == PrefillShape(8, 24, 16, bound)
    assert shape((0, 64)) and shape((0, 65)) is None and shape(*[(0, 3)] * 9) is None
    assert shape((longest - 16, longest - 14)) == PrefillShape(1, 16, 16, longest)
    assert shape((longest - 15, longest - 14)) is None
    assert shape((longest - 3, longest - 1), (0, 3)) == PrefillShape(4, 16, 16, longest)
    assert captured.run([chunk(0, 65)]) is None, "too long"
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 0)
    assert captured.run([chunk(0, 3)]) is None and recorder.num_replays == 0, "too many graphs"


@pytest.mark.parametrize("most", [1, 2, 3, 5, 8, 40])
def test_every_shape_is_made_beforehand(case: Case, most: int) -> None:
    """What chunks may have, up to so many of them, is what `spans` has a server capture."""
    engine, _, _ = captured_engine(case, "plain", most)
    captured = engine.runner.prefill_graphs
    assert captured is not None
    longest = engine.slots.longest

    shape = captured._shape
    made = list(map(shape, captured.spans(most, 80)))
    needed = {
        shape([(0, first), *[(0, others)] * (count - 1)])
        for count in range(1, min(most, 9) + 1)
        for first in range(1, 65)
        for others in (1, 2, 3, 5, 8, 16)
    }
    assert None not in made and len(set(made)) == len(made) and longest > 64
    assert {one[:3] for one in needed if one} == {one[:3] for one in made if one}


def test_a_larger_graph_serves_while_none_may_be_captured(case: Case) -> None:
    """With the padding that its shape asks for; the smallest of those that do."""
    engine, recorder, eager = captured_engine(case, "dflash", 8)
    captured = engine.runner.prefill_graphs
    assert captured is not None
    spans = [(0, 5), (0, 9), (0, 3)]
    bound = min(512, engine.slots.longest)
    for larger in (PrefillShape(8, 64, 16, bound), PrefillShape(4, 32, 32, bound)):
        captured.obtain(larger, captured._captured)
        check_widths(captured, spans, larger)
    captured.obtain(PrefillShape(1, 24, 24, bound), captured._captured)
    captured.serving = True
    shape = captured._shape(spans)
    assert shape == PrefillShape(4, 24, 16, bound)
    assert captured.nearest(shape) == PrefillShape(4, 32, 32, bound)
    few = PrefillShape(8, 24, 16, bound)
    assert captured.nearest(few) is None, "most of its rows would pad"
    prompts = [list(range(3, 3 + end)) for _, end in spans]
    expected = [case_tokens(case, prompt) for prompt in prompts]
    assert run_all(engine, prompts, max_tokens=MAX_TOKENS) == expected
    assert captured.num_captured == 3 and recorder.num_replays and not eager


def test_inputs_of_a_replay(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding rows name the null block, padding requests the padding slot; positions stay within
    the model's length.
    """
    engine, _, _ = captured_engine(case, "plain", 8)
    assert engine.runner.prefill_graphs is not None
    monkeypatch.setattr(engine.slots, "max_model_len", 9)
    requests = []
    for slot in range(3):
        request = Request(
            slot, list(range(10, 40)), SamplingParams(), seed=0, max_total_len=64, slot=slot
        )
        request.block_ids = [3 * slot + 1, 3 * slot + 2, 3 * slot + 3]
        requests.append(request)
    chunks = [
        Chunk(request, 4, 8 + index, last=False, admitted=False)
        for index, request in enumerate(requests)
    ]
    widths, padded = [7, 5, 6, 6], PrefillShape(4, 24, 16, 256)
    inputs = engine.runner.prefill_graphs._inputs(chunks, padded, np.array(widths))
    rows = [part.split(widths) for part in inputs[:72].view(3, 24)]
    tokens, positions, places = ([some.tolist() for some in part] for part in rows)
    slots, logit_rows, seq_lens, row_counts, next_token_ids = inputs[72:92].view(5, 4).tolist()
    null = NULL_BLOCK * 4
    for index in range(3):
        count, padding = 4 + index, widths[index] - 4 - index
        assert tokens[index] == [*range(14, 14 + count)] + [0] * padding
        assert positions[index] == ([4, 5, 6, 7] + [8] * 12)[: count + padding]
        assert (
            places[index]
            == [4 * (3 * index + 1 + p // 4) + p % 4 for p in range(4, 4 + count)]
            + [null] * padding
        )
    assert tokens[3] == [0] * 6 and positions[3] == [*range(6)] and places[3] == [null] * 6
    assert slots == [0, 1, 2, engine.slots.padding_slot]
    assert logit_rows == [3, 7 + 4, 12 + 5, 18] and seq_lens == [11, 9, 10, 6]
    assert row_counts == [4, 5, 6, 0] and next_token_ids == [18, 19, 20, 0]
    assert inputs[92:].tolist() == [0, 7, 12, 18, 24]


def test_how_many_rows_pay(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """The more weights a row reads, the fewer rows keep a device as long as their launches keep the
    host.
    """
    monkeypatch.undo()

    def most(weight_bytes: int, max_num_seqs: int, experts: RoutedExperts | None = None) -> int:
        verifier: Any = SimpleNamespace(weight_bytes=weight_bytes, routed_experts=experts)
        return max_prefill_rows(verifier, max_num_seqs)

    assert [most(3 * 10**8, count) for count in (1, 3, 100)] == [2048, 6144, 8192]
    assert [most(16 * 10**9, count) for count in (1, 100)] == [549, 549]
    assert most(10**13, 1) == 0
    assert most(41 * 10**9, 1, RoutedExperts(32, 4, 38 * 10**9)) == 2**43 // (
        3 * 10**9 + 38 * 10**9 // 8
    )


def test_a_mixed_step_has_logits_of_those_that_end(case: Case) -> None:
    """One prompt ends in a step in which another's prefill goes on."""
    engine, recorder, _ = captured_engine(case, "plain", 4)
    for first in (3, 30, 60):
        prompts = [list(range(first, first + n)) for n in (5, 20)]
        expected = [case_tokens(case, prompt)[:3] for prompt in prompts]
        assert run_all(engine, prompts, max_tokens=3) == expected
    assert recorder.num_replays >= 4 and engine.runner.prefill_graphs is not None
    assert {shape.num_reqs for shape in engine.runner.prefill_graphs.graphs} == {1, 4}


def test_a_chunk_that_ends_no_prompt_has_no_logits(case: Case) -> None:
    engine, recorder, _ = captured_engine(case, "plain", 2)
    prompt = list(range(3, 3 + 30))  # chunks of 13, 13 and 4
    requests = []
    for _ in range(2):
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=3)))
        finish(engine)
    assert recorder.num_replays >= 3
    assert (
        requests[0].output_token_ids
        == requests[1].output_token_ids
        == case_tokens(case, prompt)[:3]
    )
    assert engine.slots.seq_lens[engine.slots.padding_slot] == 0
