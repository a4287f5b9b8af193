"""Continuous batching under pressure: arrivals, cancellations, preemption, shared prefixes, late
results.
"""

import random
from typing import Any

import pytest
import torch

from specdec.base.blocks import BlockShape
from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request, Status
from specdec.engine.requests.scheduler import Chunk, Scheduler
from specdec.engine.selection import Selection
from specdec.kv_cache import BlockPool, blocks_for, prefix_hashes
from specdec.model.batch import DecodeBatch
from specdec.model.core import Drafter, DraftOutput, Verifier
from specdec.sampling.params import SamplingParams
from tests.helpers.engines import finish, tiny_engine
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash

BLOCK = 4
NUM_REQUESTS = 100


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    """One tiny target for all tests here."""
    return paged_verifier(plain_model("llama"), BLOCK)


def cache_of(
    verifier: Verifier, num_blocks: int, drafter: Drafter | None = None, **changes: object
) -> EngineConfig:
    """A config whose cache has exactly `num_blocks` blocks, the null block included."""
    specs = [*verifier.kv_specs, *(drafter.kv_specs if drafter else [])]
    block_bytes = BLOCK * sum(spec.bytes_per_token(verifier.dtype) for spec in specs)
    return EngineConfig(
        cache=CacheConfig(memory_bytes=num_blocks * block_bytes),
        **{"num_draft_tokens": None, **changes},  # type: ignore[arg-type]
    )


