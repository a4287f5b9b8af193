"""Loading targets from folders: whose code is run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.core import Verifier
from specdec.errors import UnsupportedModelError
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from verifiers.load import load_verifier

FOREIGN = "raise SystemExit('code of the repository was run')\n"
AUTO_MAP = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model", "AutoTokenizer": ["foreign.Tok", None]}


def load(folder: Path) -> Verifier:
    verifier, _ = load_verifier(str(folder), device=torch.device("cpu"), dtype=torch.float32)
    return verifier


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A tiny Llama that brings code of its own; whoever asks on standard input is heard."""
    plain_model("llama").save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "foreign.py").write_text(FOREIGN)
    change(tmp_path / "config.json", auto_map=AUTO_MAP)
    change(tmp_path / "tokenizer_config.json", auto_map=AUTO_MAP)

    asked: list[object] = []

    def answer(*words: object) -> str:
        asked.append(words)
        return "n"

    monkeypatch.setattr("builtins.input", answer)
    yield tmp_path
    assert not asked


def change(path: Path, **entries: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_code_beside_a_known_architecture_is_left_alone(folder: Path) -> None:
    """Transformers' own class is used, and nobody is asked."""
    assert load(folder).num_layers == plain_model("llama").config.num_hidden_layers


def test_an_architecture_of_foreign_code_is_refused(folder: Path) -> None:
    """With one line, and without a question on standard input."""
    change(folder / "config.json", model_type="never_heard_of", architectures=["Model"])
    with pytest.raises(UnsupportedModelError, match="need code from its repository, which is never run; use a checkpoint"):
        load(folder)
