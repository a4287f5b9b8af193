"""An engine that serves callers in other processes; their side is `specdec.session.link.remote`.

One thread does all: after each step it tells callers what has come, in one message for all outputs
of a process, and takes over what they ask for. It waits for nobody. Where a process does not read,
its outputs go on, and what came of them meanwhile is told at once when it does.
"""

from __future__ import annotations

import logging
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

from specdec.base.errors import SpecDecError, one_line, shown
from specdec.engine.launch import Launch
from specdec.engine.requests.request import Request, Status
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.link.channel import (
    Malformed,
    Numbers,
    end_of,
    packed,
    pairs,
    plain_error,
    unpacked,
)
from specdec.session.link.link import Ended, Link, Output
from specdec.session.link.updates import Updates
from specdec.session.outputs import StreamChunk

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""After which an engine without work looks whether its ranks live, and works ahead."""


ROWS_SECONDS = 0.5
"""Between two steps whose rows callers are told."""


class _Failures:
    """Where the session puts what becomes of requests; only failures are news here."""

    failed = False
    error: BaseException | None = None

    def open(self) -> None:
        """One more request."""

    def put(self, chunk: StreamChunk) -> None:
        """The end of one, which its callers are told of otherwise."""

    def fail(self, error: BaseException) -> None:
        """The engine has failed."""
        self.error = error


class Hub:
    """Steps an engine for callers in other processes.

    Args:
        on_ready: called once all processes that were added before `run` serve.
        on_loss: called with a process that has ended by itself; it may add another one.
        on_stop: called once when all are to end, which it tells them.
        update_drafter: has other weights draft, by name, in a thread of its own; None: nobody asks.
        on_end: called with each request that has ended, where anybody asks for them.

    Attributes:
        dead: the engine failed, and then failed a probe, or a rank has ended.
        stopping: nothing new is taken on.
    """

    def __init__(
        self,
        decoder: SpecDecoder,
        *,
        on_ready: Callable[[], object] = lambda: None,
        on_loss: Callable[[Link], object] = lambda link: None,
        on_stop: Callable[[], object] = lambda: None,
        update_drafter: Callable[[str], object] | None = None,
        on_end: Callable[[Ended], object] | None = None,
    ) -> None:
        self._decoder, self._session, self._engine = decoder, decoder.session, decoder.engine
        self._ranks = decoder.ranks  # which are not the decoder's any more once they have ended
        self._on_ready, self._on_loss, self._on_stop = on_ready, on_loss, on_stop
        self._updates = update_drafter and Updates(update_drafter, self._soon)
        self._on_end = on_end
        self._drafter: str | None = None  # its name, once it has changed
        self._learned: dict[str, Any] | None = None
        self._links: dict[int, Link] = {}
        self._outputs: dict[Request, Output] = {}
        self._totals: dict[int, Any] = {}  # of processes, those that have ended among them
        self._failures = _Failures()
        self._calls: deque[Callable[[], object]] = deque()
        self._poll = select.poll()
        self._bell, self._woken = socket.socketpair()
        self._bell.setblocking(False)
        self._woken.setblocking(False)
        self._poll.register(self._woken, select.POLLIN)
        self.dead = self.stopping = False
        self._rows_due = 0.0
        self._told_step: Launch | None = None

    def add(self, link: Link) -> None:
        """Serves one more process."""
        self._links[link.channel.fileno()] = link
        self._poll.register(link.channel.fileno(), select.POLLIN | select.POLLOUT)

    def stop(self) -> None:
        """Has `run` end once all processes have; from any thread, or the handler of a signal."""
        if not self.stopping:
            self.stopping = True
            self._on_stop()

    def changed_drafter(self, name: str) -> None:
        """Tells all processes that other weights draft from now on; from any thread."""
        self._soon(partial(self._change_drafter, name))

    def tell_learned(self, learned: dict[str, Any]) -> None:
        """Tells all processes what came of learning; from any thread."""
        self._soon(partial(self._tell_learned, learned))

    def run(self) -> None:
        """Serves until every process has ended."""
        self._session.watch = self._note
        try:
            while self._links:
                quiet = self._session.idle
                self._exchange(LOOK_SECONDS if quiet else 0.0)
                if not self._session.idle:
                    self._work()
                elif quiet:
                    self._session.work_ahead()
        finally:
            self._session.watch = None
            self._session.close()
            self._bell.close()
            self._woken.close()

    def _soon(self, call: Callable[[], object]) -> None:
        """Has something called between steps; from any thread."""
        self._calls.append(call)
        with suppress(OSError):  # it is awake, or has ended
            self._bell.send(b"\0")

    def _work(self) -> None:
        """Steps until there is nothing more to do."""
        try:
            self._session.run_until(self._at_rest, on_step=self._after_step)
        except Exception as error:  # of the engine, most likely
            self._failures.fail(error)
        if self._failures.error is not None:
            failure, self._failures.error = self._failures.error, None
            self._fail(failure)
        self._tell()  # what ended last is no output of others any more

    def _at_rest(self) -> bool:
        return self._session.idle or not self._links

    def _after_step(self) -> None:
        self._tell()
        self._exchange(0.0)

    def _exchange(self, seconds: float) -> None:
        """Takes over what has come, and sends what is left, after waiting for something so long."""
        seen = self._poll.poll(1000 * seconds)
        for place, events in seen:
            link = self._links.get(place)
            if link is None:
                with suppress(BlockingIOError):
                    self._woken.recv(4096)
                continue
            if events & select.POLLOUT:
                self._flush(link)
            if events & ~select.POLLOUT:
                self._hear(link)
        while self._calls:
            self._calls.popleft()()
        if seconds and not seen and self._ranks is not None and self._ranks.ended is not None:
            self.die(self._ranks.ended)

    def _send(self, link: Link, message: tuple[Any, ...]) -> None:
        link.channel.send(message)
        if link.channel.congested:  # it is heard again once it has read its answers
            self._poll.modify(link.channel.fileno(), select.POLLOUT)

    def _flush(self, link: Link) -> None:
        link.channel.flush()
        if not link.channel.congested:
            self._poll.modify(link.channel.fileno(), select.POLLIN)
            self._tell_totals(link)
            self._tell_news(link, self._numbers())

    def _hear(self, link: Link) -> None:
        try:
            for message in link.channel.receive():
                self._take(link, message)
        except EOFError:
            self._lose(link)
        except Malformed as error:
            link.fault = str(error)
            self._lose(link)

    def _take(self, link: Link, message: list[Any]) -> None:
        match message:
            case ["ready"]:
                self._take_ready(link)
            case ["new", int(key), dict(sampling), bytes(tokens)] if key not in link.outputs:
                self._take_new(link, key, unpacked(tokens), _sampling_of(sampling))
            case ["cancel", int(key)]:
                self._take_cancel(link, key)
            case ["grammar", int(key), dict(sampling)] if key not in link.grammars:
                self._take_grammar(link, key, _sampling_of(sampling))
            case ["drafter", int(key), str(name)] if self._updates is not None:
                self._updates.begin(name, partial(self._tell_drafter, link, key, name))
            case ["leave", int(key)]:
                self._take_leave(link, key)
            case ["totals", dict(totals)]:
                self._take_totals(link, totals)
            case _:
                raise Malformed(f"a message is {shown(message)}")

    def _take_ready(self, link: Link) -> None:
        link.ready = True
        if self._drafter is not None:
            self._send(link, ("drafter", self._drafter))
        if self._learned is not None:
            self._send(link, ("learned", self._learned))
        link.untold.update(self._totals)
        self._tell_totals(link)
        if all(one.ready for one in self._links.values()):
            self._on_ready()
            self._on_ready = lambda: None

    def _take_new(
        self, link: Link, key: int, tokens: Sequence[int], sampling: SamplingParams
    ) -> None:
        failures: Any = self._failures
        link.check_room(outputs=1, prompt_tokens=len(tokens))
        try:
            handle = self._session.submit(
                tokens, sampling, incremental=False, text=False, stream=failures, wait=False
            )
        except Exception as error:
            if not isinstance(error, SpecDecError):
                logger.exception("a request failed before its first step")
            self._send(link, ("refused", key, *plain_error(error)))
            return
        link.outputs[key] = self._outputs[handle.request] = Output(link, key, handle)
        link.prompt_tokens += len(tokens)

    def _take_cancel(self, link: Link, key: int) -> None:
        output = link.drop(key)
        if output is not None:
            self._outputs.pop(output.handle.request, None)
            output.handle.cancel()

    def _take_grammar(self, link: Link, key: int, sampling: SamplingParams) -> None:
        link.check_room(grammars=1)
        try:
            compiled = self._engine.admission.compiled_grammar(sampling)
        except Exception as error:
            self._send(link, ("done", key, *plain_error(error)))
            return
        if compiled is None:
            raise Malformed("a grammar is waited for, and there is none")
        link.grammars[key] = compiled
        tell = partial(self._tell_grammar, link, key)
        compiled.add_done_callback(lambda done: self._soon(partial(tell, done)))

    def _tell_grammar(self, link: Link, key: int, compiled: Future[Any]) -> None:
        if link.grammars.pop(key, None) is not None and not compiled.cancelled():
            error = compiled.exception()
            self._send(link, ("done", key, *(() if error is None else plain_error(error))))

    def _tell_drafter(self, link: Link, key: int, name: str, error: BaseException | None) -> None:
        if error is None:
            self._change_drafter(name)
        if link in self._links.values():
            self._send(link, ("done", key, *(() if error is None else plain_error(error))))

    def _change_drafter(self, name: str) -> None:
        self._drafter = name
        logger.warning("%s drafts from now on", name)
        self._tell_all(("drafter", name))

    def _tell_learned(self, learned: dict[str, Any]) -> None:
        self._learned = learned
        self._tell_all(("learned", learned))

    def _tell_all(self, message: tuple[Any, ...]) -> None:
        """Tells what is ready; what begins later is told then."""
        for link in self._links.values():
            if link.ready:
                self._send(link, message)

    def _take_leave(self, link: Link, key: int) -> None:
        """Nobody waits for a grammar, or for weights, any more."""
        compiled = link.grammars.pop(key, None)
        if compiled is not None:
            compiled.cancel()

    def _take_totals(self, link: Link, totals: dict[str, Any]) -> None:
        self._totals[link.number] = totals
        for other in self._links.values():
            if other is not link:
                other.untold.add(link.number)
                self._tell_totals(other)

    def _tell_totals(self, link: Link) -> None:
        """Counts of others as they are now, as fast as they are read."""
        while link.untold and not link.channel.congested:
            number = link.untold.pop()
            self._send(link, ("totals", number, self._totals[number]))

    def _note(self, touched: list[Request]) -> None:
        """Remembers who is to be told of what a step gave."""
        for request in touched:
            output = self._outputs.get(request)
            if output is not None:
                output.link.changed[request] = output

    def _numbers(self) -> Numbers:
        engine, links = self._engine, self._links.values()
        cached, scheduler = engine.prefix_counts, engine.scheduler
        outputs = sum(len(link.outputs) for link in links) if len(links) > 1 else 0
        prompts = sum(link.prompt_tokens for link in links) if outputs else 0
        now = len(scheduler.working), engine.pool.num_used, cached.queried, cached.found
        return Numbers(*now, scheduler.num_preemptions, outputs, prompts)

    def _tell(self) -> None:
        numbers, step = self._numbers(), self._engine.last_step
        if step is not None and step is not self._told_step and monotonic() >= self._rows_due:
            self._rows_due, self._told_step = monotonic() + ROWS_SECONDS, step
            for link in self._links.values():
                if link.ready and not link.channel.congested:
                    self._send(link, ("rows", str(step.shape), step.spent()))
        for link in self._links.values():
            if not link.channel.congested:
                self._tell_news(link, numbers)

    def _tell_news(self, link: Link, numbers: Numbers) -> None:
        """All that is new in one message: of each output how many tokens and steps, then these."""
        if numbers.outputs:
            outputs = numbers.outputs - len(link.outputs)
            prompts = numbers.prompt_tokens - link.prompt_tokens
            numbers = numbers._replace(outputs=outputs, prompt_tokens=prompts)
        changed, link.changed = link.changed, {}
        if not changed and numbers == link.numbers:
            return
        link.numbers = numbers
        keys, counts, tokens, parts, steps = [], [], [], [], []
        more: list[tuple[Any, ...]] = []
        for request, output in changed.items():
            written, known = request.output_token_ids, output.num_tokens
            keys.append(output.key)
            counts.append(len(written) - known)
            tokens += written[known:]
            output.num_tokens = len(written)
            done = request.steps
            parts.append(len(done) - output.num_steps)
            steps += done[output.num_steps :]
            output.num_steps = len(done)
            if request.logprobs:
                since, output.num_logprobs = output.num_logprobs, len(request.logprobs)
                scored = request.logprobs[since:], pairs(request.top_logprobs[since:])
                more.append(("scored", output.key, *scored))
            if request.status is Status.FINISHED:
                more.append(("end", output.key, end_of(request)))
                link.drop(output.key)
                self._outputs.pop(request, None)
                if self._on_end is not None:
                    self._on_end(Ended.of(request))
        integers = packed(counts + parts + tokens + steps, keys)
        self._send(link, ("news", len(keys), more, numbers, integers))

    def _fail(self, error: BaseException) -> None:
        """After an error of the engine, which began anew: all outputs have ended, and a token shows
        whether it can go on, for without all ranks it cannot.
        """
        line = str(error) or type(error).__name__
        for link in self._links.values():
            if link.outputs:
                self._send(link, ("failed", line))
            for output in link.outputs.values():
                output.handle.cancel()
            link.outputs, link.changed, link.prompt_tokens = {}, {}, 0
        self._outputs = {}
        try:
            token = next(iter(self._decoder.verifier.eos_token_ids), 0)
            sampling = SamplingParams(max_tokens=1)
            probe = self._session.submit([token], sampling, incremental=False, text=False)
            result = probe.result()
            if result.finish_reason == "error":
                raise RuntimeError(result.error)
        except Exception as again:
            self.die((self._ranks is not None and self._ranks.ended) or str(again))
        else:
            logger.error("the engine failed, and goes on: %s", line)

    def die(self, line: str) -> None:
        """Ends all, because the engine cannot go on."""
        if not self.dead:
            logger.error("the server ends: %s", line)
            self.dead = True
            for link in self._links.values():
                self._send(link, ("dead",))
            self.stop()

    def _lose(self, link: Link) -> None:
        """A process has ended: nobody reads its outputs any more."""
        place = link.channel.fileno()
        self._poll.unregister(place)
        del self._links[place]
        link.channel.close()
        for key in list(link.grammars):
            self._take_leave(link, key)
        for key in list(link.outputs):
            self._take_cancel(link, key)
        if not self.stopping:
            self._on_loss(link)


def _sampling_of(given: dict[str, Any]) -> SamplingParams:
    try:
        return SamplingParams.from_plain(given, known=True)
    except Exception as error:  # who sends them has made them
        raise Malformed(f"sampling is {shown(given)}: {one_line(error)}") from error
