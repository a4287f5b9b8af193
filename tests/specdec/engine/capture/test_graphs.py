"""Captured steps: the same tokens as eager ones, nothing of the host baked in, and padding that
touches nobody.

No accelerator is needed: `tests.helpers.recorder.Recorder` does what a graph does.
"""

import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from drafters.composed.drafter import ComposedDrafter
from drafters.ngram import NGramDrafter
from drafters.suffix.drafter import SuffixDrafter
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.capture import buckets, graphs
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.engine.selection import Selection
from specdec.kv_cache.block_pool import NULL_BLOCK
from specdec.model.batch import Context, DecodeBatch
from specdec.model.core import Drafter, DraftOutput
from specdec.sampling.params import SamplingParams
from specdec.sampling.tensors import SamplingPlan
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.pairs import in_turns
from tests.helpers.recorder import Recorder, refuse
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
)

K = 4
MAX_TOKENS = 24


class Case:
    """A target and the greedy outputs of some prompts."""

    def __init__(self, name: str = "llama", prompts: Sequence[Sequence[int]] | None = None) -> None:
        model = plain_model(name)
        prompts = prompts or random_prompts(7, seed=2)
        self.outputs = {tuple(p): plain_greedy(model, p, MAX_TOKENS) for p in prompts}
        self.verifier = paged_verifier(model)

    def engine(
        self, drafter: str, batch: int, *, capture: bool, num_blocks: int = 200, **changes: Any
    ) -> SpecEngine:
        """An engine with or without captured steps; one with them refuses to decode in any other
        way.
        """
        drafts = DRAFTERS[drafter](self)
        specs = [*self.verifier.kv_specs, *(drafts.kv_specs if drafts else [])]
        memory_bytes = (
            num_blocks * 4 * sum(spec.bytes_per_token(self.verifier.dtype) for spec in specs)
        )
        cache = CacheConfig(memory_bytes=memory_bytes)
        engine = SpecEngine(
            self.verifier,
            drafts,
            EngineConfig(
                max_num_seqs=batch,
                max_prefill_tokens=13,
                cache=cache,
                **{"num_draft_tokens": None, **changes},
            ),
        )
        engine.runner.host_may_look = False  # as on an accelerator
        if capture:
            engine.runner.graphs = StepGraphs(Recorder(), engine.slots, engine.runner.step_table)
            engine.slots.decode_batch = refuse  # type: ignore[assignment, method-assign]
        return engine


DRAFTERS: dict[str, Callable[[Case], Drafter | None]] = {
    "plain": lambda case: None,
    "ngram": lambda case: NGramDrafter(max_draft_tokens=K),
    "suffix": lambda case: SuffixDrafter(max_draft_tokens=K, pool_tokens=100),
    "suffix+dflash": lambda case: ComposedDrafter(
        [
            SuffixDrafter(max_draft_tokens=K, pool_tokens=100),
            random_dflash(case.verifier, block_size=K + 1),
        ]
    ),
    "dflash": lambda case: random_dflash(case.verifier, block_size=K + 1),
    "right": lambda case: ScriptedDrafter(case.outputs, K),
    "wrong": lambda case: ScriptedDrafter(case.outputs, K, [{0}, {1}, {2, 3}, set()]),
}

MIXED: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "logprobs": True},
    {"repetition_penalty": 1.3, "top_logprobs": 3},
    {
        "logit_bias": {3: 4.0, 5: -4.0},
        "min_tokens": 9,
        "stop_token_ids": (3, 4),
        "frequency_penalty": 0.4,
    },
]
SAMPLINGS: dict[str, Callable[[int], dict[str, Any]]] = {
    "greedy": lambda index: {},
    "mixed": lambda index: {**MIXED[index % len(MIXED)], "seed": index},
}


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


def run(
    engine: SpecEngine, prompts: list[tuple[int, ...]], sampling: str = "greedy"
) -> list[Request]:
    """All prompts, one joining every other step and of different lengths, so that they leave at
    different times.
    """
    pending = [
        (
            list(prompt),
            SamplingParams(max_tokens=MAX_TOKENS - 2 * index, **SAMPLINGS[sampling](index)),
        )
        for index, prompt in enumerate(prompts)
    ]
    requests: list[Request] = []
    step = 0
    while pending or engine.has_work:
        if pending and step % 2 == 0:
            requests.append(engine.add_request(*pending.pop(0)))
        engine.step()
        step += 1
    assert engine.pool.num_used == 0
    return requests


