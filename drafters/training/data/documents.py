"""Prompts about given text: what the target wrote in earlier answers, to be shortened, translated,
copied, asked about, rewritten.

A target that writes its own prompts seldom writes long ones, but documents are served every day,
and answers to them repeat much of the text. So paragraphs and programs of a run's answers become
the documents of further prompts, answered in a run of their own, in the folder `documents`.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

from drafters.training.config import TrainConfig
from drafters.training.data.dataset import Answer, read_answers
from drafters.training.data.openings import WORDS
from specdec.base.errors import InvalidInputError
from specdec.base.writing import write_text

MAX_TEMPERATURE = 0.7
"""Texts drawn above that make little sense where the target is small."""
LENGTHS = range(150, 800)
"""Characters of a paragraph."""
FEWEST = 50
"""Paragraphs without which prompts would say the same again and again."""

_PROGRAM = re.compile(r"```(\w*)\n(.+?)\n```", re.DOTALL)
_NAME = re.compile(r"\b(?:def|function|class)\s+(\w+)")
_WORD = re.compile(r"[A-Za-z]{6,}")

_SUMMARY = (
    "Sum this up in {number}:\n\n{text}",
    "{text}\n\nWhat are the main points of this text?",
    "Write a summary of the following in {number}.\n\n{text}",
    "Shorten this text to {number}, for someone in a hurry.\n\n---\n{text}\n---",
    "{text}\n\nTL;DR",
)
_TRANSLATION = (
    "Put this into {tongue}:\n\n{text}",
    "{text}\n\nHow would you say that in {tongue}?",
    "Give me a {tongue} translation of this paragraph.\n\n{text}",
    "Translate from English to {tongue}: {text}",
)
_COPY = (
    "{text}\n\nOne of these parts contains the words '{words}'. Copy that part.",
    'Below are some notes.\n\n{text}\n\nFind the one with the words "{words}" and write it out'
    " again.",
    "{text}\n\nQuote the part that ends with '{last}', and say which one it is.",
    "{text}\n\nRepeat the {ordinal} part, without a change.",
)
_QUESTION = (
    "Answer from this text alone.\n\n{text}\n\nWhat does it say about {word}?",
    "{text}\n\nQuestion: what is said about {word} above?",
    "I have read this:\n\n{text}\n\nWhy does {word} matter here?",
    "{text}\n\nWrite three questions about this text, and answer them.",
)
_REWRITING = (
    "Write {other} in place of {word} in this text, and leave the rest as it is:\n\n{text}",
    "Make this text {tone}:\n\n{text}",
    "Correct what is wrong in this text:\n\n{text}",
    "{text}\n\nGo on from here.",
)
_CODE = (
    "What does this program do?\n\n```{language}\n{program}\n```",
    "```{language}\n{program}\n```\n\nRename `{name}` to `{other}` and write the whole program"
    " again.",
    "Add a comment to every line:\n\n```{language}\n{program}\n```",
    "This program is not finished. Write all of it.\n\n```{language}\n{half}\n```",
)
_ORDINALS = ("first", "second", "third", "fourth", "fifth")
_NUMBERS = ("one sentence", "two sentences", "three sentences", "a few words", "one paragraph")
_TONES = ("shorter", "more formal", "friendlier", "easier to read", "sound like a letter")

Texts = tuple[Sequence[str], Sequence[tuple[str, str]]]
"""Paragraphs, and programs with the name of their language."""


def texts_of(answers: Sequence[str]) -> Texts:
    """Paragraphs of prose and fenced programs, each once, in the order of the answers.

    >>> texts_of(["Short.\\n\\n```python\\ndef f():\\n    x = 1\\n    return x\\n```"])
    ([], [('python', 'def f():\\n    x = 1\\n    return x')])
    """
    paragraphs, programs = [], []
    for answer in answers:
        programs += [
            (language, code)
            for language, code in _PROGRAM.findall(answer)
            if 3 <= len(code.splitlines()) <= 40
        ]
        for part in _PROGRAM.sub("", answer).split("\n\n"):
            text = part.strip()
            if (
                len(text) in LENGTHS
                and "\n" not in text
                and text[0].isupper()
                and text[-1] in ".!?"
            ):
                paragraphs.append(text)
    return list(dict.fromkeys(paragraphs)), list(dict.fromkeys(programs))


def document_prompt(texts: Texts, random: Random) -> tuple[str, str]:
    """A kind, all equally likely, and a prompt of it; code only where there are programs."""
    kinds = {**_KINDS, "code": _code} if texts[1] else _KINDS
    kind = random.choice(list(kinds))
    return kind, kinds[kind](texts, random)


def _prose(forms: Sequence[str], most: int) -> Callable[[Texts, Random], str]:
    def prompt(texts: Texts, random: Random) -> str:
        start = random.randrange(len(texts[0]) - most)  # neighbors are of one answer, as a rule
        parts = texts[0][start : start + random.randint(1, most)]
        words = _WORD.findall(parts[0]) or parts[0].split()
        random.shuffle(words)
        return random.choice(forms).format(
            text="\n\n".join(parts),
            number=random.choice(_NUMBERS),
            tongue=random.choice(WORDS["tongue"].split()),
            tone=random.choice(_TONES),
            word=words[0],
            other=random.choice([other for other in words if other != words[0]] or words),
        )

    return prompt


def _copy(texts: Texts, random: Random) -> str:
    parts = random.sample(texts[0], random.randint(2, 5))
    place = random.randrange(len(parts))
    words = parts[place].split()
    start = random.randrange(max(len(words) - 6, 1))
    mark = random.choice(("({})", "{}.", "Part {}:", "* {} *"))
    return random.choice(_COPY).format(
        text="\n\n".join(
            f"{mark.format(number)} {text}" for number, text in enumerate(parts, start=1)
        ),
        words=" ".join(words[start : start + 6]),
        last=" ".join(words[-5:]),
        ordinal=_ORDINALS[place],
    )


def _code(texts: Texts, random: Random) -> str:
    language, program = random.choice(texts[1])
    lines = program.splitlines()
    name = _NAME.search(program)
    forms = _CODE if name else (_CODE[0], *_CODE[2:])
    return random.choice(forms).format(
        language=language,
        program=program,
        half="\n".join(lines[: max(len(lines) // 2, 2)]),
        name=name and name[1],
        other=name
        and random.choice((f"{name[1]}_all", f"my_{name[1]}", "solve", "run", "convert")),
    )


_KINDS: dict[str, Callable[[Texts, Random], str]] = {
    "summary": _prose(_SUMMARY, 4),
    "translation": _prose(_TRANSLATION, 1),
    "copy": _copy,
    "question": _prose(_QUESTION, 3),
    "rewriting": _prose(_REWRITING, 2),
}


def documents_run(config: TrainConfig) -> TrainConfig:
    """The run that answers these prompts; of every ten of them at most one is held out."""
    folder = config.folder / "documents"
    return replace(
        config,
        out=str(folder),
        prompts=(str(folder / f"prompts-{config.documents}.jsonl"),),
        max_prompts=None,
        self_prompts=0,
        variations=0,
        few_shot_share=0.0,
        heldout=min(config.heldout, max(config.documents // 10, 1)),
        documents=0,
    )


def answers_of(config: TrainConfig, split: str) -> list[Answer]:
    """All answers of a run, those about documents among them; see `read_answers`."""
    about = (
        read_answers(documents_run(config).folder / "answers", split) if config.documents else []
    )
    return read_answers(config.folder / "answers", split) + about


def write_documents(config: TrainConfig, decode: Callable[[Sequence[int]], str]) -> None:
    """Writes the prompts, each once, unless they are there, once other answers are.

    Raises:
        InvalidInputError: the answers hold too few paragraphs, or the file cannot be written.
    """
    out = Path(documents_run(config).prompts[0])
    if out.exists():
        return
    answers = read_answers(config.folder / "answers", "train")
    texts = texts_of(
        [decode(answer.answer_ids) for answer in answers if answer.temperature <= MAX_TEMPERATURE]
    )
    if len(texts[0]) < FEWEST:
        what = f"the answers hold {len(texts[0])} paragraphs, and {FEWEST} are needed for documents"
        raise InvalidInputError(f"{what}; ask for more answers, or leave --documents out")
    random = Random(config.seed)
    prompts = dict.fromkeys(document_prompt(texts, random) for _ in range(config.documents))
    lines = "".join(json.dumps({"prompt": text, "kind": kind}) + "\n" for kind, text in prompts)
    write_text(out, lines)
