"""The process that compiles grammars: it forks for each, so that all have their own limits.

Every message comes with a socket of its own. A tokenizer's lists what the vocabulary reads. A
grammar's is answered there, and its end of the socket is watched as well: who lets go of the other
end ends the compiling. A process of its own waits for the one that compiles, since a signal, or
memory that runs out, leaves no answer.
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any

from specdec.grammar.grammar import Grammar
from specdec.grammar.limits import MAX_COMPILED, MAX_MEMORY
from specdec.grammar.process import TOKENIZER, reason_of
from specdec.grammar.rules import rules_of

AGAIN_SECONDS, AGAIN_BYTES = 2.0, 2**27
"""What took no more is compiled again where it is needed, which is quicker than to write it."""


def main(number: int) -> None:
    """Serves whoever holds the other end of a socket, until that is closed."""
    xgrammar = _library()
    gc.freeze()  # a fork that looks for garbage would copy all of it
    for one in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # meant for who started this, and who says when it ends
        signal.signal(one, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    compilers: dict[int, Any] = {}
    with socket.socket(fileno=number) as control:
        while True:
            message, sockets, _, _ = socket.recv_fds(control, 1, 1)
            if not message:
                os._exit(0)
            with socket.socket(fileno=sockets[0]) as link:
                if message == TOKENIZER:
                    key, _, text = _everything(link).partition(b"\n")
                    info = xgrammar.TokenizerInfo.deserialize_json(text.decode())
                    compilers[int(key)] = xgrammar.GrammarCompiler(
                        info, max_threads=1, cache_enabled=False
                    )
                elif os.fork() == 0:
                    try:
                        control.close()
                        _watch(link, compilers)
                    finally:
                        os._exit(1)


class _Absent:
    """Stands for a module, and all that is in it, that is imported and not needed here."""

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_: object, **__: object) -> _Absent:
        return self

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


def _library() -> Any:
    """xgrammar, if possible without torch and transformers, which slow forks down."""
    absent: dict[str, Any] = {"torch": _Absent(), "transformers": _Absent()}
    try:
        sys.modules["torch"] = None  # type: ignore[assignment]
        importlib.import_module("tvm_ffi")
        sys.modules |= absent
        return importlib.import_module("xgrammar")
    except Exception:
        for name in [name for name in sys.modules if name.split(".")[0] in ("xgrammar", *absent)]:
            del sys.modules[name]
        return importlib.import_module("xgrammar")


def _everything(link: socket.socket) -> bytes:
    return b"".join(iter(lambda: link.recv(2**16), b""))


def _watch(link: socket.socket, compilers: dict[int, Any]) -> None:
    """In its own process: has another compile a grammar, ends it with its asker, tells."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    alive, end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            link.sendall(_answer(link, compilers))
            os._exit(0)
        finally:
            os._exit(1)
    os.close(end)
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    poll.register(link, select.POLLHUP)
    while alive not in (places := [place for place, _ in poll.poll()]):
        os.kill(child, signal.SIGKILL)
        poll.unregister(places[0])
    _, status = os.waitpid(child, 0)
    with suppress(OSError):  # whoever asked has gone
        link.sendall(b"\n%d" % os.waitstatus_to_exitcode(status))


def _answer(link: socket.socket, compilers: dict[int, Any]) -> bytes:
    """What becomes of the grammar that a message brings: a line of JSON, and what it speaks of."""
    data = b""
    while b"\n" not in data:
        data += link.recv(2**16)
    asked, _, data = data.partition(b"\n")
    key, kind, seconds, size = json.loads(asked)
    parts, known = [data], len(data)
    while known < size:
        parts.append(link.recv(2**20))
        known += len(parts[-1])
    notes: list[str] = []
    _limit(seconds)
    os.nice(min(10, int(5 * seconds)))  # others go first, and engines before all
    _listen(notes)
    try:
        again, made = _compiled(
            compilers[key], Grammar.known(kind, b"".join(parts).decode("utf-8", "surrogatepass"))
        )
        head: dict[str, Any] = {"again": again, "notes": notes}
    except Exception as error:
        head, made = {"reason": reason_of(kind, error)}, ""
    return json.dumps(head).encode() + b"\n" + made.encode()


def _compiled(compiler: Any, grammar: Grammar) -> tuple[bool, str]:
    """Rules that are to be compiled again, or what they were compiled to."""
    before = _peak()
    rules = rules_of(grammar)
    compiled = compiler.compile_grammar(rules)
    if time.process_time() <= AGAIN_SECONDS and _peak() - before <= AGAIN_BYTES:
        return True, rules
    written = compiled.serialize_json()
    if len(written) > MAX_COMPILED:
        raise MemoryError
    return False, written


def _peak() -> int:
    """Most bytes that this process had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _limit(seconds: float) -> None:
    """Ends this process after so many seconds of a processor, and bounds its memory."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.setitimer(signal.ITIMER_PROF, seconds)  # which ends it by SIGPROF
    # other systems have no such limit
    with suppress(FileNotFoundError), open("/proc/self/statm") as file:
        most = int(file.read().split()[0]) * resource.getpagesize() + MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _listen(notes: list[str]) -> None:
    """Keeps what is said while rules are made."""
    handler = logging.Handler()
    handler.emit = lambda record: notes.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("specdec").addHandler(handler)
