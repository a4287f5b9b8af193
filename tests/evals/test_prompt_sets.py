"""Prompt sets: the bundled problems, local files, and what is said about bad ones."""

import re
from pathlib import Path
from typing import Any

import pytest

from evals.manual_prompts import MANUAL_KINDS
from evals.prompt_sets import SET_NAMES, load_prompt_set, read_bundled
from specdec.base.errors import InvalidInputError
from tests.evals.tiny import write_jsonl


def test_bundled_problems_are_many_distinct_and_have_numeric_answers() -> None:
    """Catches a set that shrinks, repeats itself, or holds an answer that no filter would find."""
    problems = read_bundled()["problems"]
    assert len(problems) >= 48
    assert len({problem["question"] for problem in problems}) == len(problems)
    assert len({problem["id"] for problem in problems}) == len(problems)
    assert all(str(int(problem["answer"])) == problem["answer"] for problem in problems)
    assert all(
        example["solution"].endswith(f"#### {example['answer']}")
        for example in read_bundled()["examples"]
    )


def test_bundled_programs_print_the_stored_answers(capsys: pytest.CaptureFixture[str]) -> None:
    """Catches a wrong answer key for the problems that carry their own proof."""
    programs = [
        problem for problem in read_bundled()["problems"] if "```python" in problem["question"]
    ]
    assert len(programs) >= 8
    for problem in programs:
        exec(problem["question"].split("```python\n")[1].split("```")[0], {})
        assert capsys.readouterr().out.strip() == problem["answer"], problem["id"]


@pytest.mark.parametrize(
    ("name", "row", "turns", "answer"),
    [
        ("gsm8k", {"question": "q?", "answer": "so\n#### 7"}, ("q?",), "7"),
        ("mt-bench", {"question_id": 81, "turns": ["one", "two"]}, ("one", "two"), None),
        ("mt-bench", {"prompt": ["one", "two"]}, ("one", "two"), None),
        ("mine", {"turns": ["one", "two", "three"]}, ("one", "two", "three"), None),
        ("mine", {"problem": "p", "answer": "3"}, ("p",), "3"),
        ("mine", {"turns": None, "prompt": None, "question": "q"}, ("q",), None),
    ],
)
def test_rows_of_local_files_become_turns(
    name: str, row: dict[str, Any], turns: tuple[str, ...], answer: str | None, tmp_path: Path
) -> None:
    """Catches the second turn of mt-bench getting lost, and answers with their worked solution."""
    prompts = load_prompt_set(name, files={name: str(write_jsonl(tmp_path / "rows.jsonl", [row]))})
    assert prompts.items[0].turns == turns
    assert prompts.items[0].answer == answer
    assert prompts.num_turns == len(turns)


def test_fields_that_mean_nothing_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a set of one's own; those of public sets are known."""
    row = {"question": "?", "context": "a text", "id": "1", "input": "", "system": "s"}
    file = str(write_jsonl(tmp_path / "rag.jsonl", [row]))
    load_prompt_set("rag", files={"rag": file})
    assert caplog.messages == [f"{file}: these fields are not read: context, system"]
    load_prompt_set("gsm8k", files={"gsm8k": file})
    assert len(caplog.messages) == 1
    both = {"question": "What?", "prompt": "Say what.", "problem": None}
    load_prompt_set("own", files={"own": str(write_jsonl(tmp_path / "own.jsonl", [both]))})
    assert caplog.messages[1].endswith("own.jsonl: these fields are not read: question")


@pytest.mark.parametrize(
    ("name", "row", "lacking"),
    [
        ("mt-bench", {"prompt": "Hello"}, "a list of prompt"),
        ("mt-bench", {"turns": "Hello"}, "a list of turns"),
        ("mine", {"turns": "Hello"}, "a list of turns"),
        ("mbpp", {"text": "Write f.", "test_list": "assert f()"}, "a list of test_list"),
    ],
)
def test_a_text_is_no_list_of_its_characters(
    name: str, row: dict[str, Any], lacking: str, tmp_path: Path
) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(InvalidInputError, match=f"it lacks {lacking} "):
        load_prompt_set(name, files={name: file})


def test_categories_are_kept_and_rows_taken_of_each(tmp_path: Path) -> None:
    """Spec-Bench's shape, and SPEED-Bench's as its own program writes it; catches a category that
    is dropped, and the first category alone.
    """
    rows: list[dict[str, Any]] = [
        {"question_id": 81, "category": "writing", "turns": ["one", "two"]},
        {"question_id": 82, "category": "writing", "turns": ["three", "four"]},
        {"question_id": "9f", "category": "qa", "sub_category": None, "turns": ["five"]},
        {
            "question_id": "a0",
            "category": "qa",
            "messages": [{"role": "user", "content": turn} for turn in ("six", "seven")],
        },
    ]
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    prompts = load_prompt_set("spec", files={"spec": file})
    assert prompts.tasks == ["writing", "writing", "qa", "qa"]
    assert [item.item_id for item in prompts.items] == ["81", "82", "9f", "a0"]
    assert prompts.items[3].turns == ("six", "seven")
    first = load_prompt_set("spec", files={"spec": file}, per_category=1)
    assert [item.item_id for item in first.items] == ["81", "9f"]
    mt_bench = load_prompt_set("mt-bench", files={"mt-bench": file}, limit=2)
    assert mt_bench.tasks == ["writing", "writing"]


