"""A session steps an engine, for any number of callers in any number of threads.

Nobody owns a thread. Of the callers that wait, one steps the engine and hands every request its
news; when it has what it waited for, another goes on. So a single caller pays for no thread at all,
an error of the engine shows where somebody waits, and a process may fork. Asynchronous callers
cannot step; for them a thread waits in the others' place, started with the first of them.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING

import torch

from specdec.base.errors import CapacityError, InvalidInputError, one_line
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Request
from specdec.sampling.params import SamplingParams
from specdec.session.callers import Callers
from specdec.session.forks import tell_of_exit, tell_of_forks
from specdec.session.handle import Handle, Stream
from specdec.session.outputs import StreamChunk
from specdec.session.prompts import PromptReader
from specdec.session.text import IncrementalDecoder, text_of, token_ids
from specdec.session.turns import PATIENCE, Turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

MAX_QUEUE = 1024
"""Unfinished requests of a session, or four times what the engine decodes at once, if more."""


_INTERRUPTED = RuntimeError("a step was interrupted")


class Session:
    """The only caller of an engine's `step`; safe to use from several threads.

    Args:
        tokenizer: turns tokens into text; None gives no text, and no stop strings can be found.
        max_queue: most unfinished requests; None: `MAX_QUEUE` or four times `max_num_seqs`.

    Attributes:
        watch: called after each step with the requests that have news, by whoever steps.
    """

    def __init__(
        self,
        engine: SpecEngine,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        max_queue: int | None = None,
    ) -> None:
        self.engine, self.tokenizer = engine, tokenizer
        self.max_queue = max_queue or max(MAX_QUEUE, 4 * engine.config.max_num_seqs)
        self._lock = threading.RLock()  # of everything below
        self._arrived = threading.Condition(self._lock)  # for the thread of asynchronous callers
        self._callers = Callers()
        self._new: list[Request] = []  # not yet known to the engine
        self._cancelled: deque[Request] = deque()
        self._between: deque[tuple[Callable[[], None], Future[None]]] = deque()
        self._turns = Turns(self._lock)  # who has the turn steps the engine
        self._thread: threading.Thread | None = None
        self._closed = False
        self.watch: Callable[[list[Request]], None] | None = None
        # a step is under way, or has failed and the engine has to begin anew
        self._unsound: BaseException | None = None
        tell_of_forks(self)
        tell_of_exit(self)

    @property
    def idle(self) -> bool:
        """Whether every request has ended."""
        return not self._callers

    @property
    def has_room(self) -> bool:
        """Whether a request can be submitted without waiting."""
        return len(self._callers) < self.max_queue

    def submit(
        self,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        index: int = 0,
        incremental: bool = True,
        text: bool = True,
        stream: Stream | None = None,
        wait: bool = True,
    ) -> Handle:
        """Queues a request.

        Args:
            prompt_token_ids: at least one token.
            index: number of its chunks.
            incremental: give chunks while it is decoded; otherwise only one at its end.
            stream: where its chunks go, shared with other requests; None gives it one of its own.
            wait: decode until the queue has room; otherwise a full queue is an error.

        Raises:
            InvalidInputError, CapacityError: see `SpecEngine.new_request`.
            CapacityError: the queue is full and `wait` is False, or the session is closed.
        """
        sampling = sampling or SamplingParams()
        if self.tokenizer is not None:
            reader = PromptReader(self.tokenizer, self.engine.verifier.name)
            sampling = reader.with_prediction(sampling)
        if self._unsound is not None and self._turns.claim(sys._getframe()):
            # a new request is not to end with those of a step that was interrupted
            self._hand_over()
        while True:
            with self._lock:
                if self._closed:
                    raise CapacityError("the session is closed; open another one")
                if self.has_room:
                    return self._add(
                        prompt_token_ids, sampling, index, incremental, text, stream or Stream(self)
                    )
                if not wait:
                    raise CapacityError(
                        f"{len(self._callers):,} requests are unfinished and the queue holds"
                        f" {self.max_queue:,}; try again later"
                    )
            self.run_until(lambda: self.has_room)

    def map(
        self,
        prompts: Iterable[tuple[Sequence[int], SamplingParams]],
        *,
        incremental: bool = False,
        text: bool = True,
    ) -> Generator[StreamChunk, None, None]:
        """Chunks of many requests, numbered in the order of `prompts`, taken as the queue has room.

        Closing the iterator early cancels what is unfinished.
        """
        stream, numbered, more = Stream(self), enumerate(prompts), True
        handles: dict[int, Handle] = {}
        try:
            while more or handles:
                while more and (self.has_room or not handles):
                    item = next(numbered, None)
                    more = item is not None
                    if item is not None:
                        index, asked = item
                        handles[index] = self.submit(
                            *asked, index=index, incremental=incremental, text=text, stream=stream
                        )
                chunk = next(stream, None)
                if chunk is None:
                    break
                if chunk.result is not None:
                    del handles[chunk.index]
                yield chunk
        finally:
            for handle in handles.values():
                handle.cancel()

    def between_steps(self, work: Callable[[], None]) -> None:
        """Does something to the engine while no step is under way: here and now, or by who steps.

        Args:
            work: what to do. An error in it is one of the engine's.

        Raises:
            InvalidInputError: this thread is stepping it, and would wait for itself.
            CapacityError: the program is ending.
        """
        self._turns.check()
        done: Future[None] = Future()
        self._between.append((work, done))
        while not done.done():
            if self._turns.ending:
                raise CapacityError("the program is ending")
            if self._turns.claim(sys._getframe()):
                self._hand_over()
            wait([done], PATIENCE)  # who steps does it, at the latest when it hands over
        done.result()

    def step(self) -> None:
        """Steps the engine once; for measurements. Others wait in `run_until` meanwhile.

        Raises:
            RuntimeError: somebody else is stepping it.
            InvalidInputError: this thread is.
        """
        self._turns.check()
        if not self._turns.claim(sys._getframe()):
            raise RuntimeError("another thread is stepping this engine")
        try:
            self._step()
        finally:
            self._hand_over()

    def run_until(
        self, ready: Callable[[], bool], on_step: Callable[[], object] | None = None
    ) -> None:
        """Steps the engine until `ready`, or waits while another caller does.

        Args:
            ready: asked after every step, in whichever thread.
            on_step: called after each step that this caller takes.

        Raises:
            InvalidInputError: this thread is stepping it already, and would wait for itself.
        """
        while not ready():
            if not self._turns.wait(ready, sys._getframe()):
                continue
            try:
                while not ready():
                    self._step()
                    if on_step is not None:
                        on_step()
                    if not self._callers and not ready():
                        raise RuntimeError(
                            "the session has no request left, and a caller still waits for one"
                        )
            finally:
                self._hand_over()

    def work_ahead(self) -> None:
        """Without requests: one piece of what makes later steps faster, once what was launched has
        been read; see `SpecEngine.idle_work`. Does nothing while somebody else steps.
        """
        work = self.engine.idle_work
        if not (self.idle and work and self._turns.claim(sys._getframe())):
            return
        try:
            self._guarded(self._one_step if self.engine.has_work else work.popleft())
        except Exception as error:
            work.clear()
            logger.warning("nothing more is captured while nobody asks: %s", one_line(error))
        finally:
            self._hand_over()

    def start(self) -> None:
        """Starts the thread that steps for asynchronous callers, unless it runs."""
        with self._lock:
            if not (self._closed or (self._thread and self._thread.is_alive())):
                name = "specdec session"
                self._thread = threading.Thread(target=self._drive, name=name, daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Cancels what is unfinished, and ends the thread; nothing can be submitted afterwards."""
        with self._lock:
            self._closed = True
            handles = self._callers.handles
            self._arrived.notify()
        for handle in handles:
            handle.cancel()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def cancel(self, request: Request) -> None:
        """Ends a request with what it has; does nothing when it has ended."""
        with self._lock:
            if self._turns.ending or request not in self._callers:
                return
            self._cancelled.append(request)
            if not self._turns.claim(sys._getframe()):
                return  # who steps does it, at the latest when it hands over
        self._hand_over()

    def _add(
        self,
        prompt: Sequence[int],
        sampling: SamplingParams,
        index: int,
        incremental: bool,
        text: bool,
        stream: Stream,
    ) -> Handle:
        """Makes a request; under the lock."""
        if sampling.stop and self.tokenizer is None:
            what = "stop strings need a tokenizer and the session has none"
            raise InvalidInputError(f"{what}; give it one, or use stop_token_ids")
        decoder, special = None, sampling.special_tokens
        if self.tokenizer is not None and (sampling.stop or (text and incremental)):
            # A least length of the checkpoint's own holds off its ends alone, as in Transformers.
            decoder = IncrementalDecoder(
                self.tokenizer, sampling.stop, min_tokens=sampling.min_tokens or 0, **special
            )
        push = None if decoder is None else lambda request, tokens: decoder.push(tokens)
        request = self.engine.new_request(token_ids(prompt), sampling, on_tokens=push)
        whole = partial(text_of, self.tokenizer if text else None, **special)
        handle = Handle(self, stream, request, index, decoder, whole)
        self._new.append(request)
        stream.open()
        # last: what is new and has no caller was interrupted here
        self._callers.add(handle, listens=incremental)
        self._arrived.notify()
        return handle

    def _drive(self) -> None:
        """What the thread does: steps while there is work, and waits for more."""
        while True:
            with self._lock:
                while not self._callers and not self._closed:
                    self._arrived.wait()
                if not self._callers:
                    return
            try:
                self.run_until(lambda: not self._callers)
            except BaseException as error:  # whatever a drafter raises, this thread goes on
                text = "the engine failed, and who waits for a request has been told: %s"
                logger.debug(text, error)

    def _step(self) -> None:
        """One step of the engine, and its news to everyone; by the caller whose turn it is."""
        if self._turns.ending:
            self._turns.park()
        if self._unsound is not None:
            self._fail(self._unsound)
        else:
            self._guarded(self._one_step)

    def _one_step(self) -> None:
        if self._new or self._cancelled or self._between:
            self._take_over()
        touched = self.engine.step()
        if self.watch is not None:
            self.watch(touched)
        with self._lock:
            for request in self._callers.deliver(touched):
                self.engine.abort(request)
            self._turns.wake()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Does what leaves the engine unsound when it ends early, however it ends."""
        try:
            self._unsound = _INTERRUPTED
            work()
            self._unsound = None
        except BaseException as error:
            if self._unsound is not None:
                self._fail(error)
            raise

    def _take_over(self) -> None:
        """Tells the engine of new and cancelled requests, and does what steps delay."""
        with self._lock:
            new, self._new = self._new, []
            cancelled, self._cancelled = [*self._cancelled, *self._callers.left], deque()
        for request in new:
            if request in self._callers:
                self.engine.enqueue(request)
        for request in cancelled:
            self.engine.abort(request)
        with self._lock:
            self._callers.deliver(cancelled)
        while self._between:
            work, done = self._between.popleft()
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
                raise
            done.set_result(None)

    def _hand_over(self) -> None:
        """Lets another caller step."""
        with self._lock:
            if self._unsound is not None:
                self._fail(self._unsound)
            while self._cancelled or self._between:
                self._guarded(self._take_over)
            self._turns.pass_on()

    def _fail(self, error: BaseException) -> None:
        """After an error nobody knows how far the step came: requests end, the engine begins anew.

        What interrupts this, or cannot be done, is done again before anything else.
        """
        with self._lock:
            left: BaseException | None = error
            again, self._unsound = self._unsound is error, error
            handles = self._callers.handles
            self._new, self._cancelled = [], deque()
            try:
                self.engine.reset()
                left = None
            except (
                Exception
            ) as lost:  # as of a device that is lost; what is raised is the error that came first
                if not again:
                    logger.warning("the engine cannot begin anew: %s", lost)
            for handle in handles:
                handle.stream.fail(error)
            self._callers.clear()
            self._turns.wake()
            self._unsound = left

    def after_fork(self) -> None:
        """In a child process, with this thread alone: nobody steps or waits, no lock is held.

        OpenMP's threads are gone, too: torch, which would wait for them, computes on this one.
        """
        torch.set_num_threads(1)
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        if self.engine.admission.grammars:
            self.engine.admission.grammars.after_fork()
        self._between.clear()  # who waits is not here
        self._thread, stepping = None, self._turns.taken
        self._turns = Turns(self._lock)
        if stepping:
            self._fail(RuntimeError("the process was forked while another thread was decoding"))

    def at_exit(self) -> None:
        """At the end of the program: no thread steps any more."""
        self._turns.end()
