"""What a session's callers hold: a handle for each request, and streams of chunks."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from specdec.engine.requests.request import Request, Status
from specdec.session.outputs import GenerationResult, StreamChunk
from specdec.session.text import IncrementalDecoder
from specdec.session.thinking import PartedDecoder


class Owner(Protocol):
    """The owner of an engine, as far as handles and streams know: a `Session`."""

    def run_until(self, ready: Callable[[], bool]) -> None:
        """Steps the engine until `ready`, or waits while another caller does."""

    def start(self) -> None:
        """Starts the thread that steps for asynchronous callers, unless it runs."""

    def cancel(self, request: Request) -> None:
        """Ends a request with what it has."""


class Stream:
    """Chunks of requests in the order in which they come, for `for` and `async for`.

    It ends when its requests have and their chunks are taken. Each reader gets some of them.
    """

    def __init__(self, session: Owner) -> None:
        self._session = session
        self._chunks: deque[StreamChunk] = deque()
        self._num_open = 0  # requests that have not ended
        self._error: BaseException | None = None
        self._wakes: list[Callable[[], object]] = []  # for asynchronous readers

    @property
    def ready(self) -> bool:
        """Whether the next chunk, or the end, is there."""
        return bool(self._chunks) or not self._num_open

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        """The next chunk; decodes, or waits for who does.

        Raises:
            RuntimeError: the engine failed while somebody else stepped it.
        """
        chunk = None
        while chunk is None:
            if not self.ready:
                self._session.run_until(lambda: self.ready)
            chunk = self._take(StopIteration)
        return chunk

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StreamChunk:
        self._session.start()
        chunk = None
        while chunk is None:
            while not self.ready:
                arrived, loop = asyncio.Event(), asyncio.get_running_loop()
                self._wakes.append(partial(loop.call_soon_threadsafe, arrived.set))
                if not self.ready:  # it may have come before anyone could be woken
                    await arrived.wait()
            chunk = self._take(StopAsyncIteration)
        return chunk

    @property
    def paused(self) -> bool:
        """Whether nobody reads at the moment, so that what comes is better put together."""
        return False

    @property
    def failed(self) -> bool:
        """Whether the engine failed before all requests had ended."""
        return self._error is not None

    def open(self) -> None:
        """Counts one more request whose chunks will come; called by the session, as the rest is."""
        self._num_open += 1

    def put(self, chunk: StreamChunk) -> None:
        """Takes a chunk."""
        self._chunks.append(chunk)
        if chunk.result is not None:
            self._num_open -= 1
        if self._wakes:
            self._notify()

    def fail(self, error: BaseException) -> None:
        """Ends the stream because the engine has failed."""
        self._error, self._num_open = error, 0
        self._notify()

    def raise_error(self) -> None:
        """Raises if the engine has failed.

        Raises:
            RuntimeError: it has.
        """
        if self._error is not None:
            raise RuntimeError(
                f"the engine failed: {self._error or type(self._error).__name__}"
            ) from self._error

    def _take(self, end: type[Exception]) -> StreamChunk | None:
        """The next chunk, None where another reader was faster; raises `end` behind the last."""
        ended = not self._num_open  # asked first, since the last chunk comes before the end
        try:
            return self._chunks.popleft()
        except IndexError:
            if not ended:
                return None
        self.raise_error()
        raise end

    def _notify(self) -> None:
        wakes, self._wakes = self._wakes, []
        for wake in wakes:
            # its event loop is closed, and nobody waits there any more
            with suppress(RuntimeError):
                wake()


class Handle:
    """A request in a session: iterate over it or wait for its result, in any thread or asyncio.

    When nobody holds the handle any more, nobody can read the rest, and the request is cancelled.

    Args:
        stream: where its chunks go.
        index: number of its chunks.
        text: follows the output token by token; None where only the whole output becomes text.
        decode: turns the whole output into text.
    """

    def __init__(
        self,
        session: Owner,
        stream: Stream,
        request: Request,
        index: int,
        text: IncrementalDecoder | None,
        decode: Callable[[list[int]], str],
    ) -> None:
        self.stream, self.request = stream, request
        self._index, self._text, self._decode = index, text, decode
        self._num_shown = 0
        self._broken: Exception | None = None  # what `extend` raised
        self._result: GenerationResult | None = None
        self._session = session  # last: `__del__` looks for it

    @property
    def done(self) -> bool:
        """Whether the request has ended."""
        return self._result is not None or self.stream.failed

    def result(self) -> GenerationResult:
        """The whole output; decodes, or waits for who does.

        Raises:
            RuntimeError: the engine failed while somebody else stepped it.
        """
        self._session.run_until(lambda: self.done)
        if self._result is None:
            self.stream.raise_error()
        assert self._result is not None
        return self._result

    def cancel(self) -> None:
        """Ends the request with what it has; does nothing when it has ended."""
        self._session.cancel(self.request)

    def __del__(self) -> None:
        """Cancels what nobody can read."""
        if hasattr(self, "_session") and not self.done:
            self.cancel()

    def __iter__(self) -> Iterator[StreamChunk]:
        yield from self.stream  # not the stream itself, which would let go of the handle

    def __aiter__(self) -> Handle:
        return self

    async def __anext__(self) -> StreamChunk:
        return await anext(self.stream)

    def __await__(self) -> Generator[Any, None, GenerationResult]:
        return self._last().__await__()

    async def _last(self) -> GenerationResult:
        async for _ in self.stream:
            pass
        return self.result()

    def extend(self, tokens: list[int]) -> None:
        """Adds to an output what another process has decoded."""
        self.request.output_token_ids += tokens
        if self._text is not None:
            try:
                self._text.push(tokens)
            except Exception as error:
                self._broken = error

    def deliver(self) -> bool:
        """Puts what is new into the stream; called by the session, in the midst of a request only
        where chunks are wanted then.

        Returns:
            False where that raises: the request ends, and no other.
        """
        failed = False
        try:
            if self._broken is not None:
                raise self._broken
            chunk = self._chunk()
        except Exception as error:
            self.request.fail(error)
            self._result, failed = GenerationResult.failed(self.request), True
            chunk = StreamChunk(self._index, "", [], self._result)
        self.stream.put(chunk)
        return not failed

    def _chunk(self) -> StreamChunk:
        request, text = self.request, self._text
        since, self._num_shown = self._num_shown, len(request.output_token_ids)
        tokens = request.output_token_ids[since:]
        logprobs, top = [], []
        if request.logprobs:
            logprobs, top = request.logprobs[since:], request.top_logprobs[since:]
        parted = text if isinstance(text, PartedDecoder) else None
        if request.status is not Status.FINISHED:
            piece = text.take() if text else ""
        else:
            piece = text.finish() if text else self._decode(request.output_token_ids)
            self._result = GenerationResult.of(request, text.text if text else piece)
            if parted:
                self._result.reasoning, self._result.content = parted.parts
        parts = parted.new_parts if parted else None
        return StreamChunk(self._index, piece, tokens, self._result, logprobs, top, parts)
