"""Prompts to train on: files, versions of questions with other numbers and names, the target's own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from drafters.training.config import TrainConfig
from drafters.training.data.names import FIRST_NAMES
from specdec.base.errors import InvalidInputError
from specdec.base.files import parse_object, read_lines, user_path

FIELDS = ("question", "prompt", "messages", "turns")
"""Where a JSON line may hold its prompt; of `turns`, the first one is asked."""

_TEST_SPLIT = re.compile(r"(^|[^a-z])(test|validation|heldout|eval)([^a-z]|$)", re.IGNORECASE)
_INTEGER = re.compile(r"(?<![\w.,/:])\d{1,5}(?![\w/:]|[.,]\d)")
_WORD = re.compile(r"\b[A-Z][a-z]+\b")


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One prompt.

    Attributes:
        source: what messages call it, such as "train.jsonl:7".
        messages: a chat that ends with the user.
        answer: worked answer of the file, shown in few-shot prompts only; the target writes what is trained on.
        few_shot: ask as the continuation of worked examples instead of in the chat template.
    """

    source: str
    messages: tuple[tuple[str, str], ...]
    answer: str | None = None
    few_shot: bool = False

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1][1]


@dataclass(slots=True)
class PromptSet:
    """Prompts of a run: those to train on, those held out, and the worked examples for few-shot prompts."""

    train: list[TrainingPrompt]
    heldout: list[TrainingPrompt]
    examples: list[TrainingPrompt]


def make_prompts(config: TrainConfig, written: Sequence[str] = ()) -> PromptSet:
    """All prompts of a run, those that the target has `written` included; the same for the same configuration and files.

    A held-out prompt has no versions in the training set, and is in nobody's few-shot prompt.

    Raises:
        InvalidInputError: no prompt, too few to hold some out, a malformed line, or a file that is a test split by its name.
    """
    random = Random(config.seed)
    prompts = [prompt for file in config.prompts for prompt in read_prompts(user_path(file))]
    random.shuffle(prompts)
    prompts = prompts[: config.max_prompts]
    prompts += [TrainingPrompt(f"self-written {i}", (("user", text),)) for i, text in enumerate(written)]
    if not prompts:
        raise InvalidInputError("there is no prompt to train on; name files with --prompts, or ask for --self-prompts")
    if len(prompts) <= config.heldout:
        raise InvalidInputError(
            f"{len(prompts)} prompts are too few to hold out {config.heldout}; give more prompts or a smaller --heldout"
        )
    random.shuffle(prompts)
    heldout, train = prompts[: config.heldout], prompts[config.heldout :]
    examples = [prompt for prompt in train if prompt.answer is not None]
    train += [vary(prompt, random, version) for version in range(config.variations) for prompt in examples]
    if config.few_shot_share > 0:
        if len(examples) <= config.few_shot:
            raise InvalidInputError(
                f"few-shot prompts need more than {config.few_shot} questions with an answer, and the files hold {len(examples)};"
                " give such a file, or set --few-shot-share 0"
            )
        train, heldout = ([_choose_template(prompt, config, random) for prompt in part] for part in (train, heldout))
    random.shuffle(train)
    return PromptSet(train, heldout, examples)


def read_prompts(path: Path) -> list[TrainingPrompt]:
    """Prompts of a text file, one per line, or of JSON lines with one of `FIELDS` and perhaps an `answer`.

    Raises:
        InvalidInputError: the file cannot be read, holds no prompt or a malformed one, or is a test split by its name.
    """
    if _TEST_SPLIT.search(path.stem):
        raise InvalidInputError(f"{str(path)!r} is an evaluation split by its name; training on it would spoil every figure")
    read = _from_json if path.suffix in (".jsonl", ".json") else _from_text
    lines = read_lines(path, what="prompt", way_out="give --prompts a file with one prompt per line")
    return [read(line, place) for place, line in lines]


def few_shot_text(examples: Sequence[TrainingPrompt], question: str) -> str:
    r"""Worked examples and the question, in the format of the GSM8K task of lm-eval.

    >>> shot = TrainingPrompt("", (("user", "1 + 1?"),), answer="2")
    >>> few_shot_text([shot], "2 + 2?")
    'Question: 1 + 1?\nAnswer: 2\n\nQuestion: 2 + 2?\nAnswer:'
    """
    return "".join(f"Question: {e.question}\nAnswer: {e.answer}\n\n" for e in examples) + f"Question: {question}\nAnswer:"


def vary(prompt: TrainingPrompt, random: Random, version: int) -> TrainingPrompt:
    """The same question with other whole numbers and other first names; its answer no longer fits, so it has none.

    A number or name that occurs twice changes the same way twice. Decimals, times and fractions stay.
    """
    names: dict[str, str] = {}
    unused = random.sample(FIRST_NAMES, len(FIRST_NAMES))
    numbers: dict[str, str] = {}

    def other_name(match: re.Match[str]) -> str:
        word = match[0]
        if word not in _KNOWN_NAMES:
            return word
        return names.setdefault(word, unused[len(names) % len(unused)])

    def other_number(match: re.Match[str]) -> str:
        return numbers.setdefault(match[0], str(_near(int(match[0]), random)))

    text = _WORD.sub(other_name, _INTEGER.sub(other_number, prompt.question))
    messages = (*prompt.messages[:-1], ("user", text))
    return replace(prompt, source=f"{prompt.source} version {version + 1}", messages=messages, answer=None)


_KNOWN_NAMES = frozenset(FIRST_NAMES)


def _near(number: int, random: Random) -> int:
    """A number of about the same size; round ones stay round, and 0 and 1 stay what they are."""
    if number < 2:
        return number
    for unit in (1000, 100, 50, 10, 5):
        if number >= 2 * unit and number % unit == 0:
            return unit * _near(number // unit, random)
    return random.randint(max(2, number // 2), max(4, 2 * number))


def _choose_template(prompt: TrainingPrompt, config: TrainConfig, random: Random) -> TrainingPrompt:
    few_shot = len(prompt.messages) == 1 and random.random() < config.few_shot_share
    return replace(prompt, few_shot=few_shot)


def _from_text(line: str, source: str) -> TrainingPrompt:
    return TrainingPrompt(source, (("user", line.strip()),))


def _from_json(line: str, source: str) -> TrainingPrompt:
    record = parse_object(line, source)
    given = [name for name in FIELDS if name in record]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidInputError(f"{source} must have exactly one of the fields {', '.join(FIELDS)}, but has {found}")
    messages = _as_messages(record[given[0]])
    if messages is None or not messages[-1][1].strip():
        raise InvalidInputError(f"{source}: {given[0]} is no text, list of turns or chat that ends with the user")
    answer = record.get("answer")
    return TrainingPrompt(source, messages, answer if isinstance(answer, str) else None)


def _as_messages(content: Any) -> tuple[tuple[str, str], ...] | None:
    """A chat that ends with the user, from text, a list of turns, or messages; None when it is none of these."""
    if isinstance(content, str):
        return (("user", content.strip()),)
    if not isinstance(content, list) or not content:
        return None
    if isinstance(content[0], str):
        return (("user", content[0].strip()),)
    messages = []
    for message in content:
        if not (isinstance(message, dict) and isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            return None
        messages.append((message["role"], message["content"]))
    while messages and messages[-1][0] != "user":
        messages.pop()
    return tuple(messages) or None
