"""Who has to know when the process was forked."""

import os
from typing import Protocol
from weakref import WeakSet


class Forked(Protocol):
    """Holds what does not survive a fork, such as locks and threads."""

    def after_fork(self) -> None:
        """Called in the child process, where this is the only thread."""


_known: WeakSet[Forked] = WeakSet()


def tell_of_forks(one: Forked) -> None:
    """Has `one.after_fork` called in every child process, as long as somebody holds `one`."""
    _known.add(one)


def _after_fork() -> None:
    for one in list(_known):
        one.after_fork()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_after_fork)
