"""How answers travel: as server-sent events, or whole, and neither for a client that is gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.errors import RequestError, defect

T = TypeVar("T")


LINE_ENDS = {ord(sign): f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"}
"""Characters that JSON may hold as they are, and that some clients take for the end of a line."""

logger = logging.getLogger(__name__)


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientGone: it went.
    """
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class Defects:
    """Answers where the application fails, with a traceback in the log alone: the connection serves the next request.

    Args:
        app: serves.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        begun = False

        async def watched(message: Message) -> None:
            nonlocal begun
            begun = begun or message["type"] == "http.response.start"
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            if begun or scope["type"] != "http":
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            error = defect()
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)


class Whole(Response):
    """A large answer, which is written choice by choice: no other thread works while one is."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Its JSON."""
        frame = JSONResponse({**content, "choices": None}).body
        choices = b",".join(bytes(JSONResponse(choice).body) for choice in content["choices"])
        return bytes(frame).replace(b'"choices":null', b'"choices":[%s]' % choices, 1)


class EventStream(Response):
    """Server-sent events.

    Args:
        events: JSON objects.
        close: called at the end, however it comes.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[dict[str, Any]], close: Callable[[], object]) -> None:
        self._events, self._close = events, close
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends them until they end or the client goes."""
        try:
            await unless_gone(receive, self._send(send))
        except (ClientGone, OSError):
            pass
        finally:
            self._close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self._events:
                await _send_line(send, json.dumps(event, ensure_ascii=False).translate(LINE_ENDS))
        except RequestError as error:  # the status has gone out
            await _send_line(send, json.dumps(error.body))
        except Exception:
            logger.exception("an answer failed")
            await _send_line(send, json.dumps(defect().body))
        await _send_line(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_line(send: Send, data: str) -> None:
    # A lone surrogate, which JSON may hold and a prompt echoes, has no UTF-8.
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(errors="replace"), "more_body": True})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
