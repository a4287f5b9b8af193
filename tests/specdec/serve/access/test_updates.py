"""Other weights for the drafter over HTTP, while clients ask: answers stay what they are, and the
drafts become better or worse.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec import CacheConfig, EngineConfig, SpecDecoder
from specdec.base.errors import InvalidInputError
from specdec.serve.config import ServeConfig
from tests.evals.tiny import save_tiny
from tests.helpers.live_server import Live, live_server
from tests.helpers.served import command
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from tests.helpers.waiting import HANG, wait_until

KEY = {"Authorization": "Bearer secret"}
ROUTE, TEXTS = "/update_drafter", "/v1/completions"
ASKED = [
    {"prompt": "abcabc" * 3, "temperature": 0},
    {"prompt": "some other text", "temperature": 0.8, "seed": 4, "n": 2},
    {
        "prompt": "number: ",
        "temperature": 1.0,
        "seed": 9,
        "guided_regex": "[0-9]{20,40}x",
        "ignore_eos": False,
    },
]
LONG: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, and draft models: it itself, whose drafts are all right, one of other weights, and
    what cannot take their place.
    """
    root = tmp_path_factory.mktemp("models")
    save_tiny(root / "target")
    drafters = root / "drafters"
    for name, model in (
        ("good", plain_model("llama")),
        ("random", plain_model("llama", seed=7)),
        ("wider", plain_model("llama", intermediate_size=96)),
    ):
        model.save_pretrained(drafters / name)
        tiny_tokenizer().save_pretrained(drafters / name)
    (drafters / "empty").mkdir()
    (drafters / "outside").symlink_to(root / "target")
    (drafters / "latest").symlink_to(drafters / "good")
    return root


def decoder_of(root: Path) -> SpecDecoder:
    engine = EngineConfig(num_draft_tokens=3, max_num_seqs=4, cache=CacheConfig(memory_bytes=2**22))
    about: dict[str, Any] = {"device": "cpu", "dtype": "float32", "block_size": 4}
    return SpecDecoder.from_pretrained(
        root / "target", drafter=root / "drafters" / "random", engine=engine, **about
    )


@pytest.fixture(scope="module")
def live(folders: Path) -> Iterator[Live]:
    pytest.importorskip("xgrammar")
    updates = {"api_key": "secret", "drafter_updates": str(folders / "drafters")}
    with live_server(decoder_of(folders), "random", **updates) as live:
        yield live


def update(live: Live, name: Any) -> httpx.Response:
    return live.post(ROUTE, json={"drafter": name}, headers=KEY)


def ask(live: Live, body: dict[str, Any]) -> dict[str, Any]:
    answer = live.post(TEXTS, json={**LONG, **body}, headers=KEY)
    return dict(answer.raise_for_status().json())


def texts_of(live: Live, body: dict[str, Any]) -> list[str]:
    return [choice["text"] for choice in ask(live, body)["choices"]]


def tau(live: Live) -> float:
    """Of an output that nobody has asked for."""
    return float(
        ask(live, {**ASKED[0], "cache_salt": os.urandom(8).hex()})["meta_info"][
            "spec_accept_length"
        ]
    )


def test_answers_stay_and_tau_follows_the_weights(live: Live) -> None:
    """Clients ask while weights come and go, greedy, sampled and with a grammar."""
    expected = [texts_of(live, {**body, "num_draft_tokens": 0}) for body in ASKED]
    ended, wrong, rounds = threading.Event(), list[Any](), [0] * len(ASKED)

    def client(number: int) -> None:
        while not ended.is_set():
            got = texts_of(live, ASKED[number])
            if got != expected[number]:
                wrong.append((got, expected[number]))
            rounds[number] += 1

    clients = [threading.Thread(target=client, args=(number,)) for number in range(len(ASKED))]
    for thread in clients:
        thread.start()
    try:
        for name, tokens in (("good", 3.0), ("random", 1.5), ("latest", 3.0)):
            before = list(rounds)
            assert update(live, name).json() == {"drafter": name}
            assert (tau(live) > tokens) == (tokens > 2), name
            info = live.get("/server_info", headers=KEY).json()
            assert info["drafter"] == name
            for number in range(len(ASKED)):
                wait_until(partial(lambda one, then: rounds[one] > then, number, before[number]))
    finally:
        ended.set()
        for thread in clients:
            thread.join(HANG)
    assert not wrong


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("wider", "drafter 'wider' is not made as the one in use: "),
        ("empty", "config.json"),
        ("absent", "there is no checkpoint 'absent' in the folder of --drafter-updates"),
        ("../target", "there is no checkpoint '../target'"),
        ("outside", "there is no checkpoint 'outside'"),
        (".", "there is no checkpoint '.'"),
        ("/etc", "there is no checkpoint '/etc'"),
        ("a\0b", "there is no checkpoint"),
        (5, "drafter is 5"),
        (None, "drafter"),
    ],
)
def test_what_cannot_draft_is_refused(live: Live, folders: Path, name: Any, line: str) -> None:
    """In one line, without a folder of the server; the old weights stay."""
    update(live, "good").raise_for_status()
    answer = update(live, name)
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and line in message and "\n" not in message
    assert str(folders) not in message
    assert tau(live) > 3
    assert live.get("/server_info", headers=KEY).json()["drafter"] == "good"


def test_another_update_meanwhile_has_to_wait(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, goes_on, change = threading.Event(), threading.Event(), live.decoder.update_drafter

    def slow(path: Any) -> None:
        begun.set()
        assert goes_on.wait(HANG)
        change(path)

    monkeypatch.setattr(live.decoder, "update_drafter", slow)
    answers: list[httpx.Response] = []
    first = threading.Thread(target=lambda: answers.append(update(live, "random")))
    first.start()
    assert begun.wait(HANG)
    assert texts_of(live, ASKED[0]), "steps go on"
    second = update(live, "good")
    assert second.status_code == 503 and "other weights are being loaded" in second.text
    goes_on.set()
    first.join(HANG)
    assert answers[0].status_code == 200


def test_the_route_is_for_who_opens_it_and_has_the_key(live: Live, tmp_path: Path) -> None:
    assert live.post(ROUTE, json={"drafter": "good"}).status_code == 401
    with live_server() as closed:
        assert closed.post(ROUTE, json={"drafter": "good"}).status_code == 404
    with pytest.raises(InvalidInputError, match="needs a key"):
        ServeConfig(drafter_updates=str(tmp_path))
    with pytest.raises(InvalidInputError, match="is no folder"):
        ServeConfig(drafter_updates=str(tmp_path / "none"), api_key="secret")


@pytest.mark.slow
def test_all_fronts_are_told(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "serve --port 0 --device cpu -k 3 --front-processes 2"
    drafters = folders / "drafters"
    models = ["--model", folders / "target", "--drafter", drafters / "random"]
    monkeypatch.setenv("SPECDEC_API_KEY", "secret")
    with command(words, *map(str, [*models, "--drafter-updates", drafters])) as url:
        answer = httpx.post(url + ROUTE, json={"drafter": "good"}, headers=KEY)
        assert answer.json() == {"drafter": "good"}

        def named() -> set[str]:
            """By fronts that twenty new connections come to."""
            infos = [httpx.get(url + "/server_info", headers=KEY).json() for _ in range(20)]
            return {info["drafter"] for info in infos}

        wait_until(lambda: named() == {"good"})
