"""Prompts to train on: files, versions of questions with other numbers, the target's own."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from drafters.training.config import TrainConfig
from drafters.training.data.names import FIRST_NAMES
from drafters.training.data.rows import Messages, Row, conversation, read_rows
from specdec.base.errors import InvalidInputError

_INTEGER = re.compile(r"(?<![\w.,/:])\d{1,5}(?![\w/:]|[.,]\d)")
_WORD = re.compile(r"\b[A-Z][a-z]+\b")


@dataclass(frozen=True, slots=True)
class TrainingPrompt:
    """One prompt.

    Attributes:
        source: what messages call it, such as "train.jsonl:7".
        messages: a chat up to the user's first turn.
        later: further turns of the user, asked behind the target's own answers.
        token_ids: the prompt in place of messages, where it came as tokens.
        answer: worked answer of the file, for few-shot prompts; not what is trained on.
        few_shot: ask as the continuation of worked examples instead of in the chat template.
    """

    source: str
    messages: Messages
    answer: str | None = None
    few_shot: bool = False
    later: tuple[str, ...] = ()
    token_ids: tuple[int, ...] = ()

    @property
    def question(self) -> str:
        """The last message."""
        return self.messages[-1][1]


@dataclass(slots=True)
class PromptSet:
    """Prompts to train on and those held out, and worked examples for few-shot prompts."""

    train: list[TrainingPrompt]
    heldout: list[TrainingPrompt]
    examples: list[TrainingPrompt]


def make_prompts(config: TrainConfig, written: Sequence[str] = ()) -> PromptSet:
    """All prompts of a run, `written` ones too; the same for the same configuration and files.

    A held-out prompt has no versions in the training set, and is in nobody's few-shot prompt.

    Raises:
        InvalidInputError: no prompt, too few, a malformed line, or a test split's file.
    """
    random = Random(config.seed)
    prompts = [prompt for file in config.prompts for prompt in read_prompts(file)]
    random.shuffle(prompts)
    prompts = prompts[: config.max_prompts]
    numbered = enumerate(written)
    prompts += [TrainingPrompt(f"self-written {i}", (("user", text),)) for i, text in numbered]
    if not prompts:
        what = "there is no prompt to train on"
        raise InvalidInputError(f"{what}; name files with --prompts, or ask for --self-prompts")
    if len(prompts) <= config.heldout:
        what = f"{len(prompts)} prompts are too few to hold out {config.heldout}"
        raise InvalidInputError(f"{what}; give more prompts or a smaller --heldout")
    random.shuffle(prompts)
    heldout = [replace(prompt, later=()) for prompt in prompts[: config.heldout]]
    asked = {prompt.messages for prompt in heldout}
    train = [prompt for prompt in prompts[config.heldout :] if prompt.messages not in asked]
    if not train:
        what = f"no prompt differs from the {len(heldout)} that are held out"
        raise InvalidInputError(f"{what}; give more prompts or a smaller --heldout")
    examples = [prompt for prompt in train if prompt.answer is not None]
    versions = range(config.variations)
    train += [vary(prompt, random, version) for version in versions for prompt in examples]
    if config.few_shot_share > 0:
        if len(examples) <= config.few_shot:
            raise InvalidInputError(
                f"few-shot prompts need more than {config.few_shot} questions with an answer, and"
                f" the files hold {len(examples)}; give such a file, or set --few-shot-share 0"
            )
        train, heldout = (
            [_choose_template(prompt, config, random) for prompt in part]
            for part in (train, heldout)
        )
    random.shuffle(train)
    return PromptSet(train, heldout, examples)


def read_prompts(name: str) -> list[TrainingPrompt]:
    """Prompts of what `read_rows` reads; rows in which no user says anything are left out.

    Raises:
        InvalidInputError: it cannot be read, holds no or bad prompts, or is a test split.
    """
    found = [prompt for place, row in read_rows(name) if (prompt := _prompt(row, place))]
    if not found:
        what = f"{name!r} holds no prompt: no user says anything there"
        raise InvalidInputError(f"{what}; give another file")
    return found


def _prompt(row: Row, place: str) -> TrainingPrompt | None:
    """What the users of a row say, up to a message of a tool."""
    messages = conversation(row, place)
    known = ("system", "user", "assistant")
    end = next((i for i, (role, _) in enumerate(messages) if role not in known), len(messages))
    users = [i for i, (role, text) in enumerate(messages[:end]) if role == "user" and text.strip()]
    if not users:
        return None
    start = [(role, text) for role, text in messages[: users[0]] if role == "system"]
    answer = row.get("answer")
    told = (*start, messages[users[0]])
    said = answer if isinstance(answer, str) else None
    return TrainingPrompt(place, told, said, later=tuple(messages[i][1] for i in users[1:]))


def few_shot_text(examples: Sequence[TrainingPrompt], question: str) -> str:
    r"""Worked examples and the question, in the format of the GSM8K task of lm-eval.

    >>> shot = TrainingPrompt("", (("user", "1 + 1?"),), answer="2")
    >>> few_shot_text([shot], "2 + 2?")
    'Question: 1 + 1?\nAnswer: 2\n\nQuestion: 2 + 2?\nAnswer:'
    """
    shown = "".join(f"Question: {e.question}\nAnswer: {e.answer}\n\n" for e in examples)
    return shown + f"Question: {question}\nAnswer:"


def vary(prompt: TrainingPrompt, random: Random, version: int) -> TrainingPrompt:
    """The same question with other whole numbers and first names, and without its answer.

    What occurs twice changes the same way twice. Decimals, times and fractions stay.
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
    source = f"{prompt.source} version {version + 1}"
    return replace(prompt, source=source, messages=messages, answer=None, later=())


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
    single = len(prompt.messages) == 1
    few_shot = single and not prompt.later and random.random() < config.few_shot_share
    return replace(prompt, few_shot=few_shot)
