"""Goes on for as long as it is told, and prints what breaks.

    python -m tests.fuzz --kind schemas --seconds 3600 --seed 1

The first inputs of seed N are those of seed N in `make test`. What breaks is printed as a line for
`tests/fuzz/cases.jsonl`; `--case LINE` looks at that one alone. Exits 1 where something breaks.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from random import Random
from typing import Any

from tests.fuzz.bounded import failures
from tests.fuzz.kinds import KINDS

BATCH = 25
"""Inputs between two looks at the clock."""


def inputs(kind: str, seed: int, until: float) -> Iterator[Any]:
    """New ones until the time has come."""
    draw = Random(seed)
    while time.monotonic() < until:
        yield KINDS[kind].make(draw)


def main() -> int:
    """Prints failing inputs; 1 where there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seconds", type=float, default=60.0, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="one line of the file of cases")
    args = parser.parse_args()
    case = json.loads(args.case) if args.case else None
    broken = 0
    for name in [case["kind"]] if case else args.kind:
        until = time.monotonic() + args.seconds
        given = iter([case["input"]]) if case else inputs(name, args.seed, until)
        for one, said in failures(KINDS[name], given, batch=BATCH):
            broken += 1
            print(json.dumps({"kind": name, "input": one}), said, sep="\n", flush=True)
        print(f"{name}: {broken} broken until now", file=sys.stderr, flush=True)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
