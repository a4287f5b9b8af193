"""Processes that a process has started, as the system's own files tell."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any


@contextmanager
def started(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[Any]]:
    """A process, which ends with the block that has it: one whose test fails holds up none."""
    with subprocess.Popen(command, **options) as process:
        try:
            yield process
        finally:
            process.kill()


def _parents() -> dict[int, int]:
    """The parent of every process that has not ended."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = path.read_text().rpartition(")")[2].split()[:2]
            if state not in "ZX":
                found[int(path.parent.name)] = int(parent)
    return found


def below(pid: int) -> set[int]:
    """A process, if it has not ended, and all that it and its own have started."""
    parents, known = _parents(), {pid}
    while more := {child for child, parent in parents.items() if parent in known} - known:
        known |= more
    return known & parents.keys()


def session(pid: int) -> set[int]:
    """Processes of the session that a process has begun, whoever their parent is by now."""
    found = set()
    for one in _parents():
        with suppress(OSError):
            if os.getsid(one) == pid:
                found.add(one)
    return found


def memory(pids: set[int]) -> int:
    """Bytes that they have."""
    total = 0
    for pid in pids:
        with suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf(
                "SC_PAGESIZE"
            )
    return total
