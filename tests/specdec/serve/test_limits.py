"""What a server does when clients leave, come too many or without a key, and when it or its engine
ends.
"""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest

from specdec.base.errors import SpecDecError
from specdec.cli.main import main
from specdec.serve.config import ServeConfig
from specdec.serve.server import listen, take_connections
from tests.helpers.live_server import MODEL, Live, live_server, tiny_decoder
from tests.helpers.served import command
from tests.helpers.waiting import HANG, gated, wait_until

LONG = {"prompt": "abc", "max_tokens": 480, "temperature": 0, "ignore_eos": True}


FEW = 8
"""Steps that bring first tokens and end nothing of `LONG`."""


@contextmanager
def running(live: Live, count: int = 1) -> Iterator[None]:
    """While a stream has begun, nobody reads on and the engine stands; then the client leaves."""
    with gated(live.decoder.engine, FEW) as gate:
        with httpx.stream(
            "POST", live.url + "/v1/completions", json={**LONG, "stream": True, "n": count}
        ) as stream:
            parts = stream.iter_raw()  # the stream ends with its iterator
            next(parts)
            wait_until(lambda: gate.stands)
            before = cancelled(live)
            yield
        wait_until(lambda: cancelled(live) == before + count)


def cancelled(live: Live) -> int:
    """How many outputs have been cancelled so far, as the engine hears after its step."""
    return live.front.totals.finished["cancelled"]


