"""Prompts about texts of earlier answers: what each kind holds, what is refused."""

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from drafters.training.config import TrainConfig
from drafters.training.data import documents
from drafters.training.data.dataset import read_answers
from drafters.training.data.documents import answers_of, document_prompt, documents_run, texts_of
from drafters.training.data.prompts import read_prompts
from drafters.training.stages import run_stages
from specdec.base.errors import InvalidInputError
from tests.drafters.training.toy import toy_config

PARAGRAPHS = [
    f"Paragraph number{i} tells of the wonderful things that happen in place{i}. " * 3
    + f"It ends {i}."
    for i in range(60)
]
PROGRAM = "def double(x):\n    y = 2 * x\n    return y"
ANSWERS = [
    f"{text}\n\n```python\n{PROGRAM}  # {i}\n```\n\n* a list\n* of things"
    for i, text in enumerate(PARAGRAPHS)
]


def test_texts_are_paragraphs_and_programs_each_once() -> None:
    """Catches lists, short lines and code among the paragraphs, and texts that occur twice."""
    paragraphs, programs = texts_of([*ANSWERS, *ANSWERS, "Too short.", "lower case " * 20 + "."])
    assert paragraphs == PARAGRAPHS
    assert [code for _, code in programs] == [f"{PROGRAM}  # {i}" for i in range(60)]
    assert {language for language, _ in programs} == {"python"}


def test_a_prompt_holds_what_it_asks_about() -> None:
    """Catches prompts without their text, other texts' words, and absent parts."""
    texts = texts_of(ANSWERS)
    seen: Counter[str] = Counter()
    for seed in range(600):
        kind, prompt = document_prompt(texts, Random(seed))
        seen[kind] += 1
        if kind == "code":
            assert "def double(x):\n" in prompt
            continue
        inside = [text for text in PARAGRAPHS if text in prompt]
        assert inside
        if kind == "copy":
            quoted = re.search(r"""words ['"](.+?)['"]|ends with '(.+?)'""", prompt)
            ordinal = re.search(r"Repeat the (\w+) part", prompt)
            if quoted:
                assert any((quoted[1] or quoted[2]) in text for text in inside)
            else:
                assert ordinal is not None
                assert ("first", "second", "third", "fourth", "fifth").index(ordinal[1]) < len(
                    inside
                )
        if match := re.search(r"about (\w+)\?|about (\w+) above", prompt):
            assert (match[1] or match[2]) in inside[0]
        if match := re.search(r"Write (\w+) in place of (\w+)", prompt):
            assert match[1] != match[2]
            assert match[1] in inside[0]
    assert min(seen.values()) > 50
    assert len(seen) == 6
    assert document_prompt(texts, Random(1)) == document_prompt(texts, Random(1))


def toy_run(folder: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> TrainConfig:
    """A run whose target writes no paragraphs, so that the answers' tokens stand for some."""
    paragraphs = [f"w{10 + i // 8} w{20 + i % 8} w{30 + i % 7}" for i in range(64)]
    monkeypatch.setattr(
        documents, "texts_of", lambda answers: (sorted(set(paragraphs[: len(answers)])), [])
    )
    values: dict[str, Any] = {
        "max_tokens": 6,
        "heldout": 3,
        "shard_size": 64,
        "max_prompts": 70,
        "temperatures": (0.0, 1.0),
    }
    return toy_config(folder, **values | {"documents": 40} | changes)


def test_a_run_answers_prompts_about_its_own_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches prompts that are not asked, occur twice or change when the run goes on; held-out ones
    that are trained on; and answers that training does not read.
    """
    config = toy_run(tmp_path, monkeypatch)
    assert run_stages(("answers",), config)
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.json*")}
    about = documents_run(config)
    asked = [prompt.question for prompt in read_prompts(about.prompts[0])]
    assert len(asked) == len(set(asked)) > 30
    counts = {
        split: len(read_answers(about.folder / "answers", split)) for split in ("train", "heldout")
    }
    assert counts == {"train": 2 * (len(asked) - 3), "heldout": 6}
    for split, number in counts.items():
        assert len(answers_of(config, split)) == number + len(
            read_answers(config.folder / "answers", split)
        )
        assert len(answers_of(replace(config, documents=0), split)) == len(
            read_answers(config.folder / "answers", split)
        )
    assert run_stages(("answers",), config)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    with pytest.raises(
        InvalidInputError, match="holds answers that were written with another prompts"
    ):
        run_stages(("answers",), replace(config, documents=30))


def test_texts_are_those_of_likely_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches texts that were drawn at high temperatures, and too few of them."""
    config = toy_run(tmp_path, monkeypatch, temperatures=(0.0, 0.9), max_prompts=50)
    with pytest.raises(
        InvalidInputError,
        match="the answers hold 47 paragraphs, and 50 are needed for documents; ask for more",
    ):
        run_stages(("answers",), config)
