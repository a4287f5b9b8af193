"""How the requests of a batch are sampled: facts that the host knows, and numbers on the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.base.sizes import power_of_two
from specdec.device.host import CPU, host_tensor
from specdec.sampling.edits import Edits, num_edits
from specdec.sampling.params import SamplingParams

_FLOATS = (
    "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
)  # fmt: skip
_UNLIMITED = 2**31
_NEUTRAL = (0.0, 1.0, 0.0, 1.0, 0.0, 0.0)  # greedy, nothing filtered, nothing penalized


class SamplingPlan(NamedTuple):
    """What the host knows about a batch's sampling; it decides a step's operations and shape.

    Attributes:
        penalized: a request has a repetition penalty.
        all_greedy: no request samples.
        max_top_k: bound of the requests' top-k, 0 without any; a power of two, so few occur.
        any_top_p, any_min_p: a request filters so.
        logprobs: a request wants log-probabilities.
        top_logprobs: bound of the likeliest tokens wanted with them; a power of two or 0.
        edits: bound of a request's own changes, see `specdec.sampling.edits`; likewise.
        counted: a request has a presence or a frequency penalty.
        guided: a request has a grammar.
        predicted: a request has a prediction of its output.
        limited: a request wants no more than so many drafts.
    """

    penalized: bool
    all_greedy: bool
    max_top_k: int
    any_top_p: bool
    any_min_p: bool
    logprobs: bool
    top_logprobs: int = 0
    edits: int = 0
    counted: bool = False
    guided: bool = False
    predicted: bool = False
    limited: bool = False

    @property
    def filtered(self) -> bool:
        """Whether a request drops tokens before drawing."""
        return self.max_top_k > 0 or self.any_top_p or self.any_min_p

    @property
    def reads_blocks(self) -> bool:
        """Whether tokens depend on more than their own row's logits, or more is told of them."""
        return self.penalized or self.counted or self.edits > 0 or self.logprobs

    def covers(self, other: SamplingPlan) -> bool:
        """Whether a step of this plan gives requests of the other all that they want."""
        names = "all_greedy", "max_top_k", "any_top_p", "any_min_p"
        alike = self._replace(**{name: getattr(other, name) for name in names}) == other
        return alike and SamplingPlan.joined([self, other]) == self

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingPlan:
        """The facts of these requests."""
        sampled = [p for p in params if p.temperature > 0]
        return cls(
            penalized=any(p.penalized for p in params),
            all_greedy=not sampled,
            max_top_k=power_of_two(max((p.top_k for p in sampled), default=0)),
            any_top_p=any(p.top_p < 1 for p in sampled),
            any_min_p=any(p.min_p > 0 for p in sampled),
            logprobs=any(p.logprobs for p in params),
            top_logprobs=power_of_two(max((p.top_logprobs for p in params), default=0)),
            edits=power_of_two(max((num_edits(p) for p in params), default=0)),
            counted=any(p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params),
            guided=any(p.masked for p in params),
            predicted=any(p.prediction is not None for p in params),
            limited=any((p.num_draft_tokens, p.tree_nodes) != (None, None) for p in params),
        )

    @classmethod
    def joined(cls, plans: Iterable[SamplingPlan]) -> SamplingPlan:
        """The facts of requests together whose own these are."""
        distinct = {*plans, cls.of([])}
        return cls(*map(max, zip(*distinct, strict=True)))._replace(
            all_greedy=all(plan.all_greedy for plan in distinct)
        )


