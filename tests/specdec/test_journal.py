"""Finished samples on disk: what survives a kill, and what is refused."""

from pathlib import Path

import pytest

from specdec.errors import InvalidInputError
from specdec.journal import Journal


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
        ('{"question": "a"}', "was not written by specdec eval"),  # without an end of line, as of a killed run
        ('{"schema": "specdec-eval-journal", "settings": {"k": 1}}\n{"key": \n{"key": "b"}\n', "plain.jsonl:2 is damaged"),
        ('{"schema": "specdec-eval-journal", "settings": {"k": 1}}\n{"text": "x"}\n', "plain.jsonl:2 holds no sample"),
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
