"""Objects that have to know when the process was forked, or ends."""

import atexit
import os
import sys
from contextlib import suppress
from typing import Protocol
from weakref import WeakSet

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class Forked(Protocol):
    """Holds what does not survive a fork, such as locks and threads."""

    def after_fork(self) -> None:
        """Called in the child process, where this is the only thread."""


class Ending(Protocol):
    """Has threads that must not be within torch when Python ends: the process would abort."""

    def at_exit(self) -> None:
        """Called when the program has ended, before Python does."""


_known: WeakSet[Forked] = WeakSet()
_ending: WeakSet[Ending] = WeakSet()


def tell_of_forks(one: Forked) -> None:
    """Has `one.after_fork` called in every child process, as long as somebody holds `one`."""
    _known.add(one)


def tell_of_exit(one: Ending) -> None:
    """Has `one.at_exit` called, as long as somebody holds `one`."""
    _ending.add(one)


def _after_fork() -> None:
    for one in list(_known):
        one.after_fork()


@atexit.register
def _at_exit() -> None:
    try:
        for one in list(_ending):
            one.at_exit()
    except KeyboardInterrupt:  # who asks once more waits for no thread
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(_INTERRUPTED)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
