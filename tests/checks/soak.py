"""Many clients at a server for a long time, while the drafter's weights change: nothing is lost,
answers are what they are alone, and memory stays flat.

    python -m tests.checks.soak --clients 256 --minutes 20 -- --max-num-seqs 64
    python -m tests.checks.soak --tiny --clients 32 --minutes 5

The embedded model in float32, or a tiny one, is served by processes of its own. Every client asks
again and again, whole or as a stream: greedy and sampled texts, several outputs, prompts that fill
the context, grammars, calls of tools, with drafts and without. Every fifth time it leaves, before
its first token or in the midst. All the while the weights of the drafter are replaced, by good ones
and by random ones. Answers are compared with those that the server gave before, one at a time.
What follows -- are options of `specdec serve`. Clients speak HTTP by themselves; grammars and tools
are asked for where xgrammar is installed.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from drafters.shipped import shipped_drafter_path
from tests.helpers.processes import below

MORE_MEMORY = 96 * 2**20
"""Bytes that all processes of the server may grow by after a quarter of the time."""

TOOLS_TEMPLATE = Path(__file__).parents[2] / "docs" / "examples" / "tools.jinja"
TEXTS, CHATS = "/v1/completions", "/v1/chat/completions"
UPDATE, KEY = "/update_drafter", "soak"
CITIES = {"type": "string", "enum": ["Paris", "Oslo", "Rome"]}
SCHEMA = {"type": "object", "properties": {"city": CITIES}, "required": ["city"]}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


class Case(NamedTuple):
    """A request, and what it is answered alone."""

    path: str
    body: dict[str, Any]
    answer: str = ""


@dataclass
class Seen:
    """What clients saw: outcomes, wrong answers, seconds to first tokens and between events."""

    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    updates: Counter[str] = field(default_factory=Counter)


class Left(Exception):
    """The client has gone."""


async def ask(
    port: int, path: str, body: dict[str, Any] | None, seen: Seen, leave_at: int | None = None
) -> tuple[int, str]:
    """Status and text of an answer; of a stream the texts of its outputs, one after another.

    Args:
        port: of the server.
        path: of the route.
        body: of the request; None gets.
        seen: takes the times of streams.
        leave_at: goes away after so many lines.

    Raises:
        Left: it has.
        OSError, ValueError: the answer does not come as it must.
    """
    began = last = time.perf_counter()
    data = b"" if body is None else json.dumps(body).encode()
    head = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", "Host: localhost"]
    head += [f"Authorization: Bearer {KEY}", "Content-Type: application/json", "Connection: close"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        writer.write("\r\n".join([*head, f"Content-Length: {len(data)}", "", ""]).encode() + data)
        status = int((await reader.readline()).split()[1])
        if leave_at == 0:
            raise Left
        while (await reader.readline()).strip():
            pass
        if not (body or {}).get("stream") or status != 200:
            return status, (await reader.read()).decode()
        lines, ended = 0, False
        parts: dict[int, list[str]] = {}
        while line := await reader.readline():
            if not line.startswith(b"data: "):
                continue
            lines += 1
            if lines == leave_at:
                raise Left
            if line.startswith(b"data: [DONE]"):
                ended = True
                continue
            for choice in json.loads(line[6:])["choices"]:
                parts.setdefault(choice["index"], []).append(_piece(choice))
            now = time.perf_counter()
            (seen.first if lines == 1 else seen.between).append(now - last)
            last = now
        if not ended:
            raise ValueError("the stream has no end")
        seen.whole.append(last - began)
        return status, "|".join("".join(part) for _, part in sorted(parts.items()))
    finally:
        writer.close()


def _piece(choice: dict[str, Any]) -> str:
    """What an event, or an answer, adds to an output."""
    message = choice.get("delta") or choice.get("message") or {}
    calls = message.get("tool_calls") or []
    called = "".join(
        (call["function"].get("name") or "") + call["function"].get("arguments", "")
        for call in calls
    )
    return str(choice.get("text") or message.get("content") or "") + called


def _whole(text: str) -> str:
    """All outputs of an answer that came at once."""
    return "|".join(_piece(choice) for choice in json.loads(text)["choices"])


def cases_of(context: int) -> list[Case]:
    """Requests of all kinds, for a model with so much context."""
    rng, found = random.Random(0), []
    words = [
        "the", "sun", "is", "warm", "and", "sea", "far", "but", "we", "can", "go", "by", "train",
    ]  # fmt: skip
    for number in range(24):
        length = rng.choice([3, 20, 60])
        prompt = " ".join(rng.choice(words) for _ in range(length))
        body = {"prompt": prompt, "max_tokens": rng.randrange(4, 48), "seed": number}
        body |= {"temperature": rng.choice([0.0, 0.7, 1.0]), "n": rng.choice([1, 1, 1, 2])}
        found.append(Case(TEXTS, body | ({"num_draft_tokens": 0} if number % 6 == 0 else {})))
    for number in range(3):
        body = {"prompt": [5 + (number + k) % 60 for k in range(context - 40)], "max_tokens": 16}
        found.append(Case(TEXTS, {**body, "temperature": 0, "cache_salt": f"tenant {number}"}))
    chat = {"messages": [{"role": "user", "content": "Where is it warm?"}], "max_tokens": 64}
    found.append(Case(CHATS, {**chat, "temperature": 0}))
    if importlib.util.find_spec("xgrammar"):
        for number in range(4):
            way = {"temperature": float(number % 2), "seed": number}
            number_of = {"prompt": f"number {number}: ", "guided_regex": "[0-9]{3,12}x"}
            found.append(Case(TEXTS, {**number_of, "max_tokens": 32, **way}))
            form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
            found.append(Case(CHATS, {**chat, "response_format": form, **way}))
            called = {"tools": [TOOL], "tool_choice": "required", **way}
            found.append(Case(CHATS, {**chat, **called}))
    return found


async def client(port: int, number: int, cases: list[Case], seen: Seen, until: float) -> None:
    """Asks until the time is over."""
    rng = random.Random(number)
    while time.monotonic() < until:
        case = rng.choice(cases)
        leave_at = rng.randrange(8) if rng.random() < 0.2 else None
        stream = rng.random() < 0.6
        body = {**case.body, "stream": True} if stream else case.body
        try:
            asking = ask(port, case.path, body, seen, leave_at)
            seconds = rng.random() if leave_at and not stream else None
            status, text = await asyncio.wait_for(asking, seconds)
        except (Left, TimeoutError):
            seen.outcomes["left"] += 1
        except (OSError, ValueError, KeyError, IndexError) as error:
            seen.wrong.append(f"{body}: {type(error).__name__}: {error}")
        else:
            if status == 503:
                seen.outcomes["busy"] += 1
                await asyncio.sleep(0.2)
            elif status != 200:
                seen.wrong.append(f"{body}: {status} {text}")
            else:
                seen.outcomes["answered"] += 1
                got = text if stream else _whole(text)
                if got != case.answer:
                    seen.wrong.append(f"{body}: {got!r} instead of {case.answer!r}")


async def updates(port: int, names: list[str], seconds: float, seen: Seen, until: float) -> None:
    """Has one drafter after another draft; now and then one that cannot."""
    number = 0
    while time.monotonic() + seconds < until:
        await asyncio.sleep(seconds)
        name = "absent" if number % 5 == 4 else names[number % len(names)]
        status, text = await ask(port, UPDATE, {"drafter": name}, seen)
        if status != (400 if name == "absent" else 200):
            seen.wrong.append(f"update to {name}: {status} {text}")
        seen.updates[name] += 1
        number += 1


def resident(pid: int) -> int:
    """Bytes of memory of all processes of a server, what they share counted once for each."""
    pages = 0
    for one in below(pid):
        with suppress(OSError):
            pages += int(Path(f"/proc/{one}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def on_device() -> int:
    """Bytes that are taken of an accelerator's memory."""
    if not torch.cuda.is_available():
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


