"""How long a server takes until it is ready, and whether anybody waits for a compiler afterwards.

    python -m tests.checks.ready --model embedded --drafters none suffix smollm2-dflash

For each drafter a process of its own begins with an empty cache of Triton, gets ready as `specdec
serve` does and answers prompts in three passes; behind the first is a pause, in which what can be
done ahead is. Then another process begins with the cache that the first has left. Printed are the
seconds until ready, with those of looking what to compile, of waiting for those that compile and of
capturing; and, of each pass, tokens by half second, the longest time without a token, and steps
that took over five times the median of their kind.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from itertools import pairwise
from statistics import median
from typing import Any

from evals.prompt_sets import load_prompt_set, parse_data
from specdec.base.config import EngineConfig
from specdec.cli.options import load_decoder, model_options
from specdec.cli.progress import Phases
from specdec.engine.capture.buckets import batch_bucket
from specdec.sampling.params import SamplingParams

SLOW = 5
"""Times the median of its kind."""


def measure(args: argparse.Namespace, drafter: str, since: float) -> dict[str, Any]:
    """Gets ready and answers, in this process, which began at `since` by the wall clock."""
    decoder = load_decoder(args, drafter, EngineConfig(max_num_seqs=args.max_num_seqs, seed=0))
    loaded = time.time() - since
    seconds = decoder.get_ready(Phases())._asdict()
    ready = time.time() - since
    found: dict[str, Any] = {"loaded": loaded, "ready": ready, "seconds": seconds, "passes": []}
    files = parse_data(args.data, [args.set], "--set")
    prompts = load_prompt_set(args.set, files=files, limit=args.limit).items
    engine, session = decoder.engine, decoder.session
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=0)
    tokens = [decoder.tokenize([{"role": "user", "content": one.turns[0]}]) for one in prompts]
    for number in range(args.passes):
        while number and engine.idle_work:  # as in a pause before the second pass
            session.work_ahead()
        handles = [session.submit(ids, sampling, index=index) for index, ids in enumerate(tokens)]
        steps: list[tuple[float, float, str, int]] = []  # end and duration, kind, tokens
        began, counted = time.perf_counter(), 0
        while not all(handle.done for handle in handles):
            before, shapes = time.perf_counter(), engine.timer.steps_by_shape.copy()
            working = len(engine.scheduler.decoding)
            prefilled = sum(request.num_kv_tokens for request in engine.scheduler.working)
            session.step()
            now = time.perf_counter()
            total = sum(len(handle.request.output_token_ids) for handle in handles)
            shape = next(iter(engine.timer.steps_by_shape - shapes), None)
            prefill = len(engine.scheduler.working) > working or prefilled == 0
            kind = f"{'prefill and ' * prefill}{batch_bucket(max(1, working))} x {shape}"
            steps.append((now - began, now - before, kind, total - counted))
            counted = total
        found["passes"].append(summary(steps, counted))
    return found


def summary(steps: list[tuple[float, float, str, int]], tokens: int) -> dict[str, Any]:
    """What a pass was like."""
    by_time: Counter[int] = Counter()
    by_kind: dict[str, list[float]] = defaultdict(list)
    for end, took, kind, count in steps:
        by_time[int(2 * end)] += count
        by_kind[kind].append(took)
    medians = {kind: median(times) for kind, times in by_kind.items()}
    ends = [0.0, *(end for end, _, _, count in steps if count)]
    late = [one for one in steps if one[1] > SLOW * medians[one[2]]]
    slow = [(round(end, 2), round(1e3 * took, 1), kind) for end, took, kind, _ in late]
    return {
        "seconds": steps[-1][0],
        "tokens": tokens,
        "by half second": [by_time[half] for half in range(max(by_time) + 1)],
        "longest gap": max(later - earlier for earlier, later in pairwise(ends)),
        "longest step": max((took, kind) for _, took, kind, _ in steps),
        "slow steps": slow,
        "steps": len(steps),
    }


def child(drafter: str, cache: str) -> dict[str, Any]:
    """What `measure` finds in a process of its own with that cache."""
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    command = [
        sys.executable, "-m", "tests.checks.ready", *sys.argv[1:], "--inside", drafter, "--since",
        repr(time.time()),
    ]  # fmt: skip
    ran = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def show(number: int, one: dict[str, Any]) -> None:
    """Prints what `summary` says of a pass."""
    (took, kind), slow = one["longest step"], one["slow steps"]
    print(f"  pass {number}: {one['tokens']:,} tokens in {one['seconds']:.2f} s;", end=" ")
    print("by half second", *one["by half second"])
    print(f"    longest without a token {1e3 * one['longest gap']:.0f} ms,", end=" ")
    print(f"longest step {1e3 * took:.1f} ms ({kind})")
    print(f"    {len(slow)} of {one['steps']} steps over {SLOW} times", end=" ")
    print(f"the median of their kind: {slow[:8]}", flush=True)


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(prog="python -m tests.checks.ready")
    model_options(parser)
    add = parser.add_argument
    add("--drafters", nargs="+", default=["none", "suffix", "auto"], metavar="NAME")
    add("--max-num-seqs", type=int, default=32)
    add("--set", default="code", help="prompts; humaneval and others of `specdec bench --sets`")
    add("--data", action="append", default=[], metavar="NAME=FILE")
    add("--limit", type=int, help="prompts (default: all)")
    add("--max-tokens", type=int, default=256)
    add("--temperature", type=float, default=0.0)
    add("--passes", type=int, default=3)
    add("--cold-only", action="store_true", help="without the start that has all compiled")
    add("--inside", help=argparse.SUPPRESS)
    add("--since", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        print(json.dumps(measure(args, args.inside, args.since)), flush=True)
        return 0
    for drafter in args.drafters:
        with tempfile.TemporaryDirectory() as cache:
            for cold in (True,) if args.cold_only else (True, False):
                found = child(drafter, cache)
                state = "nothing compiled" if cold else "all compiled"
                print(f"{drafter}, {state}: loaded after {found['loaded']:.1f} s,", end=" ")
                parts = [f"{took:.1f} s {what}" for what, took in found["seconds"].items()]
                print(f"ready after {found['ready']:.1f} s ({', '.join(parts)})", flush=True)
                for number, one in enumerate(found["passes"], start=1):
                    show(number, one)
    return 0


if __name__ == "__main__":
    sys.exit(main())
