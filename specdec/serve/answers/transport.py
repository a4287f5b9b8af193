"""How whole answers travel, and that none does to a client that is gone."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.errors import defect

T = TypeVar("T")


LINE_ENDS = {ord(sign): f"\\u{ord(sign):04x}" for sign in "\x85\u2028\u2029"}
"""Characters that JSON may hold as they are, and that some clients take for the end of a line."""

logger = logging.getLogger(__name__)


class Json(JSONResponse):
    """An answer; half of a surrogate pair, which it may repeat, is replaced."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode(errors="replace")


class ClientGone(Exception):
    """Nobody reads the answer any more."""


async def unless_gone(receive: Receive, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes.

    Raises:
        ClientGone: it went.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


class Defects:
    """Answers where the application fails, with a traceback in the log; the connection goes on."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
            await Json(error.body, error.status, error.headers)(scope, receive, send)


class Whole(Response):
    """A large answer, which is written choice by choice: no other thread works while one is."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        frame = Json({**content, "choices": None}).body
        choices = b",".join(bytes(Json(choice).body) for choice in content["choices"])
        return bytes(frame).replace(b'"choices":null', b'"choices":[%s]' % choices, 1)


def line(event: dict[str, Any]) -> bytes:
    """An event as it is sent."""
    # A lone surrogate, which JSON may hold and a prompt echoes, has no UTF-8.
    return f"data: {escaped(json.dumps(event, ensure_ascii=False))}\n\n".encode(errors="replace")


def escaped(text: str) -> str:
    """JSON without the characters of `LINE_ENDS`."""
    return text if text.isascii() else text.translate(LINE_ENDS)


async def gone(receive: Receive) -> None:
    """Waits until nobody reads the answer any more."""
    while (await receive())["type"] != "http.disconnect":
        pass
