"""The command line as a user meets it: what it prints where, what it accepts, how it fails."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec import __version__
from specdec.base.blocks import BlockShape
from specdec.base.errors import CapacityError
from specdec.base.metrics import AcceptanceStats
from specdec.base.registry import VERBS
from specdec.cli.main import main
from specdec.engine.policy.timing import StepTimer
from specdec.grammar.grammar import Grammar
from specdec.sampling.params import SamplingParams
from specdec.session.decoder import SpecDecoder
from specdec.session.outputs import GenerationResult, StreamChunk
from tests.helpers.waiting import HANG

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


class FakeDecoder:
    """Gives the chunks it was told to give, and remembers what it was asked."""

    def __init__(
        self, *chunks: StreamChunk | BaseException, chat_template: str | None = "template"
    ) -> None:
        self.chunks = chunks
        self.tokenizer = SimpleNamespace(chat_template=chat_template)
        timer = StepTimer(torch.device("cpu"), enabled=True)
        timer.totals, timer.num_steps = (
            {"draft": 1.0, "verify": 2.0, "schedule": 0.5, "context": 0.25, "accept": 0.25},
            10,
        )
        self.engine = SimpleNamespace(planner=SimpleNamespace(shapes=(BlockShape(3),)), timer=timer)
        self.inputs: Any = None
        self.sampling = SamplingParams()
        self.options: dict[str, Any] = {}

    def stream(self, inputs: Any, sampling: SamplingParams) -> Iterator[StreamChunk]:
        self.inputs, self.sampling = inputs, sampling
        for chunk in self.chunks:
            if isinstance(chunk, BaseException):
                raise chunk
            yield chunk


def use(monkeypatch: Patch, decoder: Any) -> Any:
    """Makes the command line load `decoder`."""

    def from_pretrained(target: str, **options: Any) -> Any:
        decoder.options = {"target": target, **options}
        return decoder

    monkeypatch.setattr(SpecDecoder, "from_pretrained", from_pretrained)
    return decoder


def chunk(index: int, text: str, *, done: bool = False, error: str | None = None) -> StreamChunk:
    result = GenerationResult(
        prompt_token_ids=[1, 2],
        text=text,
        token_ids=[7, 8, 9],
        finish_reason="error" if error else "stop",
        error=error,
        logprobs=[-0.5, -1.0, -1.5],
        seed=11,
        stats=AcceptanceStats([3], [1], [2]),
    )
    return StreamChunk(index, text, [7], result if done or error else None)


def one_line(capsys: Capture) -> str:
    """What was printed, when that is a single line on standard error."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    assert captured.err.startswith("specdec: error: ")
    return captured.err


def python(code: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        "text": True,
        "timeout": HANG,
    } | options
    return subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False, **options
    )


def test_help_imports_nothing_heavy() -> None:
    """Catches an import that makes `--help` wait for torch."""
    code = (
        "import sys; from specdec.cli.main import main; from specdec.base.registry import VERBS;"
        " main(['--help']);"
        "[main([verb.name, '--help']) for verb in VERBS];"
        "sys.exit(', '.join({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)) or"
        " 0)"
    )
    done = python(code)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--num-draft-tokens" in done.stdout


def test_every_verb_has_a_module_with_arguments(capsys: Capture) -> None:
    for verb in VERBS:
        assert main([verb.name, "--help"]) == 0
        assert f"usage: specdec {verb.name}" in capsys.readouterr().out


def test_version_and_overview(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"specdec {__version__}\n"
    assert main([]) == 2
    assert "generate" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["generat"], ["'generat'", "did you mean 'generate'"]),
        (["--jsn"], ["--jsn", "specdec --help"]),
        (["generate", "x", "--max-token", "5"], ["--max-token;", "did you mean --max-tokens?"]),
        (
            ["generate", "x", "--max-tokens", "five"],
            ["--max-tokens", "'five' is not a whole number"],
        ),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens is 0", "at least 1"]),
        (["generate", "x", "--temperature", "-1"], ["temperature is -1.0", "0 (greedy)"]),
        (["generate", "x", "--temperature", "warm"], ["--temperature", "'warm' is not a number"]),
        (["generate", "x", "--top-p", "1.5"], ["top_p is 1.5", "(0, 1]"]),
        (["generate", "x", "--seed", "-3"], ["seed is -3", "[0, 2**63)"]),
        (
            ["generate", "x", "--grammar", 'json_schema:{"properties": ["a"]}'],
            ["properties is ['a'], which must be an object"],
        ),
        (["generate", "x", "--grammar", "regex:a("], ["has a ( without its )"]),
        (["generate", "x", "--stop", ""], ["stop holds an empty string"]),
        (["generate", "x", "--kv-memory", "12X"], ["--kv-memory", "'12X' is not a size", "512M"]),
        (["generate", "x", "--kv-memory", "0"], ["memory_bytes is 0", "positive"]),
        (["generate", "x", "--max-num-seqs", "0"], ["max_num_seqs is 0", "at least 1"]),
        (["generate", "x", "-k", "-1"], ["num_draft_tokens is -1"]),
        (
            ["generate", "x", "--draft-sampling", "best"],
            ["draft_sampling is 'best'", "'probabilistic'"],
        ),
        (["generate", "x", "--stream", "--json"], ["--stream", "--json", "drop one"]),
        (["generate", "x", "--repeats", "3"], ["--repeats", "--compare"]),
        (["generate", "x", "--compare", "--timing"], ["--timing", "--compare"]),
        (["generate", "x", "--compare", "--drafter", "none"], ["--drafter none"]),
        (["generate", "x", "--compare", "-k", "0"], ["-k 0"]),
        (["generate", "x", " "], ["prompt 2 is empty"]),
        (["generate", "--file", "missing.txt"], ["'missing.txt'", "no such file"]),
        (["generate", "--file", "."], ["'.'", "is a directory"]),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], fragments: list[str], capsys: Capture) -> None:
    """Catches tracebacks, usage dumps, and messages without the value, the limit or the way out;
    nothing is loaded.
    """
    assert main(arguments) == 2
    message = one_line(capsys)
    assert all(fragment in message for fragment in fragments), message


