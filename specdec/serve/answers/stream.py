"""An answer as server-sent events, written as the engine's news come."""

from __future__ import annotations

import logging
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from specdec.serve.answers.answer import Answer
from specdec.serve.answers.transport import ClientGone, line
from specdec.serve.errors import RequestError, defect
from specdec.serve.front import Outputs
from specdec.session.outputs import StreamChunk

logger = logging.getLogger(__name__)

CONNECTION = "specdec.connection"
"""Key of a scope: uvicorn's own state of the request."""


class EventStream(Response):
    """Server-sent events of outputs, which are closed at its end, however it comes.

    The head goes out through uvicorn. Events are written to its connection, in chunks of HTTP where
    the client knows them: an event passes through no task and no middleware, which would take
    longer than all the rest.
    """

    media_type = "text/event-stream"

    def __init__(self, outputs: Outputs, answer: Answer) -> None:
        self._outputs, self._answer = outputs, answer
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them until they end or the client goes."""
        try:
            head = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(head)
            if await self._write(Wire(scope[CONNECTION], scope), receive):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except OSError:
            pass
        finally:
            self._outputs.close()

    async def _write(self, wire: Wire, receive: Receive) -> bool:
        """Writes all events; False where the client has gone."""
        outputs, answer = self._outputs, self._answer

        def read(chunk: StreamChunk) -> None:
            lines = answer.lines(chunk)
            if outputs.num_open:
                wire.write(lines)
            else:
                wire.hold(lines)

        try:
            wire.hold(answer.opening_lines())
            outputs.follow(read, wire.may_write)
            results = await outputs.results(receive)
            options = answer.asked.stream_options
            if options is not None and options.include_usage:
                wire.hold(line(answer.closing(results)))
        except ClientGone:
            return False
        except RequestError as error:  # the status has gone out
            wire.hold(answer.failure(error))
        except Exception:
            logger.exception("an answer failed")
            wire.hold(answer.failure(defect()))
        wire.write(answer.last)
        return True


class Wire:
    """The body of one response."""

    def __init__(self, connection: Any, scope: Scope) -> None:
        self._transport, self._flow = connection.transport, connection.flow
        chunked = scope["http_version"] == "1.1"
        self._held = b""
        self._chunked = getattr(connection, "chunked_encoding", chunked)  # httptools' says so

    def may_write(self) -> bool:
        """Whether the client reads what was written."""
        return not self._flow.write_paused

    def hold(self, data: bytes) -> None:
        """Keeps what is to go out with what comes next."""
        self._held += data

    def write(self, data: bytes) -> None:
        """Sends more; nothing to a client that has gone."""
        data, self._held = self._held + data, b""
        if data and not self._transport.is_closing():
            framed = b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data
            self._transport.write(framed)
