"""Many callers of one engine: threads, open streams, asynchronous callers, cancellations,
errors.
"""

import asyncio
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from specdec.base.config import CacheConfig, EngineConfig
from specdec.base.errors import CapacityError, InvalidInputError
from specdec.engine.engine import SpecEngine
from specdec.model.core import Verifier
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult
from specdec.session.session import Session
from tests.helpers.engines import finish
from tests.helpers.scripted import ScriptedDrafter
from tests.helpers.tiny_configs import VOCAB
from tests.helpers.tiny_models import paged_verifier, plain_model, tiny_tokenizer
from tests.helpers.waiting import in_time

NUM_THREADS, NUM_PROMPTS = 8, 12


@pytest.fixture(scope="module")
def verifier() -> Verifier:
    """One tiny target for all tests here."""
    return paged_verifier(plain_model("llama"), 4)


def engine_config(**changes: Any) -> EngineConfig:
    return EngineConfig(max_num_seqs=6, cache=CacheConfig(memory_bytes=2**22), **changes)


def cases_of(seed: int, count: int) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    warm: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.9, "top_k": 30},
        {"repetition_penalty": 1.2},
    )
    return [
        (
            [rng.randrange(3, VOCAB) for _ in range(rng.randrange(1, 20))],
            SamplingParams(
                max_tokens=rng.randrange(1, 24),
                seed=seed * count + i,
                ignore_eos=True,
                **warm[i % 3],
            ),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def alone(verifier: Verifier) -> Callable[[list[int], SamplingParams], list[int]]:
    """Output of a request that has an engine to itself."""
    engine = SpecEngine(verifier, None, engine_config())

    def run(prompt: list[int], sampling: SamplingParams) -> list[int]:
        return finish(engine, engine.add_request(prompt, sampling))[0]

    return run


def test_many_threads_share_an_engine(verifier: Verifier, alone: Callable[..., list[int]]) -> None:
    """Streaming, waiting and cancelling at once: what is not cancelled equals its output alone, and
    nobody waits for ever.
    """
    cases = [cases_of(number, NUM_PROMPTS) for number in range(NUM_THREADS)]
    expected = [[alone(*case) for case in some] for some in cases]
    script = {
        tuple(p): e
        for some, outs in zip(cases, expected, strict=True)
        for (p, _), e in zip(some, outs, strict=True)
    }
    engine = SpecEngine(
        verifier,
        ScriptedDrafter(script, 3, [set(), {0}, {1}, {2}]),
        engine_config(num_draft_tokens=None),
    )
    session = Session(engine, max_queue=16)

    def caller(number: int) -> None:
        rng = random.Random(number)
        for i, ((prompt, sampling), output) in enumerate(
            zip(cases[number], expected[number], strict=True)
        ):
            handle = session.submit(prompt, sampling, incremental=i % 2 == 0)
            how = rng.random()
            if how < 0.15:
                handle.cancel()
            if i % 2 == 0:
                tokens: list[int] = []
                for chunk in handle:
                    tokens += chunk.token_ids
                    if how > 0.85:
                        handle.cancel()
                assert tokens == handle.result().token_ids
            result = handle.result()
            if result.finish_reason == "cancelled":
                assert how < 0.15 or how > 0.85
                assert result.token_ids == output[: len(result.token_ids)]
            else:
                assert result.token_ids == output

    def all_callers() -> None:
        with ThreadPoolExecutor(NUM_THREADS) as pool:
            for future in [pool.submit(caller, number) for number in range(NUM_THREADS)]:
                future.result()

    in_time(all_callers)
    assert session.idle
    assert engine.pool.num_used == 0


def test_streams_are_open_side_by_side(verifier: Verifier, alone: Callable[..., list[int]]) -> None:
    """Two streams read in turns, with a whole generation in between: each gets all of its own
    tokens.
    """
    decoder = SpecDecoder(verifier, tiny_tokenizer(), None, engine_config())
    (first, one), (second, two), (third, three) = cases_of(3, 3)
    expected = [alone(first, one), alone(second, two), alone(third, three)]

    def work() -> list[list[int]]:
        streams = [decoder.stream(first, one), decoder.stream(second, two)]
        tokens: list[list[int]] = [[], []]
        whole: list[int] = []
        live = {0, 1}
        while live:
            for number in sorted(live):
                chunk = next(streams[number], None)
                if chunk is None:
                    live.discard(number)
                else:
                    tokens[number] += chunk.token_ids
            if not whole:
                whole = decoder.generate(third, three).token_ids
        return [*tokens, whole]

    assert in_time(work) == expected


def test_closing_a_stream_cancels_its_requests_alone(
    verifier: Verifier, alone: Callable[..., list[int]]
) -> None:
    """Blocks come back at once, and a neighbor goes on."""
    decoder = SpecDecoder(verifier, tiny_tokenizer(), None, engine_config())
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    one, other = decoder.stream([5, 6, 7], sampling), decoder.stream([9, 8], sampling)
    next(one), next(other)
    one.close()  # type: ignore[attr-defined]
    assert len(decoder.engine.scheduler.working) == 1
    assert [token for chunk in other for token in chunk.token_ids][-5:] == alone([9, 8], sampling)[
        -5:
    ]
    assert decoder.engine.pool.num_used == 0


def test_asynchronous_callers(verifier: Verifier, alone: Callable[..., list[int]]) -> None:
    """`async for` and `await` in one event loop, which stays free, beside a thread that waits."""
    cases = cases_of(5, 12)
    session = Session(SpecEngine(verifier, None, engine_config()))
    ticks = 0

    async def stream(case: tuple[list[int], SamplingParams]) -> list[int]:
        return [token async for chunk in session.submit(*case) for token in chunk.token_ids]

    async def whole(case: tuple[list[int], SamplingParams]) -> list[int]:
        return (await session.submit(*case, incremental=False)).token_ids

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    async def main() -> list[list[int]]:
        ticking = asyncio.create_task(tick())
        in_thread = asyncio.to_thread(lambda: session.submit(*cases[0]).result().token_ids)
        outputs = await asyncio.gather(
            in_thread, *(whole(case) if i % 2 else stream(case) for i, case in enumerate(cases))
        )
        ticking.cancel()
        return outputs

    with session:
        outputs = in_time(lambda: asyncio.run(main()))
    assert outputs == [alone(*case) for case in (cases[0], *cases)]
    assert ticks > 10
    with pytest.raises(CapacityError, match="session is closed"):
        session.submit([5])


def test_a_queue_is_bounded(verifier: Verifier) -> None:
    """A full queue refuses who does not wait, and takes prompts as there is room from who does."""
    session = Session(SpecEngine(verifier, None, engine_config()), max_queue=3)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    handles = [session.submit([5, 6 + index], sampling) for index in range(3)]
    with pytest.raises(
        CapacityError, match="3 requests are unfinished and the queue holds 3; try again later"
    ):
        session.submit([5], sampling, wait=False)
    assert len(session.submit([5], sampling).result().token_ids) == 4
    assert all(handle.result().finish_reason == "length" for handle in handles)
    most = 0

    def prompts() -> Iterator[tuple[list[int], SamplingParams]]:
        nonlocal most
        for index in range(10):
            most = max(most, len(session._callers))
            yield [5, 6 + index], sampling

    assert sorted(chunk.index for chunk in session.map(prompts())) == list(range(10))
    assert most == 2


def test_an_error_in_a_step_ends_everyone_and_the_session_goes_on(
    verifier: Verifier, alone: Callable[..., list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a keyboard interrupt: who stepped sees it, the others are told, and the next request is
    served as ever.
    """
    engine = SpecEngine(verifier, None, engine_config())
    session = Session(engine)
    prompt, sampling = [5, 6, 7], SamplingParams(max_tokens=9, ignore_eos=True)
    expected = alone(prompt, sampling)
    for error in (KeyboardInterrupt(), ValueError("broken")):
        handles = [session.submit(prompt, sampling) for _ in range(9)]
        next(iter(handles[0]))

        def fail(batch: object, error: BaseException = error) -> Any:
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(engine.runner, "step", fail)
            with pytest.raises(type(error)):
                handles[0].result()
        with pytest.raises(RuntimeError, match="the engine failed"):
            in_time(handles[1].result)
        assert session.idle and engine.pool.num_used == 0
        assert in_time(session.submit(prompt, sampling).result).token_ids == expected


def test_what_cannot_be_served(verifier: Verifier) -> None:
    """Refused when it is submitted, with nothing left behind."""
    session = Session(SpecEngine(verifier, None, engine_config()))
    with pytest.raises(InvalidInputError, match="prompt is empty"):
        session.submit([])
    with pytest.raises(InvalidInputError, match="stop strings need a tokenizer"):
        session.submit([5], SamplingParams(stop=("x",)))
    assert session.idle and not session.engine.has_work
    with pytest.raises(RuntimeError, match="no request left"):
        in_time(lambda: session.run_until(lambda: False))


def test_a_result_is_the_same_however_it_is_asked_for(verifier: Verifier) -> None:
    """Token by token or at the end, with a stop string or without: same text, same tokens."""
    decoder = SpecDecoder(verifier, tiny_tokenizer(), None, engine_config())
    whole: GenerationResult = decoder.generate([5, 6, 7], max_tokens=12, ignore_eos=True, seed=1)
    chunks = list(decoder.stream([5, 6, 7], max_tokens=12, ignore_eos=True, seed=1))
    assert chunks[-1].result == whole
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [token for chunk in chunks for token in chunk.token_ids] == whole.token_ids