@pytest.mark.parametrize(
    ("line", "fragments"),
    [
        ('{"prompt": "a"', ["is not JSON", "column 15"]),
        ('["a"]', ["is a JSON list", "one object per line"]),
        ('{"text": "a"}', ["prompt, messages, question", "has none"]),
        ('{"prompt": "a", "question": "b"}', ["exactly one", "prompt and question"]),
        ('{"prompt": 3}', ["prompt is a JSON int", "must be a string"]),
        ('{"messages": []}', ["messages must be a list", "role and a content"]),
        ('{"messages": [{"content": "a"}]}', ["message 0 has no role"]),
        (
            '{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            ["'image_url'; give text alone"],
        ),
        ('{"prompt": "a", "max_tokens": 0}', ["max_tokens is 0", "at least 1"]),
        ('{"prompt": "a", "temperature": "hot"}', ["temperature is 'hot'"]),
        ('{"prompt": "a", "guided_regex": "("}', [r"a ( without its )"]),
        ('{"prompt": "a", "n": 0}', ["n is 0", "greater than or equal to 1"]),
        ('{"prompt": "a", "n": 257}', ["asks for 257 outputs and the limit is 256"]),
    ],
)
def test_a_malformed_line_is_named_with_its_number(
    line: str, fragments: list[str], monkeypatch: Patch, tmp_path: Path, capsys: Capture
) -> None:
    """Alone it is told before anything is loaded; among others it has an error of its own."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n\n" + line + "\n", encoding="utf-8")
    assert main(["generate", "--file", str(file)]) == 2
    message = one_line(capsys)
    assert f"{file}:3" in message
    assert all(fragment in message for fragment in fragments), message
    file.write_text('{"prompt": "fine"}\n\n' + line + '\n{"prompt": "b"}\n', encoding="utf-8")
    decoder = use(monkeypatch, FakeDecoder(*(chunk(index, "o", done=True) for index in range(2))))
    assert main(["generate", "--file", str(file), "--json"]) == 1
    captured = capsys.readouterr()
    _, record, _ = (json.loads(made) for made in captured.out.splitlines())
    assert all(fragment in record["error"] for fragment in fragments), record
    assert len(decoder.inputs) == 2 and f"{file}:3: {record['error']}" in captured.err


def test_files_without_prompts_or_text_are_refused(tmp_path: Path, capsys: Capture) -> None:
    blank, binary = tmp_path / "blank.txt", tmp_path / "model.bin"
    blank.write_text("\n  \n", encoding="utf-8")
    binary.write_bytes(b"ab\xff")
    assert main(["generate", "--file", str(blank)]) == 2
    assert "holds no prompt" in one_line(capsys)
    assert main(["generate", "--file", str(binary)]) == 2
    assert "not UTF-8 text (byte 2)" in one_line(capsys)


def test_no_prompt_at_a_terminal_is_explained(monkeypatch: Patch, capsys: Capture) -> None:
    """Catches a command that seems to hang because it waits for typed input."""
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))
    assert main(["generate"]) == 2
    assert "--file" in one_line(capsys)


def test_debug_adds_the_traceback(capsys: Capture) -> None:
    assert main(["generate", "x", "--max-tokens", "0", "--debug"]) == 2
    error = capsys.readouterr().err
    assert "Traceback" in error
    assert error.splitlines()[-1] == "specdec: error: max_tokens is 0; it must be at least 1"


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: Patch) -> None:
    """Catches hiding bugs behind a friendly line."""
    use(monkeypatch, FakeDecoder(RuntimeError("bug")))
    with pytest.raises(RuntimeError, match="bug"):
        main(["generate", "x"])


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
            "question": "b",
            "answer": "c",
            "seed": 5,
            "max_new_tokens": 4,
            "text": "t",
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
    ]
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
        ' null}]}\n{"prompt": "b"}\n'
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


@pytest.mark.slow
def test_a_full_disk_and_a_closed_output_are_no_defects(tmp_path: Path) -> None:
    """Catches the traceback of `specdec ... > /full/disk` and of `specdec ... >&-`."""
    code = (
        "import sys; sys.argv[1:] = ['generate', 'x']; import tests.specdec.cli.test_main as t,"
        " specdec.session.decoder as d;"
        "d.SpecDecoder.from_pretrained = lambda *a, **o: t.FakeDecoder(t.chunk(0, 'A', done=True));"
        "from specdec.cli.main import main; sys.exit(main())"
    )
    with open("/dev/full", "w") as full:
        done = python(code, stdout=full)
    assert done.returncode == 2
    assert done.stderr.splitlines() == [
        "specdec: error: cannot write standard output: no space left on device; make room and run"
        " again"
    ]
    closed = f"import sys; sys.stdout = None; {code}"
    done = python(closed)
    assert (done.returncode, done.stderr.count("\n")) == (0, 1), done.stderr


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
        "phase",
        "schedule",
        "draft",
        "verify",
        "accept",
        "context",
        "total",
        "engine's own",
    ]
    assert rows["verify"] == ["2.000", "200.000", "50.0%"]
    assert rows["total"][:3] == ["4.000", "400.000", "100.0%"]
    assert rows["engine's own"][:3] == ["0.750", "75.000", "18.8%"]
