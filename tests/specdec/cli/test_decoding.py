"""`specdec generate` as a user meets it: where prompts come from, and what it prints of outputs."""

import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.base.errors import CapacityError
from specdec.cli.main import main
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.session.outputs import StreamChunk
from tests.helpers.forked import Forked
from tests.helpers.waiting import HANG
from tests.specdec.cli.fake_decoder import FakeDecoder, chunk, one_line, python, use

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def test_prompts_come_from_arguments_pipe_and_files(monkeypatch: Patch, tmp_path: Path) -> None:
    """Catches a lost source, a changed order, and a JSON string cut at a character that only looks
    like a line end.
    """
    lines, records = tmp_path / "lines.txt", tmp_path / "records.jsonl"
    lines.write_text("one\n\n  two  \r\n", encoding="utf-8")
    records.write_text(
        '{"prompt": "a\u2028b"}\n{"messages": [{"role": "user", "content": "m"}]}\n{"question":'
        ' "q", "answer": "unused"}\n',
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\ntext\n"))
    decoder = use(monkeypatch, FakeDecoder())
    main(["generate", "--raw", "first", "-", "--max-tokens", "3", "last", "--file", str(lines)])
    assert decoder.inputs == ["first", "piped\ntext", "last", "one", "two"]
    main(["generate", "--file", str(records)])
    assert [messages[-1]["content"] for messages in decoder.inputs] == ["a\u2028b", "m", "q"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("piped\n"))
    main(["generate", "--raw"])
    assert decoder.inputs == "piped"


def test_lines_say_how_they_are_decoded_and_carry_the_rest(
    monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    """In the words of requests to the server; what nobody reads is said."""
    file = tmp_path / "lines.jsonl"
    lines: list[Any] = [
        {"id": 7, "prompt": "a", "max_tokens": 3, "temperature": 0.5, "stop": ["x"], "topic": None},
        {
            "question": "b", "answer": "c", "seed": 5, "max_new_tokens": 4, "text": "t",
            "top_p": None,
        },
        {
            "custom_id": "r",
            "messages": [{"role": "user", "content": ["d"]}],
            "guided_regex": "a+",
            "seed": -1,
            "top_k": -1,
        },
        {"prompt": "e"},
        {"prompt": "f", "n": 2, "max_completion_tokens": 2, "top_logprobs": 1, "logprobs": True},
    ]  # fmt: skip
    file.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    decoder = use(monkeypatch, FakeDecoder(*(chunk(index, "o", done=True) for index in range(6))))
    assert (
        main(["generate", "--file", str(file), "--json", "--max-tokens", "9", "--seed", "1"]) == 0
    )
    base = SamplingParams(max_tokens=9, seed=1)
    assert decoder.sampling == [
        replace(base, max_tokens=3, temperature=0.5, stop=("x",)),
        replace(base, max_tokens=4, seed=5),
        replace(base, grammar=Grammar.regex("a+"), seed=None),
        base,
        replace(base, max_tokens=2, logprobs=True, top_logprobs=1),
        replace(base, max_tokens=2, logprobs=True, top_logprobs=1, seed=2),
    ]
    assert [one[-1]["content"] for one in decoder.inputs] == ["a", "b", "d", "e", "f", "f"]
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert (records[0]["id"], records[0]["topic"], records[2]["custom_id"]) == (7, None, "r")
    assert [one.get("choice") for one in records] == [None] * 4 + [0, 1]
    assert (records[1]["answer"], records[1]["given_text"], records[1]["text"]) == ("c", "t", "o")
    assert (
        "carried along to the answers: id, topic, answer, text, custom_id, choice\n" in captured.err
    )
    main(["generate", "--file", str(file)])
    assert "left out, and carried along with --json: id," in capsys.readouterr().err
    assert main(["generate", "--file", str(file), "--compare"]) == 2
    assert "lines.jsonl:1 has its own max_tokens" in one_line(capsys)


def test_an_empty_line_of_a_file_has_an_error_of_its_own(
    monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    file = tmp_path / "lines.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"prompt": " "}\n{"messages": [{"role": "user", "content":'
        ' null}]}\n{"messages": [{"role": "user", "content": "b"}, {"role": "tool", "content":'
        ' ""}]}\n'
    )
    decoder = use(monkeypatch, FakeDecoder(chunk(0, "A", done=True), chunk(1, "B", done=True)))
    assert main(["generate", "--json", "--file", str(file)]) == 1
    captured = capsys.readouterr()
    records = [json.loads(line) for line in captured.out.splitlines()]
    assert [record["text"] for record in records] == ["A", "", "", "B"] and len(decoder.inputs) == 2
    assert [record["error"] for record in records] == [
        None,
        *["the prompt is empty; give it some text"] * 2,
        None,
    ]
    assert f"specdec: error: {file}:2: the prompt is empty" in captured.err


def test_chat_template_is_used_when_there_is_one(
    monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    user = {"role": "user", "content": "hi"}
    decoder = use(monkeypatch, FakeDecoder())
    main(["generate", "hi"])
    assert decoder.inputs == [user]
    main(["generate", "hi", "--system", "be brief"])
    assert decoder.inputs == [{"role": "system", "content": "be brief"}, user]
    main(["generate", "hi", "--raw"])
    assert decoder.inputs == "hi"
    decoder.tokenizer.chat_template = None
    main(["generate", "hi"])
    assert decoder.inputs == "hi"
    capsys.readouterr()

    file = tmp_path / "chat.jsonl"
    file.write_text(
        json.dumps({"messages": [{"role": "system", "content": "s"}, user]}) + "\n",
        encoding="utf-8",
    )
    for arguments, fragment in [
        (["hi", "--system", "s"], "the tokenizer of this model has none"),
        (["hi", "--system", "s", "--raw"], "drop --raw"),
        (["--file", str(file), "--raw"], "drop --raw"),
    ]:
        assert main(["generate", *arguments]) == 2
        assert fragment in one_line(capsys)
    decoder.tokenizer.chat_template = "template"
    assert main(["generate", "--file", str(file), "--system", "s"]) == 2
    assert "drop --system" in one_line(capsys)


@pytest.mark.parametrize(
    ("options", "drafter"),
    [
        ([], "smollm2-dflash"),
        (["--model", "m"], "ngram"),
        (["--drafter", "path/to/one"], "path/to/one"),
    ],
)
def test_the_summary_names_the_drafter(
    options: list[str], drafter: str, monkeypatch: Patch, capsys: Capture
) -> None:
    """Catches "auto" where the user wants to know what was chosen."""
    use(monkeypatch, FakeDecoder(chunk(0, "x", done=True)))
    assert main(["generate", "a", *options]) == 0
    assert f"(drafter {drafter}, k = 3)" in capsys.readouterr().err


def test_results_keep_the_order_of_the_prompts(monkeypatch: Patch, capsys: Capture) -> None:
    """Catches printing in order of arrival, and a failed prompt that hides the others or goes
    unnoticed.
    """
    chunks = [chunk(1, "", error="too long"), chunk(2, "C", done=True), chunk(0, "A", done=True)]
    use(monkeypatch, FakeDecoder(*chunks))
    assert main(["generate", "a", "b", "c"]) == 1
    captured = capsys.readouterr()
    assert captured.out == "[1/3] a\nA\n\n[2/3] b\n\n\n[3/3] c\nC\n"
    assert "specdec: error: prompt 2: too long\n" in captured.err

    use(monkeypatch, FakeDecoder(*chunks))
    assert main(["generate", "a", "b", "c", "--json"]) == 1
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(one["index"], one["text"], one["error"]) for one in records] == [
        (0, "A", None),
        (1, "", "too long"),
        (2, "C", None),
    ]


def test_an_only_prompt_that_cannot_be_served_is_a_usage_error(
    monkeypatch: Patch, capsys: Capture
) -> None:
    use(monkeypatch, FakeDecoder(CapacityError("the prompt has 9 tokens; the limit is 8")))
    assert main(["generate", "a"]) == 2
    assert one_line(capsys) == "specdec: error: the prompt has 9 tokens; the limit is 8\n"


def test_streaming_shows_text_as_it_grows_and_one_prompt_after_the_other(
    monkeypatch: Patch,
) -> None:
    """Catches mixed outputs, and text that only appears at the end."""
    seen: list[str] = []
    out = io.StringIO()

    def chunks() -> Iterator[StreamChunk]:
        for one in [
            chunk(0, "a1"),
            chunk(1, "b1"),
            chunk(0, "a2", done=True),
            chunk(1, "b2", done=True),
        ]:
            yield one
            seen.append(out.getvalue())

    decoder = use(monkeypatch, FakeDecoder())
    decoder.stream = lambda inputs, sampling: chunks()
    monkeypatch.setattr(sys, "stdout", out)
    assert main(["generate", "p", "q", "--stream"]) == 0
    assert seen == [
        "[1/2] p\na1",
        "[1/2] p\na1",
        "[1/2] p\na1a2\n\n[2/2] q\nb1",
        "[1/2] p\na1a2\n\n[2/2] q\nb1b2\n",
    ]


@pytest.mark.parametrize("option", [[], ["--stream"]])
def test_an_interrupt_keeps_what_there_is(
    option: list[str], monkeypatch: Patch, capsys: Capture
) -> None:
    """Catches losing finished results and partial text to ctrl-C."""
    use(
        monkeypatch, FakeDecoder(chunk(1, "done", done=True), chunk(0, "half"), KeyboardInterrupt())
    )
    assert main(["generate", "a", "b", *option]) == 130
    captured = capsys.readouterr()
    assert captured.out == "[1/2] a\nhalf\n\n[2/2] b\ndone\n"
    assert captured.err == "specdec: interrupted\n"


def test_an_interrupt_marks_unfinished_objects(monkeypatch: Patch, capsys: Capture) -> None:
    use(monkeypatch, FakeDecoder(chunk(0, "half"), KeyboardInterrupt()))
    assert main(["generate", "a", "--json"]) == 130
    record = json.loads(capsys.readouterr().out)
    assert (record["text"], record["finish_reason"]) == ("half", "cancelled")


def test_a_closed_pipe_is_quiet() -> None:
    """Catches the traceback that `specdec ... | head` would show."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    # A text that fills a buffer would not do: argparse writes that itself, and lets no error out.
    code = "import sys; from specdec.cli.main import main; sys.exit(main(['--help']))"
    done = python(code, stdout=write_end, env={**os.environ, "PYTHONUNBUFFERED": ""})
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_full_disk_and_a_closed_output_are_no_defects(monkeypatch: Patch) -> None:
    """Catches the traceback of `specdec ... > /full/disk` and of `specdec ... >&-`."""
    use(monkeypatch, FakeDecoder(chunk(0, "A", done=True)))

    def full() -> int:
        os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
        return main(["generate", "x"])

    def closed() -> int:
        sys.stdout = None
        return main(["generate", "x"])

    with closing(Forked(full)) as process:
        assert process.stderr.read().splitlines() == [
            "specdec: error: cannot write standard output: no space left on device; make room and"
            " run again"
        ]
        assert process.wait(HANG) == 2
    with closing(Forked(closed)) as process:
        assert process.stderr.read().count("\n") == 1 and process.wait(HANG) == 0


def test_what_was_chosen_is_shown() -> None:
    """Lines of INFO from what chooses and compiles reach standard error; those of others do not."""
    names = ("specdec.attention.selector", "specdec.device.self_check", "specdec.engine.memory")
    code = (
        "import logging; from specdec.cli.main import main; main(['--version']);"
        f"[logging.getLogger(name).info(name) for name in {names}]"
    )
    assert python(code).stderr.splitlines() == [f"specdec: {name}" for name in names[:2]]


def test_bytes_of_another_locale_are_utf8(monkeypatch: Patch, capsys: Capture) -> None:
    """Catches "half of a surrogate pair" for a plain umlaut where the locale is C."""
    decoder = use(monkeypatch, FakeDecoder(chat_template=None))
    monkeypatch.setattr(sys, "stdin", io.StringIO("p\udcc3\udcbc\n"))
    assert main(["generate", "\udcc3\udca4", "-"]) == 0
    assert decoder.inputs == ["ä", "pü"]
    capsys.readouterr()
    assert main(["generate", "a\udcff"]) == 2
    assert "prompt 1 is not UTF-8 text (byte 1)" in one_line(capsys)


def test_timing_adds_up_and_names_the_engines_share(monkeypatch: Patch, capsys: Capture) -> None:
    use(monkeypatch, FakeDecoder(chunk(0, "x", done=True)))
    assert main(["generate", "a", "--timing", "--logprobs"]) == 0
    rows = {
        line[2:15].strip(): line[15:].split()
        for line in capsys.readouterr().err.splitlines()
        if line.startswith("  ")
    }
    assert list(rows) == [
        "phase", "schedule", "draft", "verify", "accept", "context", "total", "engine's own",
    ]  # fmt: skip
    assert rows["verify"] == ["2.000", "200.000", "50.0%"]
    assert rows["total"][:3] == ["4.000", "400.000", "100.0%"]
    assert rows["engine's own"][:3] == ["0.750", "75.000", "18.8%"]
