"""In which order grammars are compiled: those that take little never wait for those that take much.

See `specdec.grammar.limits.QUEUES`. Long texts let shorter ones pass, not for ever.
"""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import Any

from specdec.base.errors import CapacityError
from specdec.grammar.limits import MAX_SECONDS, MAX_WAITING, QUEUES, QUICK_SECONDS
from specdec.grammar.process import CompilerProcess, TooSlow

CHARACTERS_PER_PLACE = 1000
"""A text so long lets one that came later pass."""


class Job:
    """A grammar on its way, for all who wait for it. Once nobody does, it stops.

    Args:
        size: characters of its text.
        work: compiles it, within so many seconds of a processor.

    Attributes:
        result: what it is compiled to.
        on_stop: called when it stops while it is compiled.
    """

    def __init__(self, size: int, work: Callable[[Job, float], Any]) -> None:
        self.size, self.work = size, work
        self.result: Future[Any] = Future()
        self.on_stop: Callable[[], object] = lambda: None
        self._lock = threading.RLock()
        self._waiting = 0

    @property
    def stopped(self) -> bool:
        """Whether nobody waited any more."""
        return self.result.cancelled()

    def join(self) -> Future[Any] | None:
        """The result, for one more who leaves by cancelling it; None where it has stopped."""
        own: Future[Any] = Future()
        with self._lock:
            if self.stopped:
                return None
            self._waiting += 1
        own.add_done_callback(self._left)
        self.result.add_done_callback(partial(_copy, own))
        return own

    def stop(self) -> None:
        """Ends it without a result."""
        if self.result.cancel():
            self.on_stop()

    def _left(self, own: Future[Any]) -> None:
        if own.cancelled():
            with self._lock:
                self._waiting -= 1
                if not self._waiting:
                    self.stop()

    def run(self, seconds: float) -> bool:
        """Does the work; False where it takes longer than these seconds, and more may be had."""
        if self.stopped:
            return True
        try:
            made = self.work(self, seconds)
        except TooSlow as error:
            if seconds < MAX_SECONDS:
                return False
            self._fail(error)
        except BaseException as error:
            self._fail(error)
        else:
            if self.result.set_running_or_notify_cancel():
                self.result.set_result(made)
        return True

    def _fail(self, error: BaseException) -> None:
        if self.result.set_running_or_notify_cancel():
            self.result.set_exception(error)


def _copy(own: Future[Any], result: Future[Any]) -> None:
    if not own.set_running_or_notify_cancel():
        return
    if result.cancelled():
        own.set_exception(RuntimeError("no grammar is compiled any more, for the process ends"))
    elif error := result.exception():
        own.set_exception(error)
    else:
        own.set_result(result.result())


class Queues:
    """The threads that have grammars compiled, and their queues; started with the first job.

    Attributes:
        process: compiles what they do not compile themselves.
    """

    def __init__(self) -> None:
        self.process = CompilerProcess()
        self._changed = threading.Condition()
        self._queues: dict[float, list[tuple[int, int, Job]]] = {limit: [] for limit in QUEUES}
        self._numbers = count()
        self._running: set[Job] = set()
        self._started = self._closed = False
        # Closed before threads are waited for.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]

    def add(self, job: Job) -> None:
        """Queues a job.

        Raises:
            CapacityError: too many wait.
        """
        with self._changed:
            waiting = sum(not one.stopped for queue in self._queues.values() for _, _, one in queue)
            if waiting >= MAX_WAITING:
                what = f"{waiting:,} grammars wait to be compiled and the limit is {MAX_WAITING:,}"
                raise CapacityError(f"{what}; try again later")
            self._put(job, QUICK_SECONDS)
            limits = [limit for limit, count in QUEUES.items() for _ in range(count)]
            for limit in () if self._started else limits:
                threading.Thread(target=self._work, args=(limit,), name="specdec grammar").start()
            self._started = True

    def close(self) -> None:
        """Ends all work; what waits for it is told that it was cancelled."""
        with self._changed:
            self._closed = True
            queued = (job for queue in self._queues.values() for _, _, job in queue)
            jobs = [*self._running, *queued]
            self._changed.notify_all()
        for job in jobs:
            job.stop()
        self.process.close()

    def _put(self, job: Job, limit: float) -> None:
        number = next(self._numbers)
        place = number + job.size // CHARACTERS_PER_PLACE
        heapq.heappush(self._queues[limit], (place, number, job))
        self._changed.notify_all()

    def _work(self, limit: float) -> None:
        queue = self._queues[limit]
        while True:
            with self._changed:
                while not queue and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                job = heapq.heappop(queue)[2]
                self._running.add(job)
            done = job.run(limit)
            with self._changed:
                self._running.discard(job)
                if not done and not self._closed:
                    self._put(job, min(other for other in QUEUES if other > limit))


_queues: Queues | None = None
_lock = threading.Lock()


def queues() -> Queues:
    """The queues of this process."""
    global _queues
    with _lock:
        _queues = _queues or Queues()
        return _queues


def _after_fork() -> None:
    global _queues, _lock
    if _queues is not None:
        _queues.process.after_fork()
    _queues, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