def alone(verifier: Verifier, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Output of a request that has an engine to itself, without a drafter."""
    engine = tiny_engine(verifier, num_draft_tokens=None, max_num_seqs=1)
    return finish(engine, engine.add_request(prompt, sampling))[0]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.slow
def test_hundreds_of_requests_in_a_pool_far_too_small(verifier: Verifier, depth: int) -> None:
    """Random arrivals, lengths, sampling and cancellations; every output equals its single-request
    output, the pool ends empty.
    """
    rng = random.Random(depth)
    stems = [[rng.randrange(3, VOCAB) for _ in range(12)] for _ in range(3)]
    cases = []
    for i in range(NUM_REQUESTS):
        stem = rng.choice(stems)[: rng.randrange(13)]
        prompt = stem + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        fields: dict[str, Any] = {"temperature": 0.9, "top_k": 30} if i % 3 == 0 else {}
        fields |= {"repetition_penalty": 1.2} if i % 7 == 0 else {}
        cases.append((prompt, SamplingParams(max_tokens=rng.randrange(1, 24), seed=i, **fields)))
    expected = [alone(verifier, prompt, sampling) for prompt, sampling in cases]
    script = ScriptedDrafter(
        {tuple(p): e for (p, _), e in zip(cases, expected, strict=True)}, 3, [set(), {0}, {1}, {2}]
    )
    engine = SpecEngine(
        verifier,
        script,
        cache_of(verifier, 22, max_num_seqs=6, max_prefill_tokens=9, pipeline_depth=depth),
    )
    requests: list[Request] = []
    cancelled: set[int] = set()
    pending = list(cases)
    while pending or engine.has_work:
        while pending and rng.random() < 0.4:
            prompt, sampling = pending.pop(0)
            requests.append(engine.add_request(prompt, sampling))
        if requests and rng.random() < 0.03:
            victim = rng.choice(requests)
            if victim.finish_reason is None:
                engine.abort(victim)
                cancelled.add(victim.request_id)
        engine.step()
    assert engine.scheduler.num_preemptions > 10
    assert 2 < len(cancelled) < NUM_REQUESTS // 2
    for request, output in zip(requests, expected, strict=True):
        if request.request_id in cancelled:
            assert request.finish_reason == "cancelled"
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == output, request.request_id
    assert engine.pool.num_used == 0
    assert not len(engine.results)


ROWS = 16
"""Cache positions that drafting writes in the tests of a block far longer than k."""


def rows_of_drafting(engine: SpecEngine, batch: DecodeBatch) -> set[int]:
    """Cache slots that drafting may write: `ROWS` positions from L on, in blocks that are the
    request's and nobody else's.
    """
    requests = {request.slot: request for request in engine.scheduler.working}
    held = [block for request in requests.values() for block in request.block_ids]
    allowed: set[int] = set()
    for slot, start, table in zip(
        batch.slots.tolist(), batch.seq_lens.tolist(), batch.block_table.tolist(), strict=True
    ):
        blocks, end = requests[slot].block_ids, start + ROWS
        assert len(blocks) * BLOCK >= end, "the request's blocks end before what drafting writes"
        assert table[: len(blocks)] == blocks
        assert batch.max_seq_len >= end
        assert all(
            held.count(block) == 1 for block in blocks[start // BLOCK : blocks_for(end, BLOCK)]
        ), "a shared block"
        allowed |= {
            blocks[position // BLOCK] * BLOCK + position % BLOCK for position in range(start, end)
        }
    return allowed


def watch(engine: SpecEngine, outputs: dict[tuple[int, ...], list[int]]) -> list[int]:
    """Compares both caches before and after every proposal, makes some proposals right, and counts
    the requests of each step.
    """
    assert engine.runner.drafter is not None
    propose = engine.runner.drafter.propose
    batch_sizes: list[int] = []

    def watched(batch: DecodeBatch) -> DraftOutput:
        allowed = rows_of_drafting(engine, batch)
        before = [side.clone() for layer in engine.kv_cache.layers for side in layer]
        draft = propose(batch)
        for old, new in zip(
            before, (side for layer in engine.kv_cache.layers for side in layer), strict=True
        ):
            assert (
                set((new != old).flatten(0, 1).flatten(1).any(1).nonzero().flatten().tolist())
                <= allowed
            )
        prompts = {request.slot: request.prompt_token_ids for request in engine.scheduler.working}
        for row, (slot, start) in enumerate(
            zip(batch.slots.tolist(), batch.seq_lens.tolist(), strict=True)
        ):
            right = (prompts[slot] + outputs[tuple(prompts[slot])])[start + 1 : start + 1 + batch.k]
            if start % 3 == 0 and len(right) == batch.k:
                draft.token_ids[row] = torch.tensor(right)
        batch_sizes.append(batch.num_reqs)
        return draft

    engine.runner.drafter.propose = watched  # type: ignore[method-assign]
    return batch_sizes


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("k", "spare_blocks", "num_requests"), [(1, 0, 1), (3, 0, 1), (1, 6, 8), (3, 6, 8)]
)
def test_drafting_writes_far_more_rows_than_k(
    verifier: Verifier, k: int, spare_blocks: int, num_requests: int, depth: int
) -> None:
    """A pool for one request up to the model's length, or for a bit more: every write is in its
    request's own blocks.

    Outputs equal plain decoding, nobody waits for ever, and a pool with one block less is refused.
    """
    longest, rng = 48, random.Random(k)
    stem = [rng.randrange(3, VOCAB) for _ in range(9)]
    prompts = [
        stem[: 3 * (i % 4)] + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 14))]
        for i in range(num_requests)
    ]
    sampling = SamplingParams(max_tokens=longest, ignore_eos=True)
    plain = SpecEngine(verifier, None, cache_of(verifier, 200, max_model_len=longest))
    expected = [plain.add_request(prompt, sampling) for prompt in prompts]
    finish(plain)
    outputs = {tuple(request.prompt_token_ids): request.output_token_ids for request in expected}

    limits = {
        "max_num_seqs": 3,
        "max_model_len": longest,
        "num_draft_tokens": k,
        "pipeline_depth": depth,
    }
    drafter = random_dflash(verifier, block_size=ROWS)
    needed = blocks_for(longest + depth * (k + 1) + ROWS, BLOCK)
    engine = SpecEngine(verifier, drafter, cache_of(verifier, needed, drafter, **limits))
    with pytest.raises(
        CapacityError, match=f"need {needed} cache blocks and the cache has {needed - 1};"
    ):
        engine.add_request(prompts[0], sampling)
    engine = SpecEngine(
        verifier, drafter, cache_of(verifier, 1 + needed + spare_blocks, drafter, **limits)
    )
    batch_sizes = watch(engine, outputs)
    requests = [engine.add_request(prompt, sampling) for prompt in prompts]
    for _ in range(100 * num_requests):
        engine.step()
    assert not engine.has_work, "a request waits for blocks that never come free"
    assert [request.output_token_ids for request in requests] == list(outputs.values())
    assert sum(sum(request.num_accepted) for request in requests) > 5 * num_requests
    assert engine.pool.num_used == 0
    assert num_requests == 1 or (max(batch_sizes) > 1 and engine.scheduler.num_preemptions > 0)


def test_a_newcomer_gets_the_rows_of_its_first_step(verifier: Verifier) -> None:
    """Admitted with less, it would be preempted before its first step, again and again."""
    for num_free, admitted in ((10, 1), (11, 2)):  # 5 blocks each, and one for the first to grow
        pool = BlockPool(1 + num_free)
        limits: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 2, "max_prefill_tokens": 64}
        scheduler = Scheduler(pool, **limits, num_lookahead_tokens=ROWS)
        for request_id in range(2):
            scheduler.add(
                Request(request_id, [5] * BLOCK, SamplingParams(), seed=0, max_total_len=40)
            )
        work = scheduler.schedule([], 1)
        assert work is not None and len(work.prefill) == admitted


def test_shared_prefix_is_computed_once(
    verifier: Verifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second request with the same beginning takes over its full blocks, and its output does not
    change.
    """
    stem, tails = list(range(10, 10 + 5 * BLOCK)), ([60, 61], [70, 71, 72])
    sampling = SamplingParams(max_tokens=6)
    engine = tiny_engine(verifier, num_draft_tokens=None)
    prefilled: list[int] = []
    original = engine._prefill

    def counted(chunks: list[Chunk], *, reads: bool) -> None:
        prefilled.append(sum(chunk.end - chunk.start for chunk in chunks))
        original(chunks, reads=reads)

    monkeypatch.setattr(engine, "_prefill", counted)
    outputs = []
    for tail in tails:
        request = engine.add_request(stem + tail, sampling)
        finish(engine)
        outputs.append(request.output_token_ids)
    assert prefilled == [len(stem) + 2, 3]
    assert outputs == [alone(verifier, stem + tail, sampling) for tail in tails]


def test_whole_prompt_in_the_cache_still_computes_its_last_token(verifier: Verifier) -> None:
    """A prompt that is cached to the last token yields the same first token again."""
    prompt = list(range(20, 20 + 2 * BLOCK))
    engine = tiny_engine(verifier, num_draft_tokens=None)
    outputs = []
    for _ in range(3):
        request = engine.add_request(prompt, SamplingParams(max_tokens=5))
        finish(engine)
        outputs.append(request.output_token_ids)
    assert outputs == [alone(verifier, prompt, SamplingParams(max_tokens=5))] * 3


def test_requests_that_can_never_fit_are_refused(verifier: Verifier) -> None:
    """Too long for the model, too long for the cache, empty, or with foreign token ids: one line
    each, and nothing is queued.
    """
    engine = SpecEngine(verifier, None, cache_of(verifier, 10, max_model_len=200))
    with pytest.raises(CapacityError, match=r"prompt has 200 tokens and the limit is 200"):
        engine.add_request([5] * 200)
    with pytest.raises(CapacityError, match=r"need 16 cache blocks and the cache has 9"):
        engine.add_request([5] * 40, SamplingParams(max_tokens=20))
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        engine.add_request([])
    with pytest.raises(InvalidInputError, match=r"token id 97; ids of this model lie in \[0, 97\)"):
        engine.add_request([5, VOCAB])
    assert not engine.has_work


def test_prefill_does_not_stall_decoding(verifier: Verifier) -> None:
    """While a long prompt is prefilled in chunks, a running request gets a token in every step."""
    engine = tiny_engine(verifier, num_draft_tokens=None, max_num_seqs=2, max_prefill_tokens=8)
    first = engine.add_request([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request([9] * 80, SamplingParams(max_tokens=2))
    for _ in range(10):
        before = len(first.output_token_ids)
        engine.step()
        assert len(first.output_token_ids) == before + 1


def test_pool_counts_references_and_reuses_by_content() -> None:
    """A block comes back only when its last owner releases it; published content survives until the
    block is handed out.
    """
    pool = BlockPool(5)
    digests = prefix_hashes([1, 2, 3, 4], 2)
    mine = pool.allocate(2)
    for block, digest in zip(mine, digests, strict=True):
        pool.publish(block, digest)
    assert pool.match(digests) == mine
    assert pool.release(mine) == []
    assert pool.num_free == 2
    assert sorted(pool.release(mine)) == sorted(mine)
    assert pool.match(digests[:1]) == mine[:1]
    pool.release(mine[:1])
    pool.allocate(4)
    assert pool.match(digests) == []
    with pytest.raises(RuntimeError, match="1 blocks asked for, 0 free"):
        pool.allocate(1)
    with pytest.raises(RuntimeError, match="more often"):
        BlockPool(3).release([1])


def test_no_step_drafts_more_than_anyone_has_left(verifier: Verifier) -> None:
    """Drafts past the end of every output would be paid for and thrown away; one request with room
    is enough to draft them all.
    """
    engine = SpecEngine(
        verifier, ScriptedDrafter({}, 8), cache_of(verifier, 50, num_draft_tokens=8)
    )
    requests = [
        Request(i, [5, 6], SamplingParams(), seed=0, max_total_len=total)
        for i, total in enumerate((4, 5))
    ]
    more = Request(9, [5, 6], SamplingParams(), seed=0, max_total_len=99)
    assert engine.planner.plan(Selection(requests)).shape == BlockShape(3)
    assert engine.planner.plan(Selection(requests[:1])).shape == BlockShape(2)
    assert engine.planner.plan(Selection([more, *requests])).shape == BlockShape(8)


def test_results_are_read_before_anyone_is_preempted() -> None:
    """Without free blocks and with unread results the scheduler decides nothing; once all is read,
    the last to arrive goes.
    """
    pool = BlockPool(6)
    scheduler = Scheduler(pool, block_size=BLOCK, max_num_seqs=2, max_prefill_tokens=64)
    requests = [Request(i, [5] * 6, SamplingParams(), seed=0, max_total_len=40) for i in range(2)]
    for request in requests:
        scheduler.add(request)
    first = scheduler.schedule([], 0)
    assert first is not None
    for chunk in first.prefill:
        scheduler.prefilled(chunk)
    for request in requests:
        request.num_kv_tokens = 12
        request.num_unread = request.num_in_flight = 1
    assert scheduler.schedule(scheduler.decoding, 0) is None
    assert scheduler.num_preemptions == 0
    for request in requests:
        request.num_unread = request.num_in_flight = 0
    work = scheduler.schedule(scheduler.decoding, 0)
    assert work is not None
    assert work.decode == requests[:1]
    assert scheduler.waiting == requests[1:]


def test_chunks_are_smaller_beside_requests_that_decode() -> None:
    """Those wait for the chunk; while nobody does, a chunk is as large as it may be."""
    limits: dict[str, Any] = {"block_size": BLOCK, "max_num_seqs": 2, "max_prefill_tokens": 20}
    scheduler = Scheduler(BlockPool(60), max_tokens_beside=6, **limits)
    requests = [Request(i, [5] * 30, SamplingParams(), seed=0, max_total_len=40) for i in range(2)]
    spans = []
    for request in requests:
        scheduler.add(request)
        while request.status is not Status.RUNNING:
            work = scheduler.schedule(scheduler.decoding, 0)
            assert work is not None
            spans.append([(chunk.start, chunk.end) for chunk in work.prefill])
            for chunk in work.prefill:
                scheduler.prefilled(chunk)
    assert spans == [[(0, 20)], [(20, 30)], *([(start, start + 6)] for start in range(0, 30, 6))]
    assert Scheduler(BlockPool(60), **limits).max_tokens_beside == 20


def test_generated_tokens_are_prefilled_by_themselves() -> None:
    """After a preemption: a backend may round prompts, and must not round what decoding has
    computed unrounded.
    """
    pool = BlockPool(60)
    scheduler = Scheduler(pool, block_size=BLOCK, max_num_seqs=2, max_prefill_tokens=20)
    requests = [Request(i, [5] * 13, SamplingParams(), seed=0, max_total_len=40) for i in range(2)]
    requests[0].output_token_ids = [6] * 5  # prompt, four generated tokens, and the anchor
    for request in requests:
        scheduler.add(request)
    steps = []
    while scheduler.waiting or any(request.status is Status.PREFILLING for request in requests):
        work = scheduler.schedule([], 0)
        assert work is not None
        steps.append(
            [
                (requests.index(chunk.request), chunk.start, chunk.end, chunk.last)
                for chunk in work.prefill
            ]
        )
        for chunk in work.prefill:
            scheduler.prefilled(chunk)
    assert steps == [[(0, 0, 13, False), (1, 0, 7, False)], [(0, 13, 17, True), (1, 7, 13, True)]]
