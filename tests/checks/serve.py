"""Many clients at a server, some of which leave: nothing leaks and no answer is lost.

    python -m tests.checks.serve --clients 200 --requests 100

A tiny model serves in a thread of this process. Every client asks again and again, whole or as a
stream, and leaves every third time, before its first token or in the midst. Answers are compared
with those that the engine gives without a server. At the end no request is left, no block of the
cache, no handle; and the process has hardly grown since a quarter of the requests.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from specdec.session.decoder import SpecDecoder
from specdec.session.handle import Handle
from tests.helpers.live_server import Live, live_server, tiny_decoder
from tests.helpers.waiting import Gate, wait_until

NUM_CASES = 24
MORE_MEMORY = 32 * 2**20
"""Bytes that a process may grow by, as allocators round up."""


@dataclass
class Report:
    """What clients saw: outcomes of requests, wrong answers,
    seconds to the first token of streams.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)

    def quantile(self, share: float) -> float:
        """Seconds within which so many of the first tokens came."""
        return (
            sorted(self.first)[min(len(self.first) - 1, int(share * len(self.first)))]
            if self.first
            else 0.0
        )


def make_cases(decoder: SpecDecoder, seed: int) -> list[tuple[dict[str, Any], list[str]]]:
    """Requests, and the texts of their outputs without a server."""
    rng, cases = random.Random(seed), []
    for number in range(NUM_CASES):
        prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 60)))
        options: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0.0, 1.0]),
            "seed": number,
        }
        n = rng.choice([1, 1, 2])
        texts = [decoder.generate(prompt, **{**options, "seed": number + i}).text for i in range(n)]
        cases.append(({"prompt": prompt, "n": n, **options}, texts))
    return cases


async def ask(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    want: list[str],
    rng: random.Random,
    report: Report,
) -> None:
    """One request, to its end or not."""
    # events until the client leaves, of streams
    leave_at = rng.randrange(12) if rng.random() < 1 / 3 else None
    if rng.random() < 0.5:
        try:
            answer = await client.post(
                "/v1/completions",
                json=body,
                timeout=rng.random() / 2 if leave_at is not None else 300,
            )
        except httpx.TimeoutException:
            report.outcomes["left"] += 1
            return
        if answer.status_code == 503:
            await turned_away(report)
            return
        texts = [choice["text"] for choice in answer.json()["choices"]]
    else:
        texts, started, events, ended = [""] * len(want), time.perf_counter(), 0, False
        async with client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}, timeout=300
        ) as answer:
            if answer.status_code == 503:
                await turned_away(report)
                return
            async for line in answer.aiter_lines():
                if events == leave_at:
                    report.outcomes["left"] += 1
                    return
                if not line:
                    continue
                if not events:
                    report.first.append(time.perf_counter() - started)
                events, ended = events + 1, line == "data: [DONE]"
                if not ended:
                    choice = json.loads(line[6:])["choices"][0]
                    texts[choice["index"]] += choice["text"]
        if not ended:
            report.wrong.append(f"{body}: the stream has no end")
    report.outcomes["answered"] += 1
    if texts != want:
        report.wrong.append(f"{body}: {texts} instead of {want}")


async def turned_away(report: Report) -> None:
    """The queue was full."""
    report.outcomes["busy"] += 1
    await asyncio.sleep(0.1)


async def load(
    live: Live,
    cases: list[tuple[dict[str, Any], list[str]]],
    clients: int,
    requests: int,
    until: float,
    gate: Gate,
) -> tuple[Report, int]:
    """All clients at once; what they saw, and the memory of the process after a quarter of the
    requests.

    The engine begins when the queue is full, where that many clients fill it.
    """
    report, memory, asked = Report(), resident(), 0

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal asked, memory
        rng = random.Random(number)
        for _ in range(requests):
            if time.monotonic() > until:
                break
            body, want = rng.choice(cases)
            try:
                await ask(client, body, want, rng, report)
            except httpx.HTTPError as error:
                report.wrong.append(f"{body}: {type(error).__name__}: {error}")
            asked += 1
            if asked == clients * requests // 4:
                memory = resident()

    async def begin() -> None:
        while clients > live.front.config.max_queue and not report.outcomes["busy"]:
            await asyncio.sleep(0.01)
        gate.open()

    limits = httpx.Limits(max_connections=None, max_keepalive_connections=clients)
    async with httpx.AsyncClient(base_url=live.url, limits=limits, verify=False) as client:
        await asyncio.gather(begin(), *(one(client, number) for number in range(clients)))
    return report, memory


def resident() -> int:
    """Bytes of memory that this process has."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def what_leaks(live: Live) -> list[str]:
    """What is left although nobody asks for anything."""
    engine, session, front = live.decoder.engine, live.decoder.session, live.front
    wait_until(lambda: front.idle and session.idle and not engine.has_work)
    gc.collect()
    left = {
        "blocks of the cache": engine.pool.num_used,
        "sequences of the prefix cache": len(engine.scheduler.prefix._sequences),
        "slots": engine.config.max_num_seqs - len(engine.scheduler._free_slots),
        "handles": sum(
            type(thing) is Handle and thing._session is session for thing in gc.get_objects()
        ),
    }
    return [f"{count} {what} are left" for what, count in left.items() if count]


def check(
    clients: int, requests: int, max_queue: int, seconds: float = math.inf
) -> tuple[Report, list[str], str]:
    """Runs it; what clients saw, what is wrong, and a line of figures."""
    cases = make_cases(tiny_decoder(), seed=0)
    with live_server(tiny_decoder(max_num_seqs=16), max_queue=max_queue) as live:
        until, gate = time.monotonic() + seconds, Gate(live.decoder.engine)
        report, early = asyncio.run(load(live, cases, clients, requests, until, gate))
        wrong = [*report.wrong[:5], *what_leaks(live)]
        grown, totals = resident() - early, live.front.totals
    if grown > MORE_MEMORY:
        wrong.append(f"the process has grown by {grown / 2**20:.0f} MiB")
    line = (
        f"{clients} clients, {requests} requests of each: {dict(report.outcomes)};"
        f" {totals.output_tokens:,} tokens, outputs {dict(totals.finished)};"
        f" first token after {report.quantile(0.5):.3f} s (median), {report.quantile(0.99):.3f} s"
        f" (p99);"
        f" memory {grown / 2**20:+.1f} MiB since a quarter of them"
    )
    return report, wrong, line


def main() -> int:
    """Prints the figures and what is wrong; 1 where something is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=100, help="of each client")
    parser.add_argument("--seconds", type=float, default=math.inf, help="at most")
    parser.add_argument("--max-queue", type=int, default=1024)
    args = parser.parse_args()
    _, wrong, line = check(args.clients, args.requests, args.max_queue, args.seconds)
    print(line)
    for one in wrong:
        print(f"WRONG: {one}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
