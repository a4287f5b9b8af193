"""Captured prefill: the same tokens as packed, eager prefill, padding that nobody sees, and what is left to the eager way."""

from collections.abc import Sequence
from typing import Any

import pytest

from specdec import prefill_graphs
from specdec.config import SamplingParams
from specdec.core import Request
from specdec.engine import SpecEngine
from specdec.errors import InvalidInputError
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.prefill_graphs import PrefillGraphs, PrefillShape
from specdec.scheduler import Chunk
from tests.specdec.test_graphs import MAX_TOKENS, Case, Recorder, beginnings, run


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def captured_engine(case: Case, drafter: str, batch: int, **changes: Any) -> tuple[SpecEngine, Recorder, list[list[Chunk]]]:
    """An engine whose prefills are captured from their second occurrence on; its stand-in of a GPU, and what was eager."""
    engine = case.engine(drafter, batch, capture=True, **changes)
    recorder, eager, packed = Recorder(), [], engine.state.prefill_batch
    engine.prefill_graphs = PrefillGraphs(recorder, engine.state, engine._prefill_logits, dtype=case.verifier.dtype)

    def prefill_batch(chunks: Sequence[Chunk]) -> Any:
        eager.append(list(chunks))
        return packed(chunks)

    engine.state.prefill_batch = prefill_batch  # type: ignore[method-assign]
    return engine, recorder, eager


@pytest.mark.parametrize(("batch", "sampling"), [(1, "greedy"), (3, "greedy"), (3, "mixed")])
@pytest.mark.parametrize("drafter", ["plain", "ngram", "dflash"])
def test_captured_equals_eager(case: Case, drafter: str, batch: int, sampling: str) -> None:
    """Prompts in one chunk and in several, alone and side by side; the drafter's context is that of eager prefill."""
    prompts = list(case.outputs)
    expected = run(case.engine(drafter, batch, capture=False, pipeline_depth=1), prompts, sampling)
    engine, recorder, eager = captured_engine(case, drafter, batch, pipeline_depth=1)
    requests = run(engine, prompts, sampling)
    for one, other in zip(expected, requests, strict=True):
        assert one.output_token_ids == other.output_token_ids
        assert one.num_accepted[:-1] == other.num_accepted[:-1]
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
    assert recorder.num_replays >= 7 > len(eager)
    assert engine.prefill_graphs is not None
    assert len({shape.num_rows for shape in engine.prefill_graphs.graphs}) == 1, "chunks of up to 13 rows share a shape"


def test_captured_equals_eager_under_preemption(case: Case) -> None:
    """Requests come back with tokens of their own to prefill, and no first token to choose."""
    engine, recorder, _ = captured_engine(case, "dflash", 3, num_blocks=22, pipeline_depth=1)
    requests = run(engine, list(case.outputs))
    assert engine.scheduler.num_preemptions > 1 and recorder.num_replays > 10
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)


def test_padding_writes_to_the_null_block_alone(case: Case) -> None:
    """Catches rows past a chunk's end that overwrite another request's keys and values, or the request's own."""
    engine, _, _ = captured_engine(case, "dflash", 3)
    assert engine.prefill_graphs is not None
    for _ in range(2):
        engine.add_request([3, 4, 5], SamplingParams(max_tokens=20))
        engine.step()
    ((shape, graph),) = engine.prefill_graphs.graphs.items()
    request = engine.add_request([3, 4, 5, 6, 7], SamplingParams(max_tokens=2))
    changed: list[set[tuple[int, int]]] = []

    def watched() -> None:
        before = [layer.key.clone() for layer in engine.kv_cache.layers]
        graph.replay()
        for layer, keys in zip(engine.kv_cache.layers, before, strict=True):
            differ = (layer.key != keys).flatten(2).any(2).nonzero().tolist()
            changed.append({(block, offset) for block, offset in differ if block != NULL_BLOCK})

    engine.prefill_graphs.graphs[shape] = graph._replace(replay=watched)
    engine.step()
    first, second = request.block_ids[:2]
    assert changed == [{(first, offset) for offset in range(4)} | {(second, 0)}] * len(engine.kv_cache.layers)


def case_tokens(case: Case, prompt: list[int]) -> list[int]:
    """Greedy output of an engine without graphs."""
    engine = case.engine("plain", 1, capture=False)
    request = engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS))
    while engine.has_work:
        engine.step()
    return request.output_token_ids


def test_what_is_left_to_packed_prefill(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long chunks, many chunks, chunks whose padding has no room, and the first of every shape."""
    engine, recorder, _ = captured_engine(case, "plain", 8)
    captured = engine.prefill_graphs
    assert captured is not None
    request = Request(0, list(range(3, 43)), SamplingParams(), seed=0, max_total_len=64)
    request.block_ids = list(range(1, 12))

    def shape(start: int, end: int) -> PrefillShape | None:
        return captured._shape(Chunk(request, start, end, last=False, admitted=False))

    assert shape(0, 3) == shape(0, 16) and shape(0, 17) == PrefillShape(32, min(256, engine.state.longest))
    monkeypatch.setattr(engine.state, "max_model_len", 9)
    small = PrefillShape(16, 256)
    positions = captured._inputs(Chunk(request, 4, 8, last=False, admitted=False), small)[16:32]
    assert positions.tolist() == [4, 5, 6, 7] + [8] * 12
    monkeypatch.setattr(prefill_graphs, "MOST_PREFILL_ROWS", 16)
    assert shape(0, 17) is None and shape(engine.state.longest - 15, engine.state.longest - 14) is None
    chunks = [Chunk(request, 0, 3, last=False, admitted=False)] * 5
    for few in (chunks[:1], chunks):  # a new shape, too many
        assert captured.run(few) is None
    assert not captured.graphs and recorder.num_replays == 0


def test_they_are_refused_where_steps_are_not_captured(case: Case) -> None:
    """They are asked for by name, so nothing else may run in their place."""
    with pytest.raises(InvalidInputError, match="prefill_graphs is set and steps are not captured on cpu; leave it out"):
        case.engine("plain", 1, capture=False, prefill_graphs=True)


def test_a_chunk_that_ends_no_prompt_has_no_logits(case: Case) -> None:
    engine, recorder, _ = captured_engine(case, "plain", 2)
    prompt = list(range(3, 3 + 30))  # chunks of 13, 13 and 4
    requests = []
    for _ in range(2):
        requests.append(engine.add_request(prompt, SamplingParams(max_tokens=3)))
        while engine.has_work:
            engine.step()
    assert recorder.num_replays >= 3
    assert requests[0].output_token_ids == requests[1].output_token_ids == case_tokens(case, prompt)[:3]
    assert engine.state.seq_lens[engine.state.padding_slot] == 0
