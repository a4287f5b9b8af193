"""What a server has done since its start, in integers and times; from it come the metrics."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from specdec.base.metrics import AcceptanceStats

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0,
    300.0,
)  # fmt: skip
TOKENS = tuple(float(first * 10**power) for power in range(6) for first in (1, 2, 5))


class Histogram:
    """How many of some numbers were at most as large as each bound."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, number: float) -> None:
        """Counts one."""
        self.counts[bisect_left(self.bounds, number)] += 1
        self.sum += number

    def merge(self, other: Histogram) -> None:
        """Counts what another one has counted."""
        self.counts, self.sum = _added(self.counts, other.counts), self.sum + other.sum


class Totals:
    """Counts of all outputs, cancelled ones among them.

    Attributes:
        finished: outputs by finish reason.
        prompt_tokens, output_tokens: of prompts at their first token, of outputs as they come.
        steps: verify steps.
        step_tokens: what these put out.
        drafts: verify steps that had drafts.
        draft_tokens: drafts verified.
        verified: verify steps by the drafts of a request that they verified.
        offered, accepted: by position, verify steps that offered a draft there, and that kept it.
        first_token, between_tokens, whole: seconds to the first, between chunks, to the end.
        per_token: seconds per token after the first; it and the first two are of streams.
        request_prompt, request_output: tokens of each output that has ended.
    """

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.output_tokens = 0
        self.steps = self.step_tokens = self.drafts = self.draft_tokens = 0
        self.verified: list[int] = []
        self.offered: list[int] = []
        self.accepted: list[int] = []
        self.first_token, self.between_tokens = Histogram(), Histogram()
        self.per_token, self.whole = Histogram(), Histogram()
        self.request_prompt, self.request_output = Histogram(TOKENS), Histogram(TOKENS)

    @property
    def tau(self) -> float:
        """Tokens per verify step, 1 before there is one."""
        return self.step_tokens / self.steps if self.steps else 1.0

    def plain(self) -> dict[str, Any]:
        """The totals as JSON has them."""
        values = dict(vars(self))
        for name, one in values.items():
            if isinstance(one, Histogram):
                values[name] = [*one.counts, one.sum]
            elif isinstance(one, Counter):
                values[name] = dict(one)
        return values

    @classmethod
    def from_plain(cls, given: dict[str, Any]) -> Totals:
        """What `plain` made.

        Raises:
            ValueError, TypeError, KeyError: it has made nothing like it.
        """
        made = cls()
        for name, mine in vars(made).items():
            value = given[name]
            if isinstance(mine, Histogram):
                *counts, mine.sum = map(float, value)
                mine.counts = [int(count) for _, count in zip(mine.counts, counts, strict=True)]
            elif isinstance(mine, Counter):
                mine.update({str(reason): int(count) for reason, count in value.items()})
            else:
                setattr(made, name, [*map(int, value)] if isinstance(mine, list) else int(value))
        return made

    def add(self, stats: AcceptanceStats) -> None:
        """Counts verify steps."""
        self.steps += stats.num_steps
        self.step_tokens += sum(stats.num_emitted)
        self.drafts += sum(drafted > 0 for drafted in stats.num_drafted)
        self.draft_tokens += sum(stats.num_verified)
        places = range(len(stats.num_offered))
        kept = [sum(accepted > place for accepted in stats.num_accepted) for place in places]
        self.verified = _added(self.verified, stats.drafted_histogram)
        self.offered = _added(self.offered, stats.num_offered)
        self.accepted = _added(self.accepted, kept)


def sum_of(some: Iterable[Totals]) -> Totals:
    """What all have counted together."""
    made = Totals()
    for totals in some:
        for name, value in vars(totals).items():
            mine = getattr(made, name)
            if isinstance(value, Histogram):
                mine.merge(value)
            elif isinstance(value, list):
                setattr(made, name, _added(mine, value))
            else:
                setattr(made, name, mine + value)
    return made


def _added(some: list[int], more: list[int]) -> list[int]:
    return [a + b for a, b in zip_longest(some, more, fillvalue=0)]