def beginnings(case: Case, requests: list[Request]) -> list[list[int]]:
    """What plain greedy decoding gives the requests, as far as they went."""
    return [case.outputs[tuple(r.prompt_token_ids)][: len(r.output_token_ids)] for r in requests]


def recorder(engine: SpecEngine) -> Recorder:
    assert engine.runner.graphs is not None
    assert isinstance(engine.runner.graphs._capture, Recorder)
    return engine.runner.graphs._capture


@pytest.mark.parametrize(
    ("drafter", "batch", "sampling"),
    [
        *((drafter, 3, "mixed") for drafter in DRAFTERS),
        *((drafter, batch, "greedy") for drafter, batch in in_turns(DRAFTERS, [1, 5], 1)),
    ],
)
def test_captured_equals_eager(case: Case, drafter: str, batch: int, sampling: str) -> None:
    """Tokens, acceptance and log-probabilities of every request, while others join and leave."""
    prompts = list(case.outputs)
    eager = run(case.engine(drafter, batch, capture=False, pipeline_depth=1), prompts, sampling)
    engine = case.engine(drafter, batch, capture=True, pipeline_depth=1)
    captured = run(engine, prompts, sampling)
    for one, other in zip(eager, captured, strict=True):
        assert one.output_token_ids == other.output_token_ids
        # a last step may offer more drafts than there is room for
        assert one.num_accepted[:-1] == other.num_accepted[:-1]
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert [list(top) for top in one.top_logprobs] == [list(top) for top in other.top_logprobs]
    if sampling == "greedy":
        assert [r.output_token_ids for r in captured] == beginnings(case, captured)
    assert recorder(engine).num_replays == engine.timer.num_steps > 10
    assert engine.slots.seq_lens[engine.slots.padding_slot] == 0


@pytest.mark.parametrize("drafter", ["ngram", "suffix+dflash"])
def test_captured_equals_eager_under_preemption(case: Case, drafter: str) -> None:
    """A cache far too small: requests lose their slots and blocks and come back in others."""
    engine = case.engine(drafter, 3, capture=True, num_blocks=22, pipeline_depth=1)
    captured = run(engine, list(case.outputs))
    assert engine.scheduler.num_preemptions > 1
    assert [r.output_token_ids for r in captured] == beginnings(case, captured)
    assert all(r.finish_reason in ("length", "stop") for r in captured)


def test_adaptive_k_is_captured(case: Case) -> None:
    """Every k of the ladder has graphs of its own, and no other k has."""
    engine = case.engine("right", 3, capture=True, num_draft_tokens="auto")
    run(engine, list(case.outputs))
    assert engine.runner.graphs is not None
    assert {shape.block.drafts for shape in engine.runner.graphs.graphs} <= {0, 1, 3, 4}
    assert {shape.block for shape in engine.runner.graphs.graphs} == set(
        engine.timer.steps_by_shape
    )