@pytest.mark.parametrize(
    ("row", "options", "message"),
    [
        (
            {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"], "category": "a"},
            {},
            "rows.jsonl:1 holds a placeholder",
        ),
        ({"turns": ["a"], "category": 3}, {}, "category 3"),
        ({"turns": ["a"]}, {"per_category": 2}, "has no categories to take 2 rows of each from"),
        ({"turns": ["a"], "category": "a"}, {"per_category": 0}, "per_category is 0"),
        (
            {"messages": [{"role": "system", "content": "a"}]},
            {},
            "messages have a turn of 'system'",
        ),
        ({"messages": ["a"]}, {}, "lacks a list of messages"),
        ({"messages": [{"role": "user"}]}, {}, "lacks content"),
    ],
)
def test_rows_of_benchmarks_that_cannot_be_asked_are_refused(
    row: dict[str, Any], options: dict[str, int], message: str, tmp_path: Path
) -> None:
    file = str(write_jsonl(tmp_path / "rows.jsonl", [row]))
    with pytest.raises(InvalidInputError, match=re.escape(message)):
        load_prompt_set("mine", files={"mine": file}, **options)


@pytest.mark.parametrize(
    ("name", "row", "expected"),
    [
        ("math500", {"problem": "What is 1+1?"}, "What is 1+1?"),
        ("humaneval", {"prompt": "def f():\n"}, "def f():\n"),
        ("mbpp", {"text": "Write f.", "test_list": ["assert f() == 1"]}, "assert f() == 1"),
    ],
)
def test_instructions_keep_the_text_of_the_row(
    name: str, row: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    prompts = load_prompt_set(name, files={name: str(write_jsonl(tmp_path / "rows.jsonl", [row]))})
    assert expected in prompts.items[0].turns[0]


def test_hash_follows_the_prompts(tmp_path: Path) -> None:
    """Catches reports of different prompts that look comparable."""
    one = load_prompt_set(
        "x",
        files={"x": str(write_jsonl(tmp_path / "one.jsonl", [{"prompt": "a"}, {"prompt": "b"}]))},
    )
    same = load_prompt_set(
        "y",
        files={
            "y": str(write_jsonl(tmp_path / "two.jsonl", [{"question": "a"}, {"question": "b"}]))
        },
    )
    assert one.sha256 == same.sha256
    assert (
        load_prompt_set("x", files={"x": str(tmp_path / "one.jsonl")}, limit=1).sha256 != one.sha256
    )


@pytest.mark.parametrize(
    ("text", "fragments"),
    [
        (None, ["cannot read", "no such file"]),
        ("", ["holds no row"]),
        ('{"question": "a"}\n\n{"question": \n', ["rows.jsonl:3", "not JSON"]),
        ('{"question": "a"}\n[1]\n', ["rows.jsonl:2", "JSON list"]),
        ('{"text": "a"}\n', ["rows.jsonl:1", "lacks question", "it has text"]),
        ('{"question": " "}\n', ["rows.jsonl:1", "empty turn"]),
        ('{"question": 3}\n', ["rows.jsonl:1", "not a string"]),
    ],
)
def test_bad_files_are_named_with_the_line(
    text: str | None, fragments: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInputError) as caught:
        load_prompt_set("gsm8k", files={"gsm8k": str(path)})
    assert "\n" not in str(caught.value)
    assert all(fragment in str(caught.value) for fragment in fragments), caught.value


def test_unknown_names_and_limits_outside_the_set_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="did you mean 'gsm8k'"):
        load_prompt_set("gsm8")
    size = len(read_bundled()["problems"])
    with pytest.raises(
        InvalidInputError, match=f"limit is {size + 1} and prompt set 'bundled' has {size} rows"
    ):
        load_prompt_set("bundled", limit=size + 1)
    with pytest.raises(InvalidInputError, match="limit is 0"):
        load_prompt_set("bundled", limit=0)
    assert len(load_prompt_set("bundled", limit=3).items) == 3
    assert {"gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "bundled", *MANUAL_KINDS} == set(
        SET_NAMES
    )


@pytest.mark.parametrize("kind", MANUAL_KINDS)
def test_prompts_from_the_manual(kind: str) -> None:
    """Catches a manual that yields too few prompts, prompts twice,
    and passages that are missing.
    """
    prompts = [item.turns[0] for item in load_prompt_set(kind).items]
    assert len(prompts) >= 12 and len(set(prompts)) == len(prompts)
    assert max(map(len, prompts)) < 6000
    assert kind not in ("summaries", "translation", "retrieval") or min(map(len, prompts)) > 200
