"""Callers that misbehave: they drop what they asked for, read it from several places, let event
loops die, fork. Nobody else may notice, and no block stays behind."""

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from specdec import EngineConfig, SamplingParams, SpecDecoder
from specdec.base.errors import InvalidInputError
from specdec.engine.requests.request import Request
from specdec.session.handle import Handle
from specdec.session.outputs import StreamChunk
from tests.helpers.tiny_models import paged_verifier, plain_model, random_dflash, tiny_tokenizer
from tests.helpers.waiting import HANG, Gate, gated, in_time, wait_until

PROMPT, LONG = [5, 6, 7], SamplingParams(max_tokens=120, ignore_eos=True)


@pytest.fixture(scope="module")
def decoder() -> SpecDecoder:
    verifier = paged_verifier(plain_model("llama"))
    return SpecDecoder(
        verifier,
        tiny_tokenizer(),
        random_dflash(verifier),
        EngineConfig(max_num_seqs=4, num_draft_tokens=None),
    )


@pytest.fixture(autouse=True)
def nothing_stays_behind(decoder: SpecDecoder) -> Iterator[None]:
    """The next caller is served as ever, and afterwards every block is free."""
    yield
    assert (
        len(in_time(lambda: decoder.generate(PROMPT, max_tokens=9, ignore_eos=True)).token_ids) == 9
    )
    assert decoder.session.idle and decoder.engine.pool.num_used == 0


def begun(decoder: SpecDecoder) -> Handle:
    """A long request that has been stepped."""
    handle = decoder.session.submit(PROMPT, LONG)
    next(iter(handle))
    return handle


