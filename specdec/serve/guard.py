"""Before any route: who may ask, and how much a request may hold."""

from __future__ import annotations

import secrets
from hashlib import sha256
from ipaddress import ip_address

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from specdec.serve.answers.transport import Json
from specdec.serve.bodies import Bodies, header
from specdec.serve.config import ServeConfig
from specdec.serve.errors import RequestError

OPEN_PATHS = {"/", "/health", "/ping", "/version"}
"""What anybody may ask; the page at the root asks for the key before it shows numbers."""


class Guard:
    """Lets requests through whose host, key and size are right; it reads the body first."""

    def __init__(self, app: ASGIApp, config: ServeConfig) -> None:
        self._app, self._bodies = app, Bodies(config)
        self._key = _digest(config.api_key.encode()) if config.api_key is not None else None
        self._hosts = {one.lower() for one in (*config.allowed_hosts, config.host, "localhost", "")}
        self._by_host = bool(config.allowed_hosts) or (self._key is None and _local(config.host))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._bodies.place() as place:
            try:
                self._check_host(scope)
                self._check_key(scope)
                body = await self._bodies.read(place, scope, receive)
            except RequestError as error:
                await Json(error.body, error.status, error.headers)(scope, receive, send)
                return
            if body is None:
                return
            waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def replay() -> Message:
                return waiting.pop() if waiting else await receive()

            await self._app(scope, replay, send)

    def _check_host(self, scope: Scope) -> None:
        """Another's DNS may lead its name here, to read what is served without a key."""
        if not self._by_host:
            return
        given = header(scope, b"host").decode("latin-1").lower()
        host = given[: given.find("]") + 1] if given.startswith("[") else given.partition(":")[0]
        if not (host in self._hosts or host.endswith(".localhost") or _is_address(host)):
            way_out = "ask for localhost, or name it with --allowed-hosts"
            what = f"the host {host[:200]!r} is not this server's; {way_out}"
            raise RequestError(what, status=403)

    def _check_key(self, scope: Scope) -> None:
        if self._key is None or scope["method"] == "OPTIONS" or scope["path"] in OPEN_PATHS:
            return
        given = header(scope, b"authorization")
        scheme, _, key = given.partition(b" ")
        right = secrets.compare_digest(_digest(key.strip()), self._key)
        if scheme.lower() != b"bearer" or not right:
            what = "the API key is wrong or missing; send Authorization: Bearer KEY"
            raise RequestError(what, status=401, code="invalid_api_key")


def _is_address(host: str) -> bool:
    try:
        return bool(ip_address(host.strip("[]")))
    except ValueError:
        return False


def _local(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    return host == "localhost" or (_is_address(host) and ip_address(host).is_loopback)


def _digest(key: bytes) -> bytes:
    """A digest, equally long for all keys, so that a comparison takes the same time."""
    return sha256(key).digest()
