"""What is kept of requests: which, how many bytes, and for whom."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import httpx
import pytest

from drafters.training.learning.served import read_served
from specdec import SamplingParams
from specdec.base.errors import InvalidInputError
from specdec.serve.config import ServeConfig
from specdec.serve.learning.journal import LEAST_BYTES, RequestJournal, files_of, is_kept
from specdec.session.link.link import Ended
from tests.helpers.live_server import Live, live_server

BODY: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}


def ended(number: int = 0, tokens: int = 8, **changes: Any) -> Ended:
    made = Ended([number, 7], [number] * tokens, SamplingParams(), 5, "stop", [tokens])
    return made._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, True),
        ({"finish_reason": "length"}, True),
        ({"finish_reason": "cancelled"}, False),
        ({"finish_reason": "error"}, False),
        ({"output_token_ids": [3]}, False),
        ({"sampling": SamplingParams(store=False)}, False),
        ({"sampling": SamplingParams(cache_salt="tenant")}, False),
    ],
)
def test_which_requests_are_kept(changes: dict[str, Any], kept: bool) -> None:
    assert is_kept(ended(**changes)) == kept


def test_the_newest_are_kept_within_the_limit(tmp_path: Path) -> None:
    """Catches a bound that is passed, and one that drops new requests or too many old ones."""
    limit = LEAST_BYTES
    journal = RequestJournal(tmp_path / "kept", limit)
    for number in range(400):
        assert journal.add(ended(number, tokens=200))
        files = files_of(journal.folder)
        assert sum(path.stat().st_size for path in files) == journal.num_bytes <= limit
    assert journal.num_bytes > 0.8 * limit
    first = [answer.prompt_ids[0] for answer in read_served(journal.folder)]
    assert first == list(range(400 - len(first), 400)) and len(first) < 400
    assert not journal.add(ended(400, tokens=limit))
    assert [one.prompt_ids[0] for one in read_served(journal.folder)] == first
    journal.close()


def test_files_are_for_their_owner_alone(tmp_path: Path) -> None:
    journal = RequestJournal(tmp_path / "kept", LEAST_BYTES)
    journal.add(ended())
    (path,) = files_of(journal.folder)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(journal.folder.stat().st_mode) == 0o700


def test_a_server_goes_on_behind_one_that_was_killed(tmp_path: Path) -> None:
    """Half a line at the end of a file is nobody's, and later lines are whole."""
    journal = RequestJournal(tmp_path, LEAST_BYTES)
    journal.add(ended(1))
    with pytest.raises(InvalidInputError, match="in use by another process"):
        RequestJournal(tmp_path, LEAST_BYTES)
    journal.close()
    (path,) = files_of(tmp_path)
    path.write_text(path.read_text() + path.read_text()[:20])
    journal = RequestJournal(tmp_path, LEAST_BYTES)
    journal.add(ended(2))
    assert [one.prompt_ids[0] for one in read_served(tmp_path)] == [1, 2]
    journal.close()
    small = RequestJournal(tmp_path, LEAST_BYTES)
    assert small.num_bytes == sum(path.stat().st_size for path in files_of(tmp_path))


def ask(live: Live, path: str = "/v1/completions", **body: Any) -> httpx.Response:
    return live.post(path, json={**BODY, **body})


def test_only_what_may_be_is_kept(tmp_path: Path) -> None:
    """Over HTTP: refused requests, and those that ask for it, leave no trace."""
    folder = tmp_path / "kept"
    chat = "/v1/chat/completions"
    with live_server(learn_from_requests=str(folder)) as live:
        answer = ask(live, prompt=[9, 8, 7], return_token_ids=True).raise_for_status().json()
        sampled: dict[str, Any] = {"temperature": 0.7, "seed": 11, "n": 2, "return_token_ids": True}
        others = ask(live, prompt=[6, 6, 6], **sampled).raise_for_status().json()
        ask(live, prompt=[5, 5, 5], store=False).raise_for_status()
        ask(live, prompt=[4, 4, 4], cache_salt="tenant").raise_for_status()
        ask(live, chat, messages=[{"role": "user", "content": "x"}], store=False)
        refused = ask(live, prompt=[3, 3, 3], temperature=-1)
        response = {"input": "y", "store": False, "max_output_tokens": 8}
        live.post("/v1/responses", json=response).raise_for_status()
        assert refused.status_code == 400
        assert live.learner is not None and str(folder) in live.learner.line
    kept = [(list(a.prompt_ids), list(a.answer_ids)) for a in read_served(folder)]
    prompts = {"choices": [*answer["choices"], *others["choices"]]}["choices"]
    expected = [
        ([9, 8, 7] if number == 0 else [6, 6, 6], choice["token_ids"])
        for number, choice in enumerate(prompts)
    ]
    assert sorted(kept) == sorted(expected)
    draws = sorted((a.temperature, a.seed) for a in read_served(folder))[1:]
    assert draws == [(0.7, 11), (0.7, 12)]


def test_nothing_is_kept_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with live_server() as live:
        ask(live, prompt=[9, 8, 7]).raise_for_status()
    assert live.learner is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"learn_device": "cpu"}, "learn_device is 'cpu' without learn_from_requests"),
        ({"learn_from_requests": "x", "learn_config": "y"}, "without learn_device"),
        ({"learn_every": 0}, "learn_every is 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(given: dict[str, Any], line: str) -> None:
    with pytest.raises(InvalidInputError, match=line):
        ServeConfig(**given)


def test_a_limit_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="learn_limit is 100 bytes"):
        RequestJournal(tmp_path, 100)
