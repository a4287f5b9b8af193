"""A server's engine that got ready: while requests come and go, no step is held up by a compiler or
a capture.

Compiling and capturing take a made-up clock's time here, and steps take none: what was never
launched before compiles.
"""

import random
from collections.abc import Callable, Hashable
from itertools import chain
from socket import socketpair
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from drafters.ngram import NGramDrafter
from specdec.base.blocks import BlockShape
from specdec.engine.capture import buckets, compiled, graphs, prefill_graphs, warmup
from specdec.engine.capture.graphs import StepGraphs
from specdec.engine.capture.prefill_graphs import PrefillGraphs
from specdec.engine.capture.warmup import get_ready
from specdec.engine.engine import SpecEngine
from specdec.engine.guided import GuidedGraphs
from specdec.engine.launch import Launch
from specdec.engine.policy.timing import StepClock
from specdec.engine.requests.request import Request
from specdec.model.batch import DecodeBatch
from specdec.parallel.group import Group
from specdec.sampling.params import SamplingParams
from specdec.session.link import hub
from specdec.session.session import Session
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.tiny_models import paged_verifier, plain_greedy, plain_model, random_prompts
from tests.helpers.waiting import wait_until

COMPILE, CAPTURE = 1.0, 0.03
"""Made-up seconds."""
MOST = 5
KINDS = (
    SamplingParams(max_tokens=12, ignore_eos=True),
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=0.8, seed=3, ignore_eos=True),
    SamplingParams(max_tokens=15, temperature=1.0, top_p=0.8, top_k=20, seed=4, ignore_eos=True),
)
RARE = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=True)


