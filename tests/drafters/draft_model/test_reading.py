"""A draft model reads what drafts need: nothing of requests for which they do not pay."""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from drafters.draft_model.drafter import DraftModel
from drafters.sequential.drafter import MAX_DEFERRED
from drafters.sequential.network import Rows
from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.engine.engine import SpecEngine
from specdec.engine.launch import Launch
from specdec.engine.policy.block_choice import FEW
from specdec.engine.requests.request import Request
from specdec.engine.selection import Selection
from specdec.kv_cache import prefix_hashes
from specdec.model.batch import DecodeBatch, ForwardInput
from specdec.model.core import DraftOutput, Verifier, VerifyOutput
from specdec.sampling.params import SamplingParams
from tests.drafters.draft_model.test_drafter import K, draft_model
from tests.drafters.sequential.toy import check_drafts, noted_run
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.fake_clock import FakeClock
from tests.helpers.tiny_models import paged_verifier, plain_model, random_prompts

BLOCK = 4
WAVES = 12


class Run(NamedTuple):
    """What came of a run.

    Attributes:
        texts: all tokens of every request.
        rows: that the draft model has written.
        contexts: of all steps.
        steps: how many had which shape.
    """

    texts: list[list[int]]
    rows: int
    contexts: list[str]
    steps: Counter[BlockShape]


def run(model: str | None, num_reqs: int, *, late: bool = True, depth: int = 1) -> Run:
    """Waves of prompts in a world where a draft model's forward takes a third of the target's.

    Args:
        model: that drafts; the target's own weights are always right, others never; None is plain.
        num_reqs: at once.
        late: the draft model may read late.
        depth: steps launched before the oldest result is read.
    """
    target, clock, rows = paged_verifier(plain_model("llama")), FakeClock(), 0
    drafter = None
    forward = target.forward

    def timed(batch: ForwardInput, caches: Any, aux: Sequence[int] = ()) -> VerifyOutput:
        clock.now += 1 + 0.005 * batch.metadata.num_tokens
        return forward(batch, caches, aux)

    target.forward = timed  # type: ignore[method-assign, assignment]
    if model is not None:
        weights = paged_verifier(plain_model("llama") if model == "right" else plain_model("qwen3"))
        drafter = DraftModel(weights, target, max_draft_tokens=K)
        drafter.reads_late = late
        reading = drafter.network.forward

        def counted(batch: Rows, caches: Sequence[Any], wanted: Any) -> torch.Tensor:
            nonlocal rows
            rows += int((batch.metadata.slot_mapping >= BLOCK).sum())
            clock.now += (1 + 0.005 * batch.metadata.num_tokens) / 3
            return reading(batch, caches, wanted)

        drafter.network.forward = counted  # type: ignore[method-assign, assignment]
    options: dict[str, Any] = {"num_draft_tokens": "auto" if drafter else None}
    cache = CacheConfig(memory_bytes=2**23)
    config = EngineConfig(
        max_num_seqs=num_reqs, max_prefill_tokens=64, cache=cache, pipeline_depth=depth, **options
    )
    engine = SpecEngine(target, drafter, config)
    engine.clock = engine.results._clock = clock  # type: ignore[assignment]
    contexts, step = list[str](), engine.runner.step

    def noted(batch: DecodeBatch) -> Any:
        contexts.append(batch.context)
        return step(batch)

    engine.runner.step = noted  # type: ignore[method-assign]
    texts = list[list[int]]()
    for wave in range(WAVES):
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        prompts = random_prompts(num_reqs, seed=wave)
        requests = [engine.add_request(prompt, sampling) for prompt in prompts]
        finish(engine)
        texts += [request.token_ids for request in requests]
    return Run(texts, rows, contexts, engine.timer.steps_by_shape)


@cache
def plain(num_reqs: int) -> list[list[int]]:
    """What `run` writes without drafts."""
    return run(None, num_reqs).texts


@pytest.mark.parametrize("depth", [0, 1])
def test_what_does_not_pay_is_not_read(depth: int) -> None:
    """Neither prompts nor answers, but for a few of a trial."""
    found, before = (run("wrong", 8, late=late, depth=depth) for late in (True, False))
    num_tokens = sum(map(len, found.texts))
    assert found.texts == before.texts == plain(8)
    assert before.rows > 0.9 * num_tokens and found.rows < 0.3 * num_tokens
    assert 0 < sum(count for shape, count in found.steps.items() if shape.drafts) < 50


def test_a_lone_request_for_which_drafts_pay_is_read_as_before() -> None:
    """In the same steps."""
    found, before = (run("right", 1, late=late) for late in (True, False))
    assert found == before and found.texts == plain(1)
    assert found.rows > sum(map(len, found.texts)) and "later" in found.contexts


