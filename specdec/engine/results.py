"""What comes back from the device: one asynchronous copy per step, read later, and taken over into the requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from specdec.batch import Context
from specdec.blocks import BlockShape
from specdec.core import AcceptOutput, DraftOutput
from specdec.engine.request import Request
from specdec.engine.timing import StepClock
from specdec.sampling.logprobs import num_packed, top_of, unpacked
from specdec.sampling.tensors import SamplingPlan

TokenLogprobs = tuple[float, Sequence[int], Sequence[float]]
"""See `specdec.sampling.logprobs.unpacked`."""

_COUNTS = 3  # columns before the tokens: accepted drafts, offered drafts, and whether the logits were finite with twice the part


@dataclass(slots=True)
class StepResult:
    """What one step gave one request.

    Attributes:
        shape: of the block verified; None for the first token, which comes from a prefill.
        num_accepted: drafts kept.
        num_drafts: positions for which drafts were offered, at most the block's depth.
        finite: the logits behind the tokens were finite.
        token_ids: `num_accepted + 1` output tokens.
        logprobs: of each token its own, the likeliest tokens and theirs; empty when nobody in the batch asked.
        rows: of a tree, the rows that were kept, from the anchor's child on.
        ranks: of a tree, the places of these drafts among the candidates of their positions.
        part: of a composition of drafters, whose drafts they were; 0 for any other.
    """

    shape: BlockShape | None
    num_accepted: int
    num_drafts: int
    finite: bool
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    rows: Sequence[int] = ()
    ranks: Sequence[int] = ()
    part: int = 0


@dataclass(slots=True)
class ScoredPrompts:
    """Log-probabilities of prompt tokens, from the rows before them.

    Attributes:
        requests: whose they are, each with the number of its rows; those of a request follow each other, as do its chunks.
        table: int64 [rows, columns], see `specdec.sampling.logprobs.Logprobs.packed`.
    """

    requests: list[tuple[Request, int]]
    table: Tensor

    def take_over(self) -> None:
        """Adds them to their requests; `table` is on the host."""
        rows = unpacked(self.table, self.table.shape[1])
        for request, count in self.requests:
            wanted = request.sampling.prompt_logprobs or 0
            for token_logprobs in islice(rows, count):
                token = request.prompt_token_ids[len(request.prompt_logprobs) + 1]
                request.prompt_logprobs.append(token_logprobs[0])
                request.prompt_top_logprobs.append(top_of(token, *token_logprobs, wanted))


@dataclass(slots=True)
class FinishedStep:
    """A step that the device is done with.

    Attributes:
        shape: of its blocks; None for first tokens, which come from a prefill.
        requests: its batch.
        table: int64 [num_reqs, columns], on the host; see `result_table`.
        seconds: from the stamp that `send` was given to the arrival of the results; None without a stamp.
        scored: of a prefill, whose prompt tokens it scored; see `ScoredPrompts`.
        context: which the drafter took over.
    """

    shape: BlockShape | None
    requests: list[Request]
    table: Tensor
    seconds: float | None
    scored: ScoredPrompts | None = None
    context: Context = "now"

    def results(self) -> Iterator[tuple[Request, StepResult]]:
        """What the step gave each request.

        One at a time, from lists for the whole batch: thousands of small objects alive at once would set off Python's garbage
        collector in every few steps, and that takes longer than all else that the host does.
        """
        shape = self.shape or BlockShape(0)
        depth, width = shape.depth, shape.depth + 1
        columns = self.table.shape[1]
        values = self.table.flatten().tolist()
        of_token = (columns - num_columns(shape)) // width
        logprobs = unpacked(self.table[:, -of_token * width :], of_token) if of_token else iter(())
        for index, request in enumerate(self.requests):
            row = index * columns
            num_accepted, num_drafts, told = values[row : row + _COUNTS]
            token_ids = values[row + _COUNTS : row + _COUNTS + num_accepted + 1]
            own = list(islice(logprobs, width))
            result = StepResult(self.shape, num_accepted, num_drafts, told % 2 == 1, token_ids, own, part=told // 2)
            if shape.is_tree:
                start = row + _COUNTS + width
                result.rows = values[start : start + num_accepted]
                result.ranks = values[start + depth : start + depth + num_accepted]
            yield request, result


@dataclass(slots=True)
class _Launched:
    requests: list[Request]
    shape: BlockShape | None
    table: Tensor  # int64 [num_reqs, columns], on the host once the device has come past `end`
    scored: ScoredPrompts | None  # likewise
    start: Any
    end: Any
    context: Context


def result_table(shape: BlockShape, accept: AcceptOutput, draft: DraftOutput | None = None, out: Tensor | None = None) -> Tensor:
    """One tensor with all that the host wants to know about a step of blocks of one shape.

    Returns:
        int64 [num_reqs, num_columns(shape, ...)]; `out` when it is given.
    """
    told = accept.finite.long()
    if draft is not None and draft.part is not None:
        told = torch.add(told, draft.part, alpha=2)
    counts = (accept.num_accepted, _positions_offered(shape, accept, draft), told)
    columns = [*(count[:, None] for count in counts), accept.token_ids]
    if accept.path is not None:
        assert draft is not None and draft.tree is not None
        rows = accept.path[:, 1:]
        columns += [rows, draft.tree.ranks.gather(1, rows - 1)]
    if accept.logprobs is not None:
        columns.append(accept.logprobs.packed())
    return torch.cat(columns, dim=1, out=out)


def _positions_offered(shape: BlockShape, accept: AcceptOutput, draft: DraftOutput | None) -> Tensor:
    """int64 [num_reqs]: positions for which drafts count, of a tree those of its longest path."""
    if draft is None or draft.num_drafts is None:
        return torch.full_like(accept.num_accepted, shape.depth)
    if draft.tree is None:
        return draft.num_drafts
    drafts = torch.arange(shape.drafts, device=draft.num_drafts.device)
    return torch.where(drafts < draft.num_drafts[:, None], draft.tree.depths, 0).amax(dim=1)


def num_columns(shape: BlockShape, plan: SamplingPlan | None = None) -> int:
    """Width of the table of a step of blocks of one shape; without a plan, that of requests that want no log-probabilities."""
    of_token = num_packed(plan.top_logprobs) if plan and plan.logprobs else 0
    return _COUNTS + (shape.depth + 1) * (1 + of_token) + 2 * shape.tree_depth


class ResultQueue:
    """Results of launched steps, first in, first out.

    Args:
        clock: stamps the arrival of results.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._launched: deque[_Launched] = deque()

    def __len__(self) -> int:
        """Steps whose results are unread."""
        return len(self._launched)

    def reset(self) -> None:
        """Forgets what is unread."""
        self._launched.clear()

    def send(
        self,
        requests: list[Request],
        shape: BlockShape | None,
        table: Tensor | None,
        start: Any = None,
        scored: ScoredPrompts | None = None,
        context: Context = "now",
    ) -> Any:
        """Starts the copy of a step's results to the host, into pinned memory when they come from an accelerator.

        Args:
            requests: the batch.
            shape: of the step's blocks; None for first tokens.
            table: from `result_table`, one row per request; further rows belong to nobody. None without requests.
            start: stamp of the step's beginning, when its time is wanted.
            scored: prompt tokens that a prefill has scored.
            context: which the drafter takes over.

        Returns:
            Stamp of its end.
        """
        table = _on_its_way(table[: len(requests)]) if table is not None else torch.empty(0, num_columns(BlockShape(0)))
        if scored is not None:
            scored.table = _on_its_way(scored.table)
        end = self._clock.stamp()
        self._launched.append(_Launched(requests, shape, table, scored, start, end, context))
        return end

    def receive(self, leave: int = 0) -> Iterator[FinishedStep]:
        """The oldest steps, until only `leave` are unread; waits for a copy that is still under way."""
        while len(self._launched) > leave:
            step = self._launched.popleft()
            self._clock.wait(step.end)
            seconds = None if step.start is None else self._clock.seconds(step.start, step.end)
            yield FinishedStep(step.shape, step.requests, step.table, seconds, step.scored, step.context)