class Clock:
    """Compiles and captures, which both take its time.

    Attributes:
        now: seconds since the beginning.
        num_captures, num_compiled: how often.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_captures = self.num_compiled = 0
        self._compiled: set[Hashable] = set()

    def compile(self, what: Hashable) -> None:
        """What a first launch of its kind does."""
        if what not in self._compiled:
            self._compiled.add(what)
            self.num_compiled += 1
            self.now += COMPILE

    def capture(self, launch: Callable[[], None], kind: Hashable) -> Callable[[], None]:
        """See `specdec.engine.capture.capture.Capture.capture`."""
        launch()
        self.num_captures += 1
        self.now += CAPTURE
        return launch


@pytest.fixture(autouse=True)
def small_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "_SHORTEST", 16)
    monkeypatch.setattr(prefill_graphs, "MIN_ROWS", 8)


@pytest.fixture(scope="module")
def outputs() -> dict[tuple[int, ...], list[int]]:
    model = plain_model("llama")
    return {tuple(prompt): plain_greedy(model, prompt, 24) for prompt in random_prompts(7, seed=2)}


def engine_for(outputs: dict[tuple[int, ...], list[int]], clock: Clock) -> SpecEngine:
    """Of five requests of up to 72 tokens, whose drafts are copies; steps are captured, as far as
    the clock can tell.
    """
    verifier, drafter = paged_verifier(plain_model("llama")), NGramDrafter(max_draft_tokens=7)
    engine = tiny_engine(
        verifier,
        drafter,
        max_num_seqs=MOST,
        max_model_len=72,
        max_prefill_tokens=24,
        pipeline_depth=1,
        num_draft_tokens="auto",
    )
    runner, step, prefill = engine.runner, engine.runner.step, engine.runner.prefill_step

    def compiling_step(batch: DecodeBatch) -> Any:
        clock.compile((batch.shape, batch.sampling.plan))
        return step(batch)

    def compiling_prefill(batch: Any) -> Any:
        clock.compile("prefill")
        return prefill(batch)

    runner.step = compiling_step  # type: ignore[method-assign]
    runner.prefill_step = compiling_prefill  # type: ignore[method-assign]
    runner.graphs = StepGraphs(clock, engine.slots, runner.step_table)
    runner.guided_graphs = GuidedGraphs(clock, engine.slots, runner)
    runner.prefill_graphs = PrefillGraphs(
        clock,
        engine.slots,
        runner.prefill_step,
        dtype=engine.verifier.dtype,
        max_rows=64,
    )
    return engine


def ready_engine(outputs: dict[tuple[int, ...], list[int]]) -> tuple[SpecEngine, Clock]:
    """One that got ready, and its clock."""
    clock = Clock()
    engine = engine_for(outputs, clock)
    get_ready(engine, lambda *progress: None)
    return engine, clock


def serve(
    engine: SpecEngine,
    outputs: dict[tuple[int, ...], list[int]],
    kinds: tuple[SamplingParams, ...],
    seed: int,
) -> list[Request]:
    """Requests that come at random until all are answered."""
    rng, requests = random.Random(seed), list[Request]()
    coming = [(rng.randrange(30), prompt) for prompt in outputs for _ in range(3)]
    for step in range(400):
        for _, prompt in [one for one in coming if one[0] == step]:
            requests.append(engine.add_request(list(prompt), rng.choice(kinds)))
        if engine.has_work:
            engine.step()
    assert len(requests) == len(coming) and not engine.has_work
    return requests


@pytest.mark.parametrize("seed", range(3))
def test_nothing_holds_up_a_step(outputs: dict[tuple[int, ...], list[int]], seed: int) -> None:
    """Whatever mixture of requests a step has, and however the shape of its blocks is chosen."""
    clock = Clock()
    engine = engine_for(outputs, clock)
    told: list[tuple[str, int, int]] = []
    get_ready(engine, lambda *progress: told.append(progress))
    assert told[-1][1] == told[-1][2] > 20 and {title for title, *_ in told} == {"capturing"}
    ready = clock.now
    assert clock.num_compiled and clock.num_captures
    for request in serve(engine, outputs, KINDS, seed):
        assert not request.error
        if request.plan.all_greedy:
            expected = outputs[tuple(request.prompt_token_ids)]  # up to its end, which is ignored
            output = request.output_token_ids
            assert output[: len(expected)] == expected[: len(output)]
    assert clock.now == ready
    assert {shape.drafts > 0 for shape in engine.timer.steps_by_shape} == {False, True}


def test_a_rank_looks_alone(
    outputs: dict[tuple[int, ...], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other ranks launch nothing then, so nothing is exchanged; they take part in captures."""
    group, taking_part = Group(0, 2, None, None), list[tuple[str, bool]]()
    engine = engine_for(outputs, Clock())
    monkeypatch.setattr(warmup, "group_of", lambda _: group)
    monkeypatch.setattr(
        warmup.Compiled, "look", lambda *_: taking_part.append(("look", group.takes_part))
    )
    monkeypatch.setattr(
        warmup,
        "collective_rpc",
        lambda _, work, *__: taking_part.append((work.__name__, group.takes_part)),
    )
    get_ready(engine, lambda *progress: None)
    assert ("look", False) in taking_part and ("_capture_shape", True) in taking_part
    assert [kind for kind, takes_part in taking_part if not takes_part] == ["look"]


def test_without_getting_ready_steps_are_held_up(outputs: dict[tuple[int, ...], list[int]]) -> None:
    """The same requests, for the clock of the test above must be able to tell."""
    clock = Clock()
    serve(engine_for(outputs, clock), outputs, KINDS, seed=0)
    assert clock.num_compiled > 3 and clock.num_captures > 3


def test_what_is_rare_is_captured_once_it_is_not(outputs: dict[tuple[int, ...], list[int]]) -> None:
    """Steps that no graph serves run without one, and not for ever; shapes are chosen all the
    same.
    """
    engine, clock = ready_engine(outputs)
    captured = clock.num_captures
    engine.add_request(list(next(iter(outputs))), RARE)
    for _ in range(graphs.EAGER):
        engine.step()
    assert clock.num_captures == captured
    for seed in range(6):
        serve(engine, outputs, (RARE,), seed)
    assert clock.num_captures > captured


