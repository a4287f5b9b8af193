"""Every option that names an output, against everything that a path may lead to; and the process's
own streams.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from drafters.ngram import load_ngram
from evals.bench.command import _answers_file
from evals.report.report import new_report, write_report
from specdec.base.config import EngineConfig
from specdec.cli.main import main
from specdec.session.decoder import SpecDecoder
from tests.drafters.tiny import write_tiny_dflash
from tests.evals.tiny import tiny_decoder
from tests.helpers.nodes import NULL, REFUSED, device, look, mounted
from tests.helpers.waiting import HANG

Capture = pytest.CaptureFixture[str]

TINY = "--limit 1 --max-tokens 4 --repeats 1 --warmup 0 --drafter ngram -k 2 --raw"


def words(text: str, *more: str) -> list[str]:
    return [*text.split(), *more]


Made = Callable[[str, Path], list[str]]
FILES: dict[str, Made] = {
    "generate --out": lambda out, _: words(
        "generate abc --max-tokens 4 --drafter ngram --out", out
    ),
    "bench --out": lambda out, _: words(f"bench {TINY} --out", out),
    "bench --html": lambda out, _: words(f"bench {TINY} --html", out),
    "bench show --html": lambda out, folder: [
        *("bench", "show", str(small_report(folder)), "--html", out)
    ],
    "profile --trace": lambda out, _: words(
        "profile --context 8 --steps 2 --drafter ngram --trace", out
    ),
}
ONLY_REFUSED: dict[str, Made] = {
    "eval --html": lambda out, _: words("eval --tasks bundled --html", out),
    "bench --dummy-weights --out": lambda out, _: words(
        "bench --dummy-weights qwen3-8b --out", out
    ),
}
"""What takes long to reach its end."""

FOLDERS: dict[str, Made] = {
    "eval --out": lambda out, _: words("eval --tasks bundled --out", out),
    "train --out": lambda out, _: words("train --prompts x.txt --out", out),
    "convert": lambda out, folder: [
        *("convert", str(write_tiny_dflash(folder / "drafter")), out, "--to", "z-lab")
    ],
}


def small_report(folder: Path) -> Path:
    report = new_report("specdec-bench", PROVENANCE, {"repeats": 1, "prompt_sets": []})
    write_report(report | {"complete": True, "bandwidth": 1e9, "rows": []}, folder / "report.json")
    return folder / "report.json"


PROVENANCE: dict[str, Any] = {
    "command": "specdec bench", "started": "2026", "commit": None,
    "versions": {"specdec": "0", "torch": "0", "transformers": "0"},
    "device": "d", "num_threads": 1, "dtype": "float32", "attention": "a", "drafters": {},
    "target": {"name": "t", "revision": None, "sha256": {}},
}  # fmt: skip


@pytest.fixture
def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        SpecDecoder, "from_pretrained", lambda *args, **options: pytest.fail("the model was loaded")
    )


@pytest.fixture
def loads_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(target: str, *, drafter: str | None = None, **options: Any) -> SpecDecoder:
        plain = tiny_decoder()
        if drafter is None:
            return plain
        ngram = load_ngram(None, verifier=plain.verifier)
        return SpecDecoder(
            plain.verifier, plain.tokenizer, ngram, EngineConfig(max_num_seqs=1, max_model_len=512)
        )

    monkeypatch.setattr(SpecDecoder, "from_pretrained", load)
    monkeypatch.setattr("evals.report.provenance.provenance", lambda *args: PROVENANCE)


def one_line(capsys: Capture) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("specdec: error: "), error
    return error


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("option", FILES | ONLY_REFUSED)
def test_what_is_no_file_is_refused_before_the_work(
    option: str, kind: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / "x"
    REFUSED[kind](path)
    before = look(tmp_path / "out")
    assert main((FILES | ONLY_REFUSED)[option](str(path), tmp_path)) == 2
    assert kind in one_line(capsys) and look(tmp_path / "out") == before


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize(
    "kind", ["a FIFO", "a socket", "a device", "a file", "a long name", "symbolic links"]
)
@pytest.mark.parametrize("option", FOLDERS)
def test_what_is_no_folder_is_refused_before_the_work(
    option: str, kind: str, tmp_path: Path, capsys: Capture
) -> None:
    (tmp_path / "out").mkdir()
    path = tmp_path / "out" / ("x" * 300 if kind == "a long name" else "x")
    own: dict[str, Callable[[Path], object]] = {
        "a device": lambda path: device(path, NULL),
        "a file": lambda path: path.write_text("kept"),
        "a long name": lambda path: None,
    }
    (own | REFUSED)[kind](path)
    before = look(tmp_path / "out")
    assert main(FOLDERS[option](str(path), tmp_path)) == 2
    one_line(capsys)
    assert look(tmp_path / "out") == before


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("option", FILES | ONLY_REFUSED)
@pytest.mark.parametrize("name", ["x" * 300, "no/folder/x", "report.json/x", "/proc/x"])
def test_names_that_cannot_be_written_are_refused_before_the_work(
    option: str, name: str, tmp_path: Path, capsys: Capture
) -> None:
    small_report(tmp_path)
    assert main((FILES | ONLY_REFUSED)[option](str(tmp_path / name), tmp_path)) == 2
    one_line(capsys)


@pytest.mark.usefixtures("loads_tiny")
@pytest.mark.parametrize("option", FILES)
def test_a_device_a_link_and_a_mounted_file_are_written_and_stay(
    option: str, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "link").symlink_to("target")
    (out / "mount").touch()
    device(out / "null", NULL)
    for name in ("link", "null"):
        assert main(FILES[option](str(out / name), tmp_path)) == 0
    with mounted(out / "mount"):
        assert main(FILES[option](str(out / "mount"), tmp_path)) == 0
    assert (out / "link").is_symlink() and (out / "null").is_char_device()
    assert (out / "target").stat().st_size and (out / "outside").stat().st_size
    assert {one.name for one in out.iterdir()} == {"link", "target", "mount", "outside", "null"}


@pytest.mark.usefixtures("loads_tiny")
@pytest.mark.parametrize("option", ["generate --out", "bench --out"])
def test_a_pipe_is_told_what_a_file_would_hold(option: str, tmp_path: Path) -> None:
    """As `--out /dev/stdout | ...` and `--out >(...)`; of a report, the complete one alone."""
    with (tmp_path / "told").open("w+") as file:
        # a file is written after each
        parts = [] if option == "generate --out" else ["--temperature", "0", "1"]
        assert main([*FILES[option](f"/dev/fd/{file.fileno()}", tmp_path), *parts]) == 0
    told = json.loads((tmp_path / "told").read_text())
    assert told["results" if option == "generate --out" else "rows"]


NAMED_TWICE = {
    "a report and its page": "bench --out OUT --html OUT",
    "data and a report": "bench --sets own --data own=OUT --out OUT",
    "a shape and its report": "bench --dummy-weights OUT --out OUT",
    "a report and the page of it": "bench show OUT --html OUT",
    "data and a page": "eval --tasks gsm8k --data gsm8k=OUT --html OUT",
}


@pytest.mark.usefixtures("loads_nothing")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("kind", NAMED_TWICE)
def test_an_output_in_place_of_another_file_of_the_command_is_refused(
    kind: str, linked: bool, tmp_path: Path, capsys: Capture
) -> None:
    """Catches a user's data, or a report of hours, overwritten by what came of it."""
    file, link = tmp_path / "file.json", tmp_path / "link"
    file.write_text("kept")
    link.symlink_to(file)
    *others, last = NAMED_TWICE[kind].replace("OUT", str(file)).split()
    assert main([*others, str(link) if linked else last]) == 2
    assert "named for two things" in one_line(capsys) and file.read_text() == "kept"


