"""Hostile clients at a server at which others work: nobody else fails, waits or loses memory.

    python -m tests.checks.hostile --generated 500 --seed 1
    python -m tests.checks.hostile --fronts 3

Starts `specdec serve` with a tiny model (or --model), lets ordinary clients ask all the while, and
sends what has broken servers before, malformed schemas, generated requests and odd connections.
Prints a table; exits 1 where one of its lines does not hold. What was answered wrongly is printed
as a line for `python -m tests.fuzz --case`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from specdec.grammar.compiler import CACHE_BYTES
from tests.checks.hostile_inputs import (
    RAW,
    Asked,
    connect,
    drip,
    generated,
    half_open,
    known,
    leave,
    malformed,
    unread,
)
from tests.evals.tiny import save_tiny
from tests.fuzz.notation import written
from tests.helpers.processes import below, memory

DRAIN = 5.0
LEEWAY = 8.0
"""Seconds after the drain in which answers leave and a process ends."""
PATIENCE = 150.0
"""Seconds that a hostile client waits for its answer."""
MAX_WAIT, MAX_BYTES, MAX_AGAIN = 1.0, 200 * 2**20 + CACHE_BYTES, 32 * 2**20
"""Seconds, bytes that the server may take with the grammars it keeps, and those that the same
requests may take a second time.
"""
ORDINARY = {"prompt": "abcabc", "max_tokens": 8, "temperature": 0, "ignore_eos": True}


@dataclass
class Seen:
    """One request of an ordinary client: when it began, how long it took, what went wrong."""

    began: float
    seconds: float
    wrong: str = ""


@dataclass
class Notes:
    """Answers that hostile clients got, when each was asked, and what was wrong with them."""

    statuses: Counter[str] = field(default_factory=Counter)
    asked: list[tuple[float, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def during(self, began: float, seconds: float) -> str:
        """What went on for most of that time."""
        ends = [*(at for at, _ in self.asked[1:]), began + seconds]
        shares = [
            min(end, began + seconds) - max(at, began)
            for (at, _), end in zip(self.asked, ends, strict=True)
        ]
        return self.asked[shares.index(max(shares))][1] if shares and max(shares) > 0 else "nothing"


def ask(
    address: tuple[str, int], path: str, body: Any = None, patience: float = PATIENCE
) -> tuple[int, str]:
    """The status of an answer, and all of it."""
    connection = http.client.HTTPConnection(*address, timeout=patience)
    try:
        data = None if body is None else written(body).encode(errors="surrogatepass")
        with suppress(BrokenPipeError, ConnectionResetError):  # refused before all of it was sent
            connection.request(
                "GET" if data is None else "POST", path, data, {"Content-Type": "application/json"}
            )
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


@contextmanager
def served(
    options: Sequence[str],
) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int], list[str]]]:
    """A server, where it listens, and the lines that it writes."""
    command = [
        sys.executable, "-m", "specdec", "serve", "--port", "0", "--drain-seconds", str(DRAIN),
        *options,
    ]  # fmt: skip
    server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    lines: list[str] = []
    try:
        assert server.stderr is not None
        found = None
        while found is None:
            lines.append(server.stderr.readline())
            assert lines[-1], f"the server does not start: {''.join(lines)}"
            found = re.search(r" at http://([\d.]+):(\d+)", lines[-1])
        threading.Thread(target=lambda: lines.extend(server.stderr or ()), daemon=True).start()
        yield server, (found[1], int(found[2])), lines
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def work(address: tuple[str, int], folder: Path, number: int, until: Path) -> None:
    """An ordinary client, in a process of its own: writes what it saw when it is told to end."""
    seen: list[Seen] = []
    path, body = ("/health", None) if number == 0 else ("/v1/completions", ORDINARY)
    want = None
    while not until.exists():
        began, wrong = time.time(), ""
        try:
            status, text = ask(address, path, body, 30.0)
            made = json.loads(text)["choices"][0]["text"] if number and status == 200 else ""
            want = made if want is None else want
            wrong = (
                f"status {status}: {text[:200]}"
                if status != 200
                else ""
                if made == want
                else f"text {made!r}"
            )
        except (OSError, ValueError, http.client.HTTPException) as error:
            wrong = f"{type(error).__name__}: {error}"
        seen.append(Seen(began, time.time() - began, wrong))
        time.sleep(0.05)
    (folder / f"{number}.json").write_text(json.dumps([vars(one) for one in seen]))


@contextmanager
def ordinary(address: tuple[str, int], clients: int) -> Iterator[list[list[Seen]]]:
    """So many at work, and one that asks after the server's health; filled at the end."""
    seen: list[list[Seen]] = []
    with tempfile.TemporaryDirectory() as name:
        folder, until = Path(name), Path(name) / "end"
        children = []
        for number in range(clients + 1):
            child = os.fork()
            if not child:
                work(address, folder, number, until)
                os._exit(0)
            children.append(child)
        try:
            yield seen
        finally:
            until.touch()
            for child in children:
                os.waitpid(child, 0)
            for number in range(clients + 1):
                seen.append(
                    [Seen(**one) for one in json.loads((folder / f"{number}.json").read_text())]
                )


def send(address: tuple[str, int], one: Asked, notes: Notes) -> None:
    """One hostile request, and what is wrong with its answer."""
    notes.asked.append((time.time(), one.name[:80]))
    began = time.monotonic()
    try:
        status, text = ask(address, one.path, one.body)
        right = status == 400 if one.refused else status < 500 or status == 503
        if right and status >= 400:
            message = json.loads(text)["error"]["message"]
            right = bool(message) and "\n" not in message
    except (OSError, ValueError, KeyError, http.client.HTTPException) as error:
        status, text, right = (
            0,
            f"{type(error).__name__} after {time.monotonic() - began:.0f} s: {error}",
            False,
        )
    notes.statuses[str(status or "no answer")] += 1
    if not right:
        notes.wrong.append(_shown(one, f"{status} {text[:200]!r}"))


