"""The choice of k within an engine: it learns from steps, is shown, and never changes an output."""

import random
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest

from drafters.ngram import NGramDrafter
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.metrics import AcceptanceStats, pooled
from specdec.cli import generate as generate_command
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.engine import SpecEngine
from specdec.engine.policy.block_choice import BlockChoice
from specdec.engine.policy.shapes import ladder, shapes
from specdec.engine.requests.request import Request
from specdec.model.batch import DecodeBatch, ForwardInput
from specdec.model.core import Drafter, DraftOutput, Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish
from tests.helpers.fake_clock import FakeClock
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_models import (
    paged_verifier,
    plain_greedy,
    plain_model,
    random_dflash,
    random_prompts,
)

MOST = 15


MAX_TOKENS = 40


@contextmanager
def recorded(engine: SpecEngine) -> Iterator[dict[tuple[int, int], list[int]]]:
    """Proposals by prompt slot and position L of the anchor."""
    proposals: dict[tuple[int, int], list[int]] = {}
    assert engine.runner.drafter is not None
    propose = engine.runner.drafter.propose

    def kept(batch: DecodeBatch) -> DraftOutput:
        draft = propose(batch)
        for slot, length, row in zip(
            batch.slots.tolist(), batch.seq_lens.tolist(), draft.token_ids.tolist(), strict=True
        ):
            proposals[slot, length] = row
        return draft

    engine.runner.drafter.propose = kept  # type: ignore[method-assign]
    yield proposals


class Case:
    """A target, prompts and their greedy outputs."""

    def __init__(self) -> None:
        model = plain_model("llama")
        self.prompts = random_prompts(3, seed=4)
        self.outputs = {tuple(p): plain_greedy(model, p, MAX_TOKENS) for p in self.prompts}
        self.verifier = paged_verifier(model)

    def engine(self, drafter: Drafter | None, **changes: Any) -> SpecEngine:
        cache = CacheConfig(memory_bytes=2**22)
        return SpecEngine(
            self.verifier,
            drafter,
            EngineConfig(max_num_seqs=3, cache=cache, **{"num_draft_tokens": None, **changes}),
        )

    def run(
        self, engine: SpecEngine, prompts: list[list[int]] | None = None, **sampling: Any
    ) -> list[Request]:
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **sampling)
        requests = [engine.add_request(prompt, params) for prompt in prompts or self.prompts]
        finish(engine)
        return requests


@pytest.fixture(scope="module")
def case() -> Case:
    return Case()


@pytest.mark.parametrize("copies", [True, False], ids=["ngram", "scripted"])
def test_the_outlook_comes_to_the_choice(case: Case, copies: bool) -> None:
    """Before each step, and with its outcome; that of a drafter that has none is 0. No output
    changes.
    """
    drafter = NGramDrafter() if copies else ScriptedDrafter(case.outputs, 3)
    engine = case.engine(drafter, num_draft_tokens="auto")
    assert engine.planner.choice
    with (
        patch.object(engine.planner.choice, "choose", wraps=engine.planner.choice.choose) as choose,
        patch.object(
            engine.planner.choice, "observe", wraps=engine.planner.choice.observe
        ) as observe,
    ):
        requests = case.run(engine)
    for request, prompt in zip(requests, case.prompts, strict=True):
        expected = case.outputs[tuple(prompt)]  # up to a stop token
        assert request.output_token_ids[: len(expected)] == expected
    told, learned = (
        [call.kwargs["expected_accepted"] for call in mock.call_args_list]
        for mock in (choose, observe)
    )
    assert told == learned and (max(told) > 1) is copies and min(told) == 0


DRAFTERS: dict[str, Callable[[Case], Drafter]] = {
    "ngram": lambda case: NGramDrafter(max_draft_tokens=4),
    "dflash": lambda case: random_dflash(case.verifier, block_size=5),
    "right": lambda case: ScriptedDrafter(case.outputs, 4),
    "wrong": lambda case: ScriptedDrafter(case.outputs, 4, [{0}, {2}]),
}


class AnySchedule(BlockChoice):
    """Chooses at random."""

    def __init__(self, most: int, seed: int) -> None:
        super().__init__(shapes(most, trees=0))
        self.rng = random.Random(seed)

    def choose(self, num_reqs: int, **_: Any) -> BlockShape:
        return self.rng.choice(self.arms)


SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 3}


# Every pair of drafter, sampling and depth.
SCHEDULED = [
    (drafter, sampling, (i + j) % 2)
    for i, drafter in enumerate(DRAFTERS)
    for j, sampling in enumerate(({}, SAMPLED))
]


@pytest.mark.parametrize(("drafter", "sampling", "depth"), SCHEDULED)
def test_no_schedule_of_k_changes_an_output(
    case: Case, drafter: str, sampling: dict[str, Any], depth: int
) -> None:
    """Any order of k, 0 among them, gives exactly the tokens of plain decoding."""
    plain = [request.output_token_ids for request in case.run(case.engine(None), **sampling)]
    for seed in range(3):
        engine = case.engine(DRAFTERS[drafter](case), num_draft_tokens="auto", pipeline_depth=depth)
        engine.planner.choice = AnySchedule(4, seed)
        assert [request.output_token_ids for request in case.run(engine, **sampling)] == plain
        assert {shape.drafts for shape in engine.timer.steps_by_shape} == {0, 1, 3, 4}


