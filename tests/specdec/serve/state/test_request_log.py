"""Names of requests, a line about each, and what a server says of itself."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from specdec.serve.state import request_log
from tests.helpers.live_server import Live, live_server
from tests.helpers.waiting import wait_until

KEY = "a secret"
BODY: dict[str, Any] = {"prompt": "hello", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
LINE = re.compile(
    r"request (\S+): POST /v1/completions 200, 5 \+ (\d+) tokens"
    r"(, the first after \d+\.\d{3} s)?, tau (\d+\.\d\d), \d+\.\d{3} s"
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with live_server(log_requests=True, api_key=KEY, allowed_origins=("*",)) as live:
        yield live


def ask(live: Live, name: str | None = None, **changes: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}", "origin": "https://a.example"}
    if name is not None:
        headers["x-request-id"] = name
    return live.post("/v1/completions", json={**BODY, **changes}, headers=headers)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "request" in record.name]


def test_a_request_keeps_its_name(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """In the answer and in the log, whole or as a stream; a name that could forge a line does not
    get there.
    """
    for name, kept in (("job-7:a", True), (None, False), ("a b", False), ("x" * 129, False)):
        for stream in (False, True):
            caplog.clear()
            got = ask(live, name, stream=stream)
            told = got.headers["x-request-id"]
            assert (told == name) is kept and re.fullmatch(r"\S{7,32}", told)
            assert got.headers["access-control-expose-headers"].lower() == "x-request-id"
            wait_until(lambda: bool(lines(caplog)))
            (line,) = lines(caplog)
            match = LINE.fullmatch(line)
            assert match and match[1] == told and match[2] == "9"
            assert bool(match[3]) is stream and float(match[4]) >= 1
            if not stream:
                tau = got.json()["meta_info"]["spec_accept_length"]
                assert float(match[4]) == pytest.approx(tau, abs=0.006)


def test_what_is_refused_has_a_name_and_a_line(
    live: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """Before any route as well; what is not posted has no line."""
    caplog.set_level(logging.INFO, logger=request_log.__name__)  # a test ends what it has set
    got = live.post("/v1/completions", json=BODY, headers={"x-request-id": "mine"})
    assert got.status_code == 401 and got.headers["x-request-id"] == "mine"
    got = ask(live, "wrong", temperature=-1)
    assert got.status_code == 400 and got.headers["x-request-id"] == "wrong"
    assert live.get("/health").headers["x-request-id"]
    wait_until(lambda: len(lines(caplog)) == 2)
    for line, name, status in zip(lines(caplog), ("mine", "wrong"), (401, 400), strict=True):
        said = f"request {name}: POST /v1/completions {status}, "
        assert re.fullmatch(re.escape(said) + r"\d+\.\d{3} s", line)


def test_no_line_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with live_server() as live:
        got = live.post("/v1/completions", json=BODY)
        assert got.headers["x-request-id"] and not lines(caplog)


def test_the_server_says_what_it_is(live: Live) -> None:
    """To who has the key, and nothing that is secret."""
    assert live.get("/server_info").status_code == 401
    got = live.get("/server_info", headers={"authorization": f"Bearer {KEY}"})
    told = got.json()
    assert KEY not in got.text and "api_key" not in got.text and "command" not in told
    assert told["engine"]["num_draft_tokens"] == 3 and told["engine"]["max_num_seqs"] == 4
    assert told["limits"]["max_choices"] == 256 and told["limits"]["body_seconds"] == 60
    assert told["attention"] == "torch_ref" and told["dtype"] == "float32"
    assert told["max_model_len"] == live.front.max_total_tokens and "versions" in told
    assert told["served_model_name"] == live.front.names[0] and told["drafter"] is None
    assert set(told["internal_states"][0]) == {"avg_spec_accept_length"}
