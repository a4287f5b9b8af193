"""Between HTTP and the engine: who is let in, what is unfinished, and whether the engine lives."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from starlette.types import Receive

from specdec.base.errors import CapacityError, SpecDecError
from specdec.base.metrics import AcceptanceStats
from specdec.base.version import __version__
from specdec.sampling.params import SamplingParams
from specdec.serve.answers.transport import ClientGone, gone
from specdec.serve.errors import RequestError, busy, check_model, engine_failed, told
from specdec.serve.processes.setup import Setup
from specdec.serve.state.totals import Totals, sum_of
from specdec.serve.texts import Texts
from specdec.session.handle import Handle, Stream
from specdec.session.link.remote import Remote
from specdec.session.outputs import GenerationResult, StreamChunk

logger = logging.getLogger(__name__)


class Front:
    """What the routes share; in the event loop alone.

    Attributes:
        names: by which the model is called.
        texts: makes tokens of texts.
        tool_format: how the model writes calls of tools, where that is known.
        max_total_tokens: of prompt and output of one request together.
        totals: what was done so far.
        learned: what came of learning, see `specdec.serve.learning.learner.Learned`.
        draining: nothing new is taken on.
        dead: the engine failed, and a probe then, or its process or a rank has ended.
        on_end: called when the server is to end.
    """

    def __init__(self, engine: Remote, setup: Setup) -> None:
        self.engine, self.config = engine, setup.config
        self.names, self.drafter, self._model = setup.names, setup.drafter_name, setup.model
        self.texts, self.max_total_tokens = Texts(engine.reader), engine.admission.max_total_tokens
        self.tool_format = setup.tool_format(engine.reader.tokenizer)
        self.created = int(time.time())
        self.totals = Totals()
        self.learned: dict[str, Any] | None = None
        self._tau_before: float | None = None
        self._changed_at = 0, 0  # steps, and their tokens, at the last change of weights
        self._elsewhere: dict[int, Totals] = {}  # of other processes, by whatever tells them apart
        self._sent: dict[str, Any] = {}
        self.draining = self.dead = False
        self.on_end: Callable[[], object] = lambda: None
        self._open: set[Outputs] = set()
        self._waiting: set[asyncio.Future[None]] = set()  # for grammars
        engine.told = {
            "totals": self._take_totals,
            "drafter": self._take_drafter,
            "learned": self._take_learned,
            "dead": self._die,
        }

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an output."""
        return not self._open

    @property
    def num_open(self) -> int:
        """Unfinished outputs that somebody waits for."""
        return sum(outputs.num_open for outputs in self._open)

    def count(self) -> Totals:
        """The totals of all processes, with what unfinished outputs of this one are at by now."""
        for outputs in self._open:
            outputs.count()
        return sum_of([self.totals, *self._elsewhere.values()])

    def tell_others(self) -> None:
        """Tells other processes what this one has done, where there are any."""
        if self.config.num_fronts > 1:
            self.count()
            if (now := self.totals.plain()) != self._sent:
                self._sent = now
                self.engine.send(("totals", now))

    def _take_totals(self, number: int, given: dict[str, Any]) -> None:
        try:
            self._elsewhere[number] = Totals.from_plain(given)
        except (ValueError, TypeError, KeyError, AttributeError):
            logger.exception("another front has told counts that are none")

    @property
    def taus(self) -> dict[str, float]:
        """Tokens per verify step of the weights that draft "now" and "before" their last change."""
        totals, (steps, tokens) = self.count(), self._changed_at
        now = (totals.step_tokens - tokens) / max(totals.steps - steps, 1)
        found = {"before": self._tau_before, "now": now}
        return {weights: tau for weights, tau in found.items() if tau}

    def _take_drafter(self, name: str) -> None:
        self._tau_before = self.taus.get("now")
        totals = self.count()
        self._changed_at = totals.steps, totals.step_tokens
        self.drafter = name

    def _take_learned(self, learned: dict[str, Any]) -> None:
        self.learned = learned

    def described(self) -> dict[str, Any]:
        """The model, the engine and the limits, without what is nobody's business."""
        names = [field.name for field in fields(self.config)]
        names = [name for name in names if name.startswith("max_") or name.endswith("_seconds")]
        return {
            "version": __version__,
            "served_model_name": self.names[0],
            "drafter": self.drafter,
            "max_model_len": self.max_total_tokens,
            **self.engine.facts.settings,
            "limits": {name: getattr(self.config, name) for name in names},
        }

    @property
    def num_waiting(self) -> int:
        """Unfinished outputs of all processes that wait for a place."""
        numbers = self.engine.numbers
        return max(0, self.num_open + numbers.outputs - numbers.running)

    def check_model(self, name: str | None) -> None:
        """Raises:
        RequestError: a request names another model.
        """
        check_model(name, (*self.names, self._model), self.names)

    def without_folder(self, text: str) -> str:
        """The text without the folder that the model comes from."""
        return text.replace(repr(self.engine.reader.name), repr(self.names[0]))

    def check_open(self) -> None:
        """Raises:
        RequestError: nothing new is taken on.
        """
        if self.dead:
            what = "the engine has failed, and the server ends"
            raise RequestError(what, status=503, code="engine_dead")
        if self.draining:
            raise busy("the server is about to end; ask another one")

    async def wait_for_grammar(self, sampling: SamplingParams) -> None:
        """Waits until the grammar of a request can be followed.

        Raises:
            RequestError: too many wait for theirs.
            SpecDecError: there can be no grammars, or this one cannot be compiled.
        """
        self._check_room("grammars", 1, len(self._waiting), self.config.max_queue)
        waiting = asyncio.ensure_future(self.engine.grammar(sampling))
        self._waiting.add(waiting)
        try:
            await waiting
        except (CapacityError, RuntimeError) as error:
            raise told(error) from error
        except asyncio.CancelledError:
            waiting.cancel()
            self.check_open()
            raise
        finally:
            self._waiting.discard(waiting)

    async def update_drafter(self, name: str) -> None:
        """Waits until the weights of a checkpoint draft.

        Raises:
            RequestError: others are being loaded.
            SpecDecError: they cannot be used, and the old ones stay.
        """
        self.check_open()
        try:
            await self.engine.update_drafter(name)
        except (CapacityError, RuntimeError) as error:
            raise told(error) from error

    def submit(
        self,
        asked: Sequence[tuple[list[int], SamplingParams]],
        *,
        incremental: bool,
        parted: bool = False,
        tagged: bool = False,
    ) -> Outputs:
        """Queues the outputs of one request, all or none; `parted` tells their thinking apart, with
        its tags if `tagged`.

        Raises:
            RequestError: they would be too many, now or ever.
            SpecDecError: see `SpecEngine.new_request`.
        """
        self.check_open()
        limits, elsewhere = self.config, self.engine.numbers
        tokens_asked = sum(len(tokens) for tokens, _ in asked)
        tokens_open = sum(some.num_prompt_tokens for some in self._open) + elsewhere.prompt_tokens
        outputs_open = self.num_open + elsewhere.outputs
        self._check_room("outputs", len(asked), outputs_open, limits.max_queue)
        self._check_room("prompt tokens", tokens_asked, tokens_open, limits.max_queued_tokens)
        first = {id(tokens): (tokens, sampling) for tokens, sampling in reversed(asked)}
        for tokens, sampling in first.values():
            self.engine.admission.check(tokens, sampling)
        outputs = Outputs(self, incremental=incremental, parted=parted, tagged=tagged)
        for tokens, sampling in asked:
            outputs.add(tokens, sampling)
        self._open.add(outputs)
        return outputs

    def ended(self, outputs: Outputs) -> None:
        """Nobody waits for these any more."""
        self._open.discard(outputs)

    def _die(self, line: str | None = None) -> None:
        if line is not None and not (self.dead or self.draining):
            logger.error("the server ends: %s", line)
        self.dead = True
        self.on_end()

    async def drain(self) -> None:
        """Takes nothing new on, waits for what is unfinished in the config's time, ends it."""
        self.draining = True
        for waiting in list(self._waiting):  # what they are for would be refused
            waiting.cancel()
        until = time.monotonic() + self.config.drain_seconds
        while not self.idle and not self.dead and time.monotonic() < until:
            await asyncio.sleep(0.02)
        for outputs in list(self._open):
            outputs.cut(busy("the server is stopping and ended this output; ask another one"))
        self.texts.close()

    def _check_room(self, what: str, more: int, now: int, limit: int) -> None:
        if more > limit:
            asked = f"the request has {more:,} {what} and the limit is {limit:,}"
            raise RequestError(f"{asked}; send less at once")
        if now + more > limit:
            raise busy(f"{now:,} {what} are unfinished and the limit is {limit:,}; try again later")


