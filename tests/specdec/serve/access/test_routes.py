"""Nothing is served without the key but what docs/serve.md names."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from fastapi.routing import APIRoute

from specdec.serve.app import make_app
from tests.helpers.live_server import Live, live_server

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "PROPFIND")
DOCS = Path(__file__).parents[4] / "docs" / "serve.md"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """With all that can be opened."""
    with live_server(
        api_key="secret",
        drafter_updates=str(tmp_path_factory.mktemp("drafters")),
        vllm_metrics=True,
        allowed_origins=("https://chat.example",),
    ) as live:
        yield live


def open_paths() -> set[str]:
    """Those that the documentation names."""
    (row,) = re.findall(r"\| a wrong or missing key, anywhere but at (.*?);", DOCS.read_text())
    return set(re.findall(r"`([^`]+)`", row))


def asked(live: Live, method: str, path: str, *headers: str) -> tuple[int, bytes]:
    """Status and body of a request whose path goes out as it is."""
    address = urlsplit(live.url)
    assert address.hostname is not None and address.port is not None
    head = [f"{method} {path} HTTP/1.1", "Host: localhost", "Connection: close", *headers]
    with socket.create_connection((address.hostname, address.port)) as sock:
        sock.sendall("\r\n".join([*head, "Content-Length: 0", "", ""]).encode("latin-1"))
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    start, _, body = answer.partition(b"\r\n\r\n")
    return int(start.split()[1]), body


def test_every_route_wants_the_key_but_those_that_are_documented(live: Live) -> None:
    routes = make_app(live.front).routes
    assert all(isinstance(route, APIRoute) for route in routes)
    paths = {route.path for route in routes if isinstance(route, APIRoute)}
    assert {"/v1/chat/completions", "/update_drafter", "/metrics", "/"} <= paths
    free = open_paths()
    assert free == {"/", "/health", "/ping", "/version"}
    for path in paths:
        for method in METHODS:
            status, body = asked(live, method, path.replace("{name:path}", "tiny"))
            if path in free and method in ("GET", "HEAD"):
                assert status in (200, 405), (method, path)
            elif method == "OPTIONS":
                assert status in (405, 400), path  # no answer of a route
            else:
                assert status == (405 if path in free else 401), (method, path, status)
            if status > 400 and method != "HEAD":
                assert set(json.loads(body)) == {"error"}, (method, path)


@pytest.mark.parametrize(
    "path",
    [
        "/health/../v1/models", "/health/..%2fv1/models", "/health%2f..%2fv1/models", "//v1/models",
        "/./v1/models", "/v1//models", "/v1/models/", "/%76%31/models", "/v1/models?/health",
        "/v1/models#/health", "/health/v1/models", "/version/metrics", "/;/metrics", "/metrics%00",
        "http://localhost/v1/models", "http://localhost/health/../v1/models", "/docs",
        "/openapi.json", "/redoc",
    ],
)  # fmt: skip
def test_no_spelling_of_a_path_goes_around_the_key(live: Live, path: str) -> None:
    assert asked(live, "GET", path)[0] in (400, 401)


@pytest.mark.parametrize(
    "header",
    [
        "Authorization: Bearer", "Authorization: Bearer ", "Authorization: Bearer secre",
        "Authorization: Bearer secrets", "Authorization: Bearer SECRET", "Authorization: secret",
        "Authorization: Basic secret",
        "Authorization: Bearer wrong\r\nAuthorization: Bearer secret", "X-Api-Key: secret",
        "Cookie: key=secret", "Origin: https://chat.example", "X-Forwarded-For: 127.0.0.1",
        "X-Original-URL: /health", "X-HTTP-Method-Override: OPTIONS",
    ],
)  # fmt: skip
def test_no_other_header_is_a_key(live: Live, header: str) -> None:
    status, body = asked(live, "GET", "/v1/models?key=secret&api_key=secret", header)
    assert status == 401 and json.loads(body)["error"]["code"] == "invalid_api_key"


def test_the_right_key_opens_all(live: Live) -> None:
    key = {"Authorization": "Bearer secret"}
    for path in ("/v1/models", "/metrics", "/status", "/server_info", "/tokenizer_info"):
        assert live.get(path, headers=key).status_code == 200