def test_surplus_steps_teach_nothing(case: Case) -> None:
    """A request that ended while its next step was in flight had nothing left to accept there."""
    engine = case.engine(DRAFTERS["right"](case), num_draft_tokens="auto", pipeline_depth=1)
    taught: list[int] = []
    num_rows = 0

    class Listening(AnySchedule):
        def observe(
            self,
            num_reqs: int,
            shape: BlockShape,
            num_accepted: Sequence[int],
            seconds: float | None,
            **_: Any,
        ) -> None:
            nonlocal num_rows
            num_rows += num_reqs
            taught.extend(num_accepted)

    engine.planner.choice = Listening(4, 1)
    requests = case.run(engine)
    assert len(taught) == sum(len(request.num_accepted) for request in requests) < num_rows


@pytest.mark.parametrize("drafter", ["ngram", "dflash"])
def test_plain_steps_keep_the_drafters_context(case: Case, drafter: str) -> None:
    """After steps of k = 0 the drafter proposes what it would have proposed had it drafted all
    along.
    """

    def proposals(choose: Callable[[int], int]) -> dict[tuple[int, int], list[int]]:
        engine = case.engine(DRAFTERS[drafter](case), num_draft_tokens="auto")
        with recorded(engine) as found:
            choice = engine.planner.choice
            assert choice is not None
            own = lambda num_reqs, **_: BlockShape(choose(num_reqs))  # noqa: E731
            choice.choose = own  # type: ignore[method-assign]
            case.run(engine)
        return found

    # the first of two brings the context up to date
    plan = iter([0, 0, 0, 4, 4, 0, 4, 4, 0, 0] * 100)
    always, sometimes = proposals(lambda num_reqs: 4), proposals(lambda num_reqs: next(plan))
    common = [key for key in sometimes if key in always and len(sometimes[key]) == len(always[key])]
    assert len(common) >= 10
    assert [sometimes[key] for key in common] == [always[key] for key in common]


def test_a_smaller_k_only_cuts_the_drafts(case: Case) -> None:
    """Where DFlash drafts at a chosen k what it drafts at the largest, acceptance by position does
    not depend on the choices.
    """

    def proposals(**changes: Any) -> tuple[dict[tuple[int, int], list[int]], SpecEngine]:
        drafter = random_dflash(case.verifier, block_size=MOST + 1)
        engine = case.engine(drafter, **changes)
        with recorded(engine) as found:
            if engine.planner.choice:
                engine.planner.choice = AnySchedule(MOST, seed=1)
            case.run(engine)
        return found, engine

    always, _ = proposals(num_draft_tokens=MOST)
    chosen, engine = proposals(num_draft_tokens="auto")
    assert set(engine.timer.steps_by_shape) == set(map(BlockShape, ladder(MOST)))
    for key in chosen.keys() & always.keys():
        both = min(len(chosen[key]), len(always[key]))
        assert chosen[key][:both] == always[key][:both]
    assert sum(len(chosen[key]) < len(always[key]) for key in chosen.keys() & always.keys()) > 10


class TargetClock(FakeClock):
    """A clock that only forwards of the target move."""

    def __init__(self, verifier: Verifier, patch: pytest.MonkeyPatch, per_row: float) -> None:
        super().__init__()
        forward = verifier.forward

        def timed(rows: ForwardInput, caches: Any, aux: Any = ()) -> VerifyOutput:
            self.now += 1.0 + per_row * rows.metadata.max_query_len
            return forward(rows, caches, aux)

        patch.setattr(verifier, "forward", timed)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("wrong_at", "per_row", "mostly"),
    [({0}, 0.1, 0), (set(), 0.1, 8), ({1}, 9.0, 1), ({2}, 0.25, 3)],
    ids=str,
)
def test_engine_adapts(
    case: Case,
    monkeypatch: pytest.MonkeyPatch,
    wrong_at: set[int],
    per_row: float,
    mostly: int,
    depth: int,
) -> None:
    """Wrong drafts, right ones, one right draft where rows are dear, two where they are not:
    outputs stay, k follows.
    """
    engine = case.engine(
        ScriptedDrafter(case.outputs, 8, [wrong_at]), num_draft_tokens="auto", pipeline_depth=depth
    )
    clock = TargetClock(case.verifier, monkeypatch, per_row)
    engine.clock = engine.results._clock = clock  # type: ignore[assignment]
    for _ in range(8):
        for request in case.run(engine, case.prompts[:1]):
            whole = case.outputs[tuple(request.prompt_token_ids)]
            assert request.output_token_ids[: len(whole)] == whole
    engine.timer.reset()
    requests = case.run(engine, case.prompts[:1])
    assert engine.timer.steps_by_shape.most_common(1)[0][0] == BlockShape(mostly)
    assert engine.planner.choice is not None
    fastest, *others = engine.planner.choice.estimates()
    assert fastest.shape == str(mostly) and fastest.measured and fastest.requests == 1
    assert fastest.tokens_per_second == pytest.approx(fastest.tokens / fastest.milliseconds * 1000)
    assert 1 < len(others) < len(engine.planner.shapes), "what is much larger is not tried"
    assert (
        sum(engine.timer.steps_by_shape.values())
        == engine.timer.num_steps
        >= len(requests[0].num_drafted)
    )


