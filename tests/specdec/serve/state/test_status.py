"""The status page: its numbers while outputs are under way, and that it needs nothing but them."""

import json
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="fastapi comes with the extra serve")

from drafters.ngram import NGramDrafter
from specdec.base.config import EngineConfig
from specdec.serve.state.status import PAGE
from specdec.serve.state.totals import Totals
from specdec.session.decoder import SpecDecoder
from tests.evals.tiny import tiny_decoder
from tests.helpers.live_server import Live, live_server
from tests.helpers.waiting import HANG, gated, wait_until

PROMPTS = ["abcabcabcabc", "one two one two one two", "What is 2 + 2?"]


def decoder() -> SpecDecoder:
    plain = tiny_decoder()
    config = EngineConfig(num_draft_tokens=4, max_num_seqs=2, max_model_len=512)
    return SpecDecoder(plain.verifier, plain.tokenizer, NGramDrafter(max_draft_tokens=4), config)


def get(server: Live, path: str, **headers: str) -> bytes:
    with urllib.request.urlopen(
        urllib.request.Request(server.url + path, headers=headers), timeout=HANG
    ) as reply:
        body: bytes = reply.read()
    return body


def complete(server: Live, prompt: str, **options: Any) -> dict[str, Any]:
    asked = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
    body, headers = json.dumps(asked).encode(), {"Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(server.url + "/v1/completions", body, headers), timeout=HANG
    ) as reply:
        answer: dict[str, Any] = json.load(reply)
    return answer


def test_numbers_are_those_of_the_answers() -> None:
    """Counts of ended outputs, once each, whether they were asked for before their end or not."""
    with live_server(decoder(), drafter="ngram") as server:
        answers: list[dict[str, Any]] = []
        threads = [
            threading.Thread(
                target=lambda prompt=prompt: answers.append(
                    complete(server, prompt, max_tokens=150)
                )
            )
            for prompt in PROMPTS
        ]
        seen = []
        with gated(server.decoder.engine) as gate:
            for thread in threads:
                thread.start()
            wait_until(lambda: server.front.num_open == 3)
            for _ in range(5):
                gate.allow(4)
                seen.append(json.loads(get(server, "/status")))
        for thread in threads:
            thread.join()
        last = json.loads(get(server, "/status"))
    meta = [answer["meta_info"] for answer in answers]
    assert (last["model"], last["drafter"], last["max_num_seqs"]) == ("tiny", "ngram", 2)
    assert last["running"] == last["waiting"] == last["blocks_used"] == 0 and last["finished"] == 3
    assert last["output_tokens"] == sum(one["completion_tokens"] for one in meta) == 450
    assert last["steps"] == sum(one["spec_verify_ct"] for one in meta)
    assert last["step_tokens"] == 450 - 3, "first tokens come from the prefill"
    assert sum(last["accepted"]) == sum(one["spec_accept_token_num"] for one in meta) > 0
    assert sum(last["offered"]) == sum(one["spec_draft_token_num"] for one in meta)
    under_way = [one for one in seen if one["running"] == 2]
    assert (
        under_way
        and all(one["blocks_used"] > 0 for one in under_way)
        and any(one["waiting"] == 1 for one in under_way)
    )
    unfinished = [one for one in under_way if one["finished"] == 0]
    assert len({one["output_tokens"] for one in unfinished}) > 1 and any(
        one["steps"] > 0 for one in unfinished
    )
    for name in ("seconds", "output_tokens", "steps", "step_tokens", "finished"):
        values = [one[name] for one in [*seen, last]]
        assert values == sorted(values), f"{name} falls"


def test_counts_of_other_fronts_are_whole_or_none() -> None:
    told = Totals()
    told.finished["stop"] += 2
    told.first_token.add(0.02)
    told.offered, told.steps = [3, 1], 4
    plain = told.plain()
    assert Totals.from_plain(json.loads(json.dumps(plain))).plain() == plain
    told.finished["stop"] += 1
    assert told.plain() != plain
    for wrong in ({}, plain | {"steps": "a"}, plain | {"offered": 1}, plain | {"whole": [1, 2]}):
        with pytest.raises((ValueError, TypeError, KeyError)):
            Totals.from_plain(wrong)


def test_the_page_asks_for_the_key_and_numbers_want_it() -> None:
    with live_server(decoder(), api_key="secret") as server:
        assert get(server, "/").decode() == PAGE
        with pytest.raises(urllib.error.HTTPError, match="401"):
            get(server, "/status")
        assert json.loads(get(server, "/status", Authorization="Bearer secret"))["drafter"] is None


def test_the_page_needs_no_network_and_reads_what_there_is() -> None:
    """Nothing from elsewhere; every number it shows is one that the server gives."""
    assert not re.search(r"https?:|//[a-z]|@import|url\(", PAGE), "an address in the page"
    with live_server(decoder()) as server:
        given = json.loads(get(server, "/status"))
    read = set(
        re.findall(
            r"\bsample\.(\w+)|\blast\.(\w+)|of\(\"(\w+)\"\)|differences\(last, first, \"(\w+)\"\)",
            PAGE,
        )
    )
    names = {name for groups in read for name in groups if name}
    assert names == set(given), "the page and the server disagree about names"


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")
@pytest.mark.parametrize("width", [390, 1280])
def test_it_shows_itself(width: int, tmp_path: Path) -> None:
    """In a browser, at the width of a phone and of a desk: numbers, bars, and nothing beyond the
    right edge.
    """
    with live_server(decoder(), drafter="ngram") as server:
        complete(server, PROMPTS[0], max_tokens=150)
        # Scripts cannot be put into the page, so the browser tells what it has made of it.
        command = [
            "chromium",
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            f"--user-data-dir={tmp_path / 'profile'}",
        ]
        options = [f"--window-size={width},900", "--virtual-time-budget=3000", "--dump-dom"]
        done = subprocess.run(
            [*command, *options, server.url], capture_output=True, text=True, timeout=HANG
        )
    assert done.returncode == 0, done.stderr[-2000:]
    text = re.sub(r"<(script|style)>.*?</\1>", "", done.stdout, flags=re.DOTALL)
    assert "tiny, drafts by ngram" in text and ">live<" in text
    assert len(re.findall(r"<th scope=\"row\">", text)) == 4 and re.search(r"\d %</td>", text)
    assert re.search(r"<dd id=\"tau\">\d\.\d\d<", text)
