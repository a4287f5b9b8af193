"""Requests of a form of their own: nulls, unknown fields, grammars that fail;
and answers in lines.
"""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from pydantic import BaseModel

from specdec.serve.app import make_app
from specdec.serve.protocol import (
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.helpers.live_server import Live, live_server, tiny_decoder

CHAT: Any = [{"role": "user", "content": "hello"}]


def test_an_unknown_field_is_warned_of_once(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    """Also within others."""
    body = {"prompt": "a", "max_tokens": 1, "colour": 3, "stream": True}
    body |= {
        "response_format": {"type": "text", "depth": 1},
        "stream_options": {"include_use": True},
    }
    for _ in range(2):
        live.post("/v1/completions", json=body).raise_for_status()
    said = [record.getMessage() for record in caplog.records]
    for name in ("colour", "response_format.depth", "stream_options.include_use"):
        assert (
            said.count(f"a request has the field {name!r}, which is not known and is left alone")
            == 1
        )


@pytest.mark.parametrize(
    ("path", "model", "needed"),
    [
        ("/v1/completions", CompletionRequest, {"prompt": "a"}),
        ("/v1/chat/completions", ChatRequest, {"messages": CHAT}),
        ("/tokenize", TokenizeRequest, {"prompt": "a"}),
        ("/detokenize", DetokenizeRequest, {"tokens": [5]}),
    ],
    ids=str,
)
def test_null_is_a_field_that_is_not_set(
    live: Live, path: str, model: type[BaseModel], needed: dict[str, Any]
) -> None:
    """In each field by itself and in all at once; those that the server refuses or does not know as
    well.
    """
    fields = [name for name in model.model_fields if name not in needed]
    for name in fields:
        assert model.model_validate(needed | {name: None}) == model.model_validate(needed)
    within = (
        {"stream_options": {"include_usage": None, "colour": None}}
        if "stream_options" in fields
        else {}
    )
    limit = {"max_tokens": 1, "seed": 0} if "max_tokens" in fields else {}
    want, found = (
        live.post(path, json=more | needed | limit)
        for more in ({}, within | dict.fromkeys([*REFUSED, "colour", *fields]))
    )
    assert found.status_code == 200, found.text
    assert (
        found.json().get("choices") == want.json().get("choices")
        and found.json().keys() == want.json().keys()
    )


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "object", "properties": ["a"]}},
        {"guided_json": {"$ref": "#"}},
        {"guided_json": {"type": "integer", "minimum": 10**400}},
        {"guided_json": {"type": "string", "pattern": "^(?=a)b"}},
        {"guided_json": "[" * 100_000},
        {"guided_regex": "["},
        {"guided_choice": ["\ud800"]},
        {"guided_grammar": "root ::= missing"},
        {"response_format": {"type": "json_object", "schema": {"type": "str"}}},
    ],
    ids=lambda fields: str(fields)[:60],
)
def test_a_bad_grammar_is_the_client_s_mistake(live: Live, fields: dict[str, Any]) -> None:
    """Before there is a status, in streams, too; and the connection serves the next request."""
    with httpx.Client(base_url=live.url) as client:
        for stream in (False, True):
            body = json.dumps({"prompt": "a", "max_tokens": 2, "stream": stream, **fields})
            answer = client.post(
                "/v1/completions", content=body, headers={"Content-Type": "application/json"}
            )
            error = answer.json()["error"]
            assert (answer.status_code, error["type"]) == (400, "invalid_request_error"), error
            assert "\n" not in error["message"] and len(error["message"]) < 400
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).raise_for_status()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prediction": {}}, "prediction.content is missing; give it"),
        ({"stream_options": 5}, "stream_options is 5: input should be a valid object"),
        ({"thinking": True}, "thinking is True: input should be a valid object"),
        ({"thinking": {"type": "on"}}, "thinking is 'on': input should be 'enabled' or 'disabled'"),
        ({"enable_thinking": "no"}, "enable_thinking is 'no': input should be a valid boolean"),
        (
            {"thinking": {"type": "enabled"}, "enable_thinking": False},
            "thinking and enable_thinking disagree; give one of them",
        ),
        ({"dry_multiplier": 0.8}, "dry_multiplier is not offered: this server has no such way"),
        ({"mirostat": 2}, "mirostat is not offered: this server has no such way"),
        ({"repeat_penalty": 1.1}, "repeat_penalty is not offered: it is called repetition_penalty"),
        ({"response_schema": {}}, "response_schema is not offered: ask with response_format"),
        (
            {"extra_body": {"guided_regex": "a"}},
            "extra_body is not offered: give its fields beside the others",
        ),
    ],
)
def test_a_wrong_field_is_told_in_the_client_s_words(
    live: Live, fields: dict[str, Any], said: str
) -> None:
    answer = live.post("/v1/chat/completions", json={"messages": CHAT, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(said)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", -1),
        ("stop", ""),
        ("stop", ["a"] * 65),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"999": 1}),
        ("stop_token_ids", [5] * 1025),
        ("top_p", 2),
    ],
)
def test_a_wrong_value_is_told_with_its_field(live: Live, name: str, value: Any) -> None:
    """For programs, whatever the line says of the value or a part of it."""
    answer = live.post("/v1/chat/completions", json={"messages": CHAT, name: value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name


def test_samplers_of_others_that_are_off_are_let_pass(live: Live) -> None:
    body = {"mirostat": 0, "dry_multiplier": 0.0, "xtc_probability": 0, "repeat_penalty": 1}
    body |= {"tfs_z": 1.0, "top_n_sigma": -1, "typical_p": 1.0, "dynatemp_range": 0.0}
    asked = {"prompt": "a", "max_tokens": 1, **body}
    live.post("/v1/completions", json=asked).raise_for_status()


def test_a_dead_end_in_the_midst_is_the_client_s_mistake(live: Live) -> None:
    """No token of this vocabulary is a ~."""
    body = {"prompt": "a", "max_tokens": 9, "guided_grammar": 'root ::= "ab" "~"'}
    answer = live.post("/v1/completions", json=body)
    assert (
        answer.status_code == 400
        and "allows no token of the vocabulary" in answer.json()["error"]["message"]
    )
    events = live.post("/v1/completions", json=body | {"stream": True}).text
    assert '"type": "invalid_request_error"' in events and events.endswith("data: [DONE]\n\n")


def test_what_a_schema_is_not_held_to_is_said_in_the_answer(live: Live) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 30,
        "guided_json": {"type": "string", "format": "colour", "maxLength": 2},
    }
    (warning,) = live.post("/v1/completions", json=body).json()["warnings"]
    assert warning == "format colour at # is taken for an annotation"
    assert (
        "warnings" not in live.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).json()
    )


