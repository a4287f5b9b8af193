"""Kills commands at random moments and goes on: nothing lost, doubled or left running.

    python -m tests.checks.kills --moments 100 --seed 1

Each command runs in a child that is forked once everything has been imported. It ends by kill -9,
SIGTERM, two SIGINT close together, or SIGSTOP and then kill -9; where it has several processes,
any of them may be meant. The next run goes on in the same folder; one that ends by itself is
compared with a clean run, and the next begins anew. Prints a table, and exits 1 where something is
wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any, NoReturn

from specdec.cli.main import command
from tests.checks.kills_commands import (
    Command,
    Damage,
    State,
    check_places,
    commands,
    make_places,
    prepare,
)
from tests.helpers.processes import below

PATIENCE = 40.0
"""Seconds in which a command that is told to end has ended, with all that it started."""
MAX_UNFINISHED = 2
"""Files that a kill may leave, which the next run takes away."""
ADOPT = 36  # PR_SET_CHILD_SUBREAPER: orphans become our children, so none goes unseen
IMPORTED = (
    "lm_eval.api.model",
    "uvicorn",
    "drafters.training.stages",
    "evals.accuracy.evaluation",
    "specdec.serve.server",
)
WAYS = ("kill -9", "SIGTERM", "SIGINT twice", "SIGSTOP, kill -9")


class Forked(BaseException):
    """In a child: leaves all frames of the check, and runs the command."""


@dataclass
class Found:
    """What came of the runs of one command."""

    ways: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    longest: float = 0.0
    wrong: list[str] = field(default_factory=list)


def start(command: Command, folder: Path) -> int:
    """Begins a run in a child, whose process is given."""
    child = os.fork()
    if child:
        return child
    os.setsid()
    # which a shell lets those ignore that it starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(folder)
    for number, name in ((0, os.devnull), (1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    raise Forked(command.argv(folder))


def ended(pid: int, until: float) -> int | None:
    """The status of a child that ends by then."""
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            return None
        time.sleep(0.005)


def hurt(pid: int, way: str, draw: Random) -> int:
    """Sends what ends a process, which is given: that of the run, or one below it."""
    # none is left of a run that has just ended
    victim = draw.choice(sorted(below(pid)) or [pid]) if draw.random() < 0.3 else pid
    # a terminal tells all
    kill = os.killpg if way.startswith("SIGINT") and draw.random() < 0.5 else os.kill
    with suppress(ProcessLookupError):
        if way == "kill -9":
            os.kill(victim, signal.SIGKILL)
        elif way == "SIGTERM":
            os.kill(pid, signal.SIGTERM)
        elif way == "SIGINT twice":
            kill(pid, signal.SIGINT)
            time.sleep(draw.choice([0.0, 0.0005, 0.002, 0.05, 0.3]))
            kill(pid, signal.SIGINT)
        else:
            os.kill(victim, signal.SIGSTOP)
            time.sleep(draw.choice([0.1, 1.0]))
            os.kill(victim, signal.SIGKILL)
    return pid if way.startswith("SIG") and not way.startswith("SIGSTOP") else victim


def orphans(until: float) -> set[int]:
    """Processes that are left, whoever has started them; those that have ended are forgotten."""
    while True:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        left = below(os.getpid()) - {os.getpid()}
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.02)


def one(
    command: Command, folder: Path, moment: float, way: str, draw: Random, found: Found
) -> bool:
    """A run that is hurt at a moment; whether it has ended by itself, and all is well."""
    (folder / "stderr").unlink(missing_ok=True)  # where clients read the address
    pid, began = start(command, folder), time.monotonic()
    client = _client(command, folder)
    status = ended(pid, began + moment)
    alone = status is not None
    if not alone:
        told = time.monotonic()
        victim = hurt(pid, way, draw)
        found.ways[way] += 1
        if victim != pid and not command.ends:
            # a server has another one take its place, and ends when it is told to
            status = ended(pid, told + draw.random())
            if status is None:
                os.kill(pid, signal.SIGTERM)
        if status is None:
            status = ended(pid, told + PATIENCE)
        found.longest = max(found.longest, time.monotonic() - told)
    if client:
        os.kill(client, signal.SIGKILL)
        os.waitpid(client, 0)
    if status is None:
        found.wrong.append(f"runs on {PATIENCE:g} s after {way}")
    elif status in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        found.wrong.append(f"status {status} after {way}: {_said(folder)}")
    elif alone and (status or not command.ends):
        found.wrong.append(f"ends by itself with status {status}: {_said(folder)}")
    left = orphans(time.monotonic() + PATIENCE / 2)
    if left:
        names = [
            Path(f"/proc/{other}/cmdline").read_text().replace("\0", " ")[:80] for other in left
        ]
        found.wrong.append(f"{way} leaves {names} running")
        for other in left:
            with suppress(ProcessLookupError):
                os.kill(other, signal.SIGKILL)
        orphans(time.monotonic() + PATIENCE)
    return alone and status == 0


def serving(command: Command, folder: Path) -> None:
    """Waits until a server says where it listens, and ends it."""
    pid, said = start(command, folder), folder / "stderr"
    while not (said.exists() and " at http://" in said.read_text()):
        assert ended(pid, time.monotonic() + 0.01) is None, f"it does not start: {_said(folder)}"
    os.kill(pid, signal.SIGKILL)
    ended(pid, time.monotonic() + PATIENCE)
    orphans(time.monotonic() + PATIENCE)


def _client(command: Command, folder: Path) -> int:
    child = os.fork() if command.load is not None else 0
    if command.load is not None and not child:
        try:
            command.load(folder)
        finally:
            os._exit(0)
    return child


def _said(folder: Path) -> str:
    said = folder / "stderr"
    return said.read_text()[-300:].strip() if said.exists() else ""


def kills(
    name: str, command: Command, root: Path, moments: int, seed: int, ways: Sequence[str]
) -> Found:
    """So many kills of one command."""
    draw, found = Random(f"{seed} {name}"), Found()
    clean = _fresh(root / "clean")
    began = time.monotonic()
    if not command.ends:
        serving(command, clean)
        seconds = time.monotonic() - began + 4.0
    else:
        assert one(command, clean, 600.0, "", draw, found), f"{name} fails by itself: {found.wrong}"
        seconds = time.monotonic() - began
    want, files = command.result(clean), _files(clean)
    folder, before = _fresh(root / "killed"), State()
    while sum(found.ways.values()) < moments:
        way = draw.choice(ways)
        moment = draw.random() * seconds * 1.1
        whole = one(command, folder, moment, way, draw, found)
        try:
            before = _judged(command, folder, before, whole, want, files)
        except Damage as damage:
            found.wrong.append(f"{damage}, after {way} at {moment:.3f} s")
            whole = True
        if whole:
            found.whole += 1
            folder, before = _fresh(root / "killed"), State()
    return found


def _judged(
    command: Command, folder: Path, before: State, whole: bool, want: Any, files: set[str]
) -> State:
    """What is finished by now.

    Raises:
        Damage: something of it is lost, doubled, or not that of a clean run.
    """
    check_places(folder)
    now = command.finished(folder)
    lost = [key for key, value in before.items() if now.get(key) != value]
    if lost:
        raise Damage(f"{len(lost)} of {len(before)} are lost, such as {lost[0][:80]}")
    more = sorted(_files(folder) - files)
    if len(more) > (0 if whole else MAX_UNFINISHED):
        raise Damage(f"{len(more)} files are left over: {more[:4]}")
    if whole and command.result(folder) != want:
        raise Damage("the result is not that of a clean run")
    return now


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


def _fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    make_places(folder)
    return folder


def check(names: list[str], moments: int, seed: int, ways: Sequence[str]) -> int:
    """Prints the table; 1 where something is wrong."""
    root = Path(tempfile.mkdtemp(prefix="specdec-kills-"))
    prepare(root)
    ctypes.CDLL(None).prctl(ADOPT, 1, 0, 0, 0)
    known, wrong = commands(root), 0
    for name in names or known:
        found = kills(name, known[name], root, moments, seed, ways)
        hurts = ", ".join(f"{count} x {way}" for way, count in sorted(found.ways.items()))
        print(
            f"{'WRONG' if found.wrong else 'ok   '} {name:<10} {hurts}; {found.whole} whole runs;"
            f" longest end {found.longest:.1f} s",
            flush=True,
        )
        for text, count in Counter(found.wrong).most_common(20):
            print(f"      {count} x {text}", flush=True)
        wrong += len(found.wrong)
    shutil.rmtree(root)
    return int(bool(wrong))


def main() -> int:
    """Imports what the commands do, and checks them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--commands", nargs="+", default=[])
    parser.add_argument("--moments", type=int, default=100, help="of each command")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="these alone")
    args = parser.parse_args()
    for name in IMPORTED:
        import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{threads} threads run, of which a child would have one"
    return check(args.commands, args.moments, args.seed, args.ways)


def run() -> NoReturn:
    """The check, or in a child of it the command."""
    try:
        sys.exit(main())
    except Forked as told:
        argv = told.args[0]
    sys.argv[1:] = argv
    command()


if __name__ == "__main__":
    run()
