"""A name for every request, which its answer has as well, and a line about each."""

from __future__ import annotations

import logging
import re
import time
from uuid import uuid4

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.bodies import header

logger = logging.getLogger(__name__)

HEADER = "x-request-id"

OUTPUTS = "specdec.outputs"
"""Key of a scope: the outputs of a request, of which the line about it tells."""
_NAME = re.compile(rb"[A-Za-z0-9._:/-]{1,128}")
"""What a client may call its request: it stands in the log as it is."""


class RequestLog:
    """Names requests, as they name themselves or anew, before all else.

    Args:
        lines: write one about each that is posted, once its answer has ended.
    """

    def __init__(self, app: ASGIApp, *, lines: bool) -> None:
        self._app, self._lines = app, lines
        if lines:
            logger.setLevel(logging.INFO)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        own = header(scope, HEADER.encode())
        name = own if _NAME.fullmatch(own) else uuid4().hex.encode()
        begin, status = time.perf_counter(), 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (HEADER.encode(), name)]
            await send(message)

        try:
            await self._app(scope, receive, named)
        finally:
            if self._lines and scope["method"] == "POST":
                outputs = scope.get(OUTPUTS)
                what = f"{name.decode()}: {scope['method']} {scope['path']} {status}"
                summary = "" if outputs is None else f", {outputs.summary}"
                logger.info("request %s%s, %.3f s", what, summary, time.perf_counter() - begin)
