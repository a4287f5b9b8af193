"""What comes back from the device: one asynchronous copy per step, read later."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import AcceptOutput, DraftOutput, Request


@dataclass(slots=True)
class StepResult:
    """What one step gave one request.

    Attributes:
        k: drafts verified; None for the first token, which comes from a prefill.
        num_accepted: drafts kept.
        num_drafts: drafts offered, of the k.
        finite: the logits behind the tokens were finite.
        token_ids: `num_accepted + 1` output tokens.
        logprobs: one per token, or empty when nobody in the batch asked.
    """

    k: int | None
    num_accepted: int
    num_drafts: int
    finite: bool
    token_ids: list[int]
    logprobs: list[float]


@dataclass(slots=True)
class _Launched:
    requests: list[Request]
    k: int | None
    table: Tensor  # int64 [num_reqs, columns], on the host once `arrived`
    arrived: torch.cuda.Event | None


class ResultQueue:
    """Results of launched steps, first in, first out."""

    def __init__(self) -> None:
        self._launched: deque[_Launched] = deque()

    def __len__(self) -> int:
        """Steps whose results are unread."""
        return len(self._launched)

    def send(self, requests: list[Request], k: int | None, accept: AcceptOutput, draft: DraftOutput | None = None) -> None:
        """Starts the copy of a step's results to the host, into pinned memory when it comes from an accelerator."""
        num_drafts = draft.num_drafts if draft and draft.num_drafts is not None else torch.full_like(accept.num_accepted, k or 0)
        columns = [torch.stack([accept.num_accepted, num_drafts, accept.finite.long()], dim=1), accept.token_ids]
        if accept.logprobs is not None:
            columns.append(accept.logprobs.double().view(torch.int64))  # the same 8 bytes, so that one tensor carries both
        table = torch.cat(columns, dim=1)
        arrived = None
        if table.device.type == "cuda":
            host = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
            table = host.copy_(table, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._launched.append(_Launched(requests, k, table, arrived))

    def receive(self, leave: int = 0) -> Iterator[tuple[Request, StepResult]]:
        """Results of the oldest steps, until only `leave` steps are unread; waits for a copy that is still under way."""
        while len(self._launched) > leave:
            step = self._launched.popleft()
            if step.arrived:
                step.arrived.synchronize()
            width = (step.k or 0) + 1
            for request, (num_accepted, num_drafts, finite, *row) in zip(step.requests, step.table.tolist(), strict=True):
                logprobs = torch.tensor(row[width:], dtype=torch.int64).view(torch.float64).tolist() if row[width:] else []
                yield request, StepResult(step.k, num_accepted, num_drafts, bool(finite), row[: num_accepted + 1], logprobs)
