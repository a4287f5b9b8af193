"""Continuous batching under pressure: arrivals, cancellations, preemption, shared prefixes, late results."""

import random

import pytest

from specdec.config import CacheConfig, EngineConfig, SamplingParams
from specdec.core import Request, Verifier
from specdec.engine import SpecEngine
from specdec.errors import CapacityError, InvalidInputError
from specdec.kv_cache import BlockPool, prefix_hashes
from specdec.scheduler import Chunk
from tests.scripted import ScriptedDrafter
from tests.tiny_models import VOCAB, paged_verifier, plain_model

BLOCK = 4
NUM_REQUESTS = 300


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    """One tiny target for all tests here."""
    return paged_verifier(plain_model("llama"), BLOCK)


def cache_of(verifier: Verifier, num_blocks: int, **changes: object) -> EngineConfig:
    """A config whose cache has exactly `num_blocks` blocks, the null block included."""
    block_bytes = BLOCK * sum(spec.bytes_per_token(verifier.dtype) for spec in verifier.kv_specs)
    return EngineConfig(cache=CacheConfig(block_size=BLOCK, memory_bytes=num_blocks * block_bytes), **changes)  # type: ignore[arg-type]


def alone(verifier: Verifier, prompt: list[int], sampling: SamplingParams) -> list[int]:
    """Output of a request that has an engine to itself, without a drafter."""
    engine = SpecEngine(verifier, None, EngineConfig(max_num_seqs=1, cache=CacheConfig(block_size=BLOCK, memory_bytes=2**22)))
    request = engine.add_request(prompt, sampling)
    while engine.has_work:
        engine.step()
    return request.output_token_ids


@pytest.mark.parametrize("depth", [0, 1])
def test_hundreds_of_requests_in_a_pool_far_too_small(verifier: Verifier, depth: int) -> None:
    """Random arrivals, lengths, sampling and cancellations; every output equals its single-request output, the pool ends empty."""
    rng = random.Random(depth)
    stems = [[rng.randrange(3, VOCAB) for _ in range(12)] for _ in range(3)]
    cases = []
    for i in range(NUM_REQUESTS):
        stem = rng.choice(stems)[: rng.randrange(13)]
        prompt = stem + [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))]
        warm = {"temperature": 0.9, "top_k": 30} if i % 3 == 0 else {}
        penalty = {"repetition_penalty": 1.2} if i % 7 == 0 else {}
        cases.append((prompt, SamplingParams(max_tokens=rng.randrange(1, 24), seed=i, **warm, **penalty)))  # type: ignore[arg-type]
    expected = [alone(verifier, prompt, sampling) for prompt, sampling in cases]
    script = ScriptedDrafter({tuple(p): e for (p, _), e in zip(cases, expected, strict=True)}, 3, [set(), {0}, {1}, {2}])
    engine = SpecEngine(verifier, script, cache_of(verifier, 22, max_num_seqs=6, max_prefill_tokens=9, pipeline_depth=depth))
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
    assert engine.scheduler.num_preemptions > 20
    assert 5 < len(cancelled) < NUM_REQUESTS // 2
    for request, output in zip(requests, expected, strict=True):
        if request.request_id in cancelled:
            assert request.finish_reason == "cancelled"
            assert request.output_token_ids == output[: len(request.output_token_ids)]
        else:
            assert request.output_token_ids == output, request.request_id
    assert engine.pool.num_used == 0
    assert not len(engine.results)


def test_shared_prefix_is_computed_once(verifier: Verifier, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second request with the same beginning takes over its full blocks, and its output does not change."""
    stem, tails = list(range(10, 10 + 5 * BLOCK)), ([60, 61], [70, 71, 72])
    sampling = SamplingParams(max_tokens=6)
    engine = SpecEngine(verifier, None, EngineConfig(cache=CacheConfig(block_size=BLOCK, memory_bytes=2**22)))
    prefilled: list[int] = []
    original = engine._prefill

    def counted(chunks: list[Chunk]) -> None:
        prefilled.append(sum(chunk.end - chunk.start for chunk in chunks))
        original(chunks)

    monkeypatch.setattr(engine, "_prefill", counted)
    outputs = []
    for tail in tails:
        request = engine.add_request(stem + tail, sampling)
        while engine.has_work:
            engine.step()
        outputs.append(request.output_token_ids)
    assert prefilled == [len(stem) + 2, 3]
    assert outputs == [alone(verifier, stem + tail, sampling) for tail in tails]


def test_whole_prompt_in_the_cache_still_computes_its_last_token(verifier: Verifier) -> None:
    """A prompt that is cached to the last token yields the same first token again."""
    prompt = list(range(20, 20 + 2 * BLOCK))
    engine = SpecEngine(verifier, None, EngineConfig(cache=CacheConfig(block_size=BLOCK, memory_bytes=2**22)))
    outputs = []
    for _ in range(3):
        request = engine.add_request(prompt, SamplingParams(max_tokens=5))
        while engine.has_work:
            engine.step()
        outputs.append(request.output_token_ids)
    assert outputs == [alone(verifier, prompt, SamplingParams(max_tokens=5))] * 3


def test_requests_that_can_never_fit_are_refused(verifier: Verifier) -> None:
    """Too long for the model, too long for the cache, empty, or with foreign token ids: one line each, and nothing is queued."""
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
    engine = SpecEngine(
        verifier, None, EngineConfig(max_num_seqs=2, max_prefill_tokens=8, cache=CacheConfig(block_size=BLOCK, memory_bytes=2**22))
    )
    first = engine.add_request([5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True))
    engine.step()
    engine.add_request([9] * 80, SamplingParams(max_tokens=2))
    for _ in range(10):
        before = len(first.output_token_ids)
        engine.step()
        assert len(first.output_token_ids) == before + 1


def test_pool_counts_references_and_reuses_by_content() -> None:
    """A block comes back only when its last owner releases it; published content survives until the block is handed out."""
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