class Outputs(Stream):
    """The outputs of one request, in one stream. Closing it cancels what is unfinished.

    Attributes:
        ended: done once all have ended, or with why they have not.
    """

    def __init__(
        self, front: Front, *, incremental: bool, parted: bool = False, tagged: bool = False
    ) -> None:
        super().__init__(front.engine)
        self._front, self._incremental = front, incremental
        self._parted, self._tagged = parted, tagged
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        self._reader: Callable[[StreamChunk], object] | None = None
        self._may_write: Callable[[], bool] = lambda: False
        self._results: dict[int, GenerationResult] = {}
        self._handles: list[Handle] = []
        self._waiting: deque[tuple[list[int], SamplingParams]] = deque()
        seats = front.engine.facts.max_num_seqs
        # in the engine at once, and its queue: others come between the rest
        self._share = seats + max(1, seats // 4)
        self._arrived = time.perf_counter()
        # when the first chunk of an output came, and its tokens
        self._first: dict[int, tuple[float, int]] = {}
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
        """Queues one."""
        self._waiting.append((tokens, sampling))
        self.num_prompt_tokens += len(tokens)
        self._submit()

    def _submit(self) -> None:
        """Gives the engine what has its turn."""
        while self._waiting and len(self._handles) - len(self._counted) < self._share:
            asked, index = self._waiting.popleft(), len(self._handles)
            made = self._front.engine.submit(
                *asked,
                index=index,
                incremental=self._incremental,
                stream=self,
                parted=self._parted,
                tagged=self._tagged,
            )
            self._handles.append(made)

    @property
    def summary(self) -> str:
        """Tokens, the first of them and tau, in words."""
        requests = [handle.request for handle in self._handles]
        tokens = sum(len(request.output_token_ids) for request in requests)
        emitted = [count for request in requests for count in request.num_emitted]
        summary = f"{self.num_prompt_tokens} + {tokens} tokens"
        if self._first:
            first = min(when for when, _ in self._first.values()) - self._arrived
            summary += f", the first after {first:.3f} s"
        return f"{summary}, tau {sum(emitted) / len(emitted):.2f}" if emitted else summary

    @property
    def paused(self) -> bool:
        """Whether chunks cannot be written at the moment."""
        return not self._may_write()

    def follow(self, read: Callable[[StreamChunk], object], may_write: Callable[[], bool]) -> None:
        """Has chunks read as they come.

        Args:
            read: called with each.
            may_write: says whether it is to be; where not, more is put together meanwhile.
        """
        self._reader, self._may_write = read, may_write
        early, self._chunks = list(self._chunks), deque()
        for chunk in early:
            read(chunk)

    def put(self, chunk: StreamChunk) -> None:
        """Takes a chunk."""
        try:
            self._count(chunk)
            if chunk.result is not None:
                _check_result(chunk.result)
                self._results[chunk.index] = chunk.result
                self._submit()
            if self._reader is not None:
                self._reader(chunk)
            elif self._incremental:
                self._chunks.append(chunk)
        except Exception as error:
            self.cut(error)
        if not self.num_open and not self.ended.done():
            self.ended.set_result(None)
            self._front.ended(self)

    def fail(self, error: BaseException) -> None:
        """Ends all because the engine has failed, or refuses one."""
        if not isinstance(error, SpecDecError):
            self._error = error
        self.cut(told(error))

    def cut(self, error: Exception) -> None:
        """Ends all, for this reason."""
        if not self.ended.done():
            self.ended.set_exception(error)
        self.close()

    async def results(self, receive: Receive) -> list[GenerationResult]:
        """All outputs, in the order in which they were added.

        Raises:
            ClientGone: nobody reads them any more.
            RequestError: the engine failed, or the server ends.
        """
        leaving = asyncio.ensure_future(gone(receive))

        def left(leaving: asyncio.Future[None]) -> None:
            if not leaving.cancelled():
                self.cut(ClientGone())

        leaving.add_done_callback(left)
        try:
            await self.ended
        finally:
            leaving.cancel()
        return [self._results[index] for index in range(len(self._handles))]

    def close(self) -> None:
        """Cancels what is unfinished."""
        self._front.totals.finished["cancelled"] += len(self._waiting)
        self._waiting.clear()
        for handle in self._handles:
            if not handle.done:
                handle.cancel()
        for index in range(len(self._handles)):
            if index not in self._counted:
                self._end(index, "error" if self.failed else "cancelled")
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
        request = handle.request
        totals, tokens = self._front.totals, len(request.output_token_ids)
        totals.output_tokens += tokens - self._tokens[index]
        steps, known = len(request.num_drafted), self._steps[index]
        if steps > known:
            counts = request.num_drafted, request.num_accepted, request.num_emitted
            totals.add(AcceptanceStats(*(of[known:] for of in (*counts, request.tree_sizes))))
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


def _check_result(result: GenerationResult) -> None:
    """Raises:
    RequestError: the output was not finished.
    """
    if result.bad_input:
        raise RequestError(result.error or "the request cannot be served")
    if result.finish_reason == "error":
        raise engine_failed(RuntimeError(result.error or "the engine failed"))
    if result.finish_reason == "cancelled":
        raise busy("the server is stopping and ended this output; ask another one")