@pytest.mark.parametrize("plain_too", [False, True])
def test_only_shapes_that_are_captured_are_chosen(
    outputs: dict[tuple[int, ...], list[int]], plain_too: bool
) -> None:
    """And the nearest larger one serves a batch, whose other rows stay as they are. Plain steps are
    missing behind a warm-up whose drafts paid; they may always be had.
    """
    engine, _ = ready_engine(outputs)
    steps, plain = engine.runner.graphs, BlockShape(0)
    assert steps is not None
    request = engine.add_request(list(next(iter(outputs))), KINDS[0])
    engine.step()
    shorter, chain = sorted(s for s in engine.planner.shapes if s.drafts and not s.is_tree)[-2:]
    ready = engine.runner.ready(engine.slots.select([request]))
    assert ready(chain) and ready(shorter) and ready(plain)
    missing = [chain, plain] if plain_too else [chain]
    for shape in [one for one in steps.graphs if one.block in missing]:
        del steps.graphs[shape]
    steps._nearest.clear()
    ready = engine.runner.ready(engine.slots.select([request]))
    assert not ready(chain) and ready(shorter) and ready(plain)
    finish(engine)
    assert chain not in engine.timer.steps_by_shape and len(engine.timer.steps_by_shape) > 1


def test_where_nothing_is_captured_every_shape_may_be_tried(
    outputs: dict[tuple[int, ...], list[int]],
) -> None:
    engine, _ = ready_engine(outputs)
    request = engine.add_request(list(next(iter(outputs))), KINDS[0])
    engine.step()
    assert engine.runner.graphs is not None
    engine.runner.graphs.graphs.clear()
    engine.runner.graphs._nearest.clear()
    ready = engine.runner.ready(engine.slots.select([request]))
    assert all(map(ready, engine.planner.shapes))


