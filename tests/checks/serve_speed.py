"""What a server adds to its engine: tokens per second and first tokens beside the engine alone.

    python -m tests.checks.serve_speed --at-once 1 8 32 128 256 1000 -- --max-num-seqs 256
    python -m tests.checks.serve_speed --dummy --at-once 1 32 256

The first prints, for so many clients at once, greedy and at temperature 1, what `specdec serve`
gives six processes of clients that read streamed chats, beside what an engine of the same options
gives the same prompts in a process without a server, in turn; and what other servers give that
`--peer HOST:PORT ...` names. `--seconds` bounds how long it measures a row. The second has an
engine that writes five tokens per step and computes nothing, and prints the processor's
microseconds that each process of the server takes for an event, a token and a request. Clients
speak HTTP by themselves, so they need no package. What follows -- are options of `specdec serve`;
those of model and engine hold for both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from evals.prompt_sets import read_bundled
from specdec.cli.options import engine_config, engine_options, load_decoder, model_options
from specdec.engine.engine import SpecEngine
from specdec.engine.requests.request import Status
from specdec.sampling.params import SamplingParams
from specdec.session.handle import Handle, Stream
from tests.helpers.processes import below

PROCESSES = 6
"""Of clients."""

DUMMY_TOKENS = 5
"""Of a step and a request."""

DUMMY_EVENTS = 41
"""Of a long answer."""

MOST = ["--max-queue", "4096", "--max-connections", "4096"]

Address = tuple[str, int]


@dataclass(frozen=True)
class Asked:
    """What is asked of one row.

    Attributes:
        questions: of all clients.
        at_once: clients.
        tokens: of each answer at most.
        temperature: of sampling.
    """

    questions: list[str]
    at_once: int
    tokens: int
    temperature: float = 0.0


@dataclass
class Seen:
    """What clients saw: seconds of first tokens, tokens, events, and answers that went wrong."""

    first: list[float] = field(default_factory=list)
    tokens: int = 0
    events: int = 0
    lost: int = 0
    begun: float = 0.0
    ended: float = 0.0

    def add(self, other: Seen) -> None:
        """Takes in what other clients saw."""
        self.begun = min(self.begun or other.begun, other.begun)
        self.ended = max(self.ended, other.ended)
        self.first += other.first
        self.tokens += other.tokens
        self.events += other.events
        self.lost += other.lost

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / (self.ended - self.begun)

    def first_ms(self, share: float) -> float:
        """Milliseconds within which so many of the first tokens came."""
        place = min(len(self.first) - 1, int(share * len(self.first)))
        return 1e3 * sorted(self.first)[place] if self.first else 0.0


class Client:
    """A client, which keeps its connection.

    Args:
        address: of the server.
    """

    def __init__(self, address: Address) -> None:
        self._address = address
        self._connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def chat(self, question: str, about: Asked, seen: Seen) -> None:
        """One streamed chat."""
        asked = {
            "messages": [{"role": "user", "content": question}],
            "max_tokens": about.tokens,
            "temperature": about.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        body = json.dumps(asked).encode()
        head = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost"]
        head += ["Content-Type: application/json", f"Content-Length: {len(body)}"]
        began, first, last = time.perf_counter(), 0.0, b""
        try:
            if self._connection is None:
                self._connection = await asyncio.open_connection(*self._address)
            reader, writer = self._connection
            writer.write("\r\n".join([*head, "", ""]).encode() + body)
            answer = await reader.readline()
            if b" 200 " not in answer:
                raise ValueError(answer)
            while (line := await reader.readline()) not in (b"", b"0\r\n"):
                if line.startswith(b"data: {"):
                    seen.events += 1
                    if not first and _begins(line):
                        first = time.perf_counter()
                    if b'"usage"' in line:
                        last = line
            await reader.readline()
            seen.tokens += json.loads(last[6:])["usage"]["completion_tokens"]
            seen.first.append((first or time.perf_counter()) - began)
        except (OSError, ValueError, KeyError) as error:
            seen.lost += 1
            if seen.lost == 1:
                print(f"lost: {error!r}", file=sys.stderr)
            self._connection = None


def _begins(line: bytes) -> bool:
    """Whether an event has the beginning of an answer."""
    choices = json.loads(line[6:])["choices"]
    return bool(choices and choices[0]["delta"].get("content"))


def clients(out: Any, address: Address, about: Asked) -> None:
    """A process of clients, which asks all questions."""

    async def work() -> Seen:
        seen, left = Seen(begun=time.perf_counter()), iter(about.questions)

        async def one() -> None:
            client = Client(address)
            for question in left:
                await client.chat(question, about, seen)

        await asyncio.gather(*(one() for _ in range(about.at_once)))
        seen.ended = time.perf_counter()
        return seen

    out.put(asyncio.run(work()))


def load(address: Address, about: Asked) -> Seen:
    """All questions, so many at once, asked by several processes."""
    count, seen = min(about.at_once, PROCESSES), Seen()
    context = multiprocessing.get_context("fork")
    out, started = context.Queue(), []
    for number in range(count):
        theirs = range(number, about.at_once, count)  # clients, each with as many questions
        asked = [text for client in theirs for text in about.questions[client :: about.at_once]]
        part = replace(about, questions=asked, at_once=len(theirs))
        started.append(context.Process(target=clients, args=(out, address, part)))
    for process in started:
        process.start()
    for _ in started:
        seen.add(out.get())
    for process in started:
        process.join()
    return seen


def questions_of(path: Path | None, count: int) -> list[str]:
    """So many: those of a JSONL file, or the bundled ones, again and again with a number."""
    if path is not None:
        found = [json.loads(line)["question"] for line in path.read_text().splitlines()]
    else:
        found = [row["question"] for row in read_bundled()["problems"]]
    again = [f"({number}) {found[number % len(found)]}" for number in range(len(found), count)]
    return found[:count] + again


@contextmanager
def served(command: Sequence[str], options: Sequence[str]) -> Iterator[tuple[int, Address]]:
    """A server, its process and where it listens."""
    words = [sys.executable, *command, "serve", "--port", "0", *MOST, *options]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        try:
            found = None
            while found is None:
                line = server.stderr.readline()
                assert line, "the server does not start"
                print(line.strip(), file=sys.stderr)
                found = re.search(r" at http://([\d.]+):(\d+)", line)
            yield server.pid, (found[1], int(found[2]))
        finally:
            server.send_signal(signal.SIGTERM)
            print(server.stderr.read(), file=sys.stderr, end="")


def alone(orders: Connection, options: list[str]) -> None:
    """A process of an engine without a server, which answers questions when told to."""
    parser = argparse.ArgumentParser()
    model_options(parser)
    engine_options(parser)
    args, _ = parser.parse_known_args(options)
    decoder = load_decoder(args, args.drafter, engine_config(args))
    session = decoder.session
    orders.send(None)
    while (about := orders.recv()) is not None:
        sampling = SamplingParams(max_tokens=about.tokens, temperature=about.temperature)
        chats = [[{"role": "user", "content": text}] for text in about.questions]
        prompts = [decoder.tokenize(chat) for chat in chats]
        stream, written = Stream(session), 0
        handles: dict[int, Handle] = {}
        began = time.perf_counter()
        left = iter([(index, prompt, sampling) for index, prompt in enumerate(prompts)])

        def submit(stream: Stream, handles: dict[int, Handle], left: Iterator[Any]) -> None:
            for index, prompt, sampling in left:
                way: dict[str, Any] = {"index": index, "incremental": False, "stream": stream}
                handles[index] = session.submit(prompt, sampling, **way)
                return

        for _ in range(about.at_once):
            submit(stream, handles, left)
        for chunk in stream:
            if chunk.result is not None:
                written += len(chunk.result.token_ids)
                del handles[chunk.index]
                submit(stream, handles, left)
        orders.send(written / (time.perf_counter() - began))
    decoder.close()


@dataclass
class Row:
    """What was measured of so many clients: tokens per second, and what clients saw."""

    temperature: float
    at_once: int
    alone: list[float] = field(default_factory=list)
    server: list[Seen] = field(default_factory=list)
    peers: dict[str, list[Seen]] = field(default_factory=dict)

    @property
    def lost(self) -> int:
        """Answers."""
        return sum(one.lost for side in (self.server, *self.peers.values()) for one in side)

    def line(self) -> str:
        """It in a table."""
        ratios = [now.speed / alone for now, alone in zip(self.server, self.alone, strict=True)]
        share = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        cells = [f"{self.temperature:g}", f"{self.at_once}"]
        cells.append(f"{statistics.median(self.alone):,.0f}")
        for side in (self.server, *self.peers.values()):
            every = Seen()
            for one in side:
                every.add(one)
            cells.append(f"{statistics.median(one.speed for one in side):,.0f}")
            cells += [share] if side is self.server else []
            cells += [f"{every.first_ms(0.5):.1f}", f"{every.first_ms(0.99):.1f}"]
        return f"| {' | '.join([*cells, str(self.lost)])} |"


def compare(args: argparse.Namespace) -> int:
    """Prints the table; 1 where an answer was lost."""
    context, lost = multiprocessing.get_context("spawn"), 0
    orders, theirs = context.Pipe()
    engine = context.Process(target=alone, args=(theirs, args.options), daemon=True)
    engine.start()
    theirs.close()  # so that its end is noticed
    orders.recv()
    columns = ["temperature", "at once", "engine alone, tokens/s", "server"]
    columns += ["server / alone, median (least to most)", "first token, ms: median", "p99"]
    for peer in args.peer:
        columns += [f"{peer}, tokens/s", "first token, ms: median", "p99"]
    with served(["-m", "specdec"], args.options) as (_, address):
        print(f"| {' | '.join([*columns, 'lost'])} |\n|{'---|' * (len(columns) + 1)}")
        for temperature, count in product(args.temperatures, args.at_once):
            row = Row(temperature, count)
            questions = questions_of(args.questions, max(16, min(8 * count, count + 1024)))
            about, until = Asked(questions, count, args.tokens, temperature), math.inf
            for number in range(args.repeats + 1):
                if number == 1:  # what came before has warmed up
                    lost, row = lost + row.lost, Row(temperature, count)
                    until = time.monotonic() + args.seconds
                orders.send(about)
                row.alone.append(orders.recv())
                row.server.append(load(address, about))
                for peer in args.peer:
                    host, _, port = peer.rpartition(":")
                    row.peers.setdefault(peer, []).append(load((host, int(port)), about))
                if time.monotonic() > until:
                    break
            lost += row.lost
            print(row.line(), flush=True)
    orders.send(None)
    engine.join()
    return int(lost > 0)


def seconds_of(pid: int) -> float:
    """A processor's seconds that a process has taken."""
    numbers = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(numbers[11]) + int(numbers[12])) / os.sysconf("SC_CLK_TCK")


