"""Inputs one after another in a child process, whose work and memory the system limits."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.fuzz.kind import Broken, Kind
from tests.helpers.waiting import HANG

MAX_SECONDS = 20
"""Of the processor, per input: far more than any needs, far less than a flood takes."""
MAX_BYTES = 2**32
"""That an input may add to the process."""

Failure = tuple[Any, str]


def failures(kind: Kind, inputs: Iterable[Any], batch: int = 1_000) -> Iterator[Failure]:
    """The inputs that break what must hold, and how; each child takes so many."""
    left = iter(inputs)
    while some := list(islice(left, batch)):
        while some:
            some = some[(yield from _child(kind, some)) :]


def _child(kind: Kind, inputs: Sequence[Any]) -> Generator[Failure, None, int]:
    """Like `failures`; gives how many inputs were looked at before the child ended."""
    folder = Path(tempfile.mkdtemp(prefix="specdec-fuzz-"))
    reader, writer = Pipe(duplex=False)
    child = os.fork()
    if not child:
        reader.close()
        _run(kind, inputs, folder, writer)
    writer.close()
    begun = 0
    try:
        while reader.poll(HANG):
            number, said = json.loads(reader.recv_bytes())
            if number == len(inputs):
                return number
            begun = number
            if said:
                yield inputs[number], said
        yield inputs[begun], f"no end within {HANG:g} s"
    except EOFError:
        yield inputs[begun], f"the process ended: {_ending(os.waitpid(child, 0)[1])}"
        child = 0
    finally:
        _end(child)
        shutil.rmtree(folder, ignore_errors=True)
    return begun + 1


def _run(kind: Kind, inputs: Sequence[Any], folder: Path, told: Connection) -> None:
    """In the child; never returns."""
    os.setsid()
    said = "cannot start"

    def tell(number: int, said: str = "") -> None:
        told.send_bytes(json.dumps([number, said]).encode())

    try:
        check = kind.start(folder)
        for number, one in enumerate(inputs):
            tell(number)
            _limit()
            said = _looked_at(check, one)
            if said:
                tell(number, said)
        tell(len(inputs))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _looked_at(check: Callable[[Any], None], one: Any) -> str:
    """What is wrong; nothing if nothing is."""
    try:
        check(one)
    except Broken as error:
        return str(error)
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {str(error)[:300]} @ {where.filename}:{where.lineno}"
        return said + "".join(traceback.format_exception(error, limit=-6)).join(("\n", ""))
    return ""


def _limit() -> None:
    """What the next input may take."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + MAX_SECONDS
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MAX_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))


def _ending(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGXCPU:
        return f"more than {MAX_SECONDS} s of the processor"
    return f"status {code}"


def _end(child: int) -> None:
    """The child and all that it started."""
    if child:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
