"""Answers of a server are those of the engine; what cannot serve is named."""

import gzip
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from drafters.training.data import source
from drafters.training.data.source import Source
from drafters.training.stages import run_stages
from specdec.base.errors import InvalidInputError, SpecDecError
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.drafters.training.toy import toy_config

NO_SAMPLES = {"heldout_temperature": 0.0, "heldout": 3, "max_tokens": 6, "max_prompts": 20}


class Behind:
    """What a server is to do.

    Attributes:
        decoder: answers.
        tokens: whether it gives token ids.
        refusals: statuses of the first answers, before it serves.
        models: that it names.
        asked: bodies that came.
    """

    def __init__(self, folder: Path) -> None:
        target = str(folder / "target")
        self.decoder = SpecDecoder.from_pretrained(
            target,
            drafter=None,
            device="cpu",
            dtype="float32",
        )
        self.tokens, self.refusals, self.models = True, list[int](), ["as-served"]
        self.asked: list[dict[str, Any]] = []
        self.lock = threading.Lock()


@contextmanager
def serving(behind: Behind) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.answer(200, {"data": [{"id": name} for name in behind.models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with behind.lock:
                if behind.refusals:
                    return self.answer(behind.refusals.pop(0), {"error": "not now"})
                behind.asked.append(body)
                sampling = SamplingParams(
                    max_tokens=body["max_tokens"],
                    temperature=body["temperature"],
                    seed=body["seed"],
                )
                result = behind.decoder.generate(body["prompt"], sampling)
            assert not isinstance(result, list)
            text = behind.decoder.tokenizer.decode(result.token_ids, skip_special_tokens=True)
            choice: dict[str, Any] = {"text": text, "finish_reason": result.finish_reason}
            self.answer(
                200,
                {"choices": [choice | ({"token_ids": result.token_ids} if behind.tokens else {})]},
            )

        def answer(self, status: int, content: Any) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def behind(tmp_path: Path) -> Behind:
    toy_config(tmp_path)  # writes the target
    return Behind(tmp_path)


def records(folder: Path) -> list[dict[str, Any]]:
    paths = sorted((folder / "answers").glob("*.jsonl.gz"))
    contents = [gzip.decompress(path.read_bytes()) for path in paths]
    return [json.loads(line) for content in contents for line in content.splitlines()]


@pytest.mark.parametrize("tokens", [True, False])
def test_a_server_gives_the_answers_of_the_engine(
    tmp_path: Path, behind: Behind, monkeypatch: pytest.MonkeyPatch, tokens: bool
) -> None:
    """Catches an answer under another prompt, a lost token, and a busy server that ends the run."""
    monkeypatch.setattr(source, "WAITS", (0.0, 0.0))
    behind.tokens, behind.refusals = tokens, [503, 429]
    engine = toy_config(tmp_path, out=str(tmp_path / "engine"), **NO_SAMPLES)
    assert run_stages(("answers",), engine)
    with serving(behind) as url:
        config = toy_config(tmp_path, answer_server=f"{url}/v1", max_num_seqs=4, **NO_SAMPLES)
        assert run_stages(("answers",), config)
    assert records(tmp_path / "run") == records(tmp_path / "engine")
    assert {body["model"] for body in behind.asked} == {"as-served"}
    about = json.loads((tmp_path / "run" / "answers" / "provenance.json").read_text())
    assert (about["served_as"], about["target"]) == ("as-served", str(tmp_path / "target"))


def test_a_text_that_stopped_has_its_end(
    tmp_path: Path,
    behind: Behind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    behind.tokens = False
    tokenizer = behind.decoder.tokenizer
    with serving(behind) as url:
        asked = Source.of_server(url, str(tmp_path / "target"), max_model_len=9, at_once=1)
        stopped = source.GenerationResult([5], "", [6, 7, 1], "stop")
        monkeypatch.setattr(behind.decoder, "generate", lambda *_: stopped)
        [(number, result)] = list(asked.answers(iter([([5], SamplingParams(max_tokens=4))])))
    assert (number, result.token_ids) == (0, [6, 7, tokenizer.eos_token_id])
    assert asked.max_model_len == 9


def test_servers_that_cannot_answer_are_named(
    tmp_path: Path,
    behind: Behind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(source, "WAITS", (0.0,))
    target = str(tmp_path / "target")
    with serving(behind) as url:
        behind.refusals = [400]
        asked = Source.of_server(url, target, max_model_len=9, at_once=2)
        with pytest.raises(SpecDecError, match=r"refused: 400 .*not now"):
            list(asked.answers(iter([([5], SamplingParams(max_tokens=4))])))
        behind.refusals = [503, 503]
        with pytest.raises(SpecDecError, match="refused: 503"):
            list(asked.answers(iter([([5], SamplingParams(max_tokens=4))])))
        behind.models = ["one", "other"]
        with pytest.raises(InvalidInputError, match=r"has no model .*it has one, other"):
            Source.of_server(url, target, max_model_len=9, at_once=2)
    with pytest.raises(SpecDecError, match="does not answer"):
        Source.of_server(url, target, max_model_len=9, at_once=2)
    with pytest.raises(InvalidInputError, match="it must be 0 with answer-server"):
        toy_config(tmp_path, answer_server=url, heldout_temperature=1.0)