def test_shorter_contexts_are_captured_while_nobody_asks(
    outputs: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By a hub whose processes ask for nothing; an answer in between is right."""
    engine, clock = ready_engine(outputs)
    before = clock.num_captures
    prompt = next(iter(outputs))
    monkeypatch.setattr(hub, "LOOK_SECONDS", 0.001)
    ours, theirs = socketpair()
    with Session(engine) as session:
        served: Any = SimpleNamespace(engine=engine, session=session, ranks=None)
        one = hub.Hub(served)
        one.add(hub.Link(ours, 8, 4096))
        serving = Thread(target=one.run)
        serving.start()
        wait_until(lambda: clock.num_captures > before)
        handle = session.submit(prompt, KINDS[0])
        assert handle.result().token_ids[: len(outputs[prompt])] == outputs[prompt][:12]
        wait_until(lambda: not engine.idle_work)
        one.stop()
        theirs.close()
        serving.join()
    steps = engine.runner.graphs
    assert clock.num_captures > before and steps is not None and steps.serving
    bounds = {shape.max_seq_len for shape in steps.graphs}
    assert bounds == set(buckets.lengths(engine.slots.longest))


def test_what_fails_meanwhile_is_told_of(
    outputs: dict[tuple[int, ...], list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In one line, and requests are answered without it."""
    engine = engine_for(outputs, Clock())

    def fail() -> None:
        raise RuntimeError("out of\n memory")

    engine.idle_work.extend([fail, fail])
    with Session(engine) as session:
        for _ in range(3):
            session.work_ahead()
        (record,) = caplog.records
        assert record.getMessage().endswith("asks: out of memory") and not engine.idle_work
        prompt = next(iter(outputs))
        output = session.submit(prompt, KINDS[0]).result().token_ids
        assert output[: len(outputs[prompt])] == outputs[prompt][:12]


def test_what_cannot_be_looked_at_is_told_of(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """While kernels are left out: in one line; the rest is looked at, and nothing is noted as
    compiled.
    """
    compile_ahead = pytest.importorskip("specdec.kernels.triton_compile")
    noted: list[object] = []
    monkeypatch.setattr(compiled, "unavailable_reasons", lambda device: [])
    monkeypatch.setattr(compiled, "needs", str)
    monkeypatch.setattr(compile_ahead, "is_known", lambda what: False)
    monkeypatch.setattr(compile_ahead, "remember", lambda what, kernels: noted.append("known"))
    verifier = SimpleNamespace(device=torch.device("cuda"))
    engine: Any = SimpleNamespace(verifier=verifier, reset=lambda: noted.append("reset"))

    def fail() -> None:
        raise RuntimeError("an index\n of nothing")

    def launch() -> None:
        noted.append(torch.empty(3).tolist())

    def look(*launches: tuple[str, Callable[[], None]]) -> None:
        ahead = compiled.Compiled(engine, lambda *progress: None)
        ahead.look(launches)
        ahead.finish()
        ahead.close()

    bad, good = ("odd", fail), ("even", launch)
    look(bad, good, bad)
    assert noted == [[0.0] * 3, "reset"]
    (record,) = caplog.records
    assert record.getMessage().endswith("odd: an index of nothing, and 1 more")
    look(good)
    assert noted[2:] == [[0.0] * 3, "reset", "known"] and len(caplog.records) == 1
    look(bad)
    assert caplog.records[1].getMessage().endswith("odd: an index of nothing")


@pytest.mark.parametrize("what", ["attention", "drafter", "environment"])
def test_other_kernels_are_looked_for_again(
    outputs: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    what: str,
) -> None:
    """What was noted as compiled holds for one backend, one drafter and one choice of kernels."""
    engine = engine_for(outputs, Clock())
    attention = engine.verifier.attention
    before = compiled.needs(engine)
    assert before == compiled.needs(engine_for(outputs, Clock()))
    if what == "attention":
        other = type("Other", (type(attention),), {})(attention.spec)
        monkeypatch.setattr(engine.verifier, "attention", other)
    elif what == "drafter":
        monkeypatch.setattr(NGramDrafter, "weight_bytes", 2**20)
    else:
        monkeypatch.setenv("SPECDEC_KERNELS", "-argmax")
    assert compiled.needs(engine) != before


def test_not_too_many_are_captured_beside(
    outputs: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, clock = ready_engine(outputs)
    before = clock.num_captures
    assert engine.runner.graphs is not None
    monkeypatch.setattr(warmup, "IDLE_GRAPHS", engine.runner.graphs.num_captured + 2)
    while engine.idle_work:
        engine.idle_work.popleft()()
    assert clock.num_captures == before + 2


def test_what_is_rare_can_be_launched(outputs: dict[tuple[int, ...], list[int]]) -> None:
    """Batches that want more, or follow a grammar: a server compiles their kernels, too."""
    engine = engine_for(outputs, Clock())
    plans = set()
    step = engine.runner.decode

    def noted(launch: Launch, clock: StepClock) -> None:
        plans.add(launch.selection.plan)
        step(launch, clock)

    engine.runner.decode = noted  # type: ignore[method-assign]
    for shape in warmup._rare(engine):
        shape.eager()
    assert {plan.logprobs for plan in plans} == {plan.guided for plan in plans} == {False, True}
    assert {plan.penalized and plan.counted and plan.edits > 0 for plan in plans} == {False, True}
    serve(engine, outputs, KINDS[:1], seed=0)


def test_a_step_is_captured_as_soon_as_its_kernels_are_there(
    outputs: dict[tuple[int, ...], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Not before, and not when all are; those of nobody's steps are waited for at the end."""
    clock = Clock()
    engine = engine_for(outputs, clock)
    noted: list[tuple[str, int]] = []
    monkeypatch.setattr(compiled.Compiled, "look", lambda self, all: noted.append(("", len(all))))
    monkeypatch.setattr(
        compiled.Compiled, "wait", lambda self, index: noted.append(("wait", index))
    )
    monkeypatch.setattr(compiled.Compiled, "finish", lambda self: noted.append(("finish", 0)))
    monkeypatch.setattr(compiled.Compiled, "close", lambda self: noted.append(("close", 0)))
    with caplog.at_level("INFO"):
        seconds = get_ready(engine, lambda title, done, _: noted.append((title, done)))
    shapes = warmup.ready_shapes(engine)
    captured = [index for index, shape in enumerate(shapes) if shape.captured]
    assert noted[0][1] > len(shapes)
    pairs = ((("wait", index), ("capturing", n)) for n, index in enumerate(captured, start=1))
    assert noted[1:] == [*chain.from_iterable(pairs), ("finish", 0), ("close", 0)]
    assert seconds.looking >= 0 and seconds.capturing > 0 == seconds.compiling
    assert "capturing" in caplog.text
