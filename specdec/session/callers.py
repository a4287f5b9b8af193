"""Callers that wait for the unfinished requests of a session."""

from collections.abc import Iterable
from weakref import ref

from specdec.engine.requests.request import Request, Status
from specdec.session.handle import Handle


class Callers:
    """Handles of unfinished requests; nothing is kept for who has let go of his."""

    def __init__(self) -> None:
        self._handles: dict[Request, ref[Handle]] = {}
        self._listening: set[Request] = set()  # whose handles get chunks before the end
        self._served: Handle | None = None  # is being given its end

    def __len__(self) -> int:
        return len(self._handles)

    def __contains__(self, request: Request) -> bool:
        return request in self._handles

    @property
    def handles(self) -> list[Handle]:
        """Handles that somebody holds."""
        held = [handle for known in list(self._handles.values()) if (handle := known()) is not None]
        return held if self._served is None else [*held, self._served]

    @property
    def left(self) -> list[Request]:
        """Requests whose handles nobody holds."""
        return [request for request, known in list(self._handles.items()) if known() is None]

    def add(self, handle: Handle, *, listens: bool) -> None:
        """Takes note of a handle, which gets chunks before the end if it `listens`."""
        if listens:
            self._listening.add(handle.request)
        self._handles[handle.request] = ref(handle)

    def deliver(self, requests: Iterable[Request]) -> list[Request]:
        """Hands news of requests to those whom they concern: of most requests, only the end does.

        Returns:
            Requests whose news could not be handed over; callers know, and do not wait.
        """
        finished, listening, failed = Status.FINISHED, self._listening, []
        for request in [one for one in requests if one.status is finished or one in listening]:
            known = self._handles.get(request)
            self._served = handle = known() if known is not None else None
            if request.status is finished:
                self._handles.pop(request, None)
                listening.discard(request)
            if handle is not None and not handle.deliver():
                failed.append(request)
                self._handles.pop(request, None)
                listening.discard(request)
        self._served = None
        return failed

    def clear(self) -> None:
        self._handles, self._listening, self._served = {}, set(), None
