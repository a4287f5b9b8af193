"""Runs single calls of AITER's Triton kernels and prints a table of their errors, for
`tests.checks.aiter_triton`.
"""

import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np

from tests.checks.aiter_triton_calls import Call, Setting, calls
from tests.helpers.aiter_real import real_aiter
from tests.helpers.bounds import error_of

RIGHT, REFUSED = "right", "garbage, as known"
Verdict = tuple[str, float]
"""What became of a call, and its error as a share of what is allowed."""


@dataclass
class Row:
    """A row of the table."""

    calls: int = 0
    wrong: int = 0
    refused: bool = False
    share: float = 0.0


def check(setting: Setting, counts: dict[str, int], *, jobs: int, verbose: bool) -> int:
    """Prints the table and everything that is wrong; returns how many calls are.

    Args:
        setting: what to call.
        counts: how often each function has been called, from `real_aiter`.
        jobs: processes; a GPU waits for the compiler nearly all the time.
        verbose: also print every call.
    """
    made, table = list(calls(setting)), dict[str, Row]()
    with ExitStack() as stack:
        verdicts: Iterable[Verdict] = (_judge(call, counts) for call in made)
        if jobs > 1:
            spawn = multiprocessing.get_context("spawn")
            pool = stack.enter_context(ProcessPoolExecutor(jobs, spawn, _prepare, (setting,)))
            verdicts = pool.map(_judge_nth, range(len(made)))
        for call, (said, share) in zip(made, verdicts, strict=True):
            row = table.setdefault(call.row, Row())
            row.calls += 1
            row.wrong += said not in (RIGHT, REFUSED)
            row.refused |= said == REFUSED
            row.share = max(row.share, share)
            if verbose or said not in (RIGHT, REFUSED):
                print(
                    f"  {call.row}, {call.what}, {str(call.dtype)[6:]}: {said}; {share:.2g} of the"
                    f" allowed error",
                    flush=True,
                )
    print(f"  {'':<58} calls  wrong  of the allowed error, at most")
    for name, row in sorted(table.items()):
        note = "garbage on AITER, specdec refuses it" if row.refused else f"{row.share:.2f}"
        print(f"  {name:<58} {row.calls:>5}  {row.wrong:>5}  {note}")
    return sum(row.wrong for row in table.values())


def _judge(call: Call, counts: dict[str, int]) -> Verdict:
    before = counts.get(call.kernel, 0)
    try:
        outcome = call.run()
    except Exception as why:  # one kernel that does not compile does not hide what the others do
        return f"{type(why).__name__}: {' '.join(str(why).split())[:200]}", float("nan")
    error = error_of(*outcome)
    share = error.found / error.most
    if call.kernel in counts and counts[call.kernel] == before:
        return f"{call.kernel} was not called", share
    if call.refused:
        return (
            "AITER has mended it: specdec need not refuse it any more" if share <= 1 else REFUSED
        ), share
    return (RIGHT if share <= 1 else "WRONG"), share  # WRONG when it is not a number, too


_worker: list[tuple[list[Call], dict[str, int], ExitStack]] = []


def _prepare(setting: Setting) -> None:
    """Finds AITER in a process of its own."""
    np.seterr(all="ignore")
    stack = ExitStack()
    counts = stack.enter_context(
        real_aiter(setting.device, version=setting.version, architecture=setting.architecture)
    )
    _worker.append((list(calls(setting)), counts, stack))


def _judge_nth(index: int) -> Verdict:
    return _judge(_worker[0][0][index], _worker[0][1])
