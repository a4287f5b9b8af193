"""The prompts of the answers stage: which it makes of what, and what it refuses."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import datasets
import pytest

from drafters.training.config import TrainConfig
from drafters.training.data.prompts import (
    TrainingPrompt,
    few_shot_text,
    make_prompts,
    read_prompts,
    vary,
)
from drafters.training.data.rows import Messages, conversation, fingerprint, read_rows
from specdec.base.errors import InvalidInputError
from tests.drafters.training.toy import (
    write_prompts,
)

QUESTION = (
    "Maria has 12 apples and gives Tom 3. At 10:30 Maria buys 12 more for $1.50 each, 20%"
    " off. How many?"
)


def question(text: str, answer: str | None = "worked") -> TrainingPrompt:
    return TrainingPrompt("x", (("user", text),), answer)


def test_a_version_has_other_numbers_and_names_in_the_same_places() -> None:
    """Catches what changes in one place only, and changed decimals, times or words."""
    seen = set()
    for seed in range(30):
        varied = vary(question(QUESTION), Random(seed), 0)
        pattern = (
            r"(\w+) has (\d+) apples and gives (\w+) (\d+)\. At 10:30 \1 buys \2 more for"
            r" \$1\.50 each, (\d+)% off\. How many\?"
        )
        match = re.fullmatch(pattern, varied.question)
        assert match is not None
        assert "Maria" != match[1] != match[3] != "Tom"
        assert 6 <= int(match[2]) <= 24
        assert varied.answer is None
        seen.add(varied.question)
    assert len(seen) > 25
    assert vary(question(QUESTION), Random(1), 0) == vary(question(QUESTION), Random(1), 0)


def test_held_out_questions_are_nowhere_in_training(tmp_path: Path) -> None:
    """Catches versions of held-out questions, and few-shot examples that answer them."""
    file = tmp_path / "train.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"question": f"Tom number {i} of x{i}y", "answer": f"#### {i}"})
            for i in range(40)
        )
    )
    config = TrainConfig(
        out="x", prompts=(str(file),), heldout=10, variations=2, few_shot_share=0.5
    )
    written = [f"write about {topic}" for topic in "abcde"]
    prompts = make_prompts(config, written)
    marks = [
        {
            re.findall(r"x\d+y", p.question)[0]
            for p in part
            if "x" in p.question and "number" in p.question
        }
        for part in (prompts.heldout, prompts.train, prompts.examples)
    ]
    assert not marks[0] & marks[1] and not marks[0] & marks[2]
    assert len(prompts.train) == 35 + 2 * len(prompts.examples)
    assert 0.3 < sum(p.few_shot for p in prompts.train) / len(prompts.train) < 0.7
    assert (
        make_prompts(config, written) == prompts != make_prompts(replace(config, seed=1), written)
    )


def test_few_shot_text_has_the_format_of_the_benchmark() -> None:
    examples = [question("1 + 1?", "2"), question("2 + 2?", "4")]
    assert (
        few_shot_text(examples, "3 + 3?")
        == "Question: 1 + 1?\nAnswer: 2\n\nQuestion: 2 + 2?\nAnswer: 4\n\nQuestion: 3 + 3?\nAnswer:"
    )


A, B, C = ("user", "a"), ("assistant", "b"), ("user", "c")


CALLS: list[dict[str, Any]] = [
    {"content": None, "tool_calls": [{}]},
    {"content": "", "tool_calls": [{}]},
    {"content": None, "function_call": {"name": "f"}},
]

ROWS: list[tuple[dict[str, Any], Messages]] = [
    ({"prompt": " a "}, (A,)),
    ({"question": "a", "answer": "b"}, (A,)),
    ({"turns": ["a", "c"]}, (A, C)),
    ({"messages": [{"role": "user", "content": "a"}]}, (A,)),
    (  # UltraChat
        {"prompt": "a", "messages": [{"role": "user", "content": "a"},
                                     {"role": "assistant", "content": "b"}]},
        (A, B),
    ),
    (  # ShareGPT, whose conversations may begin in the middle
        {"id": "x", "conversations": [
            {"from": "gpt", "value": "z"}, {"from": "human", "value": "a"},
            {"from": "gpt", "value": "b"}, {"from": "human", "value": "c"},
        ]},
        (A, B, C),
    ),
    ({"conversations": {"from": ["human", "gpt"], "value": ["a", "b"]}}, (A, B)),
    ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, (A,)),
    ({"instruction": "a", "input": "", "output": "b"}, (A, B)),
    ({"instruction": "a", "input": "x", "output": "b"}, (("user", "a\n\nx"), B)),
    ({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]},
     (("system", "s"), A)),
    ({"conversations": []}, ()),
    ({"instruction": "a", "context": "x", "response": "b"}, (("user", "a\n\nx"),)),  # Dolly
    ({"system_prompt": "s", "question": "a", "response": "b"}, (("system", "s"), A)),  # OpenOrca
    ({"system": "s", "tools": "[]", "conversations": [{"from": "Human", "value": "a"}]},
     (("system", "s"), A)),
    ({"system": "z", "messages": [{"role": "system", "content": "s"},
                                  {"role": "user", "content": "a"}]}, (("system", "s"), A)),
    ({"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": "a"}]},
     (("system", "s"), A)),
    *(({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", **called},
                     {"role": "tool", "content": "x"}, {"role": "assistant", "content": "b"}]},
       (A,))
      for called in CALLS),
]  # fmt: skip


@pytest.mark.parametrize(("row", "messages"), ROWS)
def test_rows_are_read_as_people_have_them(row: dict[str, Any], messages: Messages) -> None:
    assert conversation(row, "here") == messages


def test_what_the_system_says_is_asked_with_the_question(tmp_path: Path) -> None:
    """Whichever way it is given."""
    told = {"role": "developer", "content": "s"}
    rows = [{"system": "s", "prompt": "a"}, {"messages": [told, {"role": "user", "content": "a"}]}]
    file = tmp_path / "a.ndjson"
    file.write_text("\n".join(map(json.dumps, rows)))
    texts = [[text for _, text in prompt.messages] for prompt in read_prompts(str(file))]
    assert texts == [["s", "a"]] * 2


def test_fields_that_mean_nothing_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "a.jsonl"
    says = {"role": "user", "content": "a", "weight": 0, "name": None}
    file.write_text(json.dumps({"messages": [says], "answer": "b", "tools": [{}], "history": []}))
    read_prompts(str(file))
    assert caplog.messages == [f"{file}: these fields are not read: tools, weight"]


def test_a_prompt_asked_twice_is_held_out_twice(tmp_path: Path) -> None:
    """Also where a chat goes on differently behind it."""
    file = tmp_path / "a.jsonl"
    turns = [[f"question {i % 10}", f"more {i}"] for i in range(30)]
    file.write_text("\n".join(json.dumps({"turns": texts}) for texts in turns))
    for heldout in range(1, 8):
        prompts = make_prompts(TrainConfig(out="x", prompts=(str(file),), heldout=heldout))
        asked = {prompt.question for prompt in prompts.heldout}
        assert not asked & {prompt.question for prompt in prompts.train}
        assert len(prompts.train) == 30 - 3 * len(asked)
    file.write_text("again\n" * 9)
    with pytest.raises(InvalidInputError, match="no prompt differs from the 2 that are held out"):
        make_prompts(
            TrainConfig(out="x", prompts=(str(file.rename(tmp_path / "b.txt")),), heldout=2)
        )


def test_files_and_data_sets_hold_the_same_prompts(tmp_path: Path) -> None:
    """Catches a format that is misread, and a turn that is lost or another model's."""
    rows = [row for row, _ in ROWS if "conversations" in row and "id" in row]
    rows += [{"id": "y", "conversations": [{"from": "human", "value": "a"}]}]
    (tmp_path / "a.jsonl").write_text("\n\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "b.json").write_text(json.dumps(rows, indent=1))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "c.parquet")
    (tmp_path / "hub").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "hub" / "train.parquet")
    for name in ("a.jsonl", "b.json", "c.parquet", "hub:hub", "hub:hub:train"):
        where = str(tmp_path / name) if name[:4] != "hub:" else f"hub:{tmp_path}/{name[4:]}"
        prompts = read_prompts(where)
        assert [prompt.messages for prompt in prompts] == [(A,), (A,)]
        assert [prompt.later for prompt in prompts] == [("c",), ()]
    with pytest.raises(InvalidInputError, match="is an evaluation split by its name"):
        read_prompts(f"hub:{tmp_path}/hub:test_sft")
    with pytest.raises(InvalidInputError, match=r"cannot read .*; name a split"):
        read_prompts(f"hub:{tmp_path}/hub:other")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "\n \n", "holds no prompt"),
        ("gsm8k_test.jsonl", "", "is an evaluation split by its name"),
        ("test.txt", "", "is an evaluation split by its name"),
        ("a.jsonl", "{", r"a.jsonl:1 is not JSON"),
        (
            "a.jsonl",
            '{"prompt": "x"}\n{"text": "x"}',
            r"a.jsonl:2 must have exactly one of .* but has none",
        ),
        ("a.json", '[{"prompt": "x"}, "y"]', "item 2 is a JSON str"),
        ("a.json", '[{"prompt": "x"}', "is not JSON"),
        ("a.parquet", "x", "cannot read .*a.parquet"),
        ("a.jsonl", '{"prompt": "x", "question": "y"}', "but has question and prompt"),
        (
            "a.jsonl",
            '{"messages": [{"role": "assistant", "content": "x"}]}',
            "holds no prompt: no user says anything",
        ),
        (
            "a.jsonl",
            '{"messages": [{"role": "user", "content": 3}]}',
            "messages is no text, list of turns or chat",
        ),
        ("a.jsonl", '{"prompt": "  "}', "prompt is no text"),
        ("a.CSV", "prompt,answer\nx,y", "no text with a prompt per line by its name; give"),
        ("a.yaml", "- prompt: x", "no text with a prompt per line by its name; give"),
    ],
)
def test_malformed_prompts_are_named(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(InvalidInputError, match=message):
        read_prompts(str(tmp_path / name))


def test_too_few_prompts_are_refused(tmp_path: Path) -> None:
    file = write_prompts(tmp_path / "p.txt", 5)
    with pytest.raises(InvalidInputError, match="5 prompts are too few to hold out 5"):
        make_prompts(TrainConfig(out="x", prompts=(str(file),), heldout=5))
    with pytest.raises(InvalidInputError, match="there is no prompt to train on"):
        make_prompts(TrainConfig(out="x"))
    with pytest.raises(
        InvalidInputError, match="more than 5 questions with an answer, and the files hold 0"
    ):
        make_prompts(TrainConfig(out="x", prompts=(str(file),), heldout=2, few_shot_share=0.5))


@pytest.mark.parametrize("read", [fingerprint, lambda name: list(read_rows(name))])
def test_a_file_that_is_missing_is_one_line(read: Callable[[str], Any], tmp_path: Path) -> None:
    """Whichever looks at it first: prompts that the target writes come before those of files."""
    with pytest.raises(InvalidInputError, match=r"^cannot read '.*x.jsonl': no such file.*; give"):
        read(str(tmp_path / "x.jsonl"))
