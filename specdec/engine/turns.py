"""One worker out of those who wait: of several callers one works for all, and another goes on when it has what it wanted."""

import threading
from collections.abc import Callable


class Turns:
    """Whose turn it is.

    Args:
        lock: held by who calls `wake` and `pass_on`, and while the others change anything.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._waiting: dict[threading.Event, Callable[[], bool]] = {}  # callers, and what each waits for
        self.taken = False

    def claim(self) -> bool:
        """Takes the turn if it is free, and says whether it was."""
        with self._lock:
            free, self.taken = not self.taken, True
        return free

    def wait(self, ready: Callable[[], bool]) -> bool:
        """Takes the turn if it is free; otherwise waits until `ready`, or until the turn may be free, and is False.

        Args:
            ready: asked by who has the turn, in whichever thread.
        """
        with self._lock:
            if self.claim():
                return True
            told = threading.Event()
            self._waiting[told] = ready
        told.wait()
        return False

    def wake(self) -> None:
        """Wakes the callers who have what they wait for."""
        for told in [told for told, ready in list(self._waiting.items()) if ready()]:
            self._waiting.pop(told, None)
            told.set()

    def pass_on(self) -> None:
        """Gives the turn back, to one of those who still wait."""
        self.taken = False
        self.wake()
        if told := next(iter(self._waiting), None):
            del self._waiting[told]
            told.set()
