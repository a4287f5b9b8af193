"""What a request says of its drafts over HTTP: a prediction, as OpenAI has it, and how many."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.helpers.live_server import Live

CHAT = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 40}
TEXT = {"prompt": "hello there", "max_tokens": 40}
ROUTES: dict[str, dict[str, Any]] = {"/v1/completions": TEXT, "/v1/chat/completions": CHAT}


def text_of(answer: Any) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("path", ROUTES)
def test_the_answer_is_the_same_in_fewer_steps(live: Live, path: str, temperature: float) -> None:
    """With the answer itself predicted, whole or in parts, or something else; also in a stream."""
    body = {**ROUTES[path], "temperature": temperature, "seed": 5, "ignore_eos": True}
    without = live.post(path, json=body).raise_for_status().json()
    assert "completion_tokens_details" not in without["usage"]
    text = text_of(without)
    parts = [{"type": "text", "text": text[:9]}, {"type": "text", "text": text[9:]}]
    for content in (text, parts, "plain", "quite another one", ""):
        said: Any = {"type": "content", "content": content}
        asked = {**body, "prediction": text if content == "plain" else said}
        answer = live.post(path, json=asked).raise_for_status().json()
        assert text_of(answer) == text
        told = answer["usage"]["completion_tokens_details"]
        assert set(told) == {"accepted_prediction_tokens", "rejected_prediction_tokens"}
        if content in (text, parts, "plain"):
            assert told["accepted_prediction_tokens"] > 20
            steps = [one["meta_info"]["spec_verify_ct"] for one in (answer, without)]
            assert steps[0] < steps[1]
    assert told == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    asked = {**body, "prediction": {"content": text}, "stream": True}
    asked["stream_options"] = {"include_usage": True}
    lines = live.post(path, json=asked).raise_for_status().text.split("\n\n")
    usage = json.loads(lines[-3].removeprefix("data: "))["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] > 20


@pytest.mark.parametrize(
    ("prediction", "said"),
    [
        (5, "prediction"),
        ({"type": "image", "content": "a"}, "prediction"),
        ({"type": "content"}, "prediction"),
        ({"content": 5}, "prediction"),
        ({"content": [{"type": "image_url", "text": "a"}]}, "a part that is no text"),
        ({"content": [{"type": "text"}]}, "a part that is no text"),
        ({"content": "a b " * 100_000}, "the limit is"),
        ({"content": "a\ud800"}, "the prediction is not Unicode text: character 2"),
        ("\udfff" * 3000, "the prediction is not Unicode text"),
    ],
    ids=lambda value: ascii(value)[:40],
)
def test_what_is_no_prediction(live: Live, prediction: Any, said: str) -> None:
    """In one line."""
    for path, body in ROUTES.items():
        text = json.dumps({**body, "prediction": prediction})
        got = live.post(path, content=text, headers={"Content-Type": "application/json"})
        assert got.status_code == 400 and said in got.json()["error"]["message"], got.text


@pytest.mark.parametrize("path", ROUTES)
def test_a_request_says_how_many_drafts_it_wants(live: Live, path: str) -> None:
    """None, fewer, or as many as there are; the answer is the same."""
    body = {**ROUTES[path], "temperature": 0, "ignore_eos": True}
    answers = [
        live.post(path, json={**body, **asked}).raise_for_status().json()
        for asked in ({}, {"num_draft_tokens": 0}, {"num_draft_tokens": 1, "tree_nodes": None})
    ]
    assert len({text_of(answer) for answer in answers}) == 1
    rates = [one["meta_info"]["spec_draft_token_num"] for one in answers]
    assert rates[0] > rates[2] > rates[1] == 0
    for name, asked, said in (
        ("num_draft_tokens", 4, "num_draft_tokens is 4 and this engine has 3 at most"),
        ("num_draft_tokens", -1, "num_draft_tokens is -1"),
        ("num_draft_tokens", "2", "num_draft_tokens"),
        ("tree_nodes", 2, "tree_nodes is 2 and this engine has 0 at most"),
    ):
        got = live.post(path, json={**body, name: asked})
        assert got.status_code == 400 and said in got.json()["error"]["message"], got.text
