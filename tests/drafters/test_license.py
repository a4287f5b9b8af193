"""What is said of the license of a drafter, and where."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from drafters.fit import read_fit
from drafters.license import CARD, license_note
from drafters.load import load_drafter
from tests.drafters.tiny import HIDDEN, TARGET_LAYERS, VOCAB, FakeVerifier, write_tiny_dflash


@pytest.mark.parametrize(
    ("card", "config", "note"),
    [
        ("---\nlicense: apache-2.0\n---\n# A drafter", {}, None),
        ("---\nlicense: MIT\n---", {}, None),
        ("# no head", {}, None),
        (None, {}, None),
        (
            "---\nlicense: cc-by-nc-nd-4.0\n---",
            {},
            "its license is cc-by-nc-nd-4.0: it forbids commercial use and changed copies",
        ),
        (
            "---\nlicense: cc-by-nc-4.0\n---",
            {},
            "its license is cc-by-nc-4.0: it forbids commercial use",
        ),
        (
            "---\nlicense: fair-noncommercial-research-license\n---",
            {},
            "its license is fair-noncommercial-research-license: it forbids commercial use",
        ),
        ("---\nlicense: llama3.1\n---", {}, "its license is llama3.1: read its terms"),
        (
            "---\nlicense: other\nlicense_name: nvidia-open-model-license\n---",
            {},
            "its license is nvidia-open-model-license: read its terms",
        ),
        ("---\nlicense:\n- mit\n- gemma\n---", {}, "its license is gemma: read its terms"),
        (
            None,
            {"license": "cc-by-nd-4.0"},
            "its license is cc-by-nd-4.0: it forbids changed copies",
        ),
        ("---\nlicense: [\n---", {}, None),
        ("---\nlicense: 5\n---", {}, None),
        ("---\nlicense: [[mit]]\n---", {}, None),
        ("---\nlicense: 2024-01-01\n---", {}, None),
        ('---\nlicense: "a\\nb"\n---', {}, "its license is a b: read its terms"),
        ("---\nlicense: other\nlicense_name: [x]\n---", {}, "its license is other: read its terms"),
        ("---\n- license\n---", {"license": 3}, None),
        (
            "---\nlicense: true\n---",
            {"license": [1, "gemma"]},
            "its license is gemma: read its terms",
        ),
    ],
)
def test_note(card: str | None, config: dict[str, Any], note: str | None, tmp_path: Path) -> None:
    path = tmp_path / CARD
    if card is not None:
        path.write_text(card)
    assert license_note(path, config) == note


def test_it_is_said_when_a_drafter_is_loaded_and_by_doctor(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, in one line that names the drafter."""
    folder = write_tiny_dflash(tmp_path / "drafter")
    target = SimpleNamespace(
        name="tiny", hidden_size=HIDDEN, num_layers=TARGET_LAYERS, vocab_size=VOCAB
    )
    with caplog.at_level(logging.WARNING):
        load_drafter(folder, verifier=FakeVerifier())
        assert not caplog.messages and read_fit(str(folder), target).license is None
        (folder / CARD).write_text("---\nlicense: cc-by-nc-nd-4.0\n---\n")
        load_drafter(folder, verifier=FakeVerifier())
    note = "its license is cc-by-nc-nd-4.0: it forbids commercial use and changed copies"
    assert caplog.messages == [f"drafter {str(folder)!r}: {note}"]
    assert read_fit(str(folder), target).license == note
