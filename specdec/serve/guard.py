"""Before any route: who may ask, and how much a request may hold."""

from __future__ import annotations

import secrets
from hashlib import sha256

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.config import ServeConfig
from specdec.serve.errors import RequestError

OPEN_PATHS = {"/", "/health", "/version"}
"""What anybody may ask; the page at the root asks for the key before it shows numbers."""


class Guard:
    """Lets requests through whose key is right and whose body is not too large; it reads the body first.

    Args:
        app: serves what comes through.
        config: key and limits.
    """

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app, self._limit = app, config.max_body_bytes
        self._key = _digest(config.api_key.encode()) if config.api_key is not None else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check_key(scope)
            body = await self._body(scope, receive)
        except RequestError as error:
            await JSONResponse(error.body, error.status, error.headers)(scope, receive, send)
            return
        waiting: list[Message] = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return waiting.pop() if waiting else await receive()

        await self._app(scope, replay, send)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        if scheme.lower() != b"bearer" or not secrets.compare_digest(_digest(key.strip()), self._key):
            raise RequestError(401, "the API key is wrong or missing; send Authorization: Bearer KEY", code="invalid_api_key")

    async def _body(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body, None where the client is gone."""
        length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
        if length.isdigit() and int(length) > self._limit:
            raise self._too_large()
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if len(body) > self._limit:
                raise self._too_large()
            more = message.get("more_body", False)
        return bytes(body)

    def _too_large(self) -> RequestError:
        return RequestError(413, f"the request has more than {self._limit:,} bytes, which is the limit; send less at once")


def _digest(key: bytes) -> bytes:
    """Of equal length for all keys, so that a comparison takes the same time."""
    return sha256(key).digest()