def test_the_first_error_is_told(
    decoder: SpecDecoder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device that is lost fails once more when the engine is to begin anew,
    and that says less.
    """

    def failing(text: str) -> Callable[[], None]:
        def fail() -> None:
            raise RuntimeError(text)

        return fail

    with monkeypatch.context() as patch:
        patch.setattr(decoder.engine, "step", failing("an assertion of the device"))
        patch.setattr(decoder.engine, "reset", failing("the device is lost"))
        with pytest.raises(RuntimeError, match="an assertion of the device") as raised:
            in_time(lambda: decoder.generate(PROMPT, LONG))
    assert raised.value.__context__ is None
    assert caplog.messages == ["the engine cannot begin anew: the device is lost"]
    decoder.engine.reset()


def test_a_dropped_handle_frees_its_blocks(decoder: SpecDecoder) -> None:
    """Nobody can read the rest, so nobody has to ask for its end; an open iterator still reads."""
    handle = begun(decoder)
    assert decoder.engine.pool.num_used > 0
    del handle
    assert decoder.session.idle and decoder.engine.pool.num_used == 0
    assert (
        sum(len(chunk.token_ids) for chunk in decoder.session.submit(PROMPT, LONG))
        == LONG.max_tokens
    )


def test_a_session_takes_integers_alone(decoder: SpecDecoder) -> None:
    """Of any library; floats once ran, cut to integers on the device."""
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    handle = decoder.session.submit(np.array(PROMPT), sampling)  # type: ignore[arg-type]
    assert handle.result().prompt_token_ids == PROMPT
    wrong: dict[str, Any] = {
        "a token id is 1.5; it must be an integer": [1.5],
        "the prompt is 'abc'; it must be a list of token ids": "abc",
        "the prompt is 5; it must be a list of token ids": 5,
        "the prompt is None; it must be a list of token ids": None,
        "the prompt holds token id <an integer of 16,610 bits>; ids": [10**5000],
        "the prompt holds token id -1; ids": [-1],
    }
    for said, prompt in wrong.items():
        with pytest.raises(InvalidInputError, match=said):
            decoder.session.submit(prompt)


def test_a_dropped_stream_frees_its_blocks(decoder: SpecDecoder) -> None:
    """The same for what `stream` gives, also in the midst of an error of who reads it."""
    stream = decoder.stream([PROMPT] * 6, LONG)
    next(stream)
    del stream
    assert decoder.session.idle
    with pytest.raises(KeyboardInterrupt):
        for _ in decoder.stream([PROMPT] * 6, LONG):
            raise KeyboardInterrupt
    assert decoder.session.idle


def test_a_cancelled_task_ends_its_request(decoder: SpecDecoder) -> None:
    """`async for` that is cancelled half-way stops decoding instead of going on for nobody."""

    requests: list[Request] = []

    async def read() -> None:
        handle = decoder.session.submit(PROMPT, LONG)
        requests.append(handle.request)
        async for _ in handle:
            pass

    async def main() -> None:
        with gated(decoder.engine, 3) as gate:
            task = asyncio.create_task(read())
            await asyncio.to_thread(wait_until, lambda: gate.stands)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        del task
        await asyncio.to_thread(wait_until, lambda: decoder.session.idle)

    in_time(lambda: asyncio.run(main()))
    assert requests[0].finish_reason == "cancelled"


def test_an_event_loop_that_dies_fails_nobody(decoder: SpecDecoder) -> None:
    """Who waited in a closed loop cannot be woken; it once took every other request along. A new
    loop is served.
    """
    handle, other = decoder.session.submit(PROMPT, LONG), decoder.session.submit(PROMPT, LONG)

    async def read() -> None:
        async for _ in handle:
            pass

    async def leave() -> None:
        reader = asyncio.create_task(read())
        await asyncio.to_thread(wait_until, lambda: gate.stands)
        reader.cancel()

    with gated(decoder.engine, 3) as gate:
        asyncio.run(leave())
    for unfinished in (handle, other):
        assert in_time(unfinished.result).finish_reason == "length"

    async def again() -> int:
        return len(
            [
                token
                async for chunk in decoder.session.submit(PROMPT, LONG)
                for token in chunk.token_ids
            ]
        )

    assert in_time(lambda: asyncio.run(again())) == LONG.max_tokens


def test_readers_share_a_handle(decoder: SpecDecoder) -> None:
    """Threads and tasks: each chunk goes to one of them, and all see the end."""

    async def read(handle: Handle) -> int:
        return sum([len(chunk.token_ids) async for chunk in handle])

    async def tasks() -> list[int]:
        handle = decoder.session.submit(PROMPT, LONG)
        return await asyncio.gather(*(read(handle) for _ in range(3)))

    assert sum(in_time(lambda: asyncio.run(tasks()))) == LONG.max_tokens
    handle = decoder.session.submit(PROMPT, LONG)
    with ThreadPoolExecutor(3) as pool:
        counts = [
            pool.submit(lambda: sum(len(chunk.token_ids) for chunk in handle)) for _ in range(3)
        ]
        assert sum(count.result(timeout=HANG) for count in counts) == LONG.max_tokens


def test_a_faster_reader_does_not_end_a_stream(decoder: SpecDecoder) -> None:
    """A reader that is woken for a chunk another one takes waits for the next; it once took that
    for the end.
    """
    handle = decoder.session.submit(PROMPT, LONG)
    run_until = decoder.session.run_until
    taken: list[StreamChunk] = []

    def stolen(ready: Callable[[], bool]) -> None:
        run_until(ready)
        if not taken:
            taken.append(handle.stream._chunks.popleft())

    handle.stream._session = type("Thief", (), {"run_until": staticmethod(stolen)})()
    tokens = [token for chunk in handle for token in chunk.token_ids]
    assert len(taken[0].token_ids) + len(tokens) == LONG.max_tokens


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning")
@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_a_forked_child_decodes(decoder: SpecDecoder, busy: bool) -> None:
    """Also after asynchronous callers, whose thread the child lacks, and while another thread
    steps, which it lacks as well.
    """

    async def whole() -> int:
        return len(
            (
                await decoder.session.submit(PROMPT, SamplingParams(max_tokens=9, ignore_eos=True))
            ).token_ids
        )

    assert asyncio.run(whole()) == 9
    num_threads = torch.get_num_threads()
    torch.set_num_threads(2)  # which the child lacks, too
    other = threading.Thread(target=lambda: decoder.generate([PROMPT] * 4, LONG))
    gate = Gate(decoder.engine)
    if busy:
        other.start()
        wait_until(lambda: gate.stands)
    child = os.fork()
    if not child:
        vars(decoder.engine).pop("step")  # the gate's lock may be anybody's
        signal.alarm(int(HANG))
        right = (
            len(decoder.generate(PROMPT, max_tokens=9, ignore_eos=True).token_ids) == 9
            and asyncio.run(whole()) == 9
        )
        os._exit(0 if right and torch.get_num_threads() == 1 else 1)
    torch.set_num_threads(num_threads)
    gate.open()
    assert os.waitpid(child, 0)[1] == 0
    if busy:
        other.join()