def test_answers_are_kept_beside_a_report_and_beside_no_device(tmp_path: Path) -> None:
    device(tmp_path / "null", NULL)
    assert _answers_file(str(tmp_path / "null")) is None and _answers_file(None) is None
    assert _answers_file(str(tmp_path / "a.json")) == tmp_path / "a.answers.jsonl"


ODD_ROWS: list[Any] = [5, [5], [{}], {"a": 1}, None, "ab"]
REPORTS = {
    "deep": "[" * 100_000,
    "NaN": '{"schema": NaN}',
    "a list": "[1]",
    "another schema": '{"schema": ["specdec-bench"]}',
    **{
        f"rows {value}": json.dumps(
            {
                "schema": "specdec-bench",
                "schema_version": 2,
                "provenance": {},
                "settings": {},
                "complete": True,
                "rows": value,
            }
        )
        for value in ODD_ROWS
    },
}


@pytest.mark.parametrize("action", ["show", "compare"])
@pytest.mark.parametrize("kind", REPORTS)
def test_reports_that_nobody_wrote_are_one_line(
    kind: str, action: str, tmp_path: Path, capsys: Capture
) -> None:
    path = tmp_path / "report.json"
    path.write_text(REPORTS[kind])
    assert main(["bench", action, *[str(path)] * (1 if action == "show" else 2)]) == 2
    assert str(path) in one_line(capsys)