def test_many_requests_for_which_drafts_pay_are_read() -> None:
    """Once that is known, with their prompts."""
    found, before = (run("right", 8, late=late) for late in (True, False))
    assert found.texts == before.texts
    assert found.rows > 0.95 * before.rows
    plain, most = found.steps[BlockShape(0)], 3 * before.steps[BlockShape(0)]
    assert plain <= most < sum(found.steps.values()) / 4


def unread(engine: SpecEngine) -> None:
    """Lets prompts be read late."""
    assert engine.planner.choice is not None
    engine.planner.choice.pays = lambda *_, **__: False  # type: ignore[method-assign]


@pytest.fixture(scope="module")
def target() -> Verifier:
    return paged_verifier(plain_model("llama"))


PATTERN = [0, K, K, *[0] * (MAX_DEFERRED + 4), K, 1, *[0] * (2 * MAX_DEFERRED), K]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(("name", "caching"), [("qwen3", True), ("qwen3", False), ("llama", False)])
def test_what_is_read_late_drafts_as_before(
    target: Verifier, depth: int, name: str, caching: bool
) -> None:
    """Prompts and answers, in pieces, with drafts wrong or, by the target's own weights, right;
    catches rows that are missing or of another position.
    """
    model, drafter = draft_model(target, name, seed=0)
    cache = CacheConfig(memory_bytes=2**22, prefix_caching=caching)
    sampling = SamplingParams(max_tokens=90, ignore_eos=True)
    options: dict[str, Any] = {"num_draft_tokens": "auto", "pipeline_depth": depth, "cache": cache}
    _, requests, noted = noted_run(
        target,
        drafter,
        random_prompts(5),
        shapes=PATTERN,
        sampling=sampling,
        prepare=unread,
        **options,
    )
    assert min(len(request.output_token_ids) for request in requests) == 90
    check_drafts(model, drafter.network, noted[::3], least=15)


def test_late_readers_share_prefixes_and_are_preempted(target: Verifier) -> None:
    """A cache too small for all, and prompts that begin alike, of which some are read."""
    model, drafter = draft_model(target)
    specs = [*target.kv_specs, *drafter.kv_specs]
    memory = BLOCK * 44 * sum(spec.bytes_per_token(torch.float32) for spec in specs)
    shared = random_prompts(1, seed=3, longest=40)[0] * 3
    prompts = [[*shared[:24], *tail] for tail in random_prompts(6, longest=8)]
    engine, _, noted = noted_run(
        target,
        drafter,
        prompts,
        shapes=[*[0] * 20, K, K, K, 0] * 20,
        sampling=SamplingParams(max_tokens=50, ignore_eos=True),
        prepare=unread,
        cache=CacheConfig(memory_bytes=memory),
        num_draft_tokens="auto",
    )
    assert engine.scheduler.num_preemptions > 0 and engine.prefix_counts.found > 0
    check_drafts(model, drafter.network, noted, least=10)


