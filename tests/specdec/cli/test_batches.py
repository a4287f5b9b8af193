"""OpenAI's batch files: requests in, answers out, each line by itself."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from specdec.cli import generate, line_fields, options
from specdec.cli.main import main
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.serve.batch import lines as lines_module
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import StreamChunk
from tests.helpers.live_server import live_server, tiny_decoder
from tests.helpers.tools import HARMONY, MARKED, MISTRAL, THINKING, function, tool_decoder

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
HI: list[Any] = [{"role": "user", "content": "hi"}]
SAMPLED = {"temperature": 0.9, "seed": 7, "max_tokens": 6}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "temperature": 0, "max_tokens": 5}),
    (CHAT, {"messages": HI, **SAMPLED, "n": 2, "logprobs": True, "top_logprobs": 2}),
    (CHAT, {"messages": HI, **SAMPLED, "chat_template_kwargs": {"name": "bot"}, "stop": None}),
    (TEXT, {"prompt": ["abc", "de"], "n": 2, **SAMPLED, "echo": True, "logprobs": 1}),
    (TEXT, {"prompt": [5, 6, 7], "temperature": 0}),
    (CHAT, {"messages": HI, **SAMPLED, "prediction": {"type": "content", "content": "hi there"}}),
    (TEXT, {"prompt": "abc", **SAMPLED, "prediction": "abcabc", "num_draft_tokens": 1}),
    (TEXT, {"prompt": "abc", "guided_regex": "a{3}", "seed": -1}),
    (RESPONSE, {"input": "hi", "temperature": 0, "max_output_tokens": 5}),
]
BAD: list[tuple[str, dict[str, Any]]] = [
    (TEXT, {"prompt": "abc", "temperature": -1}),
    (TEXT, {"prompt": "abc", "max_tokens": "3"}),
    (TEXT, {"prompt": [5] * 600}),
    (TEXT, {"prompt": "abc", "guided_regex": "("}),
    (TEXT, {"prompt": "abc", "model": "gpt-9"}),
    (TEXT, {"prompt": "abc", "suffix": "d"}),
    (CHAT, {"messages": [{"content": "a"}]}),
    (TEXT, {"prompt": "abc", "n": 300}),
    (CHAT, {"messages": HI, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    (RESPONSE, {"input": "hi", "previous_response_id": "r"}),
    (RESPONSE, {"input": [{"role": "user", "content": {}}]}),
    (RESPONSE, {"input": "hi", "text": {"format": {"type": "x"}}}),
]


def line(name: Any, url: str, body: Any, method: str = "POST") -> str:
    return json.dumps({"custom_id": name, "method": method, "url": url, "body": body})


@pytest.fixture
def decoder(monkeypatch: Patch) -> SpecDecoder:
    """What the command loads."""
    made = tiny_decoder()
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *_, **__: made)
    return made


def run(capsys: Capture, file: Path, *options: str) -> tuple[int, list[Any], str]:
    status = main(["generate", "--file", str(file), "--model", "tiny", *options])
    captured = capsys.readouterr()
    return status, [json.loads(made) for made in captured.out.splitlines()], captured.err


def shown(body: dict[str, Any]) -> tuple[Any, Any]:
    """What does not depend on the time, or on what was decoded before."""
    if "choices" not in body:  # a response
        return [one["content"] for one in body["output"]], body["usage"]["output_tokens"]
    choices = [
        {name: value for name, value in one.items() if name not in ("meta_info", "logprobs")}
        for one in body["choices"]
    ]
    usage = {key: value for key, value in body["usage"].items() if not key.endswith("details")}
    return choices, usage


def test_answers_are_those_of_the_server(
    decoder: SpecDecoder, tmp_path: Path, capsys: Capture
) -> None:
    """A line that cannot be served has its error, and ends nothing else."""
    file = tmp_path / "batch.jsonl"
    asked = [*GOOD[:3], *BAD, *GOOD[3:]]
    file.write_text("\n".join(line(f"r{at}", *one) for at, one in enumerate(asked)))
    status, made, said = run(capsys, file)
    assert status == 1 and said.count("specdec: error: ") == len(BAD) and len(made) == len(asked)
    with live_server(decoder) as live:
        for at, ((url, body), answer) in enumerate(zip(asked, made, strict=True)):
            want, response = live.post(url, json=body), answer["response"]
            assert (answer["custom_id"], answer["error"]) == (f"r{at}", None)
            assert response["status_code"] == want.status_code, want.text
            if want.status_code == 200:
                assert shown(response["body"]) == shown(want.json())
            else:
                assert response["body"] == want.json()
    assert len({one["id"] for one in made}) == len(made)
    logprobs = made[1]["response"]["body"]["choices"][1]["logprobs"]["content"]
    assert len(logprobs) == 6 and len(logprobs[0]["top_logprobs"]) == 2
    assert made[-2]["response"]["body"]["choices"][0]["text"] == "aaa"


def called(body: dict[str, Any]) -> Any:
    """Thinking, text and calls of a chat or a response."""
    if "output" in body:
        return [
            {key: value for key, value in one.items() if key not in ("id", "call_id")}
            for one in body["output"]
        ]
    message = dict(body["choices"][0]["message"])
    calls = [one["function"] for one in message.pop("tool_calls", ())]
    return message, calls, body["choices"][0]["finish_reason"]


@pytest.mark.parametrize("template", [MISTRAL, HARMONY, THINKING, MARKED])
def test_calls_are_those_of_the_server(
    template: str, monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    """Also where the tokens around thinking and calls are special."""
    pytest.importorskip("xgrammar")
    decoder = tool_decoder(template)
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *_, **__: decoder)
    thinks = {"thinking_token_budget": 3} if template in (THINKING, MARKED) else {}
    way = {**thinks, "seed": 1, "temperature": 1, "tool_choice": "required"}
    tool: dict[str, Any] = {"type": "function", "name": "now"}
    asked: list[tuple[str, dict[str, Any]]] = [
        (CHAT, {"messages": HI, **way, "max_tokens": 60, "tools": [function("now")]}),
        (RESPONSE, {"input": HI, **way, "max_output_tokens": 60, "tools": [tool]}),
    ]
    file = tmp_path / "batch.jsonl"
    file.write_text("\n".join(line(f"r{at}", *one) for at, one in enumerate(asked)))
    _, made, _ = run(capsys, file)
    with live_server(decoder) as live:
        for (url, body), answer in zip(asked, made, strict=True):
            want = called(live.post(url, json=body).json())
            assert called(answer["response"]["body"]) == want
            assert template == HARMONY or "'name': 'now'" in str(want), "calls are forced"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is not JSON"),
        ('{"prompt": "a"}', "custom_id is None; give a text"),
        (line(5, TEXT, {"prompt": "a"}), "custom_id is 5; give a text"),
        (line("b", TEXT, {"prompt": "a"}, "GET"), "a line asks GET /v1/completions"),
        (line("b", "/v1/embeddings", {}), "it must be POST /v1/chat/completions or"),
        (line("b", TEXT, None), "the body of a line is no JSON object"),
        (line("b", TEXT, {"prompt": "a", "stream": True}), "a batch has no streams"),
        (line("a", TEXT, {"prompt": "a"}), "batch.jsonl:1 has custom_id 'a'"),
    ],
)
def test_a_line_that_is_no_request(
    text: str, words: str, decoder: SpecDecoder, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "batch.jsonl"
    good = [line(name, TEXT, {"prompt": "abc", "max_tokens": 2}) for name in "ac"]
    file.write_text("\n".join([good[0], text, good[1]]))
    status, made, said = run(capsys, file)
    assert status == 1 and "batch.jsonl:2: " in said
    statuses = [one["response"]["status_code"] for one in made]
    assert statuses == [200, 400, 200]
    assert words in made[1]["response"]["body"]["error"]["message"]


def test_an_interrupted_run_goes_on_where_it_was(
    decoder: SpecDecoder, monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    """Nothing is lost, doubled or asked again."""
    file, kept = tmp_path / "batch.jsonl", str(tmp_path / "kept.jsonl")
    asked = [(TEXT, {"prompt": "abc", **SAMPLED, "n": 2}) for _ in range(6)]
    file.write_text("\n".join(line(f"r{at}", *one) for at, one in enumerate(asked)))
    stream, inputs = decoder.stream, list[int]()

    def some(given: Any, ways: Any) -> Iterator[StreamChunk]:
        inputs.append(len(given))
        left = 5 if len(inputs) == 1 else len(given)
        for chunk in stream(given, ways):
            yield chunk
            left -= chunk.result is not None
            if not left and len(inputs) == 1:
                raise KeyboardInterrupt

    monkeypatch.setattr(decoder, "stream", some)
    status, cut, _ = run(capsys, file, "--out", kept)
    assert status == 130 and [one["custom_id"] for one in cut] == [f"r{at}" for at in range(6)]
    codes = [one["error"] and one["error"]["code"] for one in cut]
    assert codes == [None, None, *["batch_cancelled"] * 4] or codes.count("batch_cancelled") >= 3
    status, made, _ = run(capsys, file, "--out", kept)
    assert status == 0 and inputs == [12, 7]
    monkeypatch.undo()
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *_, **__: decoder)
    _, whole, _ = run(capsys, file)
    for before, after in zip(made, whole, strict=True):
        assert (before["id"], before["custom_id"]) == (after["id"], after["custom_id"])
        assert shown(before["response"]["body"]) == shown(after["response"]["body"])


@pytest.mark.parametrize("url", [CHAT, TEXT])
def test_an_option_counts_where_it_says_what_is_the_default_of_the_command(
    url: str, decoder: SpecDecoder, tmp_path: Path, capsys: Capture
) -> None:
    """Which is not that of the server: it would sample, as many tokens as it likes."""
    what = {"messages": HI} if url == CHAT else {"prompt": "abc"}
    file, own = tmp_path / "batch.jsonl", {"temperature": 0, "max_tokens": 256}
    file.write_text(line("a", url, {**what, **own}) + "\n" + line("b", url, what))
    _, made, _ = run(capsys, file, "--temperature", "0", "--max-tokens", "256")
    first, other = (shown(one["response"]["body"]) for one in made)
    assert first == other


def test_options_that_are_given_are_told_from_the_others() -> None:
    """Also where they are given as they are by default."""
    parser = argparse.ArgumentParser()
    generate.add_arguments(parser)
    cases: list[tuple[list[str], dict[str, Any]]] = [
        ([], {}),
        (["--stop", "a", "--min-tokens", "0"], {"stop": ("a",), "min_tokens": 0}),
    ]
    for one in fields(SamplingParams):
        if one.name in options._ELSEWHERE or one.name == "grammar" or one.default in (None, ()):
            continue
        flag = one.name.replace("_", "-")
        words = [f"--{flag}", str(one.default)]
        if isinstance(one.default, bool):
            words = [f"--{flag}" if one.default else f"--no-{flag}"]
        cases.append((words, {one.name: one.default}))
    assert len(cases) > 10
    for words, found in cases:
        args = parser.parse_args(words)
        assert options.given_sampling(args, options.sampling_params(args)) == found


def without_names(given: Any) -> Any:
    """What does not differ from one answer to the next."""
    if isinstance(given, list):
        return [without_names(one) for one in given]
    if not isinstance(given, dict):
        return given
    names = given.keys() - {"id", "created", "created_at"}
    return {name: without_names(given[name]) for name in names}


def test_kept_answers_are_printed_as_they_were(
    decoder: SpecDecoder, tmp_path: Path, capsys: Capture
) -> None:
    """With all that they have, such as log-probabilities by token."""
    file, kept = tmp_path / "batch.jsonl", str(tmp_path / "kept.jsonl")
    file.write_text("\n".join(line(f"r{at}", *one) for at, one in enumerate(GOOD)))
    first, again = (run(capsys, file, "--out", kept) for _ in range(2))
    assert first[0] == again[0] == 0 and without_names(first[1]) == without_names(again[1])
    assert '"top_logprobs": [{' in json.dumps(again[1])


def test_thinking_is_told_apart(monkeypatch: Patch, tmp_path: Path, capsys: Capture) -> None:
    decoder = tiny_decoder()
    monkeypatch.setattr(SpecDecoder, "from_pretrained", lambda *_, **__: decoder)
    monkeypatch.setattr(lines_module, "parts_of", lambda *_, tagged: ("why", "so"))
    file = tmp_path / "batch.jsonl"
    bodies = [{"messages": HI}, {"messages": HI, "separate_reasoning": False}]
    file.write_text("\n".join(line(f"r{at}", CHAT, one) for at, one in enumerate(bodies)))
    _, (one, other), _ = run(capsys, file, "--max-tokens", "3")
    message = one["response"]["body"]["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("why", "so")
    assert "reasoning_content" not in other["response"]["body"]["choices"][0]["message"]
    assert one["response"]["body"]["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("option", ["--raw", "--stream", "--compare", "--system=x"])
def test_options_that_a_batch_has_no_use_for(option: str, tmp_path: Path, capsys: Capture) -> None:
    file = tmp_path / "batch.jsonl"
    file.write_text(line("a", TEXT, {"prompt": "a"}))
    status, made, said = run(capsys, file, option)
    assert status == 2 and not made and "batch" in said and option.partition("=")[0] in said


def test_words_of_lines_are_those_of_requests() -> None:
    """Each is known in one place and read in the other."""
    words = lines_module.LINE_FIELDS
    ours = {"json_schema", "regex", "ebnf", "grammar", "format"}  # columns of data sets as well
    assert words - ours <= line_fields.KNOWN
    assert line_fields.OF_TEMPLATE == lines_module.TEMPLATE_FIELDS


def test_a_line_has_words_for_the_template(
    decoder: SpecDecoder, tmp_path: Path, capsys: Capture
) -> None:
    """As the same arguments in Python; without a template it has an error of its own."""
    file = tmp_path / "lines.jsonl"
    sampling: dict[str, Any] = {"max_tokens": 4, "temperature": 0.8, "seed": 3}
    words = {"chat_template_kwargs": {"name": "bot"}, "guided_regex": "[a-c]{9}"}
    rows = [{"prompt": "hi", **sampling, "n": 2}, {"messages": HI, **sampling, **words}]
    file.write_text("\n".join(map(json.dumps, rows)))
    status, made, _ = run(capsys, file, "--json")
    asked: dict[str, Any] = {**sampling, "grammar": Grammar.regex("[a-c]{9}")}
    want = decoder.generate(HI, **asked, chat_template_kwargs={"name": "bot"})
    plain = [decoder.generate(HI, **sampling | {"seed": 3 + choice}).text for choice in range(2)]
    assert status == 0 and [one["text"] for one in made] == [*plain, want.text]
    assert made[2]["num_prompt_tokens"] == len(want.prompt_token_ids)
    assert made[2]["num_prompt_tokens"] != made[0]["num_prompt_tokens"]
    file.write_text("\n".join(map(json.dumps, [rows[0], {"prompt": "hi", **words}])))
    status, made, _ = run(capsys, file, "--json", "--raw")
    assert status == 1 and [bool(one["error"]) for one in made] == [False, False, True]
    assert "words for a chat template, and none is used" in made[2]["error"]