def test_a_defect_keeps_the_connection(
    live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its traceback is in the log alone; in a stream an event says so."""

    def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("secret")

    with httpx.Client(base_url=live.url) as client:
        body = {"prompt": "a", "max_tokens": 2}
        with monkeypatch.context() as patch:
            patch.setattr("specdec.serve.app.sampling_params", fail)
            answer = client.post("/v1/completions", json=body)
            assert (
                answer.status_code == 500
                and "defect" in answer.json()["error"]["message"]
                and "secret" not in answer.text
            )
            assert "connection" not in answer.headers
        with monkeypatch.context() as patch:
            patch.setattr("specdec.serve.answers.completion.Completion.delta", fail)
            events = client.post("/v1/completions", json=body | {"stream": True}).text
            assert "the server has a defect" in events and events.endswith("data: [DONE]\n\n")
        stream = next(iter(client._transport._pool.connections))  # type: ignore[attr-defined]
        client.post("/v1/completions", json=body).raise_for_status()
        assert [stream] == client._transport._pool.connections  # type: ignore[attr-defined]
    assert (
        sum(
            "ZeroDivisionError" in (record.exc_text or str(record.exc_info))
            for record in caplog.records
        )
        == 2
    )


def test_line_ends_of_unicode_are_escaped_in_events(live: Live) -> None:
    """Clients that read lines of text lose an event that holds one."""
    text = "a\u2028b\u2029c\x85d"
    body = {"prompt": text, "max_tokens": 1, "stream": True, "echo": True}
    events = live.post("/v1/completions", json=body).text
    assert not set(text) - set("abcd") & set(events)
    first = next(line for line in events.splitlines() if line)
    assert json.loads(first.removeprefix("data: "))["choices"][0]["text"] == text


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_in_every_event(live: Live, path: str) -> None:
    body = {"prompt": "abc", "n": 2} if path == "/v1/completions" else {"messages": CHAT, "n": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = live.post(
        path, json={**body, "max_tokens": 6, "stream": True, "stream_options": options}
    ).text
    found = [
        json.loads(line.removeprefix("data: "))["usage"]
        for line in events.splitlines()
        if line and "[DONE]" not in line
    ]
    counts = [usage["completion_tokens"] for usage in found]
    assert counts == sorted(counts) and counts[-1] == counts[-2] > counts[0]
    assert all(
        usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        for usage in found
    )
    assert len({usage["prompt_tokens"] for usage in found}) == 1


def test_warnings_come_with_the_end_of_a_stream(live: Live) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 30,
        "guided_json": {"type": "string", "format": "colour", "maxLength": 2},
        "stream": True,
    }
    *_, last, _ = [
        line for line in live.post("/v1/completions", json=body).text.splitlines() if line
    ]
    assert json.loads(last.removeprefix("data: "))["warnings"] == [
        "format colour at # is taken for an annotation"
    ]


def test_what_benchmarks_of_others_read(live: Live) -> None:
    live.post(
        "/v1/completions", json={"prompt": "a", "max_tokens": 9, "ignore_eos": True}
    ).raise_for_status()
    (model,) = live.get("/v1/models").json()["data"]
    assert model["root"] == model["id"]
    (state,) = live.get("/server_info").json()["internal_states"]
    assert state["avg_spec_accept_length"] == live.front.totals.tau >= 1


@pytest.mark.parametrize("path", ["/health", "/ping"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_balancers_ask_in_their_ways(method: str, path: str) -> None:
    """Without a key."""
    with live_server(api_key="k") as live:
        assert httpx.request(method, live.url + path).status_code == 200


def test_a_wrong_route_is_told_the_right_ones(live: Live) -> None:
    """To a client whose base URL lacks /v1, or that asks for what there is not."""
    for path in ("/chat/completions", "/v1/embeddings"):
        message = live.post(path, json={}).json()["error"]["message"]
        assert f"POST {path}: not found; there are /v1/completions, /v1/chat" in message

    answer = live.get("/v1/completions")
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"user": NaN}', "NaN is no number of JSON"),
        (b'{"metadata": {"a": [-Infinity]}}', "-Infinity is no number of JSON"),
        (b'{"metadata": 1e999}', "1e999 is no number of JSON"),
        (b'{"user": "\xe9"}', "it is not UTF-8 text, byte 10"),
        (gzip.compress(b"{}"), "it is not UTF-8 text"),
        (b'{"metadata": ' + b"[" * 100_000, "it is nested too deeply"),
        (b'{"metadata": ' + b"9" * 5000 + b"}", "4300 digits"),
        (b'{"user" 1}', "at column 9"),
    ],
    ids=range(8),
)
def test_a_body_that_is_no_json_is_told_why(live: Live, body: bytes, words: str) -> None:
    """On every route; an answer could repeat its values, which would be no JSON either."""
    headers = {"Content-Type": "application/json"}
    routes = make_app(live.front).routes
    posts = [
        one.path for one in routes if isinstance(one, APIRoute) and "POST" in (one.methods or ())
    ]
    assert {"/v1/responses", "/v1/completions", "/tokenize"} <= set(posts)
    for path in posts:
        answer = live.post(path, content=body, headers=headers)
        assert answer.status_code == 400, path
        said = answer.json()["error"]["message"]
        assert said.startswith("the body is not JSON: ") and words in said, path


def test_the_name_of_a_field_may_be_no_text(live: Live) -> None:
    body = b'{"prompt": "a", "\\ud800": 1}'
    kind = {"Content-Type": "application/json"}
    answer = live.post("/v1/completions", content=body, headers=kind)
    assert answer.status_code == 400
    assert "name of a field is not Unicode" in answer.json()["error"]["message"]


def test_bytes_of_tokens_are_the_text(live: Live) -> None:
    """The end-of-sequence token adds none, unless special tokens are shown."""
    end = live.decoder.tokenizer.eos_token
    asked = {
        "messages": [{"role": "user", "content": "a"}],
        "guided_choice": ["ab"],
        "logprobs": True,
    }
    for shown, text in ((True, "ab"), (False, f"ab{end}")):
        answer = live.post("/v1/chat/completions", json={**asked, "skip_special_tokens": shown})
        (choice,) = answer.json()["choices"]
        entries = choice["logprobs"]["content"]
        assert len(entries) == 3 and choice["message"]["content"] == text
        assert bytes(byte for one in entries for byte in one["bytes"]).decode() == text


def test_pages_from_elsewhere_are_let_in_by_name_alone() -> None:
    ask = {
        "Origin": "https://a.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    with live_server(api_key="k", allowed_origins=("https://a.example",)) as live:
        answer = live.options("/v1/completions", headers=ask)
        assert (
            answer.status_code == 200
            and answer.headers["access-control-allow-origin"] == "https://a.example"
        )
        assert "authorization" in answer.headers["access-control-allow-headers"]
        for origin, allowed in (("https://a.example", True), ("https://b.example", False)):
            headers = {"Origin": origin, "Authorization": "Bearer k"}
            assert (
                "access-control-allow-origin" in live.get("/v1/models", headers=headers).headers
            ) == allowed
        refused = live.get("/v1/models", headers={"Origin": "https://a.example"})
        assert refused.status_code == 401 and "access-control-allow-origin" in refused.headers


def test_none_are_by_default(live: Live) -> None:
    answer = live.options(
        "/v1/models",
        headers={"Origin": "https://a.example", "Access-Control-Request-Method": "GET"},
    )
    assert answer.status_code == 405 and not any(
        name.startswith("access-control") for name in answer.headers
    )


def test_connections_stay_open(live: Live) -> None:
    """Longer than clients of others keep theirs, so that none asks over one that is just being
    closed.
    """
    assert live.server.config.timeout_keep_alive == 65
    with live_server(tiny_decoder(), keep_alive_seconds=7) as other:
        assert other.server.config.timeout_keep_alive == 7
