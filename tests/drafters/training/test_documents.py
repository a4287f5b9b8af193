"""Prompts about texts of earlier answers: what becomes a text, that each kind holds what it asks about, and what is refused."""

import json
import re
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from drafters.training.dataset import Answer
from drafters.training.documents import document_prompt, texts_of, write_documents
from drafters.training.prompts import read_prompts
from specdec.errors import InvalidInputError

PARAGRAPHS = [
    f"Paragraph number{i} tells of the wonderful things that happen in place{i}. " * 3 + f"It ends {i}." for i in range(60)
]
PROGRAM = "def double(x):\n    y = 2 * x\n    return y"
ANSWERS = [f"{text}\n\n```python\n{PROGRAM}  # {i}\n```\n\n* a list\n* of things" for i, text in enumerate(PARAGRAPHS)]


def test_texts_are_paragraphs_and_programs_each_once() -> None:
    """Catches lists, short lines and code among the paragraphs, and texts that occur twice."""
    paragraphs, programs = texts_of([*ANSWERS, *ANSWERS, "Too short.", "lower case " * 20 + "."])
    assert paragraphs == PARAGRAPHS
    assert [code for _, code in programs] == [f"{PROGRAM}  # {i}" for i in range(60)]
    assert {language for language, _ in programs} == {"python"}


def test_a_prompt_holds_what_it_asks_about() -> None:
    """Catches prompts without their text, questions about words of other texts, and a part that is not there."""
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
                assert ("first", "second", "third", "fourth", "fifth").index(ordinal[1]) < len(inside)
        if match := re.search(r"about (\w+)\?|about (\w+) above", prompt):
            assert (match[1] or match[2]) in inside[0]
        if match := re.search(r"Write (\w+) in place of (\w+)", prompt):
            assert match[1] != match[2]
            assert match[1] in inside[0]
    assert min(seen.values()) > 50
    assert len(seen) == 6
    assert document_prompt(texts, Random(1)) == document_prompt(texts, Random(1))


def test_the_file_is_one_of_prompts(tmp_path: Path) -> None:
    """Catches a file that `specdec train` does not read, prompts that occur twice, and texts drawn at high temperatures."""
    answers = [Answer([], [i], temperature=1.0 if i % 6 == 5 else 0.7) for i in range(len(ANSWERS))]

    def decode(ids: list[int]) -> str:
        return ANSWERS[ids[0]]

    out = tmp_path / "documents.jsonl"
    number = write_documents(answers, decode, 200, 5, out)  # type: ignore[arg-type]
    questions = [prompt.question for prompt in read_prompts(out)]
    assert len(questions) == len(set(questions)) == number
    assert not any(PARAGRAPHS[5] in question for question in questions)
    assert {"kind", "prompt"} == set(json.loads(out.read_text().splitlines()[0]))
    with pytest.raises(InvalidInputError, match="count is 0; ask for 1"):
        write_documents(answers, decode, 0, 5, out)  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="the answers hold 40 paragraphs, and 50 are needed"):
        write_documents(answers[:48], decode, 10, 0, out)  # type: ignore[arg-type]