def name_of(pid: int) -> str:
    """What a process is for."""
    words = Path(f"/proc/{pid}/cmdline").read_text()
    return "front" if "serve.processes" in words else "engine"


def install_dummy(milliseconds: float, own: Path) -> None:
    """Puts steps in place of an engine's in which all requests are in work and get tokens that were
    drawn before, and which take so many milliseconds, or one for each request; what they take of
    the processor is written to a file.
    """
    file, spent, number = own.open("w"), 0.0, 0

    def step(engine: Any) -> list[Any]:
        nonlocal spent, number
        began = time.thread_time()
        scheduler, touched = engine.scheduler, []
        while scheduler.waiting:
            scheduler.waiting[0].status = Status.RUNNING
            scheduler.working.append(scheduler.waiting.pop(0))
        for request in list(scheduler.working):
            number += DUMMY_TOKENS
            places = range(number, number + DUMMY_TOKENS)
            request.output_token_ids += [1000 + place * 7919 % 20_000 for place in places]
            request.steps += (7, DUMMY_TOKENS - 1, DUMMY_TOKENS, 0, 0)
            if len(request.output_token_ids) >= request.max_output_tokens:
                request.status, request.finish_reason = Status.FINISHED, "length"
                scheduler.working.remove(request)
            touched.append(request)
        spent += time.thread_time() - began
        file.seek(0)
        file.write(f"{spent:.6f}\n")
        file.flush()
        time.sleep(max(milliseconds, len(touched)) / 1e3)
        return touched

    kind: Any = SpecEngine
    kind.step, kind.abort = step, lambda engine, request: None