@dataclass(slots=True)
class SamplingTensors:
    """The numbers of requests, a column each that the plan reads, and the plan of the batch.

    Attributes:
        plan: of the batch.
        floats: float32 [6, num_reqs]: temperature, top-p, min-p, repetition, presence, frequency.
        ints: int64 [5, num_reqs]: top-k, seed, the first output position, most drafts and nodes.
        seen: bool [num_reqs, V], tokens before the anchor that the repetition penalty counts.
        counts: int32 [num_reqs, V], how often the output before the anchor has each token; None
            when no request has a presence or frequency penalty.
        edits: of single logits; None when no request has any.
    """

    plan: SamplingPlan
    floats: Tensor
    ints: Tensor
    seen: Tensor | None = None
    counts: Tensor | None = None
    edits: Edits | None = None

    @classmethod
    def neutral(cls, num_rows: int, device: torch.device) -> SamplingTensors:
        """Rows of requests that decode greedily."""
        floats = torch.tensor(_NEUTRAL, dtype=torch.float32, device=device)
        ints = torch.zeros(5, num_rows, dtype=torch.int64, device=device)
        return cls(SamplingPlan.of([]), floats[:, None].repeat(1, num_rows), ints)

    @classmethod
    def of(
        cls,
        params: Sequence[SamplingParams],
        seeds: Sequence[int],
        *,
        firsts: Sequence[int] | None = None,
        seen: Tensor | None = None,
        device: torch.device = CPU,
    ) -> SamplingTensors:
        """The numbers of these requests on the host, to go to `device`; `firsts` are the positions
        of their first output tokens, 0 when left out.
        """
        numbers = [[_number(p, name) for p in params] for name in _FLOATS]
        floats = host_tensor(numbers, torch.float32, device)
        rows = [[p.top_k for p in params], list(seeds), list(firsts or [0] * len(params))]
        for asked in ([p.num_draft_tokens for p in params], [p.tree_nodes for p in params]):
            rows.append([_UNLIMITED if one is None else one for one in asked])
        ints = host_tensor(rows, torch.int64, device)
        return cls(SamplingPlan.of(params), floats, ints, seen)

    def put(self, slots: Tensor, other: SamplingTensors) -> None:
        """Overwrites the columns `slots` int64 [n] with the n of `other`."""
        self.floats.index_copy_(1, slots, other.floats.to(slots.device, non_blocking=True))
        self.ints.index_copy_(1, slots, other.ints.to(slots.device, non_blocking=True))

    def select(self, slots: Tensor, plan: SamplingPlan) -> SamplingTensors:
        """The columns `slots` int64 [n], as far as `plan` reads them; only device operations."""
        assert self.seen is not None or not plan.penalized
        assert self.counts is not None or not plan.counted
        assert self.edits is not None or not plan.edits
        plain = plan.all_greedy and not plan.counted
        floats, ints = self.floats[:, :0], self.ints[:, :0]
        if not plain or plan.penalized:
            floats = self.floats.index_select(1, slots)
        if not plain or plan.limited:
            ints = self.ints.index_select(1, slots)
        seen = counts = edits = None
        if plan.penalized and self.seen is not None:
            seen = self.seen.index_select(0, slots)
        if plan.counted and self.counts is not None:
            counts = self.counts.index_select(0, slots)
        if plan.edits and self.edits is not None:
            edits = self.edits.select(slots, plan.edits)
        return SamplingTensors(plan, floats, ints, seen=seen, counts=counts, edits=edits)

    def of_rows(self, requests: Tensor) -> SamplingTensors:
        """The numbers of rows of these requests int64 [T], by which a token is drawn."""
        floats, ints = (numbers.index_select(1, requests) for numbers in (self.floats, self.ints))
        return SamplingTensors(self.plan, floats, ints)

    def select_past(self, slots: Tensor, table: SamplingTensors) -> None:
        """Gathers anew from `table` what a step changes: the tokens that penalties count."""
        if self.plan.penalized and table.seen is not None:
            self.seen = table.seen.index_select(0, slots)
        if self.plan.counted and table.counts is not None:
            self.counts = table.counts.index_select(0, slots)

    @property
    def temperature(self) -> Tensor:
        """float32 [num_reqs]."""
        return self.floats[0]

    @property
    def top_p(self) -> Tensor:
        """float32 [num_reqs]."""
        return self.floats[1]

    @property
    def min_p(self) -> Tensor:
        """float32 [num_reqs]."""
        return self.floats[2]

    @property
    def repetition_penalty(self) -> Tensor:
        """float32 [num_reqs]."""
        return self.floats[3]

    @property
    def presence_penalty(self) -> Tensor:
        """float32 [num_reqs]."""
        return self.floats[4]

    @property
    def frequency_penalty(self) -> Tensor:
        """float32 [num_reqs]."""
        return self.floats[5]

    @property
    def top_k(self) -> Tensor:
        """int64 [num_reqs]."""
        return self.ints[0]

    @property
    def seeds(self) -> Tensor:
        """int64 [num_reqs]."""
        return self.ints[1]

    @property
    def firsts(self) -> Tensor:
        """int64 [num_reqs], the positions of the first output tokens."""
        return self.ints[2]

    @property
    def max_drafts(self) -> Tensor:
        """int64 [num_reqs], positions for which a request wants drafts."""
        return self.ints[3]

    @property
    def max_nodes(self) -> Tensor:
        """int64 [num_reqs], drafts of a tree that a request wants; 0 for a chain."""
        return self.ints[4]


def _number(params: SamplingParams, name: str) -> float:
    value: float | None = getattr(params, name)
    return _NEUTRAL[_FLOATS.index(name)] if value is None else value