def test_each_request_is_told_as_new_once(case: Case) -> None:
    """Also where it joins others, or takes the place of one that has left."""
    engine = case.engine(ScriptedDrafter(case.outputs, 8), num_draft_tokens="auto")
    assert engine.planner.choice is not None
    choose, told = engine.planner.choice.choose, list[int]()

    def noted(num_reqs: int, *, fresh: int, **others: Any) -> BlockShape:
        assert 0 <= fresh <= num_reqs
        told.append(fresh)
        return choose(num_reqs, fresh=fresh, **others)

    engine.planner.choice.choose = noted  # type: ignore[method-assign, assignment]
    case.run(engine, case.prompts)
    case.run(engine, case.prompts[:2])
    assert sum(told) == 5 and told.count(0) > 5


@pytest.mark.parametrize("depth", [0, 1])
def test_the_hosts_time_counts_between_steps(
    case: Case, monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    """Catches a k whose steps look short because the host's part is left out, and prefill that is
    taken for a step's time.
    """
    engine = case.engine(None, pipeline_depth=depth)
    clock = TargetClock(case.verifier, monkeypatch, per_row=0.0)
    engine.clock = engine.results._clock = clock  # type: ignore[assignment]
    schedule, receive = engine.scheduler.schedule, engine.results.receive
    times: list[float | None] = []

    def slow_schedule(*args: Any, **options: Any) -> Any:
        clock.now += 5
        return schedule(*args, **options)

    def listen(leave: int = 0) -> Any:
        for step in receive(leave):
            times.append(step.seconds)
            yield step

    monkeypatch.setattr(engine.scheduler, "schedule", slow_schedule)
    monkeypatch.setattr(engine.results, "receive", listen)

    class SlowCapture:
        def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
            launch()
            clock.now += 100
            return launch

    graphs = StepGraphs(SlowCapture(), engine.slots, engine.runner.step_table)
    for engine.runner.graphs in (None, graphs):
        for prompt in case.prompts[:2]:
            times.clear()
            case.run(engine, [prompt])
            assert times[0] is None  # the first token
            assert times[1] == 1.0 and set(times[2:]) == {6.0}
    times.clear()
    engine.add_request(case.prompts[0], SamplingParams(max_tokens=20, ignore_eos=True))
    while engine.has_work:
        engine.step()
        if len(times) == 8:
            graphs.graphs.clear()  # captured anew between two steps
    assert times[1] == 1.0 and 1.0 in times[2:] and set(times[2:]) == {1.0, 6.0}


def test_the_choice_is_shown(case: Case) -> None:
    """Catches a choice that nobody sees."""
    engine = case.engine(ScriptedDrafter(case.outputs, 4), num_draft_tokens="auto")
    engine.planner.choice = AnySchedule(4, seed=0)
    requests = case.run(engine)
    counts = ", ".join(
        f"{shape} in {count:,} steps"
        for shape, count in sorted(engine.timer.steps_by_shape.items())
    )
    assert f"drafts offered: {counts}" in generate_command.format_timing(engine.timer)
    stats = pooled(AcceptanceStats(r.num_drafted, r.num_accepted, r.num_emitted) for r in requests)
    histogram = stats.to_dict()["drafted_histogram"]
    assert [k for k, count in enumerate(histogram) if count] == [0, 1, 3, 4]
    assert sum(histogram) == stats.num_steps


def test_k_is_fixed_unless_asked_for(case: Case) -> None:
    """With a number, every step has the k it was given, but for the last ones of an output."""
    engine = case.engine(ScriptedDrafter(case.outputs, 8, [{0}]), num_draft_tokens=3)
    (request,) = case.run(engine, case.prompts[:1])
    assert engine.planner.choice is None
    assert set(request.num_drafted[:-4]) == {3}
    assert case.engine(None, num_draft_tokens="auto").planner.choice is None


def test_what_the_checkpoint_recommends_is_the_drafters_number(case: Case) -> None:
    """And more of them can be asked for, up to what the drafter gives."""
    for asked, drafted in ((None, 2), (5, 5)):
        drafter = ScriptedDrafter(case.outputs, 8, [{0}])
        drafter.usual_draft_tokens = 2
        engine = case.engine(drafter, num_draft_tokens=asked)
        (request,) = case.run(engine, case.prompts[:1])
        assert set(request.num_drafted[:-8]) == {drafted}