def dummy(at_once: Sequence[int], options: list[str]) -> None:
    """Prints what the server's processes take per event, token and request."""
    print("| at once | process | us per event | us per token | us per request |")
    print("|---|---|---|---|---|")
    given = ["--device", "cpu", "--drafter", "ngram", "--kv-memory", "64M", *options]
    with tempfile.NamedTemporaryFile() as own:
        command = ["-m", "tests.checks.serve_speed", "--install", own.name]
        with served(command, given) as (pid, address):
            load(address, Asked(questions_of(None, 8), 2, DUMMY_TOKENS))
            for clients in at_once:
                count, found = max(48, clients), []
                for events in (1, DUMMY_EVENTS):
                    found.append(_spent(pid, address, count, clients, events, Path(own.name)))
                for one, seconds in found[1].items():
                    event = (seconds - found[0][one]) / ((DUMMY_EVENTS - 1) * count)
                    request = 1e6 * (found[0][one] / count - event)
                    times = f"{1e6 * event:.0f} | {1e6 * event / DUMMY_TOKENS:.1f} | {request:.0f}"
                    print(f"| {clients} | {name_of(one)} | {times} |", flush=True)


def _spent(
    pid: int, address: Address, count: int, clients: int, events: int, own: Path
) -> dict[int, float]:
    """A processor's seconds of each process for so many answers, those of dummy steps aside."""
    before = {one: seconds_of(one) for one in below(pid)}
    dummy = float(own.read_text())
    seen = load(address, Asked(questions_of(None, count), clients, events * DUMMY_TOKENS))
    assert not seen.lost and seen.tokens == count * events * DUMMY_TOKENS, f"{seen}"
    dummy = float(own.read_text()) - dummy
    return {one: seconds_of(one) - then - dummy * (one == pid) for one, then in before.items()}


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--at-once", type=int, nargs="+", default=[1, 8, 32, 128, 256, 1000], metavar="N")
    add("--temperatures", type=float, nargs="+", default=[0.0, 1.0], metavar="T")
    add("--repeats", type=int, default=3, help="of each row, all sides in turn")
    add("--seconds", type=float, default=math.inf, help="of a row, above which it is not repeated")
    add("--peer", nargs="+", default=[], metavar="HOST:PORT", help="servers with OpenAI's routes")
    add("--tokens", type=int, default=256, help="of each answer at most")
    add("--questions", type=Path, metavar="FILE", help="JSONL with a question in each line")
    add("--dummy", action="store_true", help="an engine that computes nothing")
    add("options", nargs="*", help="of specdec serve, after --")
    args = parser.parse_args()
    if args.dummy:
        dummy(args.at_once, args.options)
        return 0
    return compare(args)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--install"]:
        from specdec.cli.main import main as specdec

        install_dummy(2.0, Path(sys.argv[2]))
        sys.exit(specdec(sys.argv[3:]))
    sys.exit(main())
