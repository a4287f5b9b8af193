"""Finished samples on disk: what survives a kill, and what is refused."""

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from specdec.base.errors import InvalidInputError
from specdec.base.journal import Journal, made, settings_of
from specdec.base.metrics import AcceptanceStats
from specdec.session.outputs import GenerationResult
from tests.helpers.nodes import NULL, REFUSED, device, look

HEAD = '{"schema": "specdec-eval-journal", "settings": {"k": 1}}\n'


def test_records_survive_and_half_a_line_does_not(tmp_path: Path) -> None:
    """Catches a record that follows the half line of a killed run on the same line."""
    path = tmp_path / "plain.jsonl"
    journal = Journal(path, {"k": 1})
    journal.add("a", {"text": "one\u2028line"})
    journal.add("b", {"text": "two"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"key": "c", "te')
    again = Journal(path, {"k": 1})
    assert (len(again), again.get("a"), again.get("c")) == (2, {"text": "one\u2028line"}, None)
    again.add("c", {"text": "three"})
    assert Journal(path, {"k": 1}).get("c") == {"text": "three"}


def test_a_run_killed_within_its_first_line_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "plain.jsonl"
    path.write_text('{"schema": "specd', encoding="utf-8")
    journal = Journal(path, {"k": 1})
    journal.add("a", {"text": "one"})
    assert len(Journal(path, {"k": 1})) == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "specdec-eval-journal", "settings": {"k": 2}}\n', "was begun with k 2, not 1"),
        ('{"question": "a"}\n', "was not written by specdec eval"),
        # without an end of line, as of a killed run
        ('{"question": "a"}', "was not written by specdec eval"),
        ("a letter\nof two lines\n", "was not written by specdec eval; choose another place"),
        ("\ufeff" + HEAD, "was not written by specdec eval; choose another place"),
        (
            '{"schema": "specdec-eval-journal", "settings": {"k"\n',
            "plain.jsonl:1 is damaged .*; choose another place",
        ),
        (
            '{"schema": "specdec-eval-journal", "settings": [1]}\n',
            "was not written by specdec eval",
        ),
        (HEAD + '{"key": \n{"key": "b"}\n', "plain.jsonl:2 is damaged .*; delete that line"),
        (HEAD + "[" * 100_000 + "\n", "plain.jsonl:2 is damaged .*nested too deeply"),
        (HEAD + '{"text": "x"}\n', "plain.jsonl:2 holds no sample"),
        (HEAD + '{"key": ["x"]}\n', "plain.jsonl:2 holds no sample"),
        (HEAD + HEAD, "plain.jsonl:2 holds no sample"),
    ],
)
def test_other_settings_and_damage_are_refused(text: str, message: str, tmp_path: Path) -> None:
    """Catches mixing the answers of two models, and dropping finished samples without a word."""
    path = tmp_path / "plain.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError, match=message):
        Journal(path, {"k": 1})
    assert path.read_text(encoding="utf-8") == text


def test_a_journal_without_a_file_remembers(tmp_path: Path) -> None:
    journal = Journal(None, {})
    journal.add("a", {"text": "one"})
    assert journal.get("a") == {"text": "one"}


def test_half_a_line_is_kept_until_the_journal_is_taken(tmp_path: Path) -> None:
    """A run with other settings, which is refused, cuts nothing."""
    path = tmp_path / "plain.jsonl"
    path.write_text(HEAD + '{"key": "a"}\n{"key": "b", ')
    with pytest.raises(InvalidInputError, match="was begun with k 1, not 2"):
        Journal(path, {"k": 2})
    assert path.read_text().endswith('"b", ')
    assert len(Journal(path, {"k": 1})) == 1 and path.read_text() == HEAD + '{"key": "a"}\n'


def test_two_runs_share_a_journal(tmp_path: Path) -> None:
    """Begun at once, it has one head, and each run's records."""
    one, other = (Journal(tmp_path / "x", {"k": 1}) for _ in range(2))
    one.add("a", {"text": "1"})
    other.add("b", {"text": "2"})
    assert len(Journal(tmp_path / "x", {"k": 1})) == 2


@pytest.mark.parametrize("kind", REFUSED)
def test_what_keeps_no_records_is_refused_at_once(kind: str, tmp_path: Path) -> None:
    """Catches a FIFO that is read before it is written, which waits for ever."""
    REFUSED[kind](tmp_path / "x")
    before = look(tmp_path)
    for begin in (settings_of, lambda path: Journal(path, {})):
        with pytest.raises(InvalidInputError, match=f"cannot write .*{kind}"):
            begin(tmp_path / "x")
    assert look(tmp_path) == before


