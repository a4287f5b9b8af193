"""One step as it goes through the engine: planned, launched, queued, read; and the queue. One
asynchronous copy per step brings its results back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
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
        top = top_of(token, *token_logprobs, request.sampling.prompt_logprobs or 0)
        request.prompt_top_logprobs.append(top)


@dataclass(slots=True)
class Launch:
    """A step: the planner decides its shape, the runner launches it, the queue brings it back.

    Attributes:
        selection: its batch.
        block: shape of the block of each request; None for the first tokens that a prefill samples.
        context: which the drafter takes over.
        reads: the drafter takes over prompts that are prefilled beside it.
        tries: nothing tells yet that its drafts pay.
        prepares: it has none, so that the next one may.
        left_out: requests whose drafts mean nothing, as the drafter has not read them.
        expected_accepted: on which the shape was chosen, see `BlockChoice.choose`.
        start: stamp from which its time counts; None where the time is not wanted.
        end: stamp of its end.
        seconds: between the two, once it was read.
        table: int64 [num_reqs, columns], see `result_table`; None without requests. On the host
            once the device has come past `end`.
        scored: prompt tokens that a prefill has scored, likewise.
    """

    selection: Selection
    block: BlockShape | None
    context: Context = "now"
    reads: bool = True
    tries: bool = False
    prepares: bool = False
    left_out: Collection[Request] = ()
    expected_accepted: float = 0.0
    start: Any = None
    end: Any = None
    seconds: float | None = None
    table: Tensor | None = None
    scored: ScoredPrompts | None = None

    @property
    def requests(self) -> list[Request]:
        """Requests of its batch."""
        return self.selection.requests

    @property
    def shape(self) -> BlockShape:
        """Shape of its blocks; without drafts for first tokens."""
        return self.block or BlockShape(0)

    def spent(self) -> list[tuple[int, int]]:
        """Drafts verified and accepted, by request of its batch; `table` is on the host."""
        columns, shape = self.columns(), self.shape
        whole = [shape.drafts] * len(columns.num_accepted) if shape.is_tree else columns.num_drafts
        return list(zip(columns.verified or whole, columns.num_accepted, strict=True))

    def columns(self) -> StepColumns:
        """What it gave its requests; `table` is on the host."""
        assert self.table is not None
        return StepColumns.of(self.table, self.shape)


class ResultQueue:
    """Results of launched steps, first in, first out.

    Args:
        clock: stamps the arrival of results.
    """

    def __init__(self, clock: StepClock) -> None:
        self._clock = clock
        self._launched: deque[Launch] = deque()

    def __len__(self) -> int:
        """Steps whose results are unread."""
        return len(self._launched)

    def reset(self) -> None:
        """Forgets what is unread."""
        self._launched.clear()

    def send(self, launch: Launch) -> None:
        """Starts the copy of a step's results to the host, into pinned memory when they come from
        an accelerator; stamps its end. Rows of the table behind those of its requests belong to
        nobody.
        """
        if launch.table is None:
            launch.table = torch.empty(0, num_columns(BlockShape(0)), device="cpu")
        else:
            launch.table = _on_its_way(launch.table[: len(launch.requests)])
        if launch.scored is not None:
            launch.scored.table = _on_its_way(launch.scored.table)
        launch.end = self._clock.stamp()
        self._launched.append(launch)

    def receive(self, leave: int = 0) -> Iterator[Launch]:
        """The oldest steps, until only `leave` are unread; waits for copies under way."""
        while len(self._launched) > leave:
            launch = self._launched.popleft()
            self._clock.wait(launch.end)
            if launch.start is not None:
                launch.seconds = self._clock.seconds(launch.start, launch.end)
            yield launch


def _on_its_way(table: Tensor) -> Tensor:
    """The table on the host, once the device has come past what is launched so far."""
    if table.device.type != "cuda":
        return table.clone()  # the next replay of a captured step writes to the same table
    host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
    return host.copy_(table, non_blocking=True)
