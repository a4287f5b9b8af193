"""What a drafter reads of requests, and when.

The context of steps without drafts is put off for as long as the drafter can hold it. A drafter
that needs nothing but tokens may read them at any time. So it leaves requests unread for which
drafts do not pay, and reads what it lacks, as in a prefill, before it drafts for them again. Drafts
that are only tried need a few requests that it has read; those of the others mean nothing.
"""

from collections.abc import Iterable, Sequence

from specdec.base.blocks import BlockShape
from specdec.engine.launch import Launch
from specdec.engine.policy.block_choice import FEW
from specdec.engine.requests.request import Request
from specdec.engine.requests.scheduler import Chunk, Scheduler
from specdec.engine.step import StepRunner


class Reading:
    """Says what the drafter takes over in each step.

    Args:
        runner, scheduler: of the engine.
        late: see `specdec.model.core.Drafter.reads_late`.
        max_rows: of a request in a step.

    Attributes:
        late: the same.
    """

    def __init__(
        self, runner: StepRunner, scheduler: Scheduler, *, late: bool, max_rows: int
    ) -> None:
        self._runner, self._scheduler, self._max_rows = runner, scheduler, max_rows
        self.late = late

    def prefill(self, chunks: Sequence[Chunk], *, wanted: bool) -> bool:
        """Whether the drafter takes over chunks that are about to be launched; what it lacks before
        them it reads now.
        """
        if not self.late:
            return True
        if wanted:
            self._read(chunk.request for chunk in chunks)
        for chunk in chunks:
            chunk.request.unread = not wanted
            if wanted:
                self._scheduler.prefix.read(chunk.request, chunk.end)
        return wanted

    def plan(self, launch: Launch) -> None:
        """Says which context the drafter takes over in a step.

        Before drafts can be made again, one step without any brings the context up to date.
        """
        if not (most := self._runner.max_deferred):
            return
        requests, drafts = launch.requests, launch.shape.drafts > 0
        drafting = self._drafting(launch) if drafts else []
        if not drafts or any(request.num_deferred or request.unread for request in drafting):
            deferred = max((request.num_deferred for request in requests), default=0)
            full = deferred + 1 >= most and not self.late
            launch.block, launch.prepares = BlockShape(0), drafts
            launch.context = "all" if drafts or full else "later"
        if launch.context == "now" and not self.late:
            return  # nothing was put off
        if launch.context == "all":
            self._read(request for request in drafting if request.unread)
        for request in requests:
            if not request.unread:
                self._take_over(request, launch, most)
        if launch.context == "now" and self.late:
            launch.left_out = {request for request in requests if request.unread}

    def _drafting(self, launch: Launch) -> Sequence[Request]:
        """Requests whose drafts are to mean something: of a trial a few, those that were read or
        else those that lack least.
        """
        requests = launch.requests
        trial = self.late and launch.tries and not launch.shape.budget
        if not trial or len(requests) <= FEW:
            return requests
        read = [request for request in requests if not (request.unread or request.num_deferred)]
        return read or sorted(requests, key=_lacking)[:FEW]

    def _take_over(self, request: Request, launch: Launch, most: int) -> None:
        """Notes the context of a step for a request that is not unread."""
        prefix = self._scheduler.prefix
        if launch.context == "later":
            if self.late and not request.num_deferred:
                prefix.read(request, request.num_kv_tokens - self._max_rows)
            request.num_deferred += 1
            request.unread = request.num_deferred >= most
        elif launch.context == "all":
            request.num_deferred = 0
            if self.late:
                prefix.read(request, request.num_kv_tokens)
        else:
            request.unread = request.num_deferred > 0

    def _read(self, requests: Iterable[Request]) -> None:
        """Has the drafter read what the target has read of requests, as far as the host knows it;
        the drafter still holds what launched steps add.
        """
        most = self._scheduler.max_prefill_tokens
        chunks, room = list[Chunk](), most
        for request in requests:
            start, end = request.num_read, max(request.num_prefilled, request.num_kv_tokens)
            while start < end:
                stop = min(end, start + room)
                chunks.append(Chunk(request, start, stop, admitted=False, last=False))
                start, room = stop, room - (stop - start)
                if not room:
                    self._runner.read(chunks)
                    chunks, room = [], most
            self._scheduler.prefix.read(request, end)
            request.num_deferred, request.unread = 0, False
        if chunks:
            self._runner.read(chunks)


def _lacking(request: Request) -> tuple[bool, int, int, int]:
    lacking = request.num_kv_tokens - request.num_read
    return request.unread, request.num_deferred, lacking, request.request_id