def _shown(one: Asked, said: str) -> str:
    text = json.dumps({"kind": "bodies", "input": {"path": one.path, "body": one.body}})
    return f"{one.name[:80]}: {said}\n  {text if len(text) < 2_000 else text[:200] + ' ...'}"


def odd_connections(address: tuple[str, int], notes: Notes, seconds: int) -> None:
    """Broken requests, connections that stay open, streams that nobody reads,
    clients that leave.
    """
    for name, data in RAW.items():
        notes.asked.append((time.time(), name))
        leave([connect(address, data)])
    for name, make in (("half-open connections", half_open), ("unread streams", unread)):
        notes.asked.append((time.time(), name))
        opened = make(address)
        drip(opened[:100], seconds)
        leave(opened)
    notes.asked.append((time.time(), "clients that leave"))
    for _ in range(20):
        leave(unread(address, 2))


def stopped(server: subprocess.Popen[str], address: tuple[str, int]) -> float:
    """Seconds from SIGTERM to the end, under work and beside open connections."""
    opened = [*unread(address, 4), *(connect(address, b"POST /v1") for _ in range(20))]
    body = {**ORDINARY, "guided_choice": [{"$times": ["a", 3_000_000]}]}
    threading.Thread(target=ask_quietly, args=(address, body), daemon=True).start()
    time.sleep(0.5)
    began = time.monotonic()
    server.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        server.wait(DRAIN + 6 * LEEWAY)
    leave(opened)
    return time.monotonic() - began


def ask_quietly(address: tuple[str, int], body: Any) -> None:
    """A request of which nobody looks at the answer."""
    with suppress(OSError, http.client.HTTPException):
        ask(address, "/v1/completions", body)


def main() -> int:
    """Prints the table; 1 where a line does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generated", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=2)
    parser.add_argument("--fronts", type=int, default=1, help="processes that speak HTTP")
    parser.add_argument("--model", help="another model, as specdec serve takes it")
    parser.add_argument("--only", help="inputs whose name matches alone")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model = args.model or str(save_tiny(Path(name)))
        options = [
            "--model", model, "--drafter", "ngram", "--kv-memory", "64M", "--max-num-seqs", "16",
            "--front-processes", str(args.fronts),
        ]  # fmt: skip
        with served(options) as (server, address, lines):
            return _judge(args, server, address, lines)


def _judge(
    args: argparse.Namespace,
    server: subprocess.Popen[str],
    address: tuple[str, int],
    lines: list[str],
) -> int:
    with ordinary(address, args.clients) as seen:
        time.sleep(5)
    alone = median(one.seconds for client in seen[1:] for one in client)
    before, notes = memory(below(server.pid)), Notes()
    pattern = re.compile(args.only or "")
    repeated = [*malformed(), *generated(args.generated, args.seed)]
    with ordinary(address, args.clients) as seen:
        for one in [*known(), *repeated]:
            if pattern.search(one.name):
                send(address, one, notes)
        once = memory(below(server.pid))
        for one in repeated:
            if pattern.search(one.name):
                send(address, one, notes)
        if pattern.search("connections"):
            odd_connections(address, notes, 10)
        notes.asked.append((time.time(), "nothing more"))
        time.sleep(3)
    after, alive = memory(below(server.pid)), server.poll() is None
    seconds = stopped(server, address)
    health, clients = seen[0], [one for client in seen[1:] for one in client]
    failed = [one for one in [*health, *clients] if one.wrong]
    waited = max(clients, key=lambda one: one.seconds)
    slow = max(health, key=lambda one: one.seconds)
    traces = sum("Traceback" in text for text in lines)
    rows = [
        ("ordinary requests", f"{len(clients):,}, median {alone:.3f} s alone", True),
        ("of these failed", f"{len(failed)}", not failed),
        (
            "greatest extra wait",
            f"{waited.seconds - alone:.2f} s ({_when(notes, waited)})",
            waited.seconds - alone < MAX_WAIT,
        ),
        (
            "slowest /health",
            f"{slow.seconds:.2f} s ({_when(notes, slow)})",
            slow.seconds < MAX_WAIT,
        ),
        (
            "memory",
            f"{before / 2**20:.0f} MB before, {once / 2**20:.0f} MB after,"
            f" {after / 2**20:.0f} MB after the same again",
            once - before < MAX_BYTES and after - once < MAX_AGAIN,
        ),
        (
            "hostile answers",
            ", ".join(f"{count} x {status}" for status, count in sorted(notes.statuses.items())),
            True,
        ),
        ("of these wrong", f"{len(notes.wrong)}", not notes.wrong),
        ("alive until told to end", str(alive), alive),
        (
            "from SIGTERM to the end",
            f"{seconds:.1f} s of {DRAIN + LEEWAY:.0f}",
            seconds < DRAIN + LEEWAY,
        ),
        ("tracebacks in its log", f"{traces}", not traces),
    ]
    for what, found, holds in rows:
        print(f"{'ok   ' if holds else 'WRONG'} {what:<24} {found}")
    for other in failed[:5]:
        print(f"failed: {other.wrong} ({_when(notes, other)})")
    print(*notes.wrong, sep="\n")
    return int(not all(holds for _, _, holds in rows))


def _when(notes: Notes, one: Seen) -> str:
    return notes.during(one.began, one.seconds)


if __name__ == "__main__":
    sys.exit(main())
