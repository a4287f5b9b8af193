"""Many clients at a server, some of which leave: nothing leaks and no answer is lost.
`tests.checks.soak` does the like for as long as one wants, from outside.
"""

import asyncio
import gc
import json
import random
from collections import Counter
from typing import Any

import httpx

from specdec.session.decoder import SpecDecoder
from specdec.session.handle import Handle
from tests.helpers.live_server import Live, live_server, tiny_decoder
from tests.helpers.waiting import HANG, Gate, wait_until

CLIENTS, REQUESTS, MAX_QUEUE = 24, 2, 8

Case = tuple[dict[str, Any], list[str]]
"""A request, and the texts of its outputs without a server."""


def make_cases(decoder: SpecDecoder) -> list[Case]:
    rng, cases = random.Random(0), []
    for number in range(24):
        prompt = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(1, 60)))
        options: dict[str, Any] = {
            "max_tokens": rng.randrange(1, 40),
            "temperature": rng.choice([0.0, 1.0]),
        }
        seeds = range(number, number + rng.choice([1, 1, 2]))
        texts = [decoder.generate(prompt, seed=seed, **options).text for seed in seeds]
        cases.append(({"prompt": prompt, "n": len(seeds), "seed": number, **options}, texts))
    return cases


async def ask(client: httpx.AsyncClient, case: Case, rng: random.Random) -> str:
    """How a request ended: the client leaves every third time, before its first token or in the
    midst.
    """
    body, want = case
    leave_at = rng.randrange(12) if rng.random() < 1 / 3 else None  # events of a stream
    if rng.random() < 0.5:
        try:
            answer = await client.post(
                "/v1/completions", json=body, timeout=rng.random() / 2 if leave_at else HANG
            )
        except httpx.TimeoutException:
            return "left"
        if answer.status_code == 503:
            return "busy"
        texts = [choice["text"] for choice in answer.json()["choices"]]
    else:
        texts, events = [""] * len(want), 0
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as found:
            if found.status_code == 503:
                return "busy"
            async for line in found.aiter_lines():
                if events == leave_at:
                    return "left"
                if line == "data: [DONE]":
                    break
                if line:
                    events += 1
                    choice = json.loads(line[6:])["choices"][0]
                    texts[choice["index"]] += choice["text"]
            else:
                raise AssertionError(f"{body}: the stream has no end")
    assert texts == want, body
    return "answered"


async def load(live: Live, cases: list[Case], gate: Gate) -> Counter[str]:
    """All clients at once, and what they saw. The engine begins when the queue is full."""
    outcomes: Counter[str] = Counter()

    async def one(client: httpx.AsyncClient, number: int) -> None:
        rng = random.Random(number)
        for _ in range(REQUESTS):
            outcomes[await ask(client, rng.choice(cases), rng)] += 1
            if outcomes["busy"]:
                gate.open()

    async with httpx.AsyncClient(base_url=live.url, timeout=HANG) as client:
        await asyncio.gather(*(one(client, number) for number in range(CLIENTS)))
    return outcomes


def what_leaks(live: Live) -> dict[str, int]:
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
    return {what: count for what, count in left.items() if count}


def test_many_clients_that_come_and_leave() -> None:
    cases = make_cases(tiny_decoder())
    with live_server(tiny_decoder(max_num_seqs=16), max_queue=MAX_QUEUE) as live:
        outcomes = asyncio.run(load(live, cases, Gate(live.decoder.engine)))
        # an answer's end is told a moment before who sent it lets go of it
        wait_until(lambda: not what_leaks(live), "what is left behind")
    assert outcomes["answered"] and outcomes["left"] and outcomes["busy"], outcomes
