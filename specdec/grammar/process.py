"""The process that compiles grammars, as seen by those who ask it; see `specdec.grammar.worker`."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from threading import Lock

from specdec.base.errors import InvalidInputError, SpecDecError, one_line
from specdec.grammar.grammar import Grammar
from specdec.grammar.limits import MAX_MEMORY, MAX_SECONDS

TOKENIZER, GRAMMAR = b"t", b"g"
"""Kinds of messages."""

START = (
    "import sys; sys.path[:] = {path!r}; from specdec.grammar.worker import main; main({number})"
)

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}
"""The process uses no accelerator."""


class TooSlow(InvalidInputError):
    """A grammar was not compiled in its time."""


class Ended(Exception):
    """The process has ended, by whatever."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a tokenizer's tokens read, as xgrammar writes it.

    Attributes:
        write: gives it.
    """

    write: Callable[[], str]
    key: int = field(default_factory=count().__next__)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a grammar was compiled to.

    Attributes:
        again: compile `text`, rules in GBNF known to be quick; else they are done.
        notes: what there is to say.
    """

    again: bool
    notes: list[str]
    text: str


class CompilerProcess:
    """A process, started when it is first asked. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._known: set[int] = set()

    def open(self, vocabulary: Vocabulary) -> socket.socket:
        """Where a grammar can be sent, and its answer read; whoever closes it ends the compiling.

        Raises:
            Ended: the process has ended; another one is started at the next call.
            OSError: it cannot be started.
        """
        with self._lock:
            if self._control is None:
                self._start()
            try:
                if vocabulary.key not in self._known:
                    with self._link(TOKENIZER) as link:
                        link.sendall(b"%d\n" % vocabulary.key + vocabulary.write().encode())
                    self._known.add(vocabulary.key)
                return self._link(GRAMMAR)
            except OSError as error:
                self._end()
                raise Ended from error

    def close(self) -> None:
        """Ends it, and what it compiles."""
        with self._lock:
            self._end()

    def after_fork(self) -> None:
        """In a child process, which starts one of its own."""
        self._lock = Lock()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.returncode = 0  # the parent's to wait for
        self._process = self._control = None
        self._known = set()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", START.format(path=sys.path, number=theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a signal to all in the terminal is not for it
                env={**os.environ, **HIDDEN},
            )
        self._control, self._known = ours, set()

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._process = self._control = None

    def _link(self, message: bytes) -> socket.socket:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [message], [theirs.fileno()])
            except OSError:
                ours.close()
                raise
        return ours


def reason_of(kind: str, error: BaseException) -> str:
    """Why a grammar cannot be compiled, on one line, whatever the library raises."""
    if isinstance(error, MemoryError) or "bad_alloc" in str(error):
        limit = f"{MAX_MEMORY // 2**20:,} MiB"
        return (
            f"the grammar of kind {kind} takes too much memory to compile (the limit is"
            f" {limit}); make it simpler"
        )
    if isinstance(error, RecursionError):
        return (
            f"the grammar of kind {kind} is nested too deeply, or has too many parts in a row;"
            f" make it simpler"
        )
    if isinstance(error, SpecDecError):
        return one_line(error, 1000)
    said = (str(error).strip().splitlines() or [""])[-1]
    reason = re.sub(r"^.*\.cc:\d+: ", "", said) or type(error).__name__
    return f"the grammar of kind {kind} cannot be compiled: {reason[:1000]}"


def ask(link: socket.socket, vocabulary: Vocabulary, grammar: Grammar, seconds: float) -> Answer:
    """What a grammar is compiled to; waits for it.

    Raises:
        InvalidInputError: it cannot be compiled within the limits.
        TooSlow: not in these seconds of a processor.
        Ended: the process has ended meanwhile, or somebody has shut the link.
    """
    what = f"the grammar of kind {grammar.kind}"
    text = grammar.text.encode("utf-8", "surrogatepass")
    try:
        link.sendall(
            json.dumps([vocabulary.key, grammar.kind, seconds, len(text)]).encode() + b"\n" + text
        )
        parts = list(iter(lambda: link.recv(2**20), b""))
    except OSError as error:
        raise Ended from error
    answer, _, status = b"".join(parts).rpartition(b"\n")
    if not re.fullmatch(rb"-?\d+", status):
        raise Ended
    if int(status) == -signal.SIGPROF:
        line = f"{what} takes more than {MAX_SECONDS:g} seconds of a processor to compile"
        raise TooSlow(f"{line}; make it simpler")
    if int(status):
        raise InvalidInputError(f"{what} ended the process that compiled it; make it simpler")
    head, _, made = answer.partition(b"\n")
    said = json.loads(head)
    if "reason" in said:
        raise InvalidInputError(said["reason"])
    return Answer(said["again"], said["notes"], made.decode())