async def watch(pid: int, begun: float, until: float, memory: list[tuple[int, int]]) -> None:
    """Notes the memory, from a quarter of the time on."""
    while time.monotonic() < until:
        await asyncio.sleep(min(5.0, (until - begun) / 20))
        if time.monotonic() > begun + (until - begun) / 4:
            memory.append((resident(pid), on_device()))


@contextmanager
def models(tiny: bool) -> Iterator[tuple[list[str], Path, list[str]]]:
    """Options of a model and its drafter, and a folder of drafters with their names."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        drafters = folder / "drafters"
        if tiny:
            from tests.helpers.tiny_models import plain_model
            from tests.helpers.tools import HERMES, tool_tokenizer

            of = {folder / "target": 0, drafters / "good": 0, drafters / "random": 7}
            for where, seed in of.items():
                plain_model("llama", seed=seed).save_pretrained(where)
                tool_tokenizer(HERMES).save_pretrained(where)
            options = ["--model", str(folder / "target"), "-k", "3"]
        else:
            for kind in ("good", "random"):
                shutil.copytree(shipped_drafter_path(), drafters / kind)
            weights = drafters / "random" / "model.safetensors"
            torch.manual_seed(0)
            drawn = {
                name: one * torch.rand_like(one.float()).to(one.dtype)
                if one.is_floating_point()
                else one
                for name, one in load_file(weights).items()
            }
            save_file(drawn, weights, {"format": "pt"})
            options = ["--chat-template", str(TOOLS_TEMPLATE), "--max-model-len", "2048"]
        drafter = ["--drafter", str(drafters / "good"), "--drafter-updates", str(drafters)]
        yield [*options, *drafter], drafters, ["random", "good"]


@contextmanager
def served(options: list[str], log: list[str]) -> Iterator[tuple[int, int]]:
    """A server: its process and its port. What it says goes to the log; it has to end well."""
    words = [sys.executable, "-m", "specdec", "serve", "--port", "0", *options]
    with tempfile.TemporaryFile("w+") as said:
        env = {**os.environ, "SPECDEC_API_KEY": KEY}
        with subprocess.Popen(words, stderr=said, env=env) as server:
            try:
                found = None
                while found is None:
                    time.sleep(0.2)
                    said.seek(0)
                    text = said.read()
                    assert server.poll() is None, f"the server does not start: {text}"
                    found = re.search(r" at http://[\d.]+:(\d+)/v1", text)
                yield server.pid, int(found[1])
            finally:
                server.send_signal(signal.SIGTERM)
                status = server.wait()
                said.seek(0)
                log += [*said.read().splitlines(), f"exit status {status}"]


async def soak(
    pid: int, port: int, args: argparse.Namespace, names: list[str]
) -> tuple[Seen, list[tuple[int, int]]]:
    """Runs it; what clients saw, and the memory of the server."""
    alone, cases, context = Seen(), [], 0
    status, text = await ask(port, "/v1/models", None, alone)
    context = min(2048, json.loads(text)["data"][0]["max_model_len"])
    for case in cases_of(context):
        body = {**case.body, "num_draft_tokens": 0}
        status, text = await ask(port, case.path, body, alone)
        if status != 200:
            raise SystemExit(f"{body} is answered {status} {text}")
        cases.append(case._replace(answer=_whole(text)))
    print(f"{len(cases)} kinds of requests, context {context:,}", file=sys.stderr, flush=True)
    seen, memory, begun = Seen(), list[tuple[int, int]](), time.monotonic()
    until = begun + 60 * args.minutes
    tasks = [client(port, number, cases, seen, until) for number in range(args.clients)]
    tasks += [updates(port, names, args.update_seconds, seen, until)]
    await asyncio.gather(watch(pid, begun, until, memory), *tasks)
    status, text = await ask(port, "/status", None, seen)
    while (now := json.loads(text)).get("running") or now.get("waiting"):
        await asyncio.sleep(0.2)  # who left last
        status, text = await ask(port, "/status", None, seen)
    for case in cases:
        status, text = await ask(port, case.path, case.body, alone)
        if status != 200 or _whole(text) != case.answer:
            seen.wrong.append(f"afterwards {case.body}: {status} {text}")
    return seen, memory


def quantile(values: list[float], share: float) -> float:
    """Of seconds; 0 of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def main() -> int:
    """Prints the figures and what is wrong; 1 where something is."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--update-seconds", type=float, default=10.0, help="between two updates")
    parser.add_argument("--tiny", action="store_true", help="a tiny random model")
    parser.add_argument("options", nargs="*", help="of specdec serve, after --")
    args = parser.parse_args()
    log: list[str] = []
    with models(args.tiny) as (options, _, names):
        words = [*options, "--dtype", "float32", "--max-connections", "4096", *args.options]
        with served(words, log) as (pid, port):
            seen, memory = asyncio.run(soak(pid, port, args, names))
    wrong = list(seen.wrong)
    wrong += [line for line in log if "Traceback" in line or "engine failed" in line]
    wrong += [log[-1]] if log[-1] != "exit status 0" else []
    if not seen.outcomes["answered"] or not seen.updates["good"]:
        wrong.append("nothing was answered, or no weights were replaced")
    grown = [last - first for first, last in zip(memory[0], memory[-1], strict=True)]
    wrong += [f"memory has grown by {more:,} bytes" for more in grown if more > MORE_MEMORY]
    times = "; ".join(
        f"{name} {quantile(values, 0.5):.3f} s (median), {quantile(values, 0.99):.3f} s (p99)"
        for name, values in (
            ("first token", seen.first),
            ("between events", seen.between),
            ("whole streams", seen.whole),
        )
    )
    print(
        f"{args.clients} clients, {args.minutes:g} minutes: {dict(seen.outcomes)}, {len(wrong)}"
        f" wrong; updates {dict(seen.updates)}; {times}; memory {memory[-1][0] / 2**20:,.0f} MiB,"
        f" {grown[0] / 2**20:+.1f} since a quarter of the time, on the device"
        f" {grown[1] / 2**20:+.1f}"
    )
    for one in wrong[:8]:
        print(f"WRONG: {one[:600]}", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
