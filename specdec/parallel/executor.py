"""What rank 0 does with a target, done by every rank of its group.

Only rank 0 runs the user's program. The others wait for what it says, and call the same functions
in the same order with the same arguments. What such a call has made, a target or an engine, is kept
by all ranks under one number, and stands for itself in the arguments of later calls. Within such a
call all ranks run the same code, so nothing has to be said there.

An error on any rank within a call leaves others waiting in a collective, so it ends the group.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist

from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.parallel.group import Group, group_of
from specdec.parallel.plain import pack, unpack
from specdec.parallel.processes.rendezvous import Rendezvous
from specdec.parallel.processes.workers import Workers
from specdec.parallel.wire import Message, Wire

Result = TypeVar("Result")

_CLOSED = "the tensor-parallel group has been closed"
_INTERRUPTED = "the tensor-parallel group has ended after an interruption"

END, CALL, STEP = range(3)
"""What a message is about: its first number."""


class Ranks:
    """The processes of a group, as rank 0 started them.

    Args:
        workers: the processes.
        threads: of torch that this one had before.
        folder: where the ranks have met.
    """

    def __init__(self, workers: Workers, threads: int, folder: Rendezvous) -> None:
        self._workers, self._threads, self._folder = workers, threads, folder
        self.why_ended, self.may_end = workers.why_ended, workers.may_end

    def end(self, *, kill: bool) -> None:
        """Waits for them to end, or ends them."""
        self._workers.end(kill=kill)
        torch.set_num_threads(self._threads)

    def join(self) -> None:
        """Waits for the threads that watch them."""
        self._workers.join()

    def forget(self) -> None:
        """Removes what they have met by, once this process has left their group; NCCL, whose group
        stays, looks for its file.
        """
        if not dist.is_initialized():
            self._folder.remove()


class Executor:
    """One rank's end of a group that follows rank 0; made by all ranks at once.

    Args:
        group: the ranks.
        ranks: whom rank 0 has started; None where somebody else did.
        secret: of the run, by which ranks know each other's messages; empty without one.
    """

    def __init__(self, group: Group, ranks: Ranks | None = None, secret: bytes = b"") -> None:
        self.group = group
        self._ranks = ranks
        own = group.device_group  # torch takes None for all ranks
        self._on_device = own is not None and dist.get_backend(own) == "nccl"
        self._process = os.getpid()
        self._wire = Wire(group, secret)
        self._lock = threading.RLock()  # callers come one at a time
        self._inside = False
        self._owners = 0
        self._ended: str | None = None
        self._numbers = count(1)
        self._by_number: dict[int, Any] = {}  # on all ranks but rank 0, whose owners let go of them
        self._by_id: dict[int, int] = {}  # on rank 0
        self._gone: deque[int] = deque()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.group.rank == 0

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._inside

    @property
    def ended(self) -> str | None:
        """Why the group has ended; None while it lives."""
        return self._ended

    @property
    def failed(self) -> bool:
        """Whether it has ended otherwise than by `end`."""
        return self._ended not in (None, _CLOSED)

    def run(self, function: Callable[..., Result], *args: Any, keep: bool = False) -> Result:
        """Calls a function on every rank.

        Args:
            function: marked by `specdec.parallel.plain.on_ranks`.
            args: what was kept by an earlier call, or what has a plain form.
            keep: what the function makes may be an argument later.

        Returns:
            What it returned on this rank.

        Raises:
            InvalidInputError: something cannot be sent to the other ranks.
            SpecDecError: the group has ended, or ends now because of an error on another rank.
        """
        with self.together() as outermost:
            if outermost:
                if keep:
                    gc.collect()  # what has been let go of makes room on all ranks
                self.say([CALL], self._packed((function, args, keep)))
            result = function(*args)
            if keep and result is not None:
                self.keep(result)
        return result

    def say(self, numbers: list[int], payload: bytes = b"") -> None:
        """Sends a message; within `together`."""
        self._wire.say(numbers, payload)

    def hear(self) -> Message:
        """Waits for the next message; on ranks that follow."""
        return self._wire.hear()

    @contextmanager
    def together(self) -> Iterator[bool]:
        """What all ranks do at the same time; on rank 0 an error ends the group. Gives whether it
        is the outermost.
        """
        with self._lock:
            if self._inside or not self.leads:
                yield False
                return
            if self._forked:
                raise SpecDecError(
                    "the ranks of this target follow another process, of which this one is a fork;"
                    " load the target there"
                )
            if self._ended:
                raise SpecDecError(f"{self._ended}; load the target again")
            self._inside = True
            try:
                yield True
                if self._ended:  # what was waited for has been given up, and its results are void
                    raise RuntimeError(self._ended)
            except Unsendable:
                raise
            except BaseException as error:
                # first, for another interrupt may come from here on
                self._ended = self._ended or _INTERRUPTED
                self._fail(error)
                raise
            finally:
                self._inside = False

    def hold(self) -> None:
        """One more owner; the last one that lets go ends the group."""
        self._owners += 1

    def let_go(self) -> None:
        """One owner less."""
        self._owners -= 1
        if self._owners <= 0:
            self.end()

    def keep(self, made: Result) -> Result:
        """`made` on every rank, which may be an argument of later calls; within a call."""
        number = next(self._numbers)
        if self.leads:
            self._by_id[id(made)] = number
            finalize(made, self._let_go, id(made), number).atexit = False
        else:
            self._by_number[number] = made
        return made

    def number_of(self, kept: object) -> int:
        """The number of what was kept; on rank 0."""
        return self._by_id[id(kept)]

    def follow(self) -> None:
        """Does what rank 0 says until it says that the group ends; on the other ranks.

        Raises:
            RuntimeError: a rank has ended.
        """
        while (message := self.hear()).numbers[0] != END:
            kind, number = message.numbers[:2]
            if kind == STEP:
                self._by_number[number].follow(message)
            else:
                self._obey(message.payload)

    def end(self) -> None:
        """Ends the group; does nothing when it has ended. On rank 0."""
        with self._lock:
            if self._ended is None and not self._forked:
                self._ended = _CLOSED
                if self._ranks is not None:
                    self._ranks.may_end()
                try:
                    self._wire.close([END])
                except RuntimeError:
                    self._release(kill=True)
                else:
                    self._release(kill=False)

    def lose(self, line: str) -> None:
        """Takes note that a rank has ended, as `line` says, and frees a host that waits for the
        device; by the thread that watches the rank.

        Where nobody waits, that thread never has a process group: if it let go of one last, while
        the interpreter ends, the process would abort.
        """
        self._ended = self._ended or line
        if self._on_device and self.busy:
            threading.Thread(target=self.group.device_group.abort, daemon=True).start()

    def join(self) -> None:
        """Waits until nobody watches the ranks any more; once the group has ended."""
        if self._ranks is not None and not self._forked:
            self._ranks.join()

    def _fail(self, error: BaseException) -> None:
        """Ends the group because of an error on rank 0, which may come from another rank's end.

        Raises:
            SpecDecError: it does.
        """
        line = self._why(error)
        if self._ended is _INTERRUPTED:
            self._ended = (
                line or f"the tensor-parallel group has ended after an error: {_first_line(error)}"
            )
        self._release(kill=True)
        if line:
            raise SpecDecError(line) from error

    def _why(self, error: BaseException) -> str | None:
        """One line about the rank whose end is behind an error; None where there is none."""
        if isinstance(error, SpecDecError) or not isinstance(error, RuntimeError):
            return None
        if self._ranks is not None:
            return self._ranks.why_ended()
        if self._ended not in (None, _INTERRUPTED):
            return self._ended
        signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
        lost = any(words in str(error) for words in signs)
        if lost:
            return "another rank of the tensor-parallel group has ended; torchrun says which"
        return None

    def _release(self, *, kill: bool) -> None:
        global _current
        if _current is self:
            _current = None
        if self._ranks is not None:
            self._ranks.end(kill=kill)
        if self._ranks is not None or not kill:  # else another rank may be amid a collective
            self._wire.leave()
            self.group.leave()
        if self._ranks is not None:
            self._ranks.forget()

    def _packed(self, call: tuple[Any, ...]) -> bytes:
        """A call, and the numbers of what rank 0 has let go of."""
        gone = [self._gone.popleft() for _ in range(len(self._gone))]
        try:
            return pack([*call, gone], self._by_id)
        except TypeError as error:
            self._gone.extend(gone)
            what = f"the other ranks cannot be told of this call: {_first_line(error)}"
            raise Unsendable(f"{what}; give names and numbers") from error

    def _obey(self, payload: bytes) -> None:
        function, args, keep, gone = unpack(payload, self._by_number)
        for number in gone:
            del self._by_number[number]
        if keep:
            gc.collect()
        self.run(function, *args, keep=keep)

    def _let_go(self, where: int, number: int) -> None:
        if self._by_id.get(where) == number:
            del self._by_id[where]
        self._gone.append(number)


class Unsendable(InvalidInputError):
    """Said before anything is sent, so the group lives on."""


_current: Executor | None = None


def current() -> Executor | None:
    """The living group of this process, of which there is at most one."""
    return _current


def install(executor: Executor) -> Executor:
    """Makes it the group of this process."""
    global _current
    _current = executor
    return executor


def executor_of(target: object) -> Executor | None:
    """The group whose ranks compute a target together; None for one computed here alone."""
    executor = _current
    return executor if executor is not None and group_of(target) is executor.group else None


def collective_rpc(
    target: object, function: Callable[..., Result], *args: Any, keep: bool = False
) -> Result:
    """Calls a function on every rank that has a part of `target`; see `Executor.run`."""
    executor = executor_of(target)
    return function(*args) if executor is None else executor.run(function, *args, keep=keep)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0][:300] or type(error).__name__