def _on_its_way(table: Tensor) -> Tensor:
    """The table on the host, once the device has come past what is launched so far."""
    if table.device.type != "cuda":
        return table.clone()  # the next replay of a captured step writes to the same table
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return host.copy_(table, non_blocking=True)


def append_tokens(request: Request, result: StepResult, eos_token_ids: Sequence[int]) -> str | None:
    """Adds what a step gave a request.

    Args:
        request: not finished.
        result: of one step.
        eos_token_ids: the model's end-of-sequence ids.

    Returns:
        Why the output ends here, or None when it goes on.
    """
    params = request.sampling
    stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    room = request.max_total_len - len(request.prompt_token_ids) - len(request.output_token_ids)
    tokens, reason = _cut(result.token_ids, room, stop_ids)
    keep = request.on_tokens(request, tokens) if request.on_tokens else None
    if keep is not None:
        tokens, reason = tokens[:keep], "stop"
    request.output_token_ids += tokens
    if params.logprobs:
        for token, of_token in zip(tokens, result.logprobs, strict=False):
            request.logprobs.append(of_token[0])
            if params.top_logprobs:
                request.top_logprobs.append(top_of(token, *of_token, params.top_logprobs))
    if result.shape is not None:
        num_accepted = min(result.num_accepted, len(tokens))
        request.num_drafted.append(result.num_drafts)
        request.num_accepted.append(num_accepted)
        request.num_emitted.append(len(tokens))
        request.tree_sizes.append(result.shape.drafts if result.shape.is_tree else 0)
        request.parts.append(result.part)
        for rank in result.ranks[:num_accepted]:
            request.num_by_rank[rank] += 1
    return reason


def _cut(tokens: list[int], room: int, stop_ids: Container[int]) -> tuple[list[int], str | None]:
    """The tokens up to the first stop token or the token limit, and why they end there.

    >>> _cut([5, 6, 7], 2, {7})
    ([5, 6], 'length')
    >>> _cut([5, 6, 7, 8], 9, {6})
    ([5, 6], 'stop')
    """
    tokens = tokens[:room]
    for index, token in enumerate(tokens):
        if token in stop_ids:
            return tokens[: index + 1], "stop"
    return tokens, "length" if len(tokens) == room else None
