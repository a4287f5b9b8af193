"""Who waits for the unfinished requests of a session."""

from collections.abc import Iterable
from weakref import ref

from specdec.engine.handle import Handle
from specdec.engine.request import Request, Status


class Callers:
    """The handles of unfinished requests, which belong to those who wait; nothing is kept for who has let go of his."""

    def __init__(self) -> None:
        self._handles: dict[int, ref[Handle]] = {}  # by request id
        self._listening: set[int] = set()  # requests whose handles get chunks before the end

    def __len__(self) -> int:
        """Unfinished requests."""
        return len(self._handles)

    def __contains__(self, request: Request) -> bool:
        """Whether a request has not ended."""
        return request.request_id in self._handles

    @property
    def handles(self) -> list[Handle]:
        """Those that somebody holds."""
        return [handle for known in self._handles.values() if (handle := known()) is not None]

    def add(self, handle: Handle, *, listens: bool) -> None:
        """Takes note of a handle, which gets chunks before the end if it `listens`."""
        self._handles[handle.request.request_id] = ref(handle)
        if listens:
            self._listening.add(handle.request.request_id)

    def deliver(self, requests: Iterable[Request]) -> None:
        """Hands news of requests to those whom they concern: of most requests, only the end does."""
        finished, listening = Status.FINISHED, self._listening
        for request in [one for one in requests if one.status is finished or one.request_id in listening]:
            known = self._handles.get(request.request_id)
            handle = known() if known is not None else None
            if request.status is finished:
                self._handles.pop(request.request_id, None)
                listening.discard(request.request_id)
            if handle is not None:
                handle.deliver()

    def clear(self) -> list[Handle]:
        """Forgets all; gives the handles that somebody holds."""
        handles, self._handles, self._listening = self.handles, {}, set()
        return handles
