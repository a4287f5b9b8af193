"""Answers brought along: which tokens are trained, what is held out, and what is refused."""

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from drafters.training.data.dataset import read_answers
from drafters.training.data.rows import THOUGHTS
from drafters.training.stages import run_stages
from specdec.base.errors import InvalidInputError
from specdec.session.decoder import SpecDecoder
from tests.drafters.training.data.test_answers import write_chat_target
from tests.drafters.training.toy import toy_config

TEMPLATE = (
    "<bos> {% for m in messages %}{{ m.role == 'user' and 'w4 ' or 'w5 ' }}{{ m.content }} <eos> w6"
    " {% endfor %}{% if add_generation_prompt %}w5 {% endif %}"
)
REASONS_SAID = [
    ("finish_reason", "stop"), ("stop_reason", None), ("done_reason", "stop"),
    ("finish_reason", "length"), ("stop_reason", "max_tokens"), ("finish_reason", "content_filter"),
    ("stop_reason", "###"),
]  # fmt: skip
THOUGHTLESS = TEMPLATE.replace("{{ m.content }}", "{{ m.content.replace('w9 ', '') }}")


def chat(*texts: str) -> dict[str, Any]:
    roles = ("human", "gpt") * len(texts)
    pairs = zip(roles, texts, strict=False)
    return {"conversations": [{"from": role, "value": text} for role, text in pairs]}


