"""Loading targets from folders: whose code is run."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.base.errors import UnsupportedModelError
from specdec.model.core import Verifier
from tests.helpers.hub_cache import cached, offline
from tests.helpers.tiny_models import plain_model, tiny_tokenizer
from verifiers.load import load_verifier
from verifiers.weights.tokenizer import load_tokenizer, tokenizer_reasons

FOREIGN = "raise SystemExit('code of the repository was run')\n"
AUTO_MAP = {
    "AutoConfig": "foreign.Config",
    "AutoModelForCausalLM": "foreign.Model",
    "AutoTokenizer": ["foreign.Tok", None],
}


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
    with pytest.raises(
        UnsupportedModelError,
        match="need code from its repository, which is never run; use a checkpoint",
    ):
        load(folder)


OF_KIMI = {
    "tokenizer_class": "TikTokenTokenizer",
    "auto_map": {"AutoTokenizer": ["foreign.TikTokenTokenizer", None]},
}


def with_ranks(folder: Path, file: str, **stated: Any) -> None:
    """Leaves tiktoken's file alone of the tokenizer."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps(stated))
    (folder / file).write_text("IQ== 0\nIg== 1\nIyM= 2\n")


@pytest.mark.parametrize("model_type", ["llama", "deepseek_v3", "qwen3"])
@pytest.mark.parametrize(
    ("file", "stated", "reason"),
    [
        (
            "tiktoken.model",
            OF_KIMI,
            "is TikTokenTokenizer, code from its repository, which is never run; put a"
            " tokenizer.json",
        ),
        (
            "tiktoken.model",
            {},
            "is tiktoken.model of tiktoken alone, which does not say where text is split; put a"
            " tokenizer.json",
        ),
        (
            "qwen.tiktoken",
            {"tokenizer_class": "QWenTokenizer"},
            "is QWenTokenizer, code from its repository",
        ),
        (
            "tokenizer.model",
            {"tokenizer_class": "LlamaTokenizer"},
            "is tokenizer.model of tiktoken alone",
        ),
    ],
)
def test_a_tokenizer_whose_files_do_not_say_how_text_is_split(
    folder: Path, model_type: str, file: str, stated: dict[str, Any], reason: str
) -> None:
    """Transformers would take a pattern that is none of the model's; whatever the model's type."""
    with_ranks(folder, file, **stated)
    change(folder / "config.json", model_type=model_type)
    with pytest.raises(UnsupportedModelError, match=f"the tokenizer of target .* {reason}"):
        load_tokenizer(str(folder))


def test_a_whole_tokenizer_beside_foreign_code(folder: Path) -> None:
    """The way out that the line names."""
    expected = tiny_tokenizer()
    (folder / "tiktoken.model").write_text("IQ== 0\n")
    for model_type in ("llama", "kimi_k2", "kimi_k25"):
        change(folder / "config.json", model_type=model_type)
        change(folder / "tokenizer_config.json", **OF_KIMI)
        read = load_tokenizer(folder)
        assert read("helloWorld 12").input_ids == expected("helloWorld 12").input_ids
        assert read.eos_token_id == expected.eos_token_id


def test_the_tokenizer_of_a_repository_in_the_cache_is_looked_at(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path_factory.mktemp("cache")
    cached(cache, "acme/whole", folder)
    with_ranks(folder, "tiktoken.model", **OF_KIMI)
    cached(cache, "acme/ranks", folder)
    offline(monkeypatch, cache)
    assert tokenizer_reasons("acme/whole") == []
    (reason,) = tokenizer_reasons("acme/ranks")
    assert reason.startswith("its tokenizer is TikTokenTokenizer, code from its repository")
    with pytest.raises(UnsupportedModelError, match="TikTokenTokenizer, code"):
        load_tokenizer("acme/ranks")
