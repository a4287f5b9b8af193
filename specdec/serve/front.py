"""Between HTTP and the session: who is let in, what is unfinished, and whether the engine lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence

from specdec.base.errors import CapacityError
from specdec.base.files import user_path
from specdec.base.metrics import AcceptanceStats
from specdec.base.registry import parts_of
from specdec.sampling.params import SamplingParams
from specdec.serve.config import ServeConfig
from specdec.serve.errors import RequestError, busy, engine_failed
from specdec.serve.state.totals import Totals
from specdec.serve.texts import Texts
from specdec.session.decoder import SpecDecoder
from specdec.session.handle import Handle, Stream
from specdec.session.outputs import GenerationResult, StreamChunk

logger = logging.getLogger(__name__)


class Front:
    """What the routes share; in the event loop alone, but for the engine, which its session's thread steps.

    Args:
        decoder: serves.
        config: limits.
        model: name of the model where the config has none; of a folder, clients are told its last part alone.
        drafter: name of what drafts; None where nothing does.

    Attributes:
        names: by which the model is called.
        texts: makes tokens of texts.
        most_tokens: of prompt and output of one request together.
        totals: what was done so far.
        draining: nothing new is taken on.
        dead: the engine failed, and then failed a probe, or one of the ranks that compute its target has ended.
    """

    def __init__(self, decoder: SpecDecoder, config: ServeConfig, model: str, drafter: str | None = None) -> None:
        self.decoder, self.config = decoder, config
        self.drafter = "+".join(map(_last_part, parts_of(drafter))) if drafter is not None else None
        self.names = config.served_model_name or (_last_part(model),)
        self._model = model
        self.texts, self.most_tokens = Texts(decoder), decoder.engine.admission.most_tokens
        self.created = int(time.time())
        self.totals = Totals()
        self.draining = self.dead = False
        self.on_death: Callable[[], object] = lambda: None
        self._open: set[Outputs] = set()
        self._waiting: set[asyncio.Future[object]] = set()  # for grammars
        self._probe: asyncio.Task[None] | None = None
        self._ranks = decoder.ranks

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an output."""
        return not self._open

    @property
    def num_open(self) -> int:
        """Unfinished outputs that somebody waits for."""
        return sum(outputs.num_open for outputs in self._open)

    def count(self) -> None:
        """Adds to the totals what unfinished outputs have come to by now."""
        for outputs in self._open:
            outputs.count()

    def check_model(self, name: str | None) -> None:
        """Raises:
        RequestError: a request names another model.
        """
        if name is not None and name not in self.names and name != self._model:
            known = ", ".join(self.names)
            raise RequestError(404, f"there is no model {name[:200]!r} (known: {known})", param="model", code="model_not_found")

    @property
    def short_cache(self) -> str | None:
        """Says so where the cache holds less than the context."""
        context = self.decoder.engine.max_model_len
        if self.most_tokens >= context:
            return None
        return (
            f"the cache holds {self.most_tokens:,} tokens of one request and the context has {context:,}; a larger --kv-memory"
            " allows more, and --max-model-len says less"
        )

    def without_folder(self, text: str) -> str:
        """The same without the folder that the model comes from."""
        return text.replace(repr(self.decoder.verifier.name), repr(self.names[0]))

    def check_choices(self, count: int) -> None:
        """Raises:
        RequestError: a request asks for too many outputs.
        """
        most = self.config.max_choices
        if count > most:
            raise RequestError(400, f"the request asks for {count:,} outputs and the limit is {most}; ask for fewer at once")

    def check_open(self) -> None:
        """Raises:
        RequestError: nothing new is taken on.
        """
        if self.dead:
            raise RequestError(503, "the engine has failed, and the server ends", code="engine_dead")
        if self.draining:
            raise busy("the server is about to end; ask another one")

    async def wait_for_grammar(self, sampling: SamplingParams) -> None:
        """Waits until the grammar of a request, if it has one, can be followed.

        Raises:
            RequestError: too many wait for theirs.
            SpecDecError: there can be no grammars, or this one cannot be compiled.
        """
        try:
            compiled = self.decoder.engine.admission.compiled_grammar(sampling)
        except CapacityError as error:
            raise busy(str(error)) from error
        if compiled is None:
            return
        waiting = asyncio.wrap_future(compiled)  # cancelled, it waits no longer, and others may
        self._waiting.add(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            self.check_open()
            raise
        finally:
            self._waiting.discard(waiting)

    def submit(self, asked: Sequence[tuple[list[int], SamplingParams]], *, incremental: bool) -> Outputs:
        """Queues the outputs of one request, all or none.

        Raises:
            RequestError: they would be too many, now or ever.
            SpecDecError: see `SpecEngine.new_request`.
        """
        self.check_open()
        limits, session = self.config, self.decoder.session
        tokens_asked, tokens_open = sum(len(tokens) for tokens, _ in asked), sum(some.num_prompt_tokens for some in self._open)
        self._check_room("outputs", len(asked), self.num_open, limits.max_queue)
        self._check_room("prompt tokens", tokens_asked, tokens_open, limits.max_queued_tokens)
        for tokens, sampling in {id(tokens): (tokens, sampling) for tokens, sampling in reversed(asked)}.values():
            self.decoder.engine.admission.check(tokens, sampling)
        outputs = Outputs(self, incremental=incremental)
        try:
            for tokens, sampling in asked:
                outputs.add(tokens, sampling)
        except CapacityError as error:  # checked above, so the session itself is full or closed
            outputs.close()
            raise busy(str(error)) from error
        session.start()
        self._open.add(outputs)
        return outputs

    def ended(self, outputs: Outputs) -> None:
        """Nobody waits for these any more."""
        self._open.discard(outputs)

    def engine_failed(self, error: Exception) -> None:
        """After an error of the engine, which began anew: a token shows whether it can go on, for without all ranks it cannot."""
        if self._ranks is not None and self._ranks.ended is not None:
            self._die(self._ranks.ended)
            return
        logger.error("%s", error)
        if self._probe is None or self._probe.done():
            self._probe = asyncio.get_running_loop().create_task(self._probe_engine())

    def check_ranks(self) -> None:
        """Notices that a rank has ended while nobody waits for an output, who would be told of it otherwise."""
        if self._ranks is not None and self._ranks.ended is not None and self.idle:
            self._die(self._ranks.ended)

    def _die(self, line: str) -> None:
        if not self.dead:
            logger.error("the server ends: %s", line)
            self.dead = True
            self.on_death()

    async def _probe_engine(self) -> None:
        try:
            token = next(iter(self.decoder.verifier.eos_token_ids), 0)
            result = await self.decoder.session.submit([token], SamplingParams(max_tokens=1), incremental=False, text=False)
            if result.finish_reason == "error":
                raise RuntimeError(result.error)
        except Exception as error:
            self._die(str(error))

    async def drain(self) -> None:
        """Takes nothing new on, and waits for what is unfinished, as long as the config allows; then ends it."""
        self.draining = True
        for waiting in list(self._waiting):  # what they are for would be refused
            waiting.cancel()
        until = time.monotonic() + self.config.drain_seconds
        while not self.idle and not self.dead and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self.texts.close()
        await asyncio.to_thread(self.decoder.session.close)

    def _check_room(self, what: str, more: int, now: int, limit: int) -> None:
        if more > limit:
            raise RequestError(400, f"the request has {more:,} {what} and the limit is {limit:,}; send less at once")
        if now + more > limit:
            raise busy(f"{now:,} {what} are unfinished and the limit is {limit:,}; try again later")


class Outputs:
    """The outputs of one request, in one stream. Closing it cancels what is unfinished.

    Args:
        front: counts them.
        incremental: give chunks before the end.
    """

    def __init__(self, front: Front, *, incremental: bool) -> None:
        self._front, self._incremental = front, incremental
        self._stream = Stream(front.decoder.session)
        self._handles: list[Handle] = []
        self._waiting: deque[tuple[list[int], SamplingParams]] = deque()
        seats = front.decoder.engine.config.max_num_seqs
        self._share = seats + max(1, seats // 4)  # in the engine at once, and its queue: others come between the rest
        self._arrived = time.perf_counter()
        self._first: dict[int, tuple[float, int]] = {}  # when the first chunk of an output came, and its tokens
        self._last: dict[int, float] = {}  # when the last one did
        self._counted: set[int] = set()  # outputs that have ended and are in the totals
        self._tokens: Counter[int] = Counter()  # of each output, those in the totals
        self._steps: Counter[int] = Counter()
        self.num_prompt_tokens = 0

    @property
    def num_open(self) -> int:
        """Outputs that have not ended."""
        return len(self._handles) + len(self._waiting) - len(self._counted)

    def add(self, tokens: list[int], sampling: SamplingParams) -> None:
        """Queues one.

        Raises:
            SpecDecError: see `Session.submit`.
        """
        self._waiting.append((tokens, sampling))
        self.num_prompt_tokens += len(tokens)
        self._submit()

    def _submit(self) -> None:
        """Gives the session what has its turn."""
        session = self._front.decoder.session
        while self._waiting and len(self._handles) - len(self._counted) < self._share:
            (tokens, sampling), index = self._waiting.popleft(), len(self._handles)
            handle = session.submit(tokens, sampling, index=index, incremental=self._incremental, stream=self._stream, wait=False)
            self._handles.append(handle)

    async def chunks(self) -> AsyncIterator[StreamChunk]:
        """Chunks of all outputs as they come.

        Raises:
            RequestError: the engine failed, or the server ends.
        """
        try:
            async for chunk in self._stream:
                self._count(chunk)
                if chunk.result is not None:
                    _check_result(chunk.result)
                    self._submit()
                yield chunk
        except CapacityError as error:  # the session was closed meanwhile
            raise busy(str(error)) from error
        except RuntimeError as error:
            if not self._stream.failed:
                raise
            self._front.engine_failed(error)
            raise engine_failed(error) from error
        finally:
            self.close()

    async def results(self) -> list[GenerationResult]:
        """All outputs, in the order in which they were added.

        Raises:
            RequestError: see `chunks`.
        """
        found = {chunk.index: chunk.result async for chunk in self.chunks() if chunk.result is not None}
        return [found[index] for index in range(len(self._handles))]

    def close(self) -> None:
        """Cancels what is unfinished."""
        self._front.totals.finished["cancelled"] += len(self._waiting)
        self._waiting.clear()
        for handle in self._handles:
            if not handle.done:
                handle.cancel()
        for index in range(len(self._handles)):
            if index not in self._counted:
                self._end(index, "error" if self._stream.failed else "cancelled")
        self._front.ended(self)

    def count(self) -> None:
        """Adds to the totals what is new of each output."""
        for index, handle in enumerate(self._handles):
            if index not in self._counted:
                self._add_news(index, handle)

    def _count(self, chunk: StreamChunk) -> None:
        now, totals, index = time.perf_counter(), self._front.totals, chunk.index
        if chunk.token_ids:
            if index not in self._last:
                totals.prompt_tokens += len(self._handles[index].request.prompt_token_ids)
                if self._incremental:
                    totals.first_token.add(now - self._arrived)
                    self._first[index] = (now, len(chunk.token_ids))
            else:
                totals.between_tokens.add(now - self._last[index])
            self._last[index] = now
        if chunk.result is not None:
            self._end(index, chunk.result.finish_reason)

    def _add_news(self, index: int, handle: Handle) -> None:
        """Of a request that the engine's thread may be adding a step to."""
        request = handle.request
        totals, tokens = self._front.totals, len(request.output_token_ids)
        totals.output_tokens += tokens - self._tokens[index]
        counts = (request.num_drafted, request.num_accepted, request.num_emitted, request.tree_sizes)
        steps, known = min(map(len, counts)), self._steps[index]
        if steps > known:
            totals.add(AcceptanceStats(*(some[known:steps] for some in counts)))
        self._tokens[index], self._steps[index] = tokens, steps

    def _end(self, index: int, reason: str) -> None:
        self._add_news(index, self._handles[index])
        self._counted.add(index)
        now, totals, request = time.perf_counter(), self._front.totals, self._handles[index].request
        totals.finished[reason] += 1
        totals.whole.add(now - self._arrived)
        totals.request_prompt.add(len(request.prompt_token_ids))
        totals.request_output.add(len(request.output_token_ids))
        begun, tokens = self._first.get(index, (now, 0))
        if index in self._first and len(request.output_token_ids) > tokens:
            totals.per_token.add((now - begun) / (len(request.output_token_ids) - tokens))


def _last_part(name: str) -> str:
    """Of the path of a folder; any other name as it is."""
    path = user_path(name)
    return path.resolve().name or name if path.exists() else name


def _check_result(result: GenerationResult) -> None:
    """Raises:
    RequestError: the output was not finished.
    """
    if result.bad_input:
        raise RequestError(400, result.error or "the request cannot be served")
    if result.finish_reason == "error":
        raise engine_failed(RuntimeError(result.error or "the engine failed"))
    if result.finish_reason == "cancelled":
        raise busy("the server ends and has cut this output; ask another one")
