"""What comes back from the device: one asynchronous copy per step, read later."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from specdec.base.blocks import BlockShape
from specdec.engine.policy.timing import StepClock
from specdec.engine.requests.request import Request
from specdec.engine.selection import Selection
from specdec.engine.step_table import StepColumns, num_columns
from specdec.model.batch import Context
from specdec.sampling.logprobs import Unpacked, top_of


@dataclass(slots=True)
class ScoredPrompts:
    """Log-probabilities of prompt tokens, from the rows before them.

    Attributes:
        requests: whose they are, each with the number of its rows; those of a request follow each
            other, as do its chunks.
        table: int64 [rows, columns], see `specdec.sampling.logprobs.Logprobs.packed`.
    """

    requests: list[tuple[Request, int]]
    table: Tensor

    def take_over(self) -> None:
        """Adds them to their requests; `table` is on the host. A request for which that raises has
        failed.
        """
        rows = iter(Unpacked(self.table, self.table.shape[1]))
        for request, count in self.requests:
            own = list(islice(rows, count))
            try:
                _add_prompt(request, own)
            except Exception as error:
                request.fail(error)


def _add_prompt(
    request: Request, rows: Iterable[tuple[float, Sequence[int], Sequence[float]]]
) -> None:
    for token_logprobs in rows:
        token = request.prompt_token_ids[len(request.prompt_logprobs) + 1]
        request.prompt_logprobs.append(token_logprobs[0])
        request.prompt_top_logprobs.append(
            top_of(token, *token_logprobs, request.sampling.prompt_logprobs or 0)
        )


@dataclass(slots=True)
class FinishedStep:
    """A step that the device is done with.

    Attributes:
        shape: of its blocks; None for first tokens, which come from a prefill.
        selection: its batch.
        table: int64 [num_reqs, columns], on the host; see `result_table`.
        seconds: from the stamp that `send` was given to the arrival of the results; None without a
            stamp.
        scored: of a prefill, whose prompt tokens it scored; see `ScoredPrompts`.
        context: which the drafter took over.
        outlook: on which its shape was chosen, see `BlockChoice.choose`.
    """

    shape: BlockShape | None
    selection: Selection
    table: Tensor
    seconds: float | None
    scored: ScoredPrompts | None = None
    context: Context = "now"
    outlook: float = 0.0

    def columns(self) -> StepColumns:
        """What it gave its requests."""
        return StepColumns.of(self.table, self.shape or BlockShape(0))


@dataclass(slots=True)
class _Launched:
    selection: Selection
    shape: BlockShape | None
    table: Tensor  # int64 [num_reqs, columns], on the host once the device has come past `end`
    scored: ScoredPrompts | None  # likewise
    start: Any
    end: Any
    context: Context
    outlook: float


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
        selection: Selection,
        shape: BlockShape | None,
        table: Tensor | None,
        start: Any = None,
        scored: ScoredPrompts | None = None,
        context: Context = "now",
        outlook: float = 0.0,
    ) -> Any:
        """Starts the copy of a step's results to the host, into pinned memory when they come from
        an accelerator.

        Args:
            selection: the batch.
            shape: of the step's blocks; None for first tokens.
            table: from `result_table`, one row per request; further rows belong to nobody. None
                without requests.
            start: stamp of the step's beginning, when its time is wanted.
            scored: prompt tokens that a prefill has scored.
            context: which the drafter takes over.
            outlook: see `FinishedStep`.

        Returns:
            Stamp of its end.
        """
        table = (
            _on_its_way(table[: len(selection.requests)])
            if table is not None
            else torch.empty(0, num_columns(BlockShape(0)))
        )
        if scored is not None:
            scored.table = _on_its_way(scored.table)
        end = self._clock.stamp()
        self._launched.append(
            _Launched(selection, shape, table, scored, start, end, context, outlook)
        )
        return end

    def receive(self, leave: int = 0) -> Iterator[FinishedStep]:
        """The oldest steps, until only `leave` are unread; waits for a copy that is still under
        way.
        """
        while len(self._launched) > leave:
            step = self._launched.popleft()
            self._clock.wait(step.end)
            seconds = None if step.start is None else self._clock.seconds(step.start, step.end)
            yield FinishedStep(
                step.shape,
                step.selection,
                step.table,
                seconds,
                step.scored,
                step.context,
                step.outlook,
            )


def _on_its_way(table: Tensor) -> Tensor:
    """The table on the host, once the device has come past what is launched so far."""
    if table.device.type != "cuda":
        return table.clone()  # the next replay of a captured step writes to the same table
    host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    return host.copy_(table, non_blocking=True)