def test_the_bound_of_a_shape_covers_what_drafting_writes(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DFlash block of 16 at k = 1: attention that stops at L + 2 would not see the rest of the
    block.
    """
    monkeypatch.setitem(
        DRAFTERS, "long_block", lambda case: random_dflash(case.verifier, block_size=16)
    )
    # rounding would hide a bound too small
    monkeypatch.setattr(graphs, "length_bucket", lambda length, longest: length)
    engine = case.engine("long_block", 1, capture=True, num_draft_tokens=1, pipeline_depth=1)
    captured = engine.runner.graphs
    assert captured is not None
    prepare = captured.prepare

    def checked(selection: Selection, k: BlockShape, context: Context) -> Any:
        graph = prepare(selection, k, context)
        (shape,) = (shape for shape, known in captured.graphs.items() if known is graph)
        assert shape.max_seq_len >= selection.requests[0].kv_tokens_bound + 16
        return graph

    captured.prepare = checked  # type: ignore[method-assign, assignment]
    requests = run(engine, list(case.outputs)[:1])
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)


def test_the_recorder_bakes_in_what_a_graph_bakes_in(case: Case) -> None:
    """A drafter whose proposal follows a Python counter is replayed with the value it was captured
    with.
    """

    engine = tiny_engine(case.verifier, NGramDrafter(max_draft_tokens=2), num_draft_tokens=None)
    table, seen = torch.zeros(1, 3, dtype=torch.int64), []

    count = 0

    def counting(batch: DecodeBatch) -> DraftOutput:
        nonlocal count
        count += 1
        return DraftOutput(torch.zeros_like(batch.anchors)[:, None].repeat(1, batch.k) + count)

    def launch() -> None:
        table.copy_(_proposal(counting, engine))

    replay = Recorder().capture(launch, "proposal")
    for _ in range(3):
        replay()
        seen.append(table[0, 0].item())
    assert seen == [2, 2, 2]
    assert count == 2


def _proposal(propose: Callable[[DecodeBatch], DraftOutput], engine: SpecEngine) -> Tensor:
    state = engine.slots
    slots = torch.zeros_like(state.seq_lens[:1])
    batch = state.gather(
        slots,
        state.sampling.select(slots, SamplingPlan.of([])),
        shape=BlockShape(2),
        max_seq_len=64,
    )
    return torch.cat([propose(batch).token_ids, slots[:, None]], dim=1)


def test_replays_read_only_what_keeps_its_place(case: Case) -> None:
    """What an eager step takes from the host is garbage during every replay: no output changes, and
    no slot outside the batch.
    """
    engine = case.engine("dflash", 5, capture=True)
    state = engine.slots
    assert engine.runner.graphs is not None
    prepare = engine.runner.graphs.prepare

    def poisoned(selection: Selection, k: BlockShape, context: Context) -> Any:
        graph = prepare(selection, k, context)
        assert graph is not None
        others = sorted(set(range(6)) - {request.slot for request in selection.requests})

        def replay() -> None:
            lengths = state.seq_lens[others]
            names = ("scheduler", "pool", "results", "timer", "config")
            kept = {name: getattr(engine, name) for name in names}
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Request, "__getattribute__", refuse)
                for name in kept:
                    patch.setattr(engine, name, None)
                selection.tensors = None
                graph.replay()
            assert torch.equal(state.seq_lens[others], lengths)

        return SimpleNamespace(replay=replay, table=graph.table)

    engine.runner.graphs.prepare = poisoned  # type: ignore[method-assign, assignment]
    requests = run(engine, list(case.outputs))
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)
    assert recorder(engine).num_replays == engine.timer.num_steps


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_capturing_moves_no_request(case: Case, drafter: str) -> None:
    """Warm-up and capture in the midst of decoding change nothing but the null block and the
    padding slot.
    """
    engine = case.engine(drafter, 3, capture=True, pipeline_depth=1)
    state = engine.slots
    requests = [
        engine.add_request(prompt, SamplingParams(max_tokens=MAX_TOKENS))
        for prompt in list(case.outputs)[:3]
    ]
    for _ in range(6):
        engine.step()
    assert any(request.num_in_flight for request in requests)

    def snapshot() -> list[Tensor]:
        tensors = [
            state.seq_lens,
            state.anchors,
            state.block_table,
            state.sampling.floats.T,
            state.sampling.ints.T,
        ]
        tensors += (
            [x for x in vars(engine.runner.drafter).values() if isinstance(x, Tensor)]
            if engine.drafter
            else []
        )
        own = [x[: state.padding_slot].clone() for x in tensors]
        return own + [
            side[NULL_BLOCK + 1 :].clone() for layer in engine.kv_cache.layers for side in layer
        ]

    before = snapshot()
    assert engine.runner.graphs is not None
    with torch.inference_mode():
        for shape in [
            graphs.StepShape(n, BlockShape(k), 64, SamplingPlan.of([]))
            for n in (1, 2, 4)
            for k in {0, engine.num_draft_tokens}
        ]:
            engine.runner.graphs._captured(shape)
    assert all(torch.equal(a, b) for a, b in zip(before, snapshot(), strict=True))
    engine.runner.graphs._selection = None
    assert finish(engine, *requests) == [case.outputs[tuple(r.prompt_token_ids)] for r in requests]


def test_padding_stays_where_it_is(case: Case) -> None:
    """Hundreds of replays do not carry the padding slot past its block table, whose entries are all
    the null block.
    """
    engine = case.engine("ngram", 3, capture=True)
    assert engine.runner.graphs is not None
    run(engine, list(case.outputs)[:3])
    state = engine.slots
    assert (state.block_table[state.padding_slot] == NULL_BLOCK).all()
    graph = next(
        graph for shape, graph in engine.runner.graphs.graphs.items() if shape.num_reqs == 4
    )
    engine.runner.graphs._slots.fill_(state.padding_slot)
    with torch.inference_mode():
        for _ in range(200):
            graph.replay()
    assert state.seq_lens[state.padding_slot] == 0


def test_shapes_are_few(case: Case) -> None:
    """Batches of 1 to 5 share four sizes, lengths up to 512 one bound, and the last steps of an
    output the ladder's k.
    """
    engine = case.engine("wrong", 5, capture=True)
    run(engine, list(case.outputs))
    assert engine.runner.graphs is not None
    assert {shape.num_reqs for shape in engine.runner.graphs.graphs} == {1, 2, 4, 8}
    assert {shape.max_seq_len for shape in engine.runner.graphs.graphs} == {512}
    assert {shape.block.drafts for shape in engine.runner.graphs.graphs} <= {0, 1, 3, 4}


def test_too_many_graphs_and_too_large_batches_run_without(
    case: Case, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beyond either limit steps are launched operation by operation, said once, and the outputs are
    the same.
    """
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 1)
    monkeypatch.setattr(graphs, "BATCH_SIZES", (1, 2))
    engine = case.engine("ngram", 5, capture=True)
    del engine.slots.decode_batch  # the refusal
    with caplog.at_level(logging.WARNING):
        requests = run(engine, list(case.outputs))
    assert [r.output_token_ids for r in requests] == beginnings(case, requests)
    assert 0 < recorder(engine).num_replays < engine.timer.num_steps
    assert [record.message for record in caplog.records if "graph" in record.message] == [
        "1 graphs are captured, the most there may be; other shapes run without one"
    ]


