"""The command line as a user meets it: what it accepts, and how it fails."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec import __version__
from specdec.base.errors import SpecDecError
from specdec.base.registry import VERBS
from specdec.cli.main import _parser_of, main
from tests.evals.tiny import save_tiny
from tests.specdec.cli.fake_decoder import FakeDecoder, chunk, one_line, python, use

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


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


def test_no_option_is_given_nothing() -> None:
    """As by a variable that is not set; catches one that is taken for left out, or for '.'."""
    taken, needed = (
        set(),
        {"convert": ["a", "b", "--to", "z-lab"], "couple": ["a", "--prompts", "b"]},
    )
    for verb in VERBS:
        for action in _parser_of(verb.name)[1]._actions:
            if action.option_strings and action.nargs != 0 and action.metavar:
                try:
                    given = [*needed.get(verb.name, []), action.option_strings[-1], ""]
                    _parser_of(verb.name)[1].parse(given)
                    taken.add(action.option_strings[-1])
                except SpecDecError as error:
                    assert f"{action.option_strings[-1]} is empty; give " in str(error)
    assert taken <= {
        *("--system", "--stop", "--chat-template-kwargs", "--served-model-name", "--prompts"),
        *("--allowed-hosts", "--allowed-origins"),
    }


@pytest.mark.parametrize(
    ("arguments", "fragments"),
    [
        (["bench", "show", ""], ["the path is empty; name a file or a folder"]),
        (["convert", "smollm2-dflash", "", "--to", "speculators"], ["FOLDER is empty; give one"]),
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
    for name in ("a.csv", "a.TSV", "a.json", "a.yml"):  # whose lines are no prompts
        (tmp_path / name).write_text("prompt")
        assert main(["generate", "--file", str(tmp_path / name)]) == 2
        assert "no text with a prompt per line by its name; --file takes" in one_line(capsys)


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


def test_what_is_chosen_for_two_models_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = str(save_tiny(tmp_path))
    shared = ["--device", "cpu", "--max-tokens", "2", "--kv-memory", "4M", "--raw"]
    for drafter in ("none", model):
        caplog.clear()
        assert main(["generate", "abc", "--model", model, "--drafter", drafter, *shared]) == 0
        assert caplog.text.count("attention torch_ref") == 1, drafter