class Served:
    """An engine whose shapes are given, and the blocks that the draft model writes to.

    Attributes:
        engine: with a draft model.
        pays, tries, shape: what its choice says next.
        written: cache slots, one for each row written.
    """

    def __init__(self, target: Verifier, num_reqs: int) -> None:
        _, drafter = draft_model(target)
        forward, self.written = drafter.network.forward, list[int]()
        self.pays, self.tries, self.shape = True, False, BlockShape(K)
        self.engine = tiny_engine(target, drafter, num_draft_tokens="auto", max_num_seqs=num_reqs)

        def noted(batch: Rows, caches: Sequence[Any], wanted: Any) -> torch.Tensor:
            slots = batch.metadata.slot_mapping
            self.written += slots[slots >= BLOCK].tolist()
            return forward(batch, caches, wanted)

        def choose(*_: Any, **__: Any) -> BlockShape:
            choice.tries = self.tries
            return self.shape

        drafter.network.forward = noted  # type: ignore[method-assign, assignment]
        choice: Any = self.engine.planner.choice
        choice.pays, choice.choose = lambda *_, **__: self.pays, choose

    def run(self, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
        """Texts of requests at once; `written` is what was for these."""
        self.written.clear()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        requests = [self.engine.add_request(prompt, sampling) for prompt in prompts]
        finish(self.engine)
        return [request.token_ids for request in requests]


def test_blocks_say_whether_they_were_read(target: Verifier) -> None:
    """A prompt that was cached without the draft model is read for the next one, and no more."""
    served, prompt = Served(target, 1), random_prompts(1, seed=3, longest=40)[0] * 2
    counts = list[int]()
    for pays in (False, True, True):
        served.pays, served.shape = pays, BlockShape(K * pays)
        served.run([prompt], 2)
        counts.append(len(served.written))
    assert counts[0] == 0 and counts[1] >= len(prompt) > 2 * counts[2]


def test_a_block_that_is_given_away_says_no_more(target: Verifier) -> None:
    """Its next owner's tokens are read with its prompt, so not again."""
    served = Served(target, 1)
    pool = served.engine.pool
    served.pays, served.shape = False, BlockShape(0)
    served.run(random_prompts(1, seed=3, longest=40), 2)
    assert not served.written and pool.unread
    pool.allocate(pool.num_free)
    assert not pool.unread


def test_answers_that_were_not_read_are_found(target: Verifier) -> None:
    """The target's part of the cache serves the next turn."""
    served, prompt = Served(target, 1), random_prompts(1, seed=3, longest=40)[0]
    served.pays, served.shape = False, BlockShape(0)
    (text,) = served.run([prompt], 4 * MAX_DEFERRED)
    served.run([[*text, 5]], 2)
    assert served.engine.prefix_counts.found > len(text) - 2 * BLOCK


def test_drafts_that_mean_nothing_are_written_to_no_shared_block(target: Verifier) -> None:
    """Of requests that a trial leaves out, whose prompts others have read; the last ones in their
    slots were short.
    """
    served, shared = Served(target, 2 * FEW), random_prompts(1, seed=3, longest=40)[0][:24]
    prompts = [[*shared, token] for token in range(30, 30 + 2 * FEW)]
    texts = served.run(prompts, 9)
    served.run([[token] for token in range(30, 30 + 2 * FEW)], 2)
    served.pays, served.tries = False, True
    kept = {block * BLOCK + n for block in _cached(served, shared) for n in range(BLOCK)}
    assert len(kept) == len(shared) == 24 and served.run(prompts, 9) == texts
    assert served.written and kept.isdisjoint(served.written)


def _cached(served: Served, tokens: list[int]) -> list[int]:
    pool = served.engine.pool
    blocks = pool.match(prefix_hashes(tokens, BLOCK))
    pool.release(blocks)
    return blocks


def test_whom_a_trial_passes_over_lacks_more_than_was_put_off(target: Verifier) -> None:
    """A step with drafts is none that the draft model makes up for later."""
    engine = Served(target, 2 * FEW).engine
    sampling = SamplingParams(max_tokens=9)
    requests = [engine.new_request([5, 6], sampling) for _ in range(FEW + 1)]
    for request in requests[1:]:
        request.num_deferred = 2
    launch = Launch(Selection(requests), BlockShape(K), tries=True)
    engine.reading.plan(launch)
    assert launch.context == "now" and launch.left_out == {*requests[1:]}
    assert [request.unread for request in requests] == [False, *[True] * FEW]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_trial_reads_a_few_and_learns_of_them_alone(target: Verifier, temperature: float) -> None:
    """Those that were read draft as ever; the output of all is that of plain decoding."""
    model, drafter = draft_model(target)
    sampling = SamplingParams(max_tokens=60, ignore_eos=True, temperature=temperature, seed=3)
    prompts, told, right = random_prompts(2 * FEW), list[int](), set[tuple[Request, int]]()

    def trying(engine: SpecEngine) -> None:
        unread(engine)
        choice, bound = engine.planner.choice, engine.runner.drafter
        assert choice is not None and bound is not None
        choice.tries = True
        observe: Callable[..., None] = choice.observe
        propose = bound.propose

        def noting(
            num_reqs: int, shape: BlockShape, num_accepted: Sequence[int], *about: Any, **more: Any
        ) -> None:
            told.extend([len(num_accepted)] * (shape.drafts > 0))
            observe(num_reqs, shape, num_accepted, *about, **more)

        def proposing(batch: DecodeBatch) -> DraftOutput:
            lengths = dict(zip(batch.slots.tolist(), batch.seq_lens.tolist(), strict=True))
            working = engine.scheduler.working
            right.update((one, lengths[one.slot]) for one in working if not one.unread)
            return propose(batch)

        choice.observe, bound.propose = noting, proposing  # type: ignore[method-assign]

    _, requests, noted = noted_run(
        target,
        drafter,
        prompts,
        shapes=[*[0] * 20, K, K, K, *[0] * 20, K, K, 0],
        sampling=sampling,
        prepare=trying,
        max_num_seqs=2 * FEW,
        max_prefill_tokens=512,
        num_draft_tokens="auto",
    )
    kept = [one for one in noted if (one.request, one.length) in right]
    assert set(told) == {FEW} and len(kept) == len(noted) / 2
    check_drafts(model, drafter.network, kept, least=2 * FEW)
    plain = tiny_engine(target)
    for request, prompt in zip(requests, prompts, strict=True):
        alone = plain.add_request(prompt, sampling)
        finish(plain)
        assert request.output_token_ids == alone.output_token_ids
