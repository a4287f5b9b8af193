"""One of several callers works for all, and another goes on when it has what it wanted.

An exception may come at any instruction, as from the handler of a signal. So the turn belongs to a
call that runs: where that has ended without passing it on, the next one takes it. Nobody sleeps for
good, so that a call that was lost is not waited for.
"""

import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn

from specdec.base.errors import CapacityError, InvalidInputError

PATIENCE = 1.0
"""Seconds after which who waits looks whether the turn was lost."""

LAST_STEP = 60.0
"""Seconds that the end of the program waits for a step under way."""


class Turns:
    """Whose turn it is.

    Args:
        lock: held by who calls `wake` and `pass_on`, and while the others change anything.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        # callers, and what each waits for
        self._waiting: dict[threading.Lock, Callable[[], bool]] = {}
        self._owner: tuple[int, FrameType] | None = None  # a thread, and the call in it
        self._ending = self._parked = False

    @property
    def taken(self) -> bool:
        """Whether somebody has the turn, or has had it and was interrupted."""
        return self._owner is not None

    def claim(self, call: FrameType) -> bool:
        """Takes the turn if it is free, and says whether it was.

        Args:
            call: of this thread, which passes the turn on before it ends.
        """
        with self._lock:
            if self._ending or (self._owner is not None and _runs(*self._owner)):
                return False
            self._owner = threading.get_ident(), call
            return True

    def check(self) -> None:
        """Raises where this thread has the turn already.

        Raises:
            InvalidInputError: it has, and would wait for itself.
        """
        owner = self._owner
        if owner is not None and owner[0] == threading.get_ident() and _runs(*owner):
            raise InvalidInputError(
                "this thread is in the midst of a step, and a call from within it, as by a drafter"
                " or the handler of a signal,"
                " would wait for itself; call from another thread, or afterwards"
            )

    def wait(self, ready: Callable[[], bool], call: FrameType) -> bool:
        """Takes the turn if it is free; else waits until `ready` or it may be free, and is False.

        Args:
            ready: asked by who has the turn, in whichever thread.
            call: see `claim`.

        Raises:
            InvalidInputError: see `check`.
            CapacityError: the program is ending.
        """
        self.check()
        if self._ending:
            self.park()
        # no event, which is Python's own code and can be interrupted with its lock held
        lock = threading.Lock()
        lock.acquire()
        with self._lock:
            free = self._owner is None or self._owner[0] == threading.get_ident()
            if free and self.claim(call):
                return True
            self._waiting[lock] = ready
        try:
            in_good_time = lock.acquire(timeout=PATIENCE)
        except BaseException:
            with self._lock:
                self._waiting.pop(lock, None)
                if self._owner is None:  # perhaps it was this one's
                    self._offer()
            raise
        with self._lock:
            self._waiting.pop(lock, None)
        return not in_good_time and self.claim(call)

    def wake(self) -> None:
        """Wakes the callers who have what they wait for."""
        for lock in [lock for lock, ready in list(self._waiting.items()) if ready()]:
            self._tell(lock)

    def pass_on(self) -> None:
        """Gives the turn back, to one of those who still wait."""
        self._owner = None
        self.wake()
        self._offer()

    def end(self) -> None:
        """Lets nobody step any more, and waits until nobody does: torch would abort."""
        self._ending, limit = True, time.monotonic() + LAST_STEP
        while (
            not self._parked
            and self._owner is not None
            and _runs(*self._owner)
            and time.monotonic() < limit
        ):
            time.sleep(0.002)

    def park(self) -> NoReturn:
        """Stays until the process has ended, after `end`; who steps asks before each step.

        Raises:
            CapacityError: in the main thread, which ends the program.
        """
        if threading.current_thread() is threading.main_thread():
            what = "the program is ending, and nothing is decoded any more"
            raise CapacityError(f"{what}; decode before its end")
        self._parked |= self._owner is not None and self._owner[0] == threading.get_ident()
        while True:
            time.sleep(3600)

    @property
    def ending(self) -> bool:
        return self._ending

    def _offer(self) -> None:
        if (lock := next(iter(self._waiting), None)) is not None:
            self._tell(lock)

    def _tell(self, lock: threading.Lock) -> None:
        if self._waiting.pop(lock, None) is not None:
            lock.release()


def _runs(thread: int, call: FrameType) -> bool:
    """Whether a call has not ended."""
    at = sys._current_frames().get(thread)
    while at is not None and at is not call:
        at = at.f_back
    return at is call
