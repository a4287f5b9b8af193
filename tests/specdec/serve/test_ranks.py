"""A server whose target two ranks compute: answers, leaving clients and ends are those of one
process.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

pytest.importorskip("xgrammar")

from specdec.base.config import EngineConfig
from specdec.cli.main import main
from specdec.parallel.executor import collective_rpc
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from tests.evals.tiny import save_tiny
from tests.helpers import lockstep_parts as parts
from tests.helpers.forked import Forked
from tests.helpers.live_server import Live, live_server
from tests.helpers.waiting import HANG, gated, wait_until

LOAD: dict[str, Any] = {
    "drafter": "tests.helpers.tiny_ranks:random_drafter",
    "device": "cpu",
    "dtype": "float32",
}
ENGINE = EngineConfig(max_num_seqs=4, num_draft_tokens=3)
SCHEMA = {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "seed": 5}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = {"prompt": "abc", "max_tokens": 480, "temperature": 0, "ignore_eos": True}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (
        COMPLETIONS,
        {
            "prompt": ["abc", "some other text"],
            "max_tokens": 12,
            "n": 2,
            "ignore_eos": True,
            **SAMPLED,
        },
    ),
    (CHATS, {**CHAT, "max_tokens": 9, "temperature": 0}),
    (
        CHATS,
        {
            **CHAT,
            "max_tokens": 9,
            "logit_bias": {"1": 9},
            "skip_special_tokens": False,
            "stop": ["s><s><s"],
            **SAMPLED,
        },
    ),
    (
        COMPLETIONS,
        {"prompt": "number: ", "max_tokens": 9, "guided_regex": "[0-9]{3,6}x", **SAMPLED},
    ),
    (
        CHATS,
        {
            **CHAT,
            "max_tokens": 30,
            "temperature": 0,
            "guided_json": SCHEMA,
            "logprobs": True,
            "top_logprobs": 3,
        },
    ),
    (
        COMPLETIONS,
        {"prompt": "abcabc", "max_tokens": 8, "temperature": 0, "logprobs": 2, "echo": True},
    ),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"))
    (folder / "generation_config.json").write_text(
        '{"eos_token_id": 2, "repetition_penalty": 1.1, "min_new_tokens": 3}'
    )
    return folder


@pytest.fixture(scope="module")
def one(folder: Path) -> Iterator[Live]:
    with live_server(SpecDecoder.from_pretrained(folder, **LOAD, engine=ENGINE)) as live:
        yield live


@pytest.fixture(scope="module")
def two(folder: Path) -> Iterator[Live]:
    decoder = SpecDecoder.from_pretrained(folder, **LOAD, tensor_parallel=2, engine=ENGINE)
    with live_server(decoder) as live:
        yield live
    decoder.close()


def answers(live: Live) -> list[dict[str, Any]]:
    """Of `REQUESTS`, asked all at once."""

    def ask(request: tuple[str, dict[str, Any]]) -> dict[str, Any]:
        answer = live.post(request[0], json=request[1])
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    with ThreadPoolExecutor(len(REQUESTS)) as threads:
        return list(threads.map(ask, REQUESTS))


def texts(answer: dict[str, Any]) -> list[tuple[str, ...]]:
    """Of each output, and its steps and accepted drafts; how many drafts the last steps had depends
    on its neighbors.
    """
    found = [
        (one["text"] if "text" in one else one["message"]["content"], one)
        for one in answer["choices"]
    ]
    counts = ("spec_verify_ct", "spec_accept_token_num")
    return [
        (text, one["finish_reason"], *(str(one["meta_info"][name]) for name in counts))
        for text, one in found
    ]


def numbers(found: Any) -> list[float]:
    """All log-probabilities in an answer, in its order."""
    if isinstance(found, dict):
        return [
            number for name, part in found.items() if name != "bytes" for number in numbers(part)
        ]
    if isinstance(found, list):
        return [number for part in found for number in numbers(part)]
    return [found] if isinstance(found, float) else []


def test_answers_are_those_of_one_process(one: Live, two: Live) -> None:
    """Texts, how drafts fared, masks of grammars on both ranks, and log-probabilities but for the
    order of sums.
    """
    verifier = two.decoder.verifier
    expected = answers(one)
    collective_rpc(verifier, parts.note_masks)
    got = answers(two)
    assert [texts(answer) for answer in got] == [texts(answer) for answer in expected]
    same, steps = collective_rpc(verifier, parts.same_masks)
    assert same and steps > 5
    logits = one.decoder.next_token_logits("abcabc")
    bound = 64 * torch.finfo(torch.float32).eps * float(logits.abs().max())
    for answer, own in zip(got[4:], expected[4:], strict=True):
        found, wanted = (numbers(one["choices"][0]["logprobs"]) for one in (answer, own))
        assert len(found) >= 8 and found == pytest.approx(wanted, rel=0, abs=bound)


def test_a_client_that_leaves_cancels_on_both_ranks(one: Live, two: Live) -> None:
    """In the midst of a stream, while others are in work; each later step compares the ranks'
    schedules.

    Nor does the other rank end at a signal that service managers send to all processes.
    """
    rank_1 = collective_rpc(two.decoder.verifier, parts.process_of_rank_1)
    with ThreadPoolExecutor(1) as threads:
        with gated(two.decoder.engine, 8) as gate:
            with httpx.stream(
                "POST", two.url + COMPLETIONS, json={**LONG, "stream": True, "n": 2}
            ) as stream:
                events = stream.iter_raw()  # the stream ends with its iterator
                next(events)
                other = threads.submit(
                    httpx.post, two.url + COMPLETIONS, json={**LONG, "max_tokens": 60}
                )
                wait_until(lambda: two.front.num_open == 3 and gate.stands)
                os.kill(rank_1, signal.SIGTERM)
            wait_until(lambda: two.front.num_open == 1)
        text = other.result().json()["choices"][0]["text"]
    assert two.front.totals.finished["cancelled"] == 2
    assert text == one.decoder.generate("abc", max_tokens=60, ignore_eos=True).text
    assert [texts(answer) for answer in answers(two)] == [texts(answer) for answer in answers(one)]
    engine = two.decoder.engine
    assert not engine.has_work and engine.pool.num_used == 0


def test_a_rank_without_memory_ends_the_server_with_one_line(
    two: Live, caplog: pytest.LogCaptureFixture
) -> None:
    """All who wait are told, whatever they wait for, and the server and the other rank end."""
    decoder = two.decoder
    collective_rpc(decoder.verifier, parts.run_out_of_memory, decoder.verifier, 20)
    handle = decoder.session.submit([5, 6, 7], SamplingParams(max_tokens=480, ignore_eos=True))
    with ThreadPoolExecutor(1) as threads:
        whole = threads.submit(httpx.post, two.url + COMPLETIONS, json=LONG)
        with httpx.stream("POST", two.url + COMPLETIONS, json={**LONG, "stream": True}) as stream:
            *_, event, end = [line for line in stream.iter_lines() if line]
        answer = whole.result()
    line = (
        "rank 1 of the tensor-parallel group failed: OutOfMemoryError: CUDA out of memory. Tried"
        " to allocate 2.00 GiB."
    )
    assert line in event and end == "data: [DONE]"
    assert (
        answer.status_code == 500
        and answer.json()["error"]["message"] == f"the engine failed: {line}"
    )
    with pytest.raises(RuntimeError, match=re.escape(line)):
        handle.result()
    two.join()
    assert two.hub.dead
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        f"the server ends: {line}"
    ]


@pytest.mark.slow
def test_sigterm_to_both_ranks_lets_the_unfinished_finish(
    folder: Path, request: pytest.FixtureRequest
) -> None:
    """Started and told to end as by torchrun, which passes a signal on to all; both end in good
    order, rank 0 first.
    """
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    line = (
        f"serve --model {folder} --device cpu --dtype float32 --drafter {LOAD['drafter']} -k 3"
        " --max-num-seqs 4 --port 0 --tensor-parallel 2"
    )

    def serve(rank: int) -> int:
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in own.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
        return main(line.split())

    with ExitStack() as stack:
        ranks = [stack.enter_context(closing(Forked(partial(serve, rank)))) for rank in range(2)]
        url = next(said for said in ranks[0].stderr if " at http" in said).split()[-1]
        asked = {**LONG, "max_tokens": 200, "stream": True}
        with httpx.stream("POST", f"{url}/completions", json=asked) as stream:
            events = (line.removeprefix("data: ") for line in stream.iter_lines() if line)
            begun = next(events)
            for rank in reversed(ranks):
                rank.send_signal(signal.SIGTERM)
            *rest, end = events
        assert end == "[DONE]"
        text = "".join(json.loads(event)["choices"][0]["text"] for event in [begun, *rest])
        one: Live = request.getfixturevalue("one")
        assert text == one.decoder.generate("abc", max_tokens=200, ignore_eos=True).text
        said = [line for rank in ranks for line in rank.stderr if "specdec" in line]
        assert not said and [rank.wait(HANG) for rank in ranks] == [0, 0]
