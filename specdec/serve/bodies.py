"""The bodies of requests: how long one may take, and how much one, and all, may hold."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from json import JSONDecodeError
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope

from specdec.base.files import parse_json
from specdec.serve.config import ServeConfig
from specdec.serve.errors import RequestError, busy

SMALL = 65_536
"""Bytes of a body that is taken whatever others hold: connections bound how many there are."""

VALUE_BYTES = 64
"""Bytes of a value of JSON in memory, about; an object or an entry of one counts as four."""


@dataclass(eq=False, slots=True)
class Place:
    """What one request holds."""

    size: int = 0
    limit: asyncio.Timeout | None = None
    gave_way: bool = False


class Bodies:
    """Reads bodies. Where all together hold too much, the largest that still comes gives way."""

    def __init__(self, config: ServeConfig) -> None:
        self._config, self._total = config, 0
        self._coming: set[Place] = set()

    @contextmanager
    def place(self) -> Iterator[Place]:
        """For one request, from its first byte to its answer."""
        place = Place()
        try:
            yield place
        finally:
            self._total -= place.size

    async def read(self, place: Place, scope: Scope, receive: Receive) -> bytes | None:
        """A body, None where the client is gone.

        Raises:
            RequestError: it is too large, does not come, or there is no room for it.
        """
        length = header(scope, b"content-length")
        if len(length) > 18 or (length.isdigit() and int(length) > self._config.max_body_bytes):
            raise self._too_large("bytes", self._config.max_body_bytes)
        self._coming.add(place)
        try:
            async with asyncio.timeout(self._config.body_seconds) as place.limit:
                body = await self._read(place, receive)
        except TimeoutError:
            if place.gave_way:
                what = "unfinished requests hold too much, and this one most; try again later"
                raise busy(what, close=True) from None
            what = f"the body has not come within {self._config.body_seconds:g} seconds"
            raise RequestError(f"{what}; send it faster", status=408, close=True) from None
        finally:
            self._coming.discard(place)
        if body:
            self._weigh(place, body)
        return body

    async def _read(self, place: Place, receive: Receive) -> bytes | None:
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            body += part
            if len(body) > self._config.max_body_bytes:
                raise self._too_large("bytes", self._config.max_body_bytes)
            self._charge(place, len(part))
            more = message.get("more_body", False)
        return bytes(body)

    def _weigh(self, place: Place, body: bytes) -> None:
        """Counts values by their signs before JSON is read: they take time and memory."""
        values = body.count(b",") + 4 * sum(body.count(sign) for sign in (b"[", b"{", b":"))
        if values > self._config.max_body_values:
            raise self._too_large("values", self._config.max_body_values)
        if len(body) + VALUE_BYTES * values > self._config.max_open_body_bytes:
            raise self._too_large("bytes and values together", self._config.max_open_body_bytes)
        self._charge(place, VALUE_BYTES * values)

    def _charge(self, place: Place, more: int) -> None:
        place.size += more
        self._total += more
        while self._total > self._config.max_open_body_bytes and place.size > SMALL:
            largest = max(self._coming, key=lambda one: one.size, default=place)
            if largest.size <= place.size:
                comes = place in self._coming
                raise busy("unfinished requests hold too much; try again later", close=comes)
            self._coming.remove(largest)
            self._total, largest.size, largest.gave_way = self._total - largest.size, 0, True
            assert largest.limit is not None, "it is being read"
            largest.limit.reschedule(0)

    def _too_large(self, what: str, limit: int) -> RequestError:
        more = f"the request has more than {limit:,} {what}, which is the limit"
        return RequestError(f"{more}; send less at once", status=413)


def header(scope: Scope, name: bytes) -> bytes:
    """The first header of that name; empty where there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


class Route(APIRoute):
    """A route whose bodies are JSON in UTF-8, without NaN and infinities, which no answer that
    repeats them may hold.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(http: Request) -> Response:
            return await handle(_Strict(http.scope, http.receive))

        return strictly


class _Strict(Request):
    async def json(self) -> Any:
        try:
            return parse_json(await self.body())
        except ValueError as error:
            raise JSONDecodeError(str(error), "", 0) from error