def test_a_device_is_told_records_and_never_asked(tmp_path: Path) -> None:
    device(tmp_path / "null", NULL)
    before = look(tmp_path)
    journal = Journal(tmp_path / "null", {"k": 1})
    journal.add("a", {"text": "one"})
    assert settings_of(tmp_path / "null") == {} and look(tmp_path) == before and len(journal) == 1


def test_a_pipe_gets_one_line_per_record(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    Journal(Path(f"/dev/fd/{writer}"), {"k": 1}).add("a", {"text": "one"})
    assert json.loads(os.read(reader, 1000)) == {"key": "a", "text": "one"}
    os.close(reader)
    os.close(writer)


RESULT = GenerationResult(
    [1, 4],
    "ab",
    [2, 3],
    "stop",
    logprobs=[-0.5, -float("inf")],
    top_logprobs=[{7: -0.1, 2: -0.5}, {}],
    prompt_top_logprobs=[None, {4: -0.25}],
    stats=AcceptanceStats([3], [1], [2]),
)


def changed(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda result: result.update(fields)


ODD: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "a field of a later version": (changed(novel=1), "novel is a JSON int"),
    "a field that is gone": (lambda result: result.pop("text"), "text"),
    "text": (changed(text=5), "text is a JSON int"),
    "no text": (changed(text=None), "text is a JSON NoneType"),
    "tokens": (changed(token_ids=[1, "a"]), "token_ids is a JSON list"),
    "no list": (changed(token_ids="ab"), "token_ids is a JSON str"),
    "a flag": (changed(seed=True), "seed is a JSON bool"),
    "logprobs": (changed(logprobs={"a": 1}), "logprobs is a JSON dict"),
    "a likely token": (changed(top_logprobs=[{"x": -0.5}]), "invalid literal"),
    "stats": (changed(stats=5), "AcceptanceStats is a JSON int"),
    "parts of stats": (changed(stats={"num_drafted": [1.5]}), "num_drafted is a JSON list"),
    "a count that takes all memory": (
        changed(stats=asdict(AcceptanceStats([3], [1], [2], tree_sizes=[10**19]))),
        r"tree_sizes holds 10000000000000000000; it must lie in \[0, 65536\)",
    ),
    "a part that is none": (
        changed(stats=asdict(AcceptanceStats([3], [1], [2], parts=[-2]))),
        r"parts holds -2; it must lie in \[-1, 65536\)",
    ),
    "stats of other lengths": (
        changed(stats={"num_drafted": [1], "num_accepted": [1, 2]}),
        "statistics are of",
    ),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_record_of_other_fields_or_types_is_one_line(kind: str, tmp_path: Path) -> None:
    """As of another version of specdec, or of a file that was edited."""
    result = json.loads(json.dumps(asdict(RESULT)))
    change, message = ODD[kind]
    change(result)
    (tmp_path / "x").write_text(HEAD + json.dumps({"key": "a", "results": [result]}) + "\n")
    journal = Journal(tmp_path / "x", {"k": 1})
    with pytest.raises(
        InvalidInputError,
        match=rf"x:2 is damaged, or of another version.*{message}.*delete that line",
    ):
        journal.read("a", lambda record: made(GenerationResult, record["results"][0]))


@pytest.mark.parametrize(
    "record", [{}, {"results": []}, {"results": 5}, {"results": [5]}, {"results": None}]
)
def test_a_record_without_results_is_one_line(record: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "x").write_text(HEAD + json.dumps({"key": "a", **record}) + "\n")
    with pytest.raises(InvalidInputError, match="x:2 is damaged, or of another version"):
        Journal(tmp_path / "x", {"k": 1}).read(
            "a", lambda found: made(GenerationResult, found["results"][0])
        )


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    """Infinite log-probabilities and fields with defaults that an earlier version lacked
    included.
    """
    record = {"results": [asdict(RESULT)]}
    del record["results"][0]["num_cached_tokens"]
    Journal(tmp_path / "x", {"k": 1}).add("a", record)
    journal = Journal(tmp_path / "x", {"k": 1})
    assert journal.read("a", lambda found: made(GenerationResult, found["results"][0])) == RESULT
    assert journal.read("b", lambda found: found) is None