def run(
    arguments: list[str], redirected: str = "", **environment: str
) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with standard streams as a shell redirects them."""
    given = {"PYTHONPATH": str(Path(__file__).parents[3]), **os.environ, **environment}
    words = [sys.executable, "-m", "specdec", *arguments]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirected}', "sh", *words],
        env=given,
        capture_output=True,
        text=True,
        timeout=HANG,
    )


@pytest.mark.parametrize(
    ("redirected", "message"),
    [
        ("<&-", "standard input is empty"),
        ("0> {out}", "cannot read standard input: "),
        ("<&- >&-", "standard input is empty"),
        ("<&- >&- 2>&-", ""),
    ],
)
def test_standard_input_that_cannot_be_read_is_one_line(
    redirected: str, message: str, tmp_path: Path
) -> None:
    done = run(["generate"], redirected.format(out=tmp_path / "x"))
    assert (
        done.returncode == 2 and done.stderr.count("\n") == bool(message) and message in done.stderr
    ), done.stderr


@pytest.mark.parametrize(
    ("redirected", "status", "message"),
    [
        ("1< {report}", 2, "cannot write standard output: bad file descriptor"),
        (">&-", 0, ""),
        ("2>&-", 0, ""),
        ("<&- >&- 2>&-", 0, ""),
    ],
)
def test_streams_that_are_closed(
    redirected: str, status: int, message: str, tmp_path: Path
) -> None:
    """Catches a page that becomes standard output because it is the next file,
    and is printed into.
    """
    page = tmp_path / "page.html"
    report = str(small_report(tmp_path))
    done = run(["bench", "show", report, "--html", str(page)], redirected.format(report=report))
    assert (
        done.returncode == status and message in done.stderr and "Traceback" not in done.stderr
    ), done.stderr
    assert page.read_text().rstrip().endswith("</html>")


def test_an_error_that_nobody_can_read_keeps_its_status(tmp_path: Path) -> None:
    device(tmp_path / "full", os.makedev(1, 7))
    assert run(["bench", "show", "missing"], f"2> {tmp_path / 'full'}").returncode == 2


@pytest.mark.parametrize(
    "variables",
    [
        {"WORLD_SIZE": "abc", "RANK": "0"},
        {"WORLD_SIZE": "2", "RANK": "-1"},
        {"WORLD_SIZE": "2", "RANK": "x"},
    ],
)
@pytest.mark.parametrize("verb", ["generate", "train"])
def test_odd_variables_of_torchrun_are_one_line(
    verb: str, variables: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main([verb, "x"]) == 2
    assert "; torchrun sets it to a number" in one_line(capsys)


@pytest.mark.usefixtures("loads_tiny")
@pytest.mark.parametrize(
    "variables",
    [{"WORLD_SIZE": "", "RANK": "0"}, {"WORLD_SIZE": "2", "RANK": ""}, {"WORLD_SIZE": "abc"}],
)
def test_empty_variables_of_torchrun_are_missing_ones(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["generate", "abc", "--max-tokens", "2", "--drafter", "ngram"]) == 0


def test_deep_config_files_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    for name, text in (
        ("a.json", "[" * 100_000),
        ("a.json", '{"lr": NaN}'),
        ("a.toml", "a = " + "[" * 100_000),
    ):
        (tmp_path / name).write_text(text)
        assert (
            main(["train", "--config", str(tmp_path / name), "--out", str(tmp_path / "run")]) == 2
        )
        assert str(tmp_path / name) in one_line(capsys)