def test_a_batch_without_a_graph_leaves_no_facts_behind(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch before and after it is the same, and must not be taken to be sampled as that one
    was.
    """
    engine = case.engine("plain", 2, capture=True)
    graphs_of = engine.runner.graphs
    assert graphs_of is not None
    sampled = engine.add_request([3, 4, 5], SamplingParams(max_tokens=9, temperature=0.8))
    greedy = engine.add_request([3, 4], SamplingParams(max_tokens=9))
    engine.step()
    both = graphs_of.prepare(engine.slots.select([sampled, greedy]), BlockShape(0))
    assert both is not None
    monkeypatch.setattr(graphs, "MAX_GRAPHS", len(graphs_of.graphs))
    assert graphs_of.prepare(engine.slots.select([greedy]), BlockShape(0)) is None
    assert graphs_of.prepare(engine.slots.select([sampled, greedy]), BlockShape(0)) is both


def test_timing_runs_without_graphs(case: Case) -> None:
    """The phases of a step cannot be told apart inside a graph, and their clock would make the
    device wait in a capture.
    """
    engine = case.engine("ngram", 1, capture=True, timing=True)
    with pytest.raises(AssertionError, match="without its graph"):
        run(engine, list(case.outputs)[:1])


def test_no_graphs_on_a_cpu(case: Case) -> None:
    """A CPU has nothing to capture, whatever the config says."""
    assert case.engine("ngram", 1, capture=False, graphs=True).runner.graphs is None


def test_buckets_hold_what_they_are_for() -> None:
    """A bucket smaller than its batch or its sequences would cut requests or keys off."""
    for count in range(1, 700):
        assert buckets.batch_bucket(count) >= count
        assert buckets.length_bucket(count, 600) >= min(count, 600)
    assert buckets.length_bucket(10, 100) == 100
