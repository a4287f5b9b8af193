"""Grammars of clients: looked at and compiled beside the event loop, for no longer than somebody
waits for them.
"""

import http.client
import json
import threading
from contextlib import suppress
from typing import Any

import httpx
import pytest

pytest.importorskip("xgrammar")

from specdec.base.errors import CapacityError, CheckpointError
from specdec.grammar import compiler
from specdec.grammar import queues as queues_module
from specdec.grammar.process import Ended, TooSlow
from specdec.serve import app
from specdec.serve.sampling import sampling_params
from tests.helpers.live_server import live_server
from tests.helpers.waiting import HANG, wait_until
from tests.specdec.grammar.test_compiler import compiling, held

URL = "/v1/completions"
LONG = {
    "prompt": "abc",
    "max_tokens": 1,
    "guided_grammar": f"root ::= {'|'.join(map(json.dumps, map(str, range(99_000))))}",
}
"""Takes seconds of a processor."""


def test_schemas_are_looked_at_beside_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def make(*about: Any, **more: Any) -> Any:
        names.append(threading.current_thread().name)
        return sampling_params(*about, **more)

    monkeypatch.setattr(app, "sampling_params", make)
    with live_server() as live, httpx.Client(base_url=live.url) as client:
        for asked in (
            {},
            {"guided_json": {"type": "null"}},
            {"guided_grammar": 'root ::= "a"' + " " * 20_000},
        ):
            assert (
                client.post(URL, json={"prompt": "abc", "max_tokens": 9, **asked}).status_code
                == 200
            )
    assert len(names) == 3 and names[0] not in names[1:]


def test_a_client_that_leaves_ends_its_compiling() -> None:
    with live_server() as live, httpx.Client(base_url=live.url) as client:
        other = http.client.HTTPConnection(live.url.removeprefix("http://"))
        other.request("POST", URL, json.dumps(LONG), {"Content-Type": "application/json"})
        wait_until(held)
        other.close()
        wait_until(lambda: not compiling())
        answer = client.post(URL, json={"prompt": "abc", "max_tokens": 9, "guided_regex": "a+b"})
        assert answer.status_code == 200


def test_a_server_that_ends_waits_for_no_grammar() -> None:
    with live_server() as live:
        asking = threading.Thread(target=_ask, args=(live.url,))
        asking.start()
        wait_until(held)
        live.hub.stop()
        live.join()
        wait_until(lambda: not compiling())
        asking.join(HANG)


def _ask(url: str) -> None:
    with suppress(httpx.HTTPError):
        assert httpx.post(url + URL, json=LONG, timeout=HANG).status_code == 503


def test_too_many_grammars_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try again later: no mistake of the client's."""
    monkeypatch.setattr(queues_module, "MAX_WAITING", 0)
    with live_server() as live:
        answer = live.post(URL, json={"prompt": "abc", "guided_regex": "a+"})
    assert answer.status_code == 503 and "grammars wait" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("raised", "status"),
    [(TooSlow, 400), (CapacityError, 503), (CheckpointError, 400), (Ended, 500), (OSError, 500)],
)
def test_whose_fault_it_is_crosses_processes(
    monkeypatch: pytest.MonkeyPatch, raised: type[Exception], status: int
) -> None:
    """Also of errors that are a kind of one that is known."""

    def fail(*_: Any) -> None:
        raise raised("too much")

    monkeypatch.setattr(compiler, "ask", fail)
    with live_server() as live, httpx.Client(base_url=live.url) as client:
        asked = {**LONG, "guided_grammar": 'root ::= "a" | "b"'}
        answer = client.post(URL, json=asked, timeout=HANG)
        assert answer.status_code == status, answer.text