def answered(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> list[dict[str, Any]]:
    """Records of the training answers, by the order of the rows."""
    (folder / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    values = {
        "prompts": (),
        "answers_from": (str(folder / "own.jsonl"),),
        "heldout": 1,
        "max_tokens": 4,
    }
    config = toy_config(folder, **values | changes)
    assert run_stages(("answers",), config)
    paths = sorted((folder / "run" / "answers").glob("train-*.jsonl.gz"))
    contents = [gzip.decompress(path.read_bytes()) for path in paths]
    records = [json.loads(line) for content in contents for line in content.splitlines()]
    return sorted(records, key=lambda row: int(row["source"].rpartition(":")[2]))


def test_each_answer_of_a_conversation_is_trained_as_it_is(tmp_path: Path) -> None:
    """Catches an answer without its end, a template's words that are trained, and a lost turn."""
    write_chat_target(tmp_path, TEMPLATE)
    rows = [chat(f"w10 w{20 + i}", "w11 w12", "w13", "w14", "w15") for i in range(3)]
    records = answered(tmp_path, rows)
    decoder = SpecDecoder.from_pretrained(str(tmp_path / "target"), drafter=None, device="cpu")
    for record in records:
        ids = [*record["prompt_ids"], *record["answer_ids"]]
        text = re.sub(" w2.", "", decoder.tokenizer.decode(ids))
        assert text == "<bos> w4 w10 <eos> w6 w5 w11 w12 <eos> w6 w4 w13 <eos> w6 w5 w14 <eos>"
        spans = [*record["spans"], [len(record["prompt_ids"]), len(ids)]]
        assert [decoder.tokenizer.decode(ids[a:b]) for a, b in spans] == [
            "w11 w12 <eos>",
            "w14 <eos>",
        ]
    assert len(records) == 2
    heldout = read_answers(tmp_path / "run" / "answers", "heldout")
    prompts = {decoder.tokenizer.decode(list(one.prompt_ids)) for one in heldout}
    assert {text[-11:] for text in prompts} == {"<eos> w6 w5"}
    assert all(len(one.answer_ids) <= 4 for one in heldout), "the target answers these itself"


def test_an_answer_ends_where_the_target_ended_it(tmp_path: Path) -> None:
    """Catches an end of turn that is trained where a limit cut the answer, or twice."""
    write_chat_target(tmp_path, TEMPLATE)
    alike: dict[str, Any] = {"instruction": "w10", "output": "w11"}
    texts = ("w10", "w11", "w12", "w13")
    of_first = chat(*texts)
    of_first["conversations"][1]["finish_reason"] = "length"
    rows = [
        alike,
        alike | {"instruction": "w14 w15"},
        *(
            alike | {"instruction": f"w{i}", name: said}
            for i, (name, said) in enumerate(REASONS_SAID)
        ),
        chat("w16", "w11 <eos> "),
        {**chat("w17", *texts[1:]), "finish_reason": "length"},
        of_first,
    ]
    records = answered(tmp_path, rows, seed=1)
    tokenizer = SpecDecoder.from_pretrained(str(tmp_path / "target"), drafter=None).tokenizer
    found = {}
    for record in records:
        ids = [*record["prompt_ids"], *record["answer_ids"]]
        spans = [*record.get("spans", ()), [len(record["prompt_ids"]), len(ids)]]
        found[int(record["source"].rpartition(":")[2])] = [
            tokenizer.decode(ids[a:b]) for a, b in spans
        ]
    ended, cut = ["w11 <eos>"], ["w11"]
    wanted = [ended, ended, ended, ended, ended, cut, cut, cut, cut, ended]
    wanted += [["w11 <eos>", "w13"], ["w11", "w13 <eos>"]]
    assert found == {n: one for n, one in enumerate(wanted, start=1) if n in found}
    assert len(found) > 9


def test_a_turn_that_the_template_says_otherwise_has_a_record_of_its_own(tmp_path: Path) -> None:
    write_chat_target(tmp_path, THOUGHTLESS)
    rows = [chat(question, "w9 w11", "w13", "w14") for question in ("w10", "w10 w10")]
    records = answered(tmp_path, rows)
    decoder = SpecDecoder.from_pretrained(str(tmp_path / "target"), drafter=None, device="cpu")
    decode, names = decoder.tokenizer.decode, ("prompt_ids", "answer_ids")
    texts = [tuple(decode(row[name]) for name in names) for row in records]
    first = texts[0][0]
    assert first in ("<bos> w4 w10 <eos> w6 w5", "<bos> w4 w10 w10 <eos> w6 w5")
    assert texts == [
        (first, "w9 w11 <eos>"),
        (f"{first} w11 <eos> w6 w4 w13 <eos> w6 w5", "w14 <eos>"),
    ]
    assert not any("spans" in row for row in records)


def test_tokens_with_a_mask_are_trained_where_it_says_so(tmp_path: Path) -> None:
    write_chat_target(tmp_path, TEMPLATE)
    mask = [0, 0, 1, 1, 1, 0, 1, 1, 0, 0]
    rows = [{"input_ids": [20 + i, *range(11, 20)], "loss_mask": mask} for i in range(3)]
    records = answered(tmp_path, rows)
    assert len(records) == 2
    for record in records:
        assert (record["prompt_ids"][1:], record["answer_ids"]) == ([11, 12, 13, 14, 15], [16, 17])
        assert record["spans"] == [[2, 5]]
    heldout = read_answers(tmp_path / "run" / "answers", "heldout")
    assert {tuple(one.prompt_ids[1:]) for one in heldout} == {(11, 12, 13, 14, 15)}


def test_other_answers_to_what_is_held_out_are_left_out(tmp_path: Path) -> None:
    """Catches a held-out question that is trained on with another of its answers."""
    write_chat_target(tmp_path, TEMPLATE)
    chats = [chat(f"w{10 + i % 4}", f"w{20 + i}") for i in range(12)]
    tokens = [{"prompt_ids": [40 + i % 4], "answer_ids": [20 + i]} for i in range(12)]
    for number, rows in enumerate((chats, tokens)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "target").symlink_to(tmp_path / "target")
        records = answered(folder, rows, heldout=2)
        heldout = read_answers(folder / "run" / "answers", "heldout")
        asked = {tuple(one.prompt_ids) for one in heldout}
        assert not asked & {tuple(record["prompt_ids"]) for record in records}
        assert len(records) == 12 - 3 * len(asked)


@pytest.mark.slow
def test_a_drafter_is_trained_on_them(tmp_path: Path) -> None:
    """Catches a run that needs prompts, and one that does not end."""
    write_chat_target(tmp_path, TEMPLATE)
    texts = [(f"w{i}", f"w{i + 1} w{i + 2} w{i + 3}", f"w{i}", f"w{i + 1}") for i in range(10, 50)]
    rows = [chat(*some) for some in texts]
    answered(tmp_path, rows, heldout=8)
    values = {"prompts": (), "answers_from": (str(tmp_path / "own.jsonl"),), "heldout": 8}
    config = toy_config(tmp_path, max_tokens=4, max_steps=3, tolerance=1.0, **values)
    assert run_stages(("answers", "train", "finish"), config)
    assert (tmp_path / "run" / "report.json").exists()


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        (
            {"input_ids": [1, 2], "loss_mask": [1]},
            {},
            "must be whole numbers, as many",
        ),
        ({"input_ids": [1, 2]}, {}, "must be whole numbers, as many"),
        ({"prompt": "w10"}, {}, "0 rows with answers are too few to hold out 1"),
        ({"text": "w10"}, {}, "must have exactly one of the fields"),
        *(
            (
                {
                    "messages": [
                        {"role": "user", "content": "w10"},
                        {"role": "assistant", "content": "w11", name: "w12"},
                    ]
                },
                {},
                f"own.jsonl:1 has {name} beside an answer; put what the target wrote into",
            )
            for name in THOUGHTS
        ),
        (chat("w10", "w11"), {}, "no row asks anything else than the 1 that are held out"),
        (chat("w10", "w11"), {"variations": 2}, "it must be empty, or prompts"),
    ],
)
def test_what_cannot_be_trained_on_is_refused(
    tmp_path: Path,
    row: dict[str, Any],
    changes: dict[str, Any],
    message: str,
) -> None:
    write_chat_target(tmp_path, TEMPLATE)
    with pytest.raises(InvalidInputError, match=message):
        answered(tmp_path, [row] * 3, **changes)


def test_texts_without_a_question_are_told_apart(tmp_path: Path) -> None:
    write_chat_target(tmp_path, TEMPLATE)
    rows = [{"input_ids": [10 + i, 11], "loss_mask": [1, 1]} for i in range(5)]
    assert len(answered(tmp_path, rows)) == 4


def test_a_chat_that_the_template_refuses_is_named(tmp_path: Path) -> None:
    """Whether its answers are there or to be written."""
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    write_chat_target(tmp_path, refuses + TEMPLATE)
    rows = [{"system": "w9", **chat("w10", f"w{20 + i}")} for i in range(3)]
    for changes in ({}, {"prompts": (str(tmp_path / "own.jsonl"),), "answers_from": ()}):
        said = r"own\.jsonl:\d: the chat template .* no system; leave out what it does not know$"
        with pytest.raises(InvalidInputError, match=said):
            answered(tmp_path, [*rows, chat("w11", "w12")], **changes)


def test_tokens_that_the_target_does_not_have(tmp_path: Path) -> None:
    write_chat_target(tmp_path, TEMPLATE)
    rows = [{"input_ids": [10 + i, 99], "loss_mask": [0, 1]} for i in range(3)]
    with pytest.raises(InvalidInputError, match="has 99 and the tokenizer of the target 64"):
        answered(tmp_path, rows)