def ends_in_engine(live: Live, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why the engine's requests end, from here on."""
    engine, reasons = live.decoder.engine, []
    finish = engine._finish

    def noting(request: Any, reason: str) -> None:
        reasons.append(reason)
        finish(request, reason)

    monkeypatch.setattr(engine, "_finish", noting)
    return reasons


def assert_nothing_is_left(live: Live) -> None:
    engine, session = live.decoder.engine, live.decoder.session
    wait_until(lambda: live.front.idle and session.idle)
    wait_until(lambda: not engine.has_work and engine.pool.num_used == 0)


def test_a_client_that_leaves_a_stream_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server() as live:
        reasons = ends_in_engine(live, monkeypatch)
        with running(live, 3):
            wait_until(lambda: live.front.num_open == 3)
        assert_nothing_is_left(live)
        assert reasons == ["cancelled"] * 3
        assert live.front.totals.finished == {"cancelled": 3}


def test_a_client_that_leaves_while_it_waits_cancels_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with live_server() as live:
        reasons = ends_in_engine(live, monkeypatch)
        with gated(live.decoder.engine, FEW) as gate:
            client = http.client.HTTPConnection(live.url.removeprefix("http://"))
            client.request(
                "POST",
                "/v1/completions",
                json.dumps({**LONG, "n": 5}),
                {"Content-Type": "application/json"},
            )
            wait_until(lambda: live.front.num_open == 5 and gate.stands)
            client.close()
            wait_until(lambda: cancelled(live) == 5)
        assert_nothing_is_left(live)
        assert reasons == ["cancelled"] * 5


def test_a_full_queue_is_told_and_room_is_found_again() -> None:
    with (
        live_server(max_queue=2, max_queued_tokens=100) as live,
        openai.OpenAI(base_url=live.url + "/v1", api_key="x") as client,
    ):
        with running(live):
            answer = live.post("/v1/completions", json={**LONG, "n": 2})
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert (
                "1 outputs are unfinished and the limit is 2" in answer.json()["error"]["message"]
            )
            answer = live.post("/v1/completions", json={**LONG, "prompt": "a" * 98})
            assert (
                answer.status_code == 503
                and "3 prompt tokens are unfinished" in answer.json()["error"]["message"]
            )
            answer = live.post("/v1/completions", json={**LONG, "n": 3})
            assert (
                answer.status_code == 400
                and "has 3 outputs and the limit is 2" in answer.json()["error"]["message"]
            )
            assert live.front.num_open == 1
        assert_nothing_is_left(live)
        assert (
            client.completions.create(
                model=MODEL, prompt="a", max_tokens=2, n=2, temperature=0
            ).usage
            is not None
        )


def test_the_key_guards_all_but_health() -> None:
    with live_server(api_key="right") as live:
        for key, status in (
            (None, 401),
            ("Bearer wrong", 401),
            ("Basic right", 401),
            ("Bearer right", 200),
        ):
            headers = {"Authorization": key} if key else {}
            for path in ("/v1/models", "/metrics", "/tokenizer_info"):
                assert live.get(path, headers=headers).status_code == status
        assert live.get("/health").status_code == 200
        assert live.options("/v1/models").status_code == 405
        with (
            openai.OpenAI(base_url=live.url + "/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.completions.create(model=MODEL, prompt="a", max_tokens=1)
        with openai.OpenAI(base_url=live.url + "/v1", api_key="right") as client:
            assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_a_body_has_a_limit_with_its_length_and_without() -> None:
    with live_server(max_body_bytes=1000) as live:
        body = b'{"prompt": "' + b"a" * 1000 + b'"}'
        headers = {"Content-Type": "application/json"}
        for content in (body, iter([body[:600], body[600:]])):
            answer = live.post("/v1/completions", content=content, headers=headers)
            assert (
                answer.status_code == 413
                and "more than 1,000 bytes" in answer.json()["error"]["message"]
            )


def test_an_end_lets_the_unfinished_finish_and_refuses_the_new() -> None:
    with live_server(drain_seconds=HANG) as live:
        made: list[Any] = []
        waiting = threading.Thread(
            target=lambda: made.append(live.post("/v1/completions", json=LONG))
        )
        with gated(live.decoder.engine, FEW), httpx.Client() as other:
            assert other.get(live.url + "/health").status_code == 200
            waiting.start()
            wait_until(lambda: live.front.num_open == 1)
            live.hub.stop()
            assert other.get(live.url + "/health").status_code == 503
            answer = other.post(live.url + "/v1/completions", json=LONG)
            assert answer.status_code == 503 and "about to end" in answer.json()["error"]["message"]
            assert live.front.num_open == 1, (
                "the first has not ended, so both answers were given while it went on"
            )
        waiting.join()
        assert made[0].json()["usage"]["completion_tokens"] == 480
        live.join()


def test_an_end_without_patience_cuts_what_is_unfinished() -> None:
    with live_server(drain_seconds=0.0) as live:
        asked, engine = {**LONG, "stream": True, "n": 4}, live.decoder.engine
        with (
            gated(engine, FEW) as gate,
            httpx.stream("POST", live.url + "/v1/completions", json=asked) as stream,
        ):
            lines = stream.iter_lines()
            next(lines)
            wait_until(lambda: gate.stands)
            live.hub.stop()
            wait_until(lambda: cancelled(live) == 4)
            gate.open()
            *_, error, end = [line for line in lines if line]
        assert '"code": "server_busy"' in error and end == "data: [DONE]"
        live.join()


def test_an_error_of_the_engine_is_told_and_survived_or_ends_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with live_server() as live:
        engine = live.decoder.engine
        step, left = engine.step, [1]

        def fail(times: int) -> None:
            left[0] = times

        def sometimes() -> Any:
            if left[0] > 0:
                left[0] -= 1
                raise RuntimeError("lost device")
            return step()

        monkeypatch.setattr(engine, "step", sometimes)
        answer = live.post("/v1/completions", json=LONG)
        assert answer.status_code == 500 and "lost device" in answer.json()["error"]["message"]
        assert live.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        fail(2)
        assert live.post("/v1/completions", json=LONG).status_code == 500
        live.join()
        assert live.hub.dead


def test_a_lost_device_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an engine cannot even begin anew."""

    def lost() -> Any:
        raise RuntimeError("lost device")

    with live_server() as live:
        monkeypatch.setattr(live.decoder.engine, "step", lost)
        monkeypatch.setattr(live.decoder.engine, "reset", lost)
        assert live.post("/v1/completions", json=LONG).status_code == 500
        live.join()
        assert live.hub.dead


def test_a_rank_that_ends_while_nobody_waits_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = SimpleNamespace(ended=None)
    monkeypatch.setattr("specdec.session.decoder.executor_of", lambda target: ranks)
    with live_server() as live:
        assert live.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200
        ranks.ended = "rank 1 of the tensor-parallel group was ended by SIGKILL"
        live.join()
        errors = [record.message for record in caplog.records if record.levelname == "ERROR"]
        assert live.hub.dead and errors == [f"the server ends: {ranks.ended}"]


@pytest.mark.slow
def test_the_command_serves_the_embedded_model_and_ends_at_sigterm() -> None:
    words = "serve --port 0 --device cpu --max-num-seqs 2 --drafter ngram"
    with command(words) as url, openai.OpenAI(base_url=f"{url}/v1", api_key="x") as client:
        chat: Any = [{"role": "user", "content": "What is the capital of France? One word."}]
        made = client.chat.completions.create(
            model="embedded", messages=chat, max_tokens=12, temperature=0
        )
        assert "Paris" in (made.choices[0].message.content or "")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--port", "70000"], "port is 70000; it must lie in [0, 65535]"),
        (["--max-queue", "0"], "max_queue is 0; it must be at least 1"),
        (["--front-processes", "65"], "front_processes is 65; it must be at most 64"),
        (["--served-model-name", ""], "served_model_name is empty; give a name, or leave it out"),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8000"),
        (["--api-key", ""], "--api-key is empty"),
        (["--api-key", "k "], "begins or ends with a blank"),
        (["--api-key", " "], "begins or ends with a blank"),
        (["--header-seconds", "0"], "header_seconds is 0.0; it must be a positive finite number"),
        (["--max-connections", "0"], "max_connections is 0; it must be at least 1"),
        (
            ["--allowed-hosts", "http://a.example"],
            "allowed_hosts has 'http://a.example'; give a name alone",
        ),
        (["--drain-seconds", "-1"], "drain_seconds is -1.0"),
        (["--keep-alive-seconds", "0"], "keep_alive_seconds is 0; it must be at least 1"),
        (
            ["--allowed-origins", "a.example"],
            "allowed_origins has 'a.example'; give a scheme and a host",
        ),
    ],
)
def test_bad_options_are_told_in_one_line(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("specdec: error: ") and words in line


def test_a_taken_port_is_told_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(tiny_decoder()) as live:
        assert main(["serve", "--model", "/nowhere", "--port", live.url.rpartition(":")[2]]) == 2
    assert "already in use; give another --host or --port" in capsys.readouterr().err


def test_a_port_that_two_servers_had_while_they_loaded_is_told() -> None:
    """The one that is ready later ends with a line; before, the kernel gives both the address."""
    one = listen(ServeConfig(port=0))
    late = listen(ServeConfig(port=one.getsockname()[1]))
    with late, one:
        take_connections(one)
        line = r"^cannot listen on 127.0.0.1:\d+: Address already in use; give another"
        with pytest.raises(SpecDecError, match=line):
            take_connections(late)
